"""``optimizer.step()`` that ends among its updates: the state is that before or after the step, or the model refuses."""

from __future__ import annotations

import copy
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
import mtcompile.checkpoint
from mtcompile.optim.backward import kernels as backward_kernels
from mtcompile.optim.wholeness import Wholeness
from tests.helpers.stopping import equal, stopped_at

BATCH = torch.linspace(-1, 1, 64).view(4, 16)
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW, one by one": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


class Training:
    """A small compiled model after two steps, with one way to put it back to there."""

    def __init__(self, make: Any, **options: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.optimizer = make(model.parameters())
        self.model: Any = mtcompile.compile(model, memory="1MiB", optimizer=self.optimizer, **options)
        self.batch = BATCH.to(next(model.parameters()).dtype)
        for _ in range(2):
            self.backward()
            self.optimizer.step()
        self.model_state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.state = copy.deepcopy(self.optimizer.state_dict())
        self.before = self.weights()
        self.backward()
        self.optimizer.step()
        self.after = self.weights()

    def backward(self) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(self.batch).float().square().mean()
        loss.backward()
        return loss

    def weights(self) -> list[Tensor]:
        """Weights and state, looked at past the methods that refuse."""
        state = [value for entry in self.optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
        masters = self.model._mt_model.door.masters
        remainders = [] if masters is None else [master.remainder for master in masters]
        return [tensor.detach().clone() for tensor in (*nn.Module.parameters(self.model), *state, *remainders)]

    def restore(self) -> None:
        self.model.load_state_dict(self.model_state)
        self.optimizer.load_state_dict(copy.deepcopy(self.state))

    def refuses(self) -> bool:
        refusals = []
        for use in (lambda: self.model(self.batch), self.model.state_dict, self.optimizer.state_dict, self.optimizer.step):
            try:
                use()
            except mtcompile.StepError as error:
                assert "Load a checkpoint" in str(error) and "after step" in str(error)
                refusals.append(str(error))
            else:
                break
        assert len(refusals) in (0, 4)
        return bool(refusals)


def outcomes(training: Training, every: int) -> Counter[str]:
    """Stops a step at one instant after the other. Counts what is left: before, after or said; raises for anything else."""
    training.restore()
    training.backward()
    count, counts = stopped_at(training.optimizer.step, 0), Counter[str]()
    assert equal(training.weights(), training.after)
    for instant in range(1, count + 1, every):
        training.restore()
        training.backward()
        stopped_at(training.optimizer.step, instant)
        now = training.weights()
        left = "before" if equal(now, training.before) else "after" if equal(now, training.after) else "half"
        said = training.refuses()
        assert said or left != "half", f"at instant {instant} of {count}, half a step is left and nothing is said"
        counts["said" if said else left] += 1
        if not said:  # and it goes on
            training.backward()
    training.restore()
    training.backward()
    training.optimizer.step()
    assert equal(training.weights(), training.after)
    return counts


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_stopped(name: str) -> None:
    counts = outcomes(Training(OPTIMIZERS[name]), 31)
    assert counts["before"] and counts["said"]


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_stopped_at_every_line(name: str) -> None:
    assert outcomes(Training(OPTIMIZERS[name]), 1)["said"]


@pytest.mark.slow
def test_a_step_of_masters_that_is_stopped() -> None:
    assert outcomes(Training(OPTIMIZERS["AdamW"], precision="bf16-master32"), 37)["said"] > 10


@pytest.mark.long
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_step_of_masters_that_is_stopped_at_every_line(name: str) -> None:
    assert outcomes(Training(OPTIMIZERS[name], precision="bf16-master32"), 1)["said"]


@pytest.mark.parametrize("precision", ["model", "bf16-master32"])
def test_a_closure_that_raises_changes_nothing(precision: str) -> None:
    training = Training(OPTIMIZERS["AdamW"], precision=precision)
    training.restore()

    def fail() -> Tensor:
        training.backward()
        raise ValueError("a closure")

    with pytest.raises(ValueError, match="a closure"):
        training.optimizer.step(fail)
    with torch.no_grad():
        next(training.model.parameters()).mul_(0.5)  # which the step did not do
    assert not training.refuses()
    training.restore()
    training.optimizer.step(closure=training.backward)
    assert equal(training.weights(), training.after)


class Scaling(torch.optim.AdamW):
    """Changes parameters itself before the step of its base class, which calls the hooks once more."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            with torch.no_grad():
                torch._foreach_mul_(group["params"], 0.9)
        return super().step(closure)


class Perturbing(torch.optim.Optimizer):
    """Calls its closure at other parameters than it began with, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        moves = [parameter.grad.clone() for parameter in parameters]
        torch._foreach_add_(parameters, moves)
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_(parameters, moves)
        self.base.step()
        return loss


@pytest.mark.parametrize("make", [Scaling, torch.optim.LBFGS, Perturbing])
def test_steps_that_look_at_the_model_while_it_changes(make: Any) -> None:
    def trained(model: Any, optimizer: Any) -> list[Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(BATCH).square().mean()
            loss.backward()
            return loss

        optimizer.register_step_post_hook(lambda *_: model(BATCH))
        for _ in range(3):
            closure()
            optimizer.step(closure)
        return [*model.parameters()]

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    plain = copy.deepcopy(model)
    optimizer = make(model.parameters())
    compiled = mtcompile.compile(model, memory="1MiB", optimizer=optimizer)
    assert all(map(torch.equal, trained(compiled, optimizer), trained(plain, make(plain.parameters()))))


@pytest.mark.parametrize("background", [False, True])
def test_the_last_checkpoint_is_named(background: bool, tmp_path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW"])
    if background:
        folder = mtcompile.checkpoint.save_in_background(tmp_path, training.model, training.optimizer, step=3).wait()
    else:
        folder = mtcompile.checkpoint.save(tmp_path, training.model, training.optimizer, step=3)
    training.backward()
    stopped_at(training.optimizer.step, stopped_at(training.optimizer.step, 0) * 2 // 3)
    with pytest.raises(mtcompile.StepError, match=f"the last is {folder}"):
        training.model(BATCH)
    mtcompile.checkpoint.load(folder, training.model, training.optimizer)
    assert equal(training.weights(), training.after)


def test_a_model_between_two_steps_is_not_copied(tmp_path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW"])
    wholeness: Wholeness = training.model._mt_model.door.wholeness
    wholeness.spoil("step 3 was spoilt")
    with pytest.raises(mtcompile.StepError, match="step 3 was spoilt"):
        copy.deepcopy(training.model)
    with pytest.raises(mtcompile.StepError, match="step 3 was spoilt"):
        torch.save(training.model, tmp_path / "model.pt")
    with torch.no_grad(), pytest.raises(mtcompile.StepError, match="step 3 was spoilt"):
        training.model.eval()(BATCH)
    training.model.load_state_dict(training.model_state)
    with pytest.raises(mtcompile.StepError, match="step 3 was spoilt"):
        training.model(BATCH)
    training.model.bind(torch.optim.SGD(training.model.parameters()))  # a new one's state belongs to any weights
    training.model(BATCH)


def test_a_copy_waits_for_updates_behind_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of what is being updated would be torn."""
    training, plain_step = Training(OPTIMIZERS["AdamW"], update="backward", run_ahead=True), backward_kernels.update_plain
    training.restore()

    def slow(*args: Any) -> None:
        time.sleep(0.05)
        plain_step(*args)

    monkeypatch.setattr(backward_kernels, "update_plain", slow)
    training.backward()
    copied = [*copy.deepcopy(training.model).parameters()]
    assert equal(copied, training.after[: len(copied)])
