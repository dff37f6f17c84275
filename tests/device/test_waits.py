"""The thread that issues a backward with updates waits for nothing before its last launch, and launches one update for the
parameters of a block; a number that is not finite still changes what it changed when the thread waited."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile.errors import StepError
from mtcompile.runtime.optim import device_kernels
from tests.device.models import make
from tests.device.reference import on
from tests.device.second import updates
from tests.device.second.streams import DEVICE, Call
from tests.helpers.training import loss_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the second device counts")

Optimizer = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    device_kernels.proven.cache_clear()
    monkeypatch.setattr(device_kernels, "apply_all", updates.apply_all)
    yield
    device_kernels.proven.cache_clear()
    DEVICE.reset()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def issued(calls: list[Call]) -> list[Call]:
    """What autograd's thread called, and the one that waits for it, from the first launch to the last."""
    own = [call for call in calls if not call.thread.startswith("mtcompile-")]
    launches = [place for place, call in enumerate(own) if call.kind == "launch"]
    return own[launches[0] : launches[-1] + 1]


CASES: dict[str, tuple[Optimizer, dict[str, Any], str]] = {
    "adamw": (fused, {}, "aten._fused_adamw_.default"),
    "sgd": (momentum, {}, "aten._fused_sgd_.default"),
    "clipped": (fused, {"max_grad_norm": 0.1}, "aten._fused_adamw_.default"),
    "masters": (adamw, {"precision": "bf16-master32"}, "second_device_updates.apply.default"),
    "plain": (adamw, {}, ""),
    "masters, clipped": (adamw, {"precision": "bf16-master32", "max_grad_norm": 0.1}, "second_device_updates.apply.default"),
}


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("case", [case for case in CASES if case != "plain"])
def test_a_backward_waits_for_nothing_before_its_last_launch(case: str, resident: bool, device: torch.device) -> None:
    """Bits are those of ``update="step"``."""
    make_optimizer, options, kernel = CASES[case]
    precision = {key: value for key, value in options.items() if key == "precision"}
    torch.manual_seed(0)
    model, data = make("decoder")
    data = on(device, data)
    plain = copy.deepcopy(model)
    ours, theirs = make_optimizer(model.parameters()), make_optimizer(plain.parameters())
    places: dict[str, Any] = {"policy": "resident"} if resident else {"policy": "megatrain"}
    compiled: Any = mtcompile.compile(model, optimizer=ours, device=device, update="backward", **places, **options)
    stepped: Any = mtcompile.compile(plain, optimizer=theirs, device=device, **places, **precision)
    for _ in range(3):
        loss, expected = loss_of(compiled(**data)), loss_of(stepped(**data))
        DEVICE.calls = calls = list[Call]()
        loss.backward()
        DEVICE.calls = None
        expected.backward()
        if "max_grad_norm" in options and not precision:
            nn.utils.clip_grad_norm_(plain.parameters(), options["max_grad_norm"])
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        if not (precision and "max_grad_norm" in options):  # torch's norm is not that of fp32
            assert torch.equal(loss, expected)
            assert all(map(torch.equal, model.parameters(), plain.parameters()))
    between = issued(calls)
    assert not [call for call in between if call.kind == "block"]
    blocks = [i for i in compiled.schedule.instructions if i.queue == "compute" and i.label.startswith("update")]
    assert bool(blocks) == resident and {p.device.type for p in model.parameters()} == {device.type if resident else "cpu"}
    assert sum(call.name == kernel for call in between if call.kind == "launch") == len(blocks)


class Exploding(nn.Module):
    """The loss is finite. Where ``at`` is 0, the gradients of layers before ``place`` are not."""

    def __init__(self, place: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.place = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), place

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        x = x.to(self.layers[0].weight.dtype)
        for number, layer in enumerate((*self.layers, None)):
            if number == self.place:
                x = (x - x.detach() + at.to(x.dtype)).sqrt()  # an infinite slope at 0
            x = x if layer is None else layer(x).tanh()
        return x.float().square().mean()


X = torch.linspace(-1, 1, 16).view(2, 8)


