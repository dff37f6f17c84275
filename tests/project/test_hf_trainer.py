"""examples/hf_trainer.py: Hugging Face Trainer trains a compiled model with the losses of a plain one."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import shutil
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile import checkpoint

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow  # it compiles a model

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer.py"
QUIET = {"disable_tqdm": True, "use_cpu": True}
ACCUMULATED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "optim": "sgd", "warmup_steps": 2}


@pytest.fixture(scope="module")
def train() -> Any:
    spec = importlib.util.spec_from_file_location("hf_trainer", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train


def history(trainer: Any) -> list[tuple[Any, ...]]:
    return [(row.get("loss"), row.get("grad_norm"), row.get("eval_loss")) for row in trainer.state.log_history]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "options",
    [
        {"eval_strategy": "steps", "eval_steps": 4, **ACCUMULATED},
        *(pytest.param(each, marks=pytest.mark.long) for each in ({}, ACCUMULATED, {"bf16": True})),
    ],
    ids=["accumulated, evaluated", "plain", "accumulated", "bf16"],
)
def test_the_losses_are_those_of_a_plain_model(train: Any, options: dict[str, Any], tmp_path: Path) -> None:
    plain = train(str(tmp_path / "plain"), None, **QUIET, **options)
    compiled = train(str(tmp_path / "compiled"), "2MiB", **QUIET, **options)
    assert history(compiled) == history(plain) and equal(weights(compiled), weights(plain))
    report = compiled.model.memory_report()
    assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= 2 * 2**20


def test_a_resumed_training_has_the_same_bits_and_its_files_load_plainly(train: Any, tmp_path: Path) -> None:
    whole = train(str(tmp_path), "2MiB", **QUIET)
    expected = weights(whole)
    saved = tmp_path / "checkpoint-8"
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    again = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert all(torch.equal(expected[name], value) for name, value in again.state_dict().items())
    shutil.rmtree(saved)
    resumed = train(str(tmp_path), "2MiB", resume=True, **QUIET)
    assert history(resumed) == history(whole) and equal(weights(resumed), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 4, "warmup_steps": 2},
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in (
                {"max_grad_norm": 0.0, "optim": "sgd"},
                {},
                {"bf16": True},
                {"weight_decay": 0.1, "optim": "adamw_torch_fused"},
                {"max_grad_norm": 1e6},
            )
        ),
    ],
    ids=["clipped, evaluated", "never clipped", "defaults", "bf16", "decay", "hardly clipped"],
)
def test_updates_in_the_backward_have_the_history_of_a_plain_trainer(
    train: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    plain = train(str(tmp_path / "plain"), None, **QUIET, **options)
    compiled = train(str(tmp_path / "compiled"), "2MiB", compiled={"update": "backward"}, **QUIET, **options)
    assert history(compiled) == history(plain) and equal(weights(compiled), weights(plain))
    assert "in the backward" in str(compiled.model.plan.updates)


def test_a_resumed_training_with_masters_has_the_same_bits(train: Any, tmp_path: Path) -> None:
    """The masters are those of the optimizer that the Trainer makes, and are in its file."""
    options: dict[str, Any] = {"compiled": {"update": "backward", "precision": "bf16-master32"}, **QUIET}
    whole = train(str(tmp_path), "2MiB", **options)
    masters, state = mtcompile.master_parameters(whole.model), whole.optimizer.state_dict()["state"]
    assert all(entry["exp_avg"].dtype == entry["master"].dtype == torch.float32 for entry in state.values())
    shutil.rmtree(tmp_path / "checkpoint-8")
    resumed = train(str(tmp_path), "2MiB", resume=True, **options)
    assert history(resumed) == history(whole) and equal(mtcompile.master_parameters(resumed.model), masters)


@pytest.mark.long
def test_masters_are_updated_as_by_plain_steps(train: Any, tmp_path: Path) -> None:
    runs = []
    for update in ("step", "backward"):
        compiled = {"update": update, "precision": "bf16-master32"}
        trainer = train(str(tmp_path / update), "2MiB", steps=4, compiled=compiled, max_grad_norm=0.0, **QUIET)
        runs.append(([loss for loss, *_ in history(trainer)], mtcompile.master_parameters(trainer.model)))
    assert runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])


def small_trainer(kind: Any, folder: Path, compiled: dict[str, Any] | None, **options: Any) -> Any:
    """Returns a trainer of 20 rows; with a plain model if ``compiled``, the options of ``mtcompile.compile``, is None."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    model: Any = transformers.LlamaForCausalLM(config)
    if compiled is not None:
        model = mtcompile.compile(model, **{"memory": "2MiB", **compiled})
    rows = [{"input_ids": torch.arange(8) + n % 9, "labels": torch.arange(8) + n % 9} for n in range(20)]
    options = {"save_strategy": "no", "report_to": [], "max_steps": 2, "logging_steps": 1, **QUIET, **options}
    return kind(model, transformers.TrainingArguments(str(folder), **options), train_dataset=rows, eval_dataset=rows[:4])


