"""The trainer behind ``mtcompile train``: an ordinary PyTorch loop but for ``compile``, with the losses of that loop."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mtcompile import checkpoint
from mtcompile.checkpoint.hf_trainer import saves
from mtcompile.data.batch import MOST_EVALUATED
from mtcompile.forecast.run_cost import RunCost, run_cost
from mtcompile.trainer.jobs import Job, prepared
from mtcompile.trainer.recipe import Recipe, learning_rate, loss_not_finite


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
    logged: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss on held-out data after a step."""

    step: int
    eval_loss: float
    eval_tokens: int
    logged: Mapping[str, float] = field(default_factory=dict)


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
    """Trains as the recipe says, see ``run``."""
    return run(prepared(recipe), report, stop)


def run(job: Job, report: Report = lambda row, model: None, stop: Callable[[], bool] = lambda: False) -> Summary:
    """Trains. ``report`` is called with each row and the compiled model; ``stop`` is asked after each step. Raises ValueError,
    OSError, and what ``compile`` raises."""
    if job.trainer is not None:
        return _run_trainer(job, report, stop)
    recipe = job.recipe
    step = 0 if recipe.resume is None else checkpoint.load(recipe.resume, job.model, job.optimizer).step
    rows: list[Row] = []
    evaluation: Evaluation | None = None
    interrupted = False
    with saving(job) as saver, metrics_file(job) as write:
        while step < job.steps and not interrupted:
            step += 1
            rows.append(one_step(job, step))
            if saver is not None:
                saver.note(step, job.extra)
            write(rows[-1])
            report(rows[-1], job.model)
            if recipe.evaluate_every and (step % recipe.evaluate_every == 0 or step == job.steps):
                evaluation = evaluate(job, step)
                write(evaluation)
                report(evaluation, job.model)
            if saver is not None:
                saver.after(step, job.extra)
            interrupted = bool(job.together.sums([step < job.steps and stop()])[0])
    return summary(job, step, rows, evaluation, interrupted)


def _run_trainer(job: Job, report: Report, stop: Callable[[], bool]) -> Summary:
    """Trains by a trainer of TRL, see ``run``."""
    from transformers import TrainerCallback

    recipe, trainer = job.recipe, job.trainer
    rows: list[Row] = []
    evaluations: list[Evaluation] = []

    class Reports(TrainerCallback):
        began, tokens = 0.0, 0.0  # of a step, and of all that this process has trained

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop |= stop()
            control.should_evaluate |= trainer.eval_dataset is not None and state.global_step == job.steps
            return control

        def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if "loss" in (logs := given["logs"]):
                memory = job.model.memory_report()
                figures = (memory["peak_device_bytes"], memory["peak_host_bytes"])
                speed = (logs["num_tokens"] - self.tokens) / (time.perf_counter() - self.began)
                self.tokens = logs["num_tokens"]
                shown = (logs["loss"], logs["learning_rate"], logs.get("grad_norm"), speed)
                rows.append(Row(state.global_step, *shown, *figures, _others(logs)))
                tell(rows[-1])
            elif "eval_loss" in logs:
                evaluations.append(Evaluation(state.global_step, logs["eval_loss"], 0, _others(logs)))
                tell(evaluations[-1])

    def tell(row: Row | Evaluation) -> None:
        write(row)
        report(row, job.model)

    before = None if recipe.resume is None else checkpoint.inspect(recipe.resume).path
    with metrics_file(job) as write, saves(trainer, recipe.save, before, job.extra, job.files, **_saving_options(recipe)):
        trainer.add_callback(Reports())
        trainer.train(resume_from_checkpoint=None if before is None else str(before))
    step = trainer.state.global_step
    return summary(job, step, rows, evaluations[-1] if evaluations else None, step < job.steps)


def _others(logs: Mapping[str, float]) -> dict[str, float]:
    """Returns what TRL logs beside what a row has, without clocks."""
    own = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time")
    return {name: value for name, value in logs.items() if name not in own and not name.endswith(("runtime", "per_second"))}


