"""``mtcompile viz``: a step's timeline as a file to look at, of a model that is planned or of a schedule that was dumped."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from mtcompile.cli.common import Accumulate, Batch, Host, Machine, Memory, Seq, planned
from mtcompile.runtime.schedule import Schedule, from_json


class Format(str, Enum):
    html = "html"


def viz(
    model: Annotated[str, typer.Argument(help="a schedule.json of MT_DUMP; or what mtcompile plan takes")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the file to write")] = Path("timeline.html"),
    batch: Batch = 1,
    seq: Seq = 2048,
    memory: Memory = "",
    host: Host = "",
    machine: Machine = "h200-sxm",
    precision: Annotated[str, typer.Option(help="model, fp32, bf16 or bf16-master32")] = "model",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd-momentum or sgd")] = "adamw",
    update: Annotated[str, typer.Option(help="step or backward")] = "step",
    max_grad_norm: Annotated[float | None, typer.Option(help="with --update backward: clipped to it")] = None,
    run_ahead: Annotated[bool, typer.Option(help="with --update backward: updates go on behind the next forward")] = False,
    accumulate: Accumulate = 1,
    force: Annotated[bool, typer.Option(help="show the leanest plan though it does not fit")] = False,
    form: Annotated[Format, typer.Option("--format", help="of the file")] = Format.html,
) -> None:
    """Write a step's timeline: what runs when on each queue, and the memory it holds. Open the file in a browser.

    \b
    Example:
      mtcompile viz qwen2.5-7b --machine rtx3090 -o timeline.html

    Exit code 0: written; 3: the step does not fit (--force shows the leanest plan); 2: something asked for is wrong.
    """
    from mtcompile.viz import page

    options: dict[str, Any] = {
        "batch": batch,
        "seq": seq,
        "memory": memory,
        "host": host,
        "machine": machine,
        "precision": precision,
        "optimizer": optimizer,
        "update": update,
        "max_grad_norm": max_grad_norm,
        "run_ahead": run_ahead,
        "accumulate": accumulate,
        "force": force,
    }
    write = {Format.html: page.write}[form]
    schedule = dumped(model)
    about: dict[str, Any] = {"title": Path(model).name}
    if schedule is None:
        schedule, about = _planned(model, options)
    print(write(schedule, output, **about))


def dumped(path: str) -> Schedule | None:
    """The schedule in a file, or None where there is something else. Raises ScheduleFormatError for a broken one."""
    if not path.endswith(".json") or not Path(path).is_file():
        return None
    text = Path(path).read_text(encoding="utf-8")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a schedule or a configuration in {path}, found no JSON: {error}") from None
    return from_json(text) if isinstance(data, dict) and str(data.get("format")).startswith("mtcompile-schedule-") else None


def _planned(model: str, options: dict[str, Any]) -> tuple[Schedule, dict[str, Any]]:
    """The schedule of a model, and what its page says of it."""
    from mtcompile.report.live_timeline import names_of

    found = planned(model, hint="nothing to show; --force shows the leanest plan", **options)
    made = found.planned
    assert made is not None
    title = f"{found.model} on {found.machine}"
    return made.schedule, {"plan": made.plan, "title": title, "names": names_of(made.schedule, made.step)}
