"""examples/lightning_trainer.py and examples/raw_loop.py: loops of others, with the losses and weights of plain models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mtcompile
from tests.project.examples import equal, example, weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of libraries about each other


@pytest.fixture
def lightning() -> Any:
    pytest.importorskip("lightning")
    return example("lightning_trainer")


def check(plain: Any, compiled: Any) -> None:
    """Compares models and losses, and looks at the budget of 2 MiB."""
    assert plain[1] == compiled[1] and equal(weights(plain[0]), weights(compiled[0]))
    report = compiled[0].memory_report()
    assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= 2 * 2**20 < report["state_bytes"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.long),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 1},
    ],
)
def test_the_trainer_has_plain_losses(lightning: Any, options: dict[str, Any], tmp_path: Path) -> None:
    runs = []
    for memory in (None, "2MiB"):
        torch.manual_seed(1)
        runs.append(lightning.train(str(tmp_path), memory, accelerator="cpu", enable_checkpointing=False, **options))
    check(*runs)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "max_epochs": 1},
        pytest.param({}, marks=pytest.mark.long),
    ],
)
def test_updates_in_the_backward_have_plain_losses(lightning: Any, options: dict[str, Any], tmp_path: Path) -> None:
    runs = []
    for memory in (None, "2MiB"):
        torch.manual_seed(1)
        update, quiet = {"update": "backward"}, {"accelerator": "cpu", "enable_checkpointing": False}
        runs.append(lightning.train(str(tmp_path), memory, compiled=update, **quiet, **options))
    check(*runs)
    assert "in the backward" in str(runs[1][0].plan.updates)


def test_what_updates_in_the_backward_cannot_follow_is_refused(lightning: Any, tmp_path: Path) -> None:
    update, quiet = {"update": "backward"}, {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 1}
    by_value = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    with pytest.raises(mtcompile.StepError, match="by value"):
        lightning.train(str(tmp_path), "2MiB", compiled=update, **quiet, **by_value)

    class Unbound(lightning.Module):  # type: ignore[name-defined, misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module = Unbound(lightning.model("2MiB", compiled=update))
    trainer = lightning.lightning.Trainer(default_root_dir=tmp_path, logger=False, enable_progress_bar=False, **quiet)
    with pytest.raises(mtcompile.StepError, match="configure_optimizers"):
        trainer.fit(module, lightning.data())


def test_a_loop_after_the_trainer_is_not_clipped_as_that_was_told(lightning: Any, tmp_path: Path) -> None:
    runs, quiet = [], {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 1, "gradient_clip_val": 0.1}
    for memory in (None, "2MiB"):
        torch.manual_seed(1)
        model, losses, *_ = lightning.train(str(tmp_path), memory, compiled={"update": "backward"}, **quiet)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if memory is not None:
            model.bind(optimizer)
        for _ in range(2):
            model(torch.arange(32).reshape(2, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, losses))
    check(*runs)


@pytest.mark.long
def test_a_module_that_calls_itself_may_be_compiled_as_a_whole(lightning: Any, tmp_path: Path) -> None:
    class Whole(lightning.Module):  # type: ignore[name-defined, misc]
        def forward(self, tokens: torch.Tensor) -> Any:
            return self.model(tokens)

        def training_step(self, window: torch.Tensor, index: int) -> torch.Tensor:
            loss = torch.nn.functional.cross_entropy(self(window[:, :-1]), window[:, -1])
            self.losses.append(loss.item())
            return loss

    runs = []
    for memory in (None, "2MiB"):
        module = Whole(lightning.model(None))
        module = module if memory is None else mtcompile.compile(module, memory=memory)
        torch.manual_seed(1)
        options = {"max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        lightning.lightning.Trainer(default_root_dir=tmp_path, accelerator="cpu", **options).fit(module, lightning.data())
        runs.append((module, module.losses))
    check(*runs)


@pytest.mark.long
def test_a_resumed_training_has_plain_losses(lightning: Any, tmp_path: Path) -> None:
    runs = []
    for memory in (None, "2MiB"):
        folder = tmp_path / str(memory)
        torch.manual_seed(1)
        lightning.train(str(folder), memory, accelerator="cpu", max_epochs=1)
        (saved,) = folder.rglob("*.ckpt")
        torch.manual_seed(2)  # Lightning does not save the generators
        runs.append(lightning.train(str(folder), memory, resume=str(saved), accelerator="cpu"))
    check(*runs)
    assert runs[1][2].global_step == 8


@pytest.mark.long
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_has_plain_losses(lightning: Any, precision: str) -> None:
    runs = []
    for memory in (None, "2MiB"):
        torch.manual_seed(1)
        runs.append(lightning.train_with_fabric(memory, accelerator="cpu", precision=precision))
    check(*runs)


@pytest.mark.long
def test_fabric_is_told_to_convert_before_compile(lightning: Any) -> None:
    with pytest.raises(mtcompile.MtcompileError, match="Convert the model first, then compile it"):
        lightning.train_with_fabric("2MiB", accelerator="cpu", precision="bf16-true")


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.long), torch.bfloat16])
def test_a_loop_with_a_scaler_and_averages_has_plain_losses(dtype: torch.dtype) -> None:
    loop = example("raw_loop")
    plain, plain_losses = loop.train(None, dtype=dtype)
    compiled, losses = loop.train("8MiB", dtype=dtype)
    assert losses == plain_losses and plain.keys() == compiled.keys() == {"model", "ema", "swa"}
    assert all(equal(weights(compiled[name]), weights(plain[name])) for name in plain)
    assert not isinstance(compiled["ema"].module, mtcompile.CompiledModule)
    assert compiled["model"].memory_report()["peak_device_bytes"] <= 8 * 2**20