THREE: dict[str, Any] = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "max_steps": -1}  # of 10 batches


@pytest.mark.parametrize(
    "options",
    [
        {"num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 2},
        *(
            pytest.param({"num_train_epochs": 2, **each}, marks=pytest.mark.long)
            for each in (
                {"max_grad_norm": 0.0, "optim": "sgd", "warmup_steps": 2},
                {"label_smoothing_factor": 0.1, "gradient_checkpointing": True},
            )
        ),
    ],
    ids=["clipped, evaluated", "never clipped", "smoothed"],
)
def test_a_backward_that_updates_adds_to_gradients_of_those_before(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    plain = small_trainer(transformers.Trainer, tmp_path, None, **THREE, **options)
    compiled = small_trainer(transformers.Trainer, tmp_path, {"update": "backward", "memory": "60KiB"}, **THREE, **options)
    for trainer in (plain, compiled):
        trainer.train()
    assert history(compiled) == history(plain) and equal(weights(compiled), weights(plain))
    report = compiled.model.memory_report()
    assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= 60 * 2**10
    assert "in the backward" in str(compiled.model.plan.updates)


@pytest.mark.long
def test_sums_of_gradients_are_added_to_masters_as_by_plain_steps(tmp_path: Path) -> None:
    runs = []
    for update in ("step", "backward"):
        compiled = {"update": update, "precision": "bf16-master32"}
        trainer = small_trainer(transformers.Trainer, tmp_path, compiled, num_train_epochs=1, max_grad_norm=0.0, **THREE)
        trainer.train()
        runs.append(([loss for loss, *_ in history(trainer)], mtcompile.master_parameters(trainer.model)))
    assert runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])


@pytest.mark.long
def test_a_training_that_accumulates_goes_on_amid_an_epoch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, **THREE}
    runs = [small_trainer(transformers.Trainer, tmp_path, {"update": "backward"}, **options) for _ in range(2)]
    runs[0].train()
    for folder in tmp_path.glob("checkpoint-[468]"):
        shutil.rmtree(folder)
    runs[1].train(resume_from_checkpoint=True)
    assert history(runs[0]) == history(runs[1]) and equal(weights(runs[0]), weights(runs[1]))


@pytest.mark.long
def test_one_model_is_trained_by_several_trainers(tmp_path: Path) -> None:
    """Each with its own optimizer, limit of the norm, and number of backwards a step."""
    models = []
    for compiled in (None, {"update": "backward"}):
        model, rows = None, []
        for options in ({"max_grad_norm": 1.0}, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}, {"optim": "sgd"}):
            trainer = small_trainer(transformers.Trainer, tmp_path, None if model else compiled, **options)
            trainer.model = trainer.model_wrapped = model = model or trainer.model
            trainer.train()
            rows += history(trainer)
        models.append((rows, weights(trainer)))
    assert models[0][0] == models[1][0] and equal(models[0][1], models[1][1])


def test_a_trainer_that_does_not_clip_as_it_was_told_is_refused(tmp_path: Path) -> None:
    compiled: dict[str, Any] = {"update": "backward", "max_grad_norm": 0.1}
    with pytest.raises(
        mtcompile.StepError, match=r"max_grad_norm=0\.1 in compile and 0\.5, the max_grad_norm in the arguments of Trainer"
    ):
        small_trainer(transformers.Trainer, tmp_path, compiled, max_grad_norm=0.5).train()

    class Never(transformers.Trainer):  # type: ignore[name-defined,misc]
        def _clip_grad_norm(self, model: Any) -> None:
            return None

        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
            return None

    class Otherwise(transformers.Trainer):  # type: ignore[name-defined,misc]
        def _clip_grad_norm(self, model: Any) -> Any:
            return self.accelerator.clip_grad_norm_(model.parameters(), 0.25)

    for kind, message in ((Never, "nobody clipped"), (Otherwise, "are scaled by")):
        message += f".* to 0.5, which was the max_grad_norm in the arguments of {kind.__name__}"
        with pytest.raises(mtcompile.StepError, match=message):
            small_trainer(kind, tmp_path, {"update": "backward"}, max_grad_norm=0.5).train()