def cost_of_rest(job: Job, step: int) -> RunCost:
    """Returns what the run costs from a step on, as its plan predicts."""
    session, steps, recipe = job.model._mt_open.session, job.steps - step + 1, job.recipe
    plan, tokens = session.plan, recipe.batch * recipe.length
    devices = job.together.count
    written = plan.disk_write_bytes * devices
    return run_cost(steps * tokens, tokens, plan.total_us, written, session.machine, devices)


def one_step(job: Job, step: int) -> Row:
    started = time.perf_counter()
    recipe, rate = job.recipe, learning_rate(job.recipe, job.steps, step)
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    batch = job.data.batch(step, recipe.batch, recipe.seed)
    loss = job.model(**batch.arguments)
    if job.together.count > 1:
        loss = loss * job.together.weight(batch.targets)
    value, tokens = job.together.sums([float(loss.detach()) / job.together.count, batch.tokens])
    if not math.isfinite(value):
        raise loss_not_finite(step, value)
    loss.backward()
    norm = clip(recipe, job.model)
    job.optimizer.step()
    job.optimizer.zero_grad()
    seconds = time.perf_counter() - started
    report = job.model.memory_report()
    peaks = (report["peak_device_bytes"], report["peak_host_bytes"])
    return Row(step, value, rate, norm, tokens / seconds, *peaks)


def clip(recipe: Recipe, model: Any) -> float | None:
    """Clips the gradients, unless the compiled backward has done so. Returns their norm, or None if it is not known yet."""
    if recipe.update == "backward":
        norm: float | None = None if recipe.run_ahead else model.grad_norm
        return norm
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip or math.inf))


def evaluate(job: Job, step: int) -> Evaluation:
    """Evaluates held-out data in batches of one rank's micro-batch, which is what fits; each rank takes a share of them."""
    recipe, ranks, total, count = job.recipe, job.together.count, 0.0, 0
    job.model.eval()
    with torch.no_grad():
        parts = recipe.accumulate * ranks
        for batch in job.data.evaluation(recipe.batch // parts, MOST_EVALUATED * parts):
            total += float(job.model(**batch.arguments)) * batch.targets
            count += batch.targets
    job.model.train()
    total, of_all = job.together.sums([total, count])
    return Evaluation(step, total / of_all, int(of_all))


def saving(job: Job) -> contextlib.AbstractContextManager[checkpoint.Autosave | None]:
    """Saves checkpoints of what is trained inside, if there is a folder for them."""
    recipe = job.recipe
    if recipe.save is None:
        return contextlib.nullcontext()
    return checkpoint.autosave(recipe.save, job.model, job.optimizer, files=job.files, **_saving_options(recipe))


def _saving_options(recipe: Recipe) -> dict[str, Any]:
    """Returns the options of ``autosave``; signals end the run by ``stop``."""
    when = {"every": recipe.save_every, "minutes": recipe.save_minutes}
    return {**when, "keep": recipe.keep, "signing_key": recipe.signing_key, "on_sigterm": False}


@contextlib.contextmanager
def metrics_file(job: Job) -> Iterator[Callable[[Row | Evaluation], None]]:
    """Opens the metrics file. Yields a function that writes one row as a line of JSON and flushes it."""
    recipe = job.recipe
    if recipe.metrics is None or job.together.rank:  # the first rank's rows are those of all
        yield lambda row: None
        return
    with recipe.metrics.open("a" if recipe.resume else "w", encoding="utf-8") as file:

        def write(row: Row | Evaluation) -> None:
            values = asdict(row)
            file.write(json.dumps(values | values.pop("logged")) + "\n")
            file.flush()

        yield write


def summary(job: Job, step: int, rows: list[Row], evaluation: Evaluation | None, interrupted: bool) -> Summary:
    recipe, model = job.recipe, job.model
    report, speeds = model.memory_report(), sorted(row.tokens_per_s for row in rows[2:])
    return Summary(
        steps=step,
        of_steps=job.steps,
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
