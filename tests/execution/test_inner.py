"""Gradients of hidden states, features and attention maps that a forward returns or stores, and goes on computing with."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile

pytestmark = pytest.mark.slow  # it compiles many models


class Model(nn.Module):
    """Returns a result, a tensor that a skip connection goes around, one that is used three times, and a view of another one;
    and stores what an activation in place has made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm, self.drop, self.relu = nn.LayerNorm(8), nn.Dropout(0.3), nn.ReLU(inplace=True)
        self.stored: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        first = self.first(x)
        block = first + self.second(self.norm(first)).tanh() * first
        self.stored = self.relu(self.second(self.drop(block)))
        features = (self.stored.view(-1, 2, 4) + first.view(-1, 2, 4).sin()).flatten(1)
        return {"result": self.last(features.tanh() * features), "hidden": (first, block), "features": features}


def inner(model: Any, outputs: Any) -> list[Tensor]:
    return [*outputs["hidden"], model.stored, outputs["features"]]


def halved(hidden: list[Tensor], noted: list[Tensor | None]) -> None:
    for tensor in hidden:
        tensor.register_hook(lambda gradient: noted.append(gradient.clone()) or gradient * 0.5)  # type: ignore[func-returns-value]


def terms(hidden: list[Tensor]) -> Tensor:
    return torch.stack([tensor.square().mean() + tensor.sin().mean() for tensor in hidden]).sum()


Look = Callable[[Tensor, list[Tensor], Tensor], list[Tensor | None]]


def retained(loss: Tensor, hidden: list[Tensor], x: Tensor) -> list[Tensor | None]:
    for tensor in hidden:
        tensor.retain_grad()
    (loss + terms(hidden)).backward()
    return [tensor.grad for tensor in hidden]


def scaled(loss: Tensor, hidden: list[Tensor], x: Tensor) -> list[Tensor | None]:
    noted: list[Tensor | None] = []
    halved(hidden, noted)
    loss.backward()
    return noted


def scaled_unheld(loss: Tensor, hidden: list[Tensor], x: Tensor) -> list[Tensor | None]:
    noted: list[Tensor | None] = []
    halved(hidden[1:2], noted)
    hidden.clear()
    loss.backward()
    return noted


def asked_one_by_one(loss: Tensor, hidden: list[Tensor], x: Tensor) -> list[Tensor | None]:
    loss = loss + terms(hidden)
    noted = [torch.autograd.grad(loss, tensor, retain_graph=True)[0] for tensor in hidden]
    loss.backward()
    return list(noted)


def asked_together(loss: Tensor, hidden: list[Tensor], x: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, [*hidden, x]))


def accumulated(loss: Tensor, hidden: list[Tensor], x: Tensor) -> list[Tensor | None]:
    (loss + terms(hidden)).backward(inputs=[hidden[0], hidden[2], x])
    return [hidden[0].grad, hidden[2].grad]


def twice(loss: Tensor, hidden: list[Tensor], x: Tensor) -> list[Tensor | None]:
    hidden[1].retain_grad()
    loss.backward(retain_graph=True)
    first = hidden[1].grad
    (loss * 3).backward()
    return [first, hidden[1].grad]


def from_it(loss: Tensor, hidden: list[Tensor], x: Tensor) -> list[Tensor | None]:
    (gradient,) = torch.autograd.grad(loss, hidden[1], retain_graph=True)
    hidden[1].backward(gradient / gradient.norm())
    return [gradient]


def alone(loss: Tensor, hidden: list[Tensor], x: Tensor) -> list[Tensor | None]:
    hidden[3].register_hook(lambda gradient: pytest.fail("the loss does not depend on it"))
    hidden[0].exp().mean().backward()
    return []


LOOKS: list[Look] = [retained, scaled, scaled_unheld, asked_one_by_one, asked_together, accumulated, twice, from_it, alone]


def run(model: Any, call: Any, look: Look) -> list[Tensor | None]:
    torch.manual_seed(0)
    model.zero_grad()
    x = torch.randn(6, 8, requires_grad=True)
    outputs = call(x)
    noted = look(outputs["result"].square().mean(), inner(model, outputs), x)
    return [*noted, x.grad, *(parameter.grad for parameter in model.parameters()), torch.rand(2)]


def same(ours: list[Tensor | None], plain: list[Tensor | None]) -> bool:
    pairs = zip(ours, plain, strict=True)
    return all(theirs is None if mine is None else theirs is not None and torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("door", ["compile", "backend"])
def test_who_looks_at_inner_outputs_sees_and_does_what_he_does_in_a_plain_run(door: str) -> None:
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    call: Any = model
    if door == "backend":
        call = torch.compile(model, backend="mtcompile", options={"activation_memory": "16MiB"})
    else:
        mtcompile.compile(model, memory="16MiB")
    for look in LOOKS if door == "compile" else LOOKS[:3]:
        assert same(run(model, call, look), run(plain, plain, look)), look.__name__


def test_what_cannot_be_had_is_refused() -> None:
    model = mtcompile.compile(Model(), memory="16MiB")
    x = torch.randn(6, 8)
    outputs = model(x)
    with pytest.raises(mtcompile.StepError, match=r"together with others.* call for its gradient alone"):
        torch.autograd.grad(outputs["result"].mean() + terms([*outputs["hidden"]]), outputs["hidden"])
    outputs = model(x)
    with pytest.raises(mtcompile.StepError, match=r"gradient of first, .* with create_graph=True"):
        torch.autograd.grad(outputs["result"].mean(), outputs["hidden"][0], create_graph=True)
    with pytest.warns(UserWarning, match="plan.numerics says so from now on"):
        gradient = torch.autograd.grad(model(x)["result"].mean(), model.first.weight, create_graph=True)[0]
    assert gradient.requires_grad and "bit-equal" not in model.plan.numerics


def test_an_update_in_the_backward_is_refused_before_it_begins() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = mtcompile.compile(model, memory="16MiB", optimizer=optimizer, update="backward")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    outputs = model(torch.randn(6, 8))
    outputs["hidden"][1].retain_grad()
    with pytest.raises(mtcompile.StepError, match=r'gradient of block, .* with update="backward"'):
        outputs["result"].mean().backward()
    assert all(map(torch.equal, before, model.parameters()))
    outputs = model.stored = None
    model(torch.randn(6, 8))["result"].mean().backward()
    optimizer.step()
    assert not torch.equal(before[0], next(model.parameters()))


def test_the_plain_run_is_within_the_budget_and_is_freed() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(64, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = out = self.first(x)
            for block in self.blocks:
                out = block(out).tanh().sin().tanh()
            return out.mean(), hidden

    model = mtcompile.compile(Deep(), memory="4MiB")
    loss, hidden = model(x := torch.randn(2048, 64))
    hidden.retain_grad()
    with pytest.raises(mtcompile.BudgetError, match="gradient of an inner output of forward") as refused:
        loss.backward()
    del loss, hidden
    model = mtcompile.compile(Deep(), memory=refused.value.minimum_bytes)
    gc.disable()
    try:
        loss, hidden = model(x)
        frame, run = weakref.ref(loss.grad_fn.step.frame), weakref.ref(loss.grad_fn.shared)
        torch.autograd.grad(loss, hidden, retain_graph=True)
        assert not loss.grad_fn.shared.is_looked_at and frame() is not None
        assert model.memory_report()["peak_device_bytes"] <= refused.value.minimum_bytes
        del loss, hidden
        assert frame() is None and run() is None
    finally:
        gc.enable()
