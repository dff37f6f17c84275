"""``mtcompile train``: a training within a device-memory budget, its rows as they come, and a summary."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtcompile.cli.common import FINE, INTERRUPTED
from mtcompile.cli.options import Json, RecipeOptions, values

if TYPE_CHECKING:
    from mtcompile.trainer.trainer import Evaluation, Recipe, Row, Summary


def train(
    model: Annotated[str, typer.Argument(help="a built-in shape (gpt-11m) or a Hugging Face config.json; random weights")],
    options: RecipeOptions,
    as_json: Json = False,
) -> None:
    """Train a language model within a device-memory budget, on text (each byte is a token) or on tokens.

    Ctrl-C or SIGTERM ends it after the current step: the checkpoint is written and the files are closed.

    \b
    Examples:
      mtcompile train gpt-11m --memory 64MiB --steps 50 --save run
      mtcompile train config.json --data notes/ --update backward --metrics run.jsonl

    Exit code 0: trained; 130: interrupted; 2: invalid argument or file; 3: it does not fit; 1: a step failed.
    """
    from mtcompile.trainer.trainer import Recipe
    from mtcompile.trainer.trainer import train as run

    recipe = Recipe(model, **{**values(options), "data": tuple(options.data or ())})
    with _stopping() as stop, _reporting(recipe, as_json) as report:
        summary = run(recipe, report, stop)
    print(json.dumps(asdict(summary), indent=1) if as_json else _lines(summary))
    raise typer.Exit(INTERRUPTED if summary.interrupted else FINE)


@contextlib.contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Lets the first Ctrl-C or SIGTERM end the training after the current step, the second at once. Yields whether there was a
    first."""
    interrupted = False

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True
        restore()
        print(
            "\nmtcompile train: stopping after this step; Ctrl-C again stops now, and saves nothing",
            file=sys.stderr,
            flush=True,
        )

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: interrupted
    finally:
        restore()


@contextlib.contextmanager
def _reporting(recipe: Recipe, as_json: bool) -> Iterator[Callable[[Row | Evaluation, Any], None]]:
    """Shows a bar on a terminal, else prints about twenty lines; on stderr with --json. Yields a function of (row, model)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from mtcompile.trainer.trainer import Row

    out = sys.stderr if as_json else sys.stdout
    console = Console(file=out)
    columns = (BarColumn(8), MofNCompleteColumn(), TextColumn("{task.fields[row]}"), TimeRemainingColumn(compact=True))
    every = max(1, recipe.steps // 20)
    with Progress(*columns, console=console, disable=not out.isatty()) as bar:
        task = bar.add_task("training", total=recipe.steps, row="capturing and planning the first step")

        def report(row: Row | Evaluation, model: Any) -> None:
            if isinstance(row, Row):
                bar.update(task, completed=row.step, row=_line(row, model))
                if out.isatty() or not (row.step == 1 or row.step % every == 0 or row.step == recipe.steps):
                    return
                line = f"step {row.step}/{recipe.steps}  {_line(row, model)}"
            else:
                line = f"step {row.step}/{recipe.steps}  held out: loss {row.eval_loss:.4f} over {row.eval_tokens:,} tokens"
            if out.isatty():
                bar.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                print(line, file=out, flush=True)

        yield report


def _line(row: Row, model: Any) -> str:
    from mtcompile.runtime.schedule import gib

    peaks = f"peak device {gib(row.peak_device_bytes)} host {gib(row.peak_host_bytes)}"
    limited = f"  limited by {model.plan.limiting_resource}" if model.plan else ""
    return f"loss {row.loss:.4f}  {row.tokens_per_s:,.0f} tokens/s  {peaks}{limited}"


def _lines(summary: Summary) -> str:
    from mtcompile.runtime.schedule import gib

    speed = f", {summary.tokens_per_s:,.0f} tokens/s" if summary.tokens_per_s else ""
    ended = "interrupted after" if summary.interrupted else "trained"
    lines = [f"{ended} {summary.steps} of {summary.of_steps} steps{speed}"]
    if summary.last_loss is not None:
        lines.append(f"  loss {summary.first_loss:.4f} at first, {summary.last_loss:.4f} at last")
    if summary.eval_loss is not None:
        lines.append(f"  held out: loss {summary.eval_loss:.4f}")
    device = f"peak {gib(summary.peak_device_bytes)} of {gib(summary.budget_device_bytes)}"
    state = f"a training state of {gib(summary.state_bytes)}"
    lines.append(f"  device memory: {device}, for {state}; host peak {gib(summary.peak_host_bytes)}")
    if summary.saved:
        lines.append(f"  saved: {summary.saved}")
    return "\n".join(lines)
