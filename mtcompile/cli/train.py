"""``mtcompile train``."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtcompile.cli.common import FINE, INTERRUPTED, Precisions, Update

if TYPE_CHECKING:
    from mtcompile.trainer.trainer import Evaluated, Recipe, Row, Summary


def train(
    model: Annotated[str, typer.Argument(help="a built-in shape (gpt-11m) or a Hugging Face config.json, of random weights")],
    data: Annotated[
        list[Path] | None,
        typer.Option(help="text, a folder of it, or .bin/.npy tokens; may be repeated (default: Python's own sources)"),
    ] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="size of the vocabulary of .bin and .npy files")] = None,
    memory: Annotated[str, typer.Option(help="device bytes: 16GiB, 141GB or a number (default: what is free)")] = "",
    host: Annotated[str, typer.Option(help="host bytes (default: no limit)")] = "",
    batch: Annotated[int, typer.Option(min=1, help="sequences per step")] = 8,
    seq: Annotated[int, typer.Option(min=1, help="tokens per sequence")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="in all, those before --resume too")] = 100,
    lr: Annotated[float, typer.Option(min=0, help="the highest learning rate")] = 1e-3,
    warmup: Annotated[int, typer.Option(min=0, help="steps until then; a cosine down to a tenth follows")] = 20,
    weight_decay: Annotated[float, typer.Option(min=0, help="of matrices")] = 0.1,
    clip: Annotated[float, typer.Option(min=0, help="the gradients' norm at most; 0: not clipped")] = 1.0,
    accumulate: Annotated[int, typer.Option(min=1, help="micro-batches that the batch is run as, region by region")] = 1,
    precision: Annotated[Precisions, typer.Option(help="of weights and optimizer state; model: as it says")] = Precisions.model,
    update: Annotated[Update, typer.Option(help="after the backward, or as gradients arrive")] = Update.step,
    run_ahead: Annotated[bool, typer.Option(help="with --update backward: updates go on behind the next forward")] = False,
    evaluate_every: Annotated[int, typer.Option(min=0, help="steps between evaluations of a held-out part; 0: never")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="of weights and the order of the data")] = 0,
    device: Annotated[str, typer.Option(help="cuda:1, cpu, ... (default: the GPU if there is one)")] = "",
    metrics: Annotated[Path | None, typer.Option(help="a file: one JSON object a step")] = None,
    save: Annotated[Path | None, typer.Option(help="a folder for the checkpoint at the end")] = None,
    resume: Annotated[Path | None, typer.Option(help="a folder that --save wrote, to go on from")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object at the end")] = False,
) -> None:
    """Train a language model within a device-memory budget: on text as bytes, or on tokens.

    Ctrl-C ends it after the current step: the checkpoint is written and the files are closed.

    \b
    Examples:
      mtcompile train gpt-11m --memory 64MiB --steps 50 --save run
      mtcompile train config.json --data notes/ --update backward --metrics run.jsonl

    Exit code 0: trained; 130: interrupted; 2: something asked for is wrong; 3: it does not fit; 1: a step failed.
    """
    from mtcompile.trainer.trainer import Recipe
    from mtcompile.trainer.trainer import train as trained

    recipe = Recipe(
        model=model,
        data=tuple(data or ()),
        vocab=vocab,
        batch=batch,
        seq=seq,
        steps=steps,
        lr=lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        accumulate=accumulate,
        precision=precision.value,
        update=update.value,
        run_ahead=run_ahead,
        memory=memory or None,
        host=host or None,
        device=device or None,
        evaluate_every=evaluate_every,
        seed=seed,
        metrics=metrics,
        save=save,
        resume=resume,
    )
    with _stopping() as stop, _shown(recipe, as_json) as tell:
        made = trained(recipe, tell, stop)
    print(json.dumps(asdict(made), indent=1) if as_json else _told(made))
    raise typer.Exit(INTERRUPTED if made.interrupted else FINE)


@contextlib.contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C is answered after the current step, the second at once."""
    asked = False

    def ask(*_: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)
        print(
            "\nmtcompile train: stopping after this step; Ctrl-C again stops now, and saves nothing",
            file=sys.stderr,
            flush=True,
        )

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _shown(recipe: Recipe, as_json: bool) -> Iterator[Callable[[Row | Evaluated, Any], None]]:
    """A bar where somebody looks, else a line now and then; with --json on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from mtcompile.trainer.trainer import Row

    out = sys.stderr if as_json else sys.stdout
    console = Console(file=out)
    columns = (BarColumn(8), MofNCompleteColumn(), TextColumn("{task.fields[now]}"), TimeRemainingColumn(compact=True))
    every = max(1, recipe.steps // 20)
    with Progress(*columns, console=console, disable=not out.isatty()) as bar:
        task = bar.add_task("training", total=recipe.steps, now="capturing and planning the first step")

        def tell(row: Row | Evaluated, model: Any) -> None:
            if isinstance(row, Row):
                bar.update(task, completed=row.step, now=_line(row, model))
                if out.isatty() or not (row.step == 1 or row.step % every == 0 or row.step == recipe.steps):
                    return
                said = f"step {row.step}/{recipe.steps}  {_line(row, model)}"
            else:
                said = f"step {row.step}/{recipe.steps}  held out: loss {row.eval_loss:.4f} over {row.eval_tokens:,} tokens"
            bar.print(said, markup=False, highlight=False, soft_wrap=True) if out.isatty() else print(
                said, file=out, flush=True
            )

        yield tell


def _line(row: Row, model: Any) -> str:
    from mtcompile.runtime.schedule import gib

    peaks = f"peak device {gib(row.peak_device_bytes)} host {gib(row.peak_host_bytes)}"
    limited = f"  limited by {model.plan.limiting_resource}" if model.plan else ""
    return f"loss {row.loss:.4f}  {row.tokens_per_s:,.0f} tokens/s  {peaks}{limited}"


def _told(made: Summary) -> str:
    from mtcompile.runtime.schedule import gib

    speed = f", {made.tokens_per_s:,.0f} tokens/s" if made.tokens_per_s else ""
    lines = [f"{'interrupted after' if made.interrupted else 'trained'} {made.steps} of {made.of_steps} steps{speed}"]
    lines.append(f"  loss {made.first_loss:.4f} at first, {made.last_loss:.4f} at last" if made.last_loss is not None else "")
    if made.eval_loss is not None:
        lines.append(f"  held out: loss {made.eval_loss:.4f}")
    lines.append(
        f"  device memory: peak {gib(made.peak_device_bytes)} of {gib(made.budget_device_bytes)}, for a training state of "
        f"{gib(made.state_bytes)}; host peak {gib(made.peak_host_bytes)}"
    )
    if made.saved:
        lines.append(f"  saved: {made.saved}")
    return "\n".join(filter(None, lines))