class Training:
    """An exploding model, compiled, after one step."""

    def __init__(self, case: str, device: torch.device, place: int = 2, **options: Any) -> None:
        make_optimizer, given, _ = CASES[case]
        self.layers = Exploding(place)
        self.optimizer = make_optimizer(self.layers.parameters())
        options = {"policy": "resident", "update": "backward"} | given | options
        self.model: Any = mtcompile.compile(self.layers, optimizer=self.optimizer, device=device, **options)
        self.x, self.ones = X.to(device), torch.ones((), device=device)
        self.model(self.x, self.ones).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[list[Tensor]]:
        """Weights and state of each layer."""
        return [
            [each.detach().cpu().clone() for p in layer.parameters() for each in (p, *self.optimizer.state[p].values())]
            for layer in self.layers.layers
        ]

    def changed(self, before: list[list[Tensor]]) -> list[bool]:
        return [not all(map(torch.equal, one, other)) for one, other in zip(self.state(), before, strict=True)]


@pytest.mark.parametrize("place", [1, 3])
@pytest.mark.parametrize("case", ["adamw", "sgd", "masters"])
def test_a_gradient_that_is_not_finite_changes_nothing_of_its_block_or_after(
    case: str, place: int, device: torch.device
) -> None:
    """Nor what is counted of them, such as steps."""
    training = Training(case, device, place)
    before = training.state()
    with pytest.raises(StepError, match=r"gradient of layers.[012].* other weights have been updated"):
        training.model(training.x, training.ones - 1).backward()
    assert training.changed(before) == [number >= place for number in range(4)]
    with pytest.raises(StepError, match="Load a checkpoint"):
        training.model(training.x, training.ones)


@pytest.mark.parametrize("what", ["gradient", "loss", "scale"])
@pytest.mark.parametrize("case", ["adamw", "sgd", "masters"])
def test_a_step_of_which_nothing_may_be_used_changes_nothing(case: str, what: str, device: torch.device) -> None:
    """Nor the optimizer's state, and the next step is the one that it would have been."""
    training, twin = Training(case, device, 4), Training(case, device, 4)
    before = training.state()
    bad, message = {
        "gradient": (0.0, r"gradient of .* is not finite, the first that was found; nothing was changed"),
        "loss": (-1.0, "the loss is nan; nothing was changed"),
        "scale": (1.0, "the loss was multiplied by 1024, as a GradScaler does"),
    }[what]
    with pytest.raises(StepError, match=message):
        loss = training.model(training.x, training.ones * bad)
        (loss * 1024 if what == "scale" else loss).backward()
    assert not any(training.changed(before))
    for each in (training, twin):
        each.model(each.x, each.ones).backward()
        each.optimizer.step()
    assert not any(training.changed(twin.state())) and all(training.changed(before))


@pytest.mark.parametrize("what", ["loss", "scale"])
@pytest.mark.parametrize("options", [{}, {"run_ahead": True}, {"max_grad_norm": 1.0}])
@pytest.mark.parametrize("case", ["adamw", "masters"])
def test_updates_at_home_see_the_flags_of_the_loss(case: str, options: dict[str, Any], what: str, device: torch.device) -> None:
    training = Training(case, device, 4, policy="megatrain", **options)
    before = training.state()
    message = {"loss": "the loss is nan; nothing was changed", "scale": "the loss was multiplied by 1024"}[what]
    with pytest.raises(StepError, match=message):
        loss = training.model(training.x, training.ones * (-1 if what == "loss" else 1))
        (loss * 1024 if what == "scale" else loss).backward()
    assert not any(training.changed(before))
    training.model(training.x, training.ones).backward()
    training.optimizer.step()
    training.model.synchronize()
    assert all(training.changed(before))


@pytest.mark.parametrize("case", ["adamw", "masters", "plain"])
def test_what_is_not_finite_is_used_where_that_is_asked_for(case: str, device: torch.device) -> None:
    training = Training(case, device, nonfinite="continue")
    with pytest.warns(UserWarning, match=r"gradient of layers.1.* it goes on, as asked"):
        training.model(training.x, training.ones - 1).backward()
    training.optimizer.step()
    finite = [all(bool(p.isfinite().all()) for p in layer.parameters()) for layer in training.layers.layers]
    assert finite == [False, False, True, True]