def loop(model: Any, optimizer: Any, loss_of: Any = None) -> list[float]:
    """The losses of two steps of a loop by hand, which clips nothing. ``loss_of``: of the model and a batch."""
    losses = []
    for n in range(2):
        batch = {"input_ids": torch.arange(8)[None] + n, "labels": torch.arange(8)[None] + n}
        loss = model(**batch).loss if loss_of is None else loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_loop_after_a_trainer_is_not_clipped_as_that_was_told(tmp_path: Path) -> None:
    """The model forgets the limit and the accumulation of a training that has ended, by itself or by an error, and follows it
    again when it trains again."""

    class Stops(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise ZeroDivisionError

    runs = []
    for compiled in (None, {"update": "backward"}):
        options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
        trainer = small_trainer(transformers.Trainer, tmp_path, compiled, **options)
        trainer.train()
        losses = loop(trainer.model, trainer.optimizer)
        trainer.train()
        with pytest.raises(ZeroDivisionError):
            trainer.add_callback(Stops())
            trainer.train()
        trainer.model.zero_grad()
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        if compiled is not None:
            trainer.model.bind(optimizer)
        losses += loop(trainer.model, optimizer)
        runs.append((losses, history(trainer), weights(trainer)))
    assert runs[0][:2] == runs[1][:2] and equal(runs[0][2], runs[1][2])


def test_a_loop_that_calls_a_trainer_clips_as_it_likes(tmp_path: Path) -> None:
    """A Trainer clips in its own loop alone, which neither a caller of ``compute_loss`` nor another loop in a subclass has."""
    from accelerate.state import GradientState

    GradientState._reset_state()  # which a training that was interrupted leaves

    class OwnLoop(transformers.Trainer):  # type: ignore[name-defined,misc]
        def train(self) -> Any:
            self.create_optimizer()
            return loop(self.model, self.optimizer, self.compute_loss)

    runs = []
    for compiled in (None, {"update": "backward"}):
        trainer = small_trainer(OwnLoop, tmp_path, compiled, max_grad_norm=0.1)
        losses = trainer.train()
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        if compiled is not None:
            trainer.model.bind(optimizer)
        runs.append(([*losses, *loop(trainer.model, optimizer, trainer.compute_loss)], weights(trainer)))
    assert runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])
    trainer.model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    with pytest.raises(mtcompile.StepError, match="Pass to compile: max_grad_norm="):
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.01)


class LeavesOut(transformers.Trainer):  # type: ignore[name-defined,misc]
    """Clips the norms' weights, and does not train them."""

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            trained = [p for name, p in self.model.named_parameters() if "norm" not in name]
            self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        return self.optimizer


