"""Whole compiled models, copied and saved: plain models come back, with the current values and ties."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile

pytestmark = pytest.mark.slow  # it compiles many models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.note = nn.Linear(4, 4), nn.Linear(4, 4), "mine"
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).pow(2).sum()


class WithState(Tied):
    """A class that says itself what is saved of it."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "note": "saved"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "note": state["note"] + ", loaded"})


def saved(model: nn.Module) -> bytes:
    memory = io.BytesIO()
    torch.save(model, memory)  # with pickle
    return memory.getvalue()


def loaded(model: nn.Module) -> Any:
    return torch.load(io.BytesIO(saved(model)), weights_only=False)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.save": loaded,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "inside": lambda model: loaded(nn.Sequential(model))[0],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [Tied, WithState])
def test_a_compiled_model_comes_back_plain(cls: type[Tied], way: str) -> None:
    torch.manual_seed(0)
    model, x = mtcompile.compile(cls(), memory="1GiB"), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).backward()
    optimizer.step()
    again = WAYS[way](model)
    assert type(again) is cls and not hasattr(again, "_mt_model")
    assert again.first.weight is again.second.weight
    assert (again.first.weight is model.first.weight) == (way == "copy")
    assert torch.equal(again(x), model(x))
    assert again.note == ("mine" if cls is Tied else "saved, loaded")
    mtcompile.compile(copy.deepcopy(again), memory="1GiB")(x).backward()


def test_what_is_saved_is_no_larger_than_the_plain_model() -> None:
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    compiled = mtcompile.compile(copy.deepcopy(plain), memory="1GiB")
    compiled(torch.ones(2, 64)).sum().backward()
    compiled.zero_grad()
    assert len(saved(compiled)) <= len(saved(plain)) * 1.05 and b"mtcompile" not in saved(compiled)
