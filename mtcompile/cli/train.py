"""``mtcompile train``: a training within a device-memory budget, its rows as they come, and a summary."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtcompile.cli.common import FINE, INTERRUPTED
from mtcompile.cli.config_file import set_defaults
from mtcompile.cli.options import Json, RecipeOptions, values
from mtcompile.reading import signals_noted

if TYPE_CHECKING:
    from mtcompile.trainer.jobs import Job
    from mtcompile.trainer.trainer import Evaluation, Row, Summary

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # what ends a process that does not handle it


def train(
    model: Annotated[
        str,
        typer.Argument(
            help="a folder of weights (config.json, safetensors, tokenizer.json) to fine-tune; or, with random weights, a "
            "built-in shape (gpt-11m) or a Hugging Face config.json. A --config file may name it instead"
        ),
    ],
    options: RecipeOptions,
    config: Annotated[
        Path | None,
        typer.Option(
            help="a YAML file of these options, such as seq: 2048; flags override it", callback=set_defaults, is_eager=True
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a language model from a local folder, or train one from random weights, within a device-memory budget.

    A folder's tokenizer and chat template turn records into tokens: {"text": ...}, {"messages": [...]}, ShareGPT's
    {"conversations": [...]}, Alpaca's {"instruction", "input", "output"}, or {"prompt", "completion"}. In conversations, only
    what the assistant says is trained; of a prompt and its completion, only the completion. Each checkpoint, such as
    run/step-00000050, is again a folder that from_pretrained of Transformers loads.

    Random weights are trained on text, whose bytes are the tokens, or on files of tokens.

    Under torchrun, each process trains on a part of each batch: torchrun --nproc-per-node 2 -m mtcompile train ...

    Ctrl-C, SIGTERM or a closed terminal ends the training after the current step. With --save, a checkpoint is written.

    \b
    Examples:
      mtcompile train llama-folder --data chats.jsonl --epochs 3 --memory 16GiB --precision bf16-master32 --save run
      mtcompile train --config run.yaml --lr 1e-5
      mtcompile train gpt-11m --memory 64MiB --steps 50 --save run

    Exit code 0: trained; 130: interrupted; 2: invalid argument or file; 3: it does not fit; 1: a step failed.
    """
    from mtcompile.trainer.jobs import prepared
    from mtcompile.trainer.recipe import Recipe
    from mtcompile.trainer.trainer import run

    repeated = {name: tuple(getattr(options, name) or ()) for name in ("data", "allow_new", "allow_change", "lora_targets")}
    recipe = Recipe(model, **{**values(options), **repeated})
    job = prepared(recipe)  # before the first step there is nothing to save: Ctrl-C ends it at once
    with _stopping(job) as (stop, ended), _reporting(job, as_json) as report:

        def reported(row: Row | Evaluation, model: Any) -> None:
            ended(row.step)
            report(row, model)

        summary = run(job, reported, stop)
        if not job.together.rank:
            _say(json.dumps(asdict(summary), indent=1) if as_json else _lines(summary), sys.stdout)
    raise typer.Exit(INTERRUPTED if summary.interrupted else FINE)


@contextlib.contextmanager
def _stopping(job: Job) -> Iterator[tuple[Callable[[], bool], Callable[[int], None]]]:
    """Lets the first Ctrl-C, SIGTERM or SIGHUP end the training after the current step, one that comes over a second later at
    once; the error then says what is saved. Yields whether there was a first, and a function to call with each step that has
    ended."""
    again = "Ctrl-C again, a second later, stops now"
    first = f"\nmtcompile train: stopping after the first step, which is captured and planned before it runs; {again}"
    asked = [signal.SIGINT, *_ENDINGS]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup has it
        asked.remove(signal.SIGHUP)
    texts: dict[int, str] = dict.fromkeys(asked, first)
    last = 0

    def ended(step: int) -> None:
        nonlocal last
        last = step
        texts.update(dict.fromkeys(texts, f"\nmtcompile train: stopping after this step; {again}"))

    try:
        with _endings_as_ctrl_c(), signals_noted(texts) as noted:
            yield lambda: bool(noted), ended
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_kept(job.recipe.save, last)) from None


@contextlib.contextmanager
def _endings_as_ctrl_c() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP raise what Ctrl-C does, where they would end the process without a word."""
    ends = [number for number in _ENDINGS if signal.getsignal(number) == signal.SIG_DFL]
    for number in ends:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)


def _kept(folder: Path | None, step: int) -> str:
    """Says whether the last step that has ended, ``step``, is saved, and in which checkpoint."""
    from mtcompile import checkpoint

    if folder is None or not step:
        return ""
    path = checkpoint.latest(folder)
    saved = 0 if path is None else checkpoint.inspect(path).step
    if saved >= step:
        return f"saved: {path}"
    last = f"{folder} has no checkpoint" if path is None else f"the last checkpoint: {path}"
    return f"not saved: what was trained after step {saved}; {last}"


@contextlib.contextmanager
def _reporting(job: Job, as_json: bool) -> Iterator[Callable[[Row | Evaluation, Any], None]]:
    """Shows a bar on a terminal, else prints about twenty lines; on stderr with --json. Yields a function of (row, model). Of
    several ranks, only the first says anything: its rows are those of all."""
    if job.together.rank:
        yield lambda row, model: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from mtcompile.trainer.trainer import Row, cost_of_rest

    told = False
    out = sys.stderr if as_json else sys.stdout
    console = Console(file=out)
    columns = (BarColumn(8), MofNCompleteColumn(), TextColumn("{task.fields[row]}"), TimeRemainingColumn(compact=True))
    every = max(1, job.steps // 20)
    if job.about:
        _say(job.about, out)
    with Progress(*columns, console=console, disable=not out.isatty()) as bar:
        task = bar.add_task("training", total=job.steps, row="capturing and planning the first step")

        def report(row: Row | Evaluation, model: Any) -> None:
            nonlocal told
            if not told and model.plan and job.trainer is None:
                told = True
                (bar.print if out.isatty() else lambda text: _say(text, out))(f"predicted: {cost_of_rest(job, row.step)}")
            if isinstance(row, Row):
                bar.update(task, completed=row.step, row=_line(row, model))
                if out.isatty() or not (row.step == 1 or row.step % every == 0 or row.step == job.steps):
                    return
                line = f"step {row.step}/{job.steps}  {_line(row, model)}"
            else:
                line = f"step {row.step}/{job.steps}  held out: loss {row.eval_loss:.4f} over {row.eval_tokens:,} tokens"
            if out.isatty():
                bar.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                _say(line, out)

        yield report


def _say(text: str, out: Any) -> None:
    """Prints text. If that fails, as in a pipe that nobody reads or a closed terminal, the training goes on without."""
    try:
        print(text, file=out, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


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
