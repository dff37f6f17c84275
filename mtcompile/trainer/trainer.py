"""The trainer behind ``mtcompile train``: an ordinary PyTorch loop but for ``compile``, with the losses of that loop."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mtcompile import checkpoint
from mtcompile.api import compile
from mtcompile.errors import StepError
from mtcompile.machine.device import choose
from mtcompile.models.loading import language_model
from mtcompile.trainer.text_data import Windows, read_tokens

_MOST_EVALUATED = 8  # batches per evaluation
_FINAL_RATE = 0.1  # share of the highest learning rate at the end of the cosine


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a training. ``model``: a built-in shape or a Hugging Face config.json; ``data``: files and folders (none:
    the standard library's sources); ``memory``, ``host``, ``disk``: bytes as text; ``clip``: 0 for no clipping;
    ``evaluate_every`` and ``save_every``: in steps, 0 for never; ``resume``, ``save``: folders; ``metrics``: a file of JSON
    lines. The others are ``compile``'s and AdamW's."""

    model: str
    data: tuple[Path, ...] = ()
    vocab: int | None = None
    batch: int = 8
    seq: int = 128
    steps: int = 100
    lr: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    accumulate: int = 1
    precision: str = "model"
    update: str = "step"
    run_ahead: bool = False
    memory: str | None = None
    host: str | None = None
    disk: str | None = None
    device: str | None = None
    evaluate_every: int = 50
    seed: int = 0
    metrics: Path | None = None
    save: Path | None = None
    save_every: int = 0
    resume: Path | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one step. ``grad_norm``: before clipping; None with ``update="backward"`` if nothing is clipped or updates
    run ahead, because then nothing waits for it."""

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    peak_device_bytes: int
    peak_host_bytes: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss on held-out data after a step."""

    step: int
    eval_loss: float
    eval_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a training. ``first_loss``, ``last_loss``: of this run; ``steps``: including those before --resume."""

    steps: int
    of_steps: int
    interrupted: bool
    parameters: int
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    budget_device_bytes: int
    peak_device_bytes: int
    peak_host_bytes: int
    state_bytes: int
    limiting_resource: str
    saved: str | None


Report = Callable[[Row | Evaluation, Any], object]


def train(recipe: Recipe, report: Report = lambda row, model: None, stop: Callable[[], bool] = lambda: False) -> Summary:
    """Trains as the recipe says. ``report`` is called with each row and the compiled model; ``stop`` is asked after each step.
    Raises ValueError, OSError, and what ``compile`` raises."""
    check(recipe)
    stream, vocabulary = read_tokens(recipe.data, recipe.vocab)
    windows = Windows.cut(stream, recipe.seq, recipe.batch)
    torch.manual_seed(recipe.seed)
    model, optimizer = compiled_model(recipe, vocabulary)
    step = 0 if recipe.resume is None else checkpoint.load(recipe.resume, model, optimizer).step
    rows: list[Row] = []
    evaluation: Evaluation | None = None
    interrupted = False
    with saving(recipe, model, optimizer, rows) as save, metrics_file(recipe) as write:
        while step < recipe.steps and not interrupted:
            step += 1
            rows.append(one_step(recipe, model, optimizer, windows, step))
            write(rows[-1])
            report(rows[-1], model)
            if recipe.evaluate_every and (step % recipe.evaluate_every == 0 or step == recipe.steps):
                evaluation = evaluate(recipe, model, windows, step)
                write(evaluation)
                report(evaluation, model)
            interrupted = step < recipe.steps and stop()
            if recipe.save_every and step % recipe.save_every == 0 and step < recipe.steps and not interrupted:
                save()
    return summary(recipe, model, step, rows, evaluation, interrupted)


def check(recipe: Recipe) -> None:
    """Raises ValueError, or OSError for a folder that cannot be made, before anything takes time."""
    if recipe.batch % recipe.accumulate:
        raise ValueError(f"expected a batch that is a multiple of accumulate={recipe.accumulate}, found {recipe.batch}")
    if recipe.run_ahead and recipe.update != "backward":
        raise ValueError("expected --run-ahead with --update backward only")
    if recipe.clip < 0:
        raise ValueError(f"expected clip of 0 (none) or more, found {recipe.clip}")
    if recipe.save_every and recipe.save is None:
        raise ValueError(f"expected --save with --save-every {recipe.save_every}, found no folder to save into")
    if recipe.save is not None:
        recipe.save.mkdir(parents=True, exist_ok=True)
    if recipe.resume is not None:
        _check_resumed(recipe, recipe.resume)


def _check_resumed(recipe: Recipe, folder: Path) -> None:
    before = checkpoint.inspect(folder)
    if (seed := before.extra.get("seed")) != recipe.seed:
        raise ValueError(f"expected seed {seed}, as {before.path} was trained with, found {recipe.seed}")
    if before.step >= recipe.steps:
        raise ValueError(
            f"expected more steps than the {before.step} that {before.path} has been trained for, found {recipe.steps}"
        )


def compiled_model(recipe: Recipe, vocabulary: int) -> tuple[Any, torch.optim.Optimizer]:
    """Returns the compiled model and its optimizer. Only matrices have weight decay."""
    module, model_vocabulary = language_model(recipe.model)
    if vocabulary > model_vocabulary:
        raise ValueError(f"expected a model with a vocabulary of {vocabulary} or more for this data, found {model_vocabulary}")
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    others = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=recipe.lr, betas=(0.9, 0.95))
    backward = recipe.update == "backward"
    model: Any = compile(
        module.train(),
        memory=recipe.memory,
        host=recipe.host,
        disk=recipe.disk,
        optimizer=optimizer,
        device=choose(recipe.device).where,
        precision=recipe.precision,
        accumulate=recipe.accumulate,
        update=recipe.update,
        max_grad_norm=recipe.clip or None if backward else None,
        run_ahead=recipe.run_ahead,
    )
    return model, optimizer


def learning_rate(recipe: Recipe, step: int) -> float:
    """Returns the rate of a step: a linear warm-up, then a cosine down to a tenth of the highest rate."""
    if step <= recipe.warmup:
        return recipe.lr * step / recipe.warmup
    share = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (_FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


def one_step(recipe: Recipe, model: Any, optimizer: torch.optim.Optimizer, windows: Windows, step: int) -> Row:
    started = time.perf_counter()
    rate = learning_rate(recipe, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    inputs, targets = windows.batch(step, recipe.batch, recipe.seed)
    loss = model(inputs, targets)
    value = float(loss.detach())
    if not math.isfinite(value):
        raise StepError(f"the loss of step {step} is {value}; nothing was changed. Lower --lr, or give a longer --warmup")
    loss.backward()
    norm = clip(recipe, model)
    optimizer.step()
    optimizer.zero_grad()
    seconds = time.perf_counter() - started
    report = model.memory_report()
    peaks = (report["peak_device_bytes"], report["peak_host_bytes"])
    return Row(step, value, rate, norm, inputs.numel() / seconds, *peaks)


def clip(recipe: Recipe, model: Any) -> float | None:
    """Clips the gradients, unless the compiled backward has done so. Returns their norm, or None if it is not known yet."""
    if recipe.update == "backward":
        norm: float | None = None if recipe.run_ahead else model.grad_norm
        return norm
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip or math.inf))


def evaluate(recipe: Recipe, model: Any, windows: Windows, step: int) -> Evaluation:
    """Evaluates held-out data in batches of one micro-batch, which is what fits."""
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for inputs, targets in windows.evaluation(recipe.batch // recipe.accumulate, _MOST_EVALUATED * recipe.accumulate):
            total += float(model(inputs, targets)) * targets.numel()
            count += targets.numel()
    model.train()
    return Evaluation(step, total / count, count)


@contextlib.contextmanager
def saving(recipe: Recipe, model: Any, optimizer: torch.optim.Optimizer, rows: list[Row]) -> Iterator[Callable[[], None]]:
    """Saves a checkpoint at the end, and if a full disk or a closed pipe ends the training between two steps. Yields a function
    that saves one now."""

    def save() -> None:
        if recipe.save is not None and rows:
            checkpoint.save(recipe.save, model, optimizer, step=rows[-1].step, extra={"seed": recipe.seed})

    try:
        yield save
    except OSError:
        save()
        raise
    save()


@contextlib.contextmanager
def metrics_file(recipe: Recipe) -> Iterator[Callable[[Row | Evaluation], None]]:
    """Opens the metrics file. Yields a function that writes one row as a line of JSON and flushes it."""
    if recipe.metrics is None:
        yield lambda row: None
        return
    with recipe.metrics.open("a" if recipe.resume else "w", encoding="utf-8") as file:

        def write(row: Row | Evaluation) -> None:
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()

        yield write


def summary(
    recipe: Recipe, model: Any, step: int, rows: list[Row], evaluation: Evaluation | None, interrupted: bool
) -> Summary:
    report, speeds = model.memory_report(), sorted(row.tokens_per_s for row in rows[2:])
    return Summary(
        steps=step,
        of_steps=recipe.steps,
        interrupted=interrupted,
        parameters=sum(p.numel() for p in model.parameters()),
        first_loss=rows[0].loss if rows else None,
        last_loss=rows[-1].loss if rows else None,
        eval_loss=evaluation.eval_loss if evaluation else None,
        tokens_per_s=speeds[len(speeds) // 2] if speeds else None,
        budget_device_bytes=report["budget_device_bytes"],
        peak_device_bytes=report["peak_device_bytes"],
        peak_host_bytes=report["peak_host_bytes"],
        state_bytes=report["state_bytes"],
        limiting_resource=model.plan.limiting_resource if model.plan else "",
        saved=str(checkpoint.latest(recipe.save)) if recipe.save is not None and rows else None,
    )