class Headed(nn.Module):
    """A body, which may be compiled, and a head beside it."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.head, self.unused = body, nn.Linear(32, 4), nn.Linear(2, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(input_ids=input_ids).logits)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten() % 4), "logits": logits}


def test_what_a_trainer_clips_and_the_backward_does_not_update_is_refused_before_it(tmp_path: Path) -> None:
    for backwards in (1, 2):
        clipped: dict[str, Any] = {"max_grad_norm": 0.5, "gradient_accumulation_steps": backwards}
        trainer = small_trainer(LeavesOut, tmp_path, {"update": "backward"}, **clipped)
        before = weights(trainer)
        with pytest.raises(mtcompile.StepError, match=r"clips model.*norm.weight and 2 more .* but the optimizer lacks them"):
            trainer.train()
        assert equal(weights(trainer), before) and not trainer.optimizer.state
    headed = small_trainer(transformers.Trainer, tmp_path, {"update": "backward"}, max_grad_norm=0.5)
    headed.model = headed.model_wrapped = Headed(headed.model)
    before = weights(headed)
    with pytest.raises(mtcompile.StepError, match=r"clips head.weight and 1 more .* but the compiled model lacks them"):
        headed.train()
    assert equal(weights(headed), before)


def test_what_a_trainer_does_not_clip_or_has_no_gradient_need_not_be_updated(tmp_path: Path) -> None:
    for kind, limit in ((LeavesOut, 0.0), (transformers.Trainer, 0.0), (transformers.Trainer, 0.5)):
        runs = []
        for compiled in (None, {"update": "backward"}):
            trainer = small_trainer(kind, tmp_path, compiled, max_grad_norm=limit)
            if kind is transformers.Trainer:
                torch.manual_seed(0)
                trainer.model = trainer.model_wrapped = Headed(trainer.model)
                trainer.model.head.requires_grad_(limit == 0.0)
            trainer.train()
            runs.append((history(trainer), weights(trainer)))
        assert runs[0][0] == runs[1][0] and equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("stop", [("error", 5), pytest.param(("sigterm", 3), marks=pytest.mark.long)], ids=["error", "sigterm"])
def test_a_training_that_saves_itself_goes_on_with_the_same_bits(train: Any, stop: tuple[str, int], tmp_path: Path) -> None:
    """With dropout, accumulation and a schedule; the checkpoint is read by a compiled and by a plain training."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32, attention_dropout=0.1
    )
    rows = [{"input_ids": torch.arange(8) + n % 9, "labels": torch.arange(8) + n % 9} for n in range(20)]

    class Stops(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop[1] and stop[0] == "error":
                raise ZeroDivisionError
            if state.global_step == stop[1] - 1 and stop[0] == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)

    def training(memory: str | None, folder: Path | None, callbacks: list[Any]) -> Any:
        transformers.set_seed(0)
        model = transformers.LlamaForCausalLM(config)
        if memory is not None:
            model = mtcompile.compile(model, memory=memory)
        options = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "report_to": []}
        arguments = transformers.TrainingArguments(str(tmp_path / "out"), save_strategy="no", **QUIET, **options)
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
        saves = contextlib.nullcontext() if folder is None else checkpoint.autosave_trainer(trainer, folder, every=2)
        with saves as before, contextlib.suppress(ZeroDivisionError):
            trainer.train(resume_from_checkpoint=before)
        return trainer

    whole = weights(training(None, None, []))
    training("2MiB", tmp_path / "run", [Stops()])
    assert checkpoint.inspect(tmp_path / "run").step == stop[1]
    again = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.latest(tmp_path / "run"))
    assert type(again) is transformers.LlamaForCausalLM
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for memory, folder in ((None, tmp_path / "run"), ("2MiB", tmp_path / "copy")):
        resumed = training(memory, folder, [])
        assert resumed.state.global_step == 10 and equal(weights(resumed), whole)


def with_accelerate(order: str, **options: Any) -> list[torch.Tensor]:
    """Losses, gradient norms and weights of a loop of Accelerate's, with accumulation, clipping and a schedule. ``options``: of
    ``mtcompile.compile``."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    if order == "compile first":
        model = mtcompile.compile(model, memory="40KiB", optimizer=optimizer, **options)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if order == "prepare first":
        model = mtcompile.compile(model, memory="40KiB", optimizer=optimizer, **options)
    rows = []
    for _ in range(6):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(torch.randn(4, 16)), torch.randint(0, 4, (4,)))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                rows.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).clone())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rows.append(loss.detach())
    return [*rows, *(p.detach().clone() for p in accelerator.unwrap_model(model).parameters())]


@pytest.mark.parametrize("options", [{}, {"update": "backward", "max_grad_norm": 0.5}], ids=["step", "backward"])
def test_accelerate_prepares_before_or_after(options: dict[str, Any]) -> None:
    plain = with_accelerate("plain")
    for order in ("compile first", "prepare first"):
        assert all(map(torch.equal, plain, with_accelerate(order, **options)))


def test_gradients_that_a_failed_backward_has_added_to_are_of_no_use() -> None:
    from accelerate import Accelerator

    losses = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        if compiles:
            mtcompile.compile(model, memory="1MiB", optimizer=optimizer, update="backward", max_grad_norm=0.5)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        prepared, stepping = accelerator.prepare(model, optimizer)
        for index in range(6):
            with accelerator.accumulate(prepared):
                batch = torch.randn(4, 8)
                loss = (prepared(batch).square() * (float("inf") if index == 1 else 1.0)).mean()
                if index == 1 and compiles:
                    with pytest.raises(mtcompile.StepError, match="not finite"):
                        accelerator.backward(loss * 1e-30)
                    with pytest.raises(mtcompile.StepError):
                        stepping.step()
                if index == 1:
                    optimizer.zero_grad()
                    continue
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                stepping.step()
                stepping.zero_grad()
                losses.append(loss.detach())
    assert all(map(torch.equal, losses[:5], losses[5:]))


def test_a_model_that_no_trainer_calls_dies_where_its_user_deletes_it() -> None:
    """Looking for a trainer leaves nothing held by the frames of the callers, nor a cycle of them."""
    model = mtcompile.compile(nn.Linear(4, 4), memory="1MiB", device="cpu")
    gc.disable()
    try:
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
        alive = weakref.ref(model)
        del model
        assert alive() is None
    finally:
        gc.enable()
