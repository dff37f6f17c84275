"""Forwards that set ``requires_grad`` on a tensor they have computed, as the audio models of Transformers do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mtcompile

pytestmark = pytest.mark.slow  # it compiles many models


def assigned(hidden: Tensor) -> Tensor:
    hidden.requires_grad = True
    return hidden


def called(hidden: Tensor) -> Tensor:
    return hidden.requires_grad_()


def without_grad_mode(hidden: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = hidden * 2
        hidden.requires_grad = True
    return hidden


class Model(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor], result: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.conv, self.norm, self.change, self.result = nn.Conv1d(1, 4, 5), nn.GroupNorm(2, 4), change, result

    def forward(self, x: Tensor) -> object:
        hidden = self.change(x[:, None])
        return self.norm(self.conv(hidden)).relu().mean(), self.result(hidden, hidden + 1)


CHANGES = [assigned, called, without_grad_mode]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "result", [lambda leaf, view: view, lambda leaf, view: leaf.requires_grad, lambda leaf, view: leaf.view(-1)]
)
def test_what_is_computed_from_the_leaf_is_as_in_a_plain_run(change: Callable[[Tensor], Tensor], result: object) -> None:
    def trained(compiled: bool) -> tuple[list[Tensor], object]:
        torch.manual_seed(0)
        model = Model(change, result)  # type: ignore[arg-type]
        loss, other = (mtcompile.compile(model, memory="1MiB", device="cpu") if compiled else model)(torch.randn(2, 16))
        loss.backward()
        return [loss, *(p.grad for p in model.parameters())], other

    (plain, seen), (compiled, seen_compiled) = trained(False), trained(True)
    assert all(map(torch.equal, plain, compiled))
    if isinstance(seen, Tensor):
        assert isinstance(seen_compiled, Tensor) and torch.equal(seen, seen_compiled)
        assert seen_compiled.requires_grad == seen.requires_grad
    else:
        assert seen_compiled is seen


@pytest.mark.parametrize("change", CHANGES)
def test_the_leaf_itself_is_not_returned(change: Callable[[Tensor], Tensor]) -> None:
    model = mtcompile.compile(Model(change, lambda leaf, view: leaf), memory="1MiB", device="cpu")
    with pytest.raises(mtcompile.CaptureError, match="set requires_grad=True") as caught:
        model(torch.randn(2, 16))
    assert "test_new_leaves.py" in str(caught.value)
