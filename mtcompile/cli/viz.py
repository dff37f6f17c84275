"""``mtcompile viz``: the timeline of a planned step, or of a dumped schedule, as a file to open in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mtcompile.cli.common import fitting_forecast
from mtcompile.cli.options import StepOptions
from mtcompile.reading import parsed_json, read_text
from mtcompile.runtime.schedule import FORMAT, Schedule, from_json


def viz(
    model: Annotated[str, typer.Argument(help="a model as for mtcompile plan, or a schedule.json that MT_DUMP wrote")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the file to write")] = Path("timeline.html"),
    *,
    options: StepOptions,
    force: Annotated[bool, typer.Option(help="show the leanest plan even if it does not fit")] = False,
    form: Annotated[Literal["html"], typer.Option("--format", help="format of the file")] = "html",
) -> None:
    """Write a step's timeline: what runs when on each queue, and the memory in use. Open the file in a browser.

    \b
    Example:
      mtcompile viz qwen2.5-7b --machine rtx3090 -o timeline.html

    Exit code 0: written; 3: the step does not fit (--force shows the leanest plan); 2: invalid argument or file.
    """
    from mtcompile.viz import page

    schedule = dumped(model)
    about: dict[str, Any] = {"title": Path(model).name}
    if schedule is None:
        schedule, about = _planned(model, options, force)
    print(page.write(schedule, output, **about))


def dumped(path: str) -> Schedule | None:
    """Reads the schedule in a file; None if the file is something else. Raises ScheduleFormatError for a broken schedule."""
    if not path.endswith(".json") or not Path(path).exists():
        return None
    text = read_text(Path(path))
    data = parsed_json(text, path)
    return from_json(text) if isinstance(data, dict) and data.get("format") == FORMAT else None


def _planned(model: str, options: StepOptions, force: bool) -> tuple[Schedule, dict[str, Any]]:
    """Plans a model's step. Returns its schedule and what the page says about it."""
    from mtcompile.passes.analysis.names import value_names

    forecast, planned = fitting_forecast(model, options, force, hint="nothing to show; --force shows the leanest plan")
    title = f"{forecast.model} on {forecast.machine}"
    return planned.schedule, {"plan": planned.plan, "title": title, "names": value_names(planned.step)}
