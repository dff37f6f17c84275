"""numpy in a forward: constants are numpy's own, arrays of other values have numpy's bits, and all else is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mtcompile


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function
        self.scale, self.small = np.sqrt(6), np.float32(0.3)
        self.row = np.linspace(0, 1, 6).astype("float32")

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, self.linear(x), x)


def written(model: Model, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    row = np.zeros(6, dtype=np.float32)
    row[2] = 3
    row += 1
    return (h * torch.from_numpy(row)).sum()


def aliased(model: Model, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    row = np.ones(6, dtype=np.float32)
    part = row[1:]
    torch.from_numpy(row).add_(2)
    return (h[:, 1:] * torch.from_numpy(part)).sum()


def fresh(model: Model, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    row = torch.from_numpy(np.arange(6.0))
    return (h * row.add_(1)).sum()


def frequencies(model: Model, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (h * torch.exp(torch.arange(6) * (-np.log(10000.0) / 6))).sum()


SAME: dict[str, Callable[..., Any]] = {
    "number": lambda m, h, x: h.mean() * np.sqrt(2),
    "number on the left": lambda m, h, x: np.sqrt(2) * h.mean(),
    "attribute": lambda m, h, x: h.mean() / m.scale,
    "arithmetic in float32": lambda m, h, x: h.mean() * (m.small / 3),
    "integers": lambda m, h, x: h.view(np.prod(h.shape) // 2, 2).mean() * (3 / np.int64(2)),
    "class": lambda m, h, x: h.mean() * (2.0 if isinstance(m.scale, float) else 3.0),
    "rounded": lambda m, h, x: h.mean() * round(np.sqrt(2), 3),
    "branch": lambda m, h, x: h.sum() if np.any([h.shape[0] > 9, False]) else h.mean(),
    "frequencies": frequencies,
    "tensor of a number": lambda m, h, x: h.mean() * torch.tensor([np.sqrt(2), 1.0]).sum(),
    "tensor of an array": lambda m, h, x: (h * torch.tensor(1 / 10000 ** (np.arange(6) / 6)).float()).sum(),
    "sine of constants": lambda m, h, x: (h * torch.from_numpy(np.sin(np.arange(6)))).sum(),
    "loop": lambda m, h, x: sum(h[:, i].sum() * v for i, v in enumerate(np.linspace(0, 1, 6))),
    "list": lambda m, h, x: sum(h[:, i].sum() * v for i, v in enumerate(np.linspace(0, 1, 6).tolist())),
    "several arrays": lambda m, h, x: (h * torch.from_numpy(np.meshgrid(np.arange(6), np.arange(5))[1])).sum(),
    "mask": lambda m, h, x: (h * torch.from_numpy(np.triu(np.ones((5, 6)), k=1).astype("uint8"))).sum(),
    "index": lambda m, h, x: h[np.arange(3)].sum(),
    "array of the model": lambda m, h, x: (h * torch.from_numpy(m.row)).sum(),
    "arithmetic of an input": lambda m, h, x: (h * torch.from_numpy((x.numpy() * 2 - 0.5) / (x.numpy() + 9))).sum(),
    "comparison of an input": lambda m, h, x: (h * torch.from_numpy((x.numpy() > 0) & (x.numpy() < 1))).sum(),
    "cast of an input": lambda m, h, x: (h * torch.from_numpy(x.numpy().astype(np.float64))).sum(),
    "row of an input": lambda m, h, x: (h * torch.from_numpy(x.numpy()[0])).sum(),
    "written": written,
    "aliased": aliased,
    "fresh": fresh,
    "numbers as outputs": lambda m, h, x: (h.sum(), np.sqrt(2), m.small, np.prod(h.shape)),
    "arrays as outputs": lambda m, h, x: (h.sum(), np.sin(np.arange(3)), x.numpy() * 2, h.detach().numpy()),
}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one.dtype == other.dtype and np.array_equal(one, other)


@pytest.mark.parametrize("case", SAME)
def test_constants_and_exact_operations_have_the_types_and_bits_of_a_plain_run(case: str) -> None:
    torch.manual_seed(0)
    plain, x = Model(SAME[case]), torch.randn(5, 6)
    compiled = mtcompile.compile(copy.deepcopy(plain), memory="1GiB")
    for _ in range(2):  # the next step does not see what one writes to its arrays
        results = [model(x) for model in (plain, compiled)]
        for result in results:
            (result[0] if isinstance(result, tuple) else result).backward()
        assert same(*results)
    assert torch.equal(plain.linear.weight.grad, compiled.linear.weight.grad)


def test_another_number_of_the_model_is_another_capture() -> None:
    torch.manual_seed(0)
    plain, x = Model(SAME["attribute"]), torch.randn(5, 6)
    compiled = mtcompile.compile(copy.deepcopy(plain), memory="1GiB")
    for scale in (np.float64(2), np.float32(2), np.int64(3)):
        plain.scale = compiled.scale = scale
        with torch.no_grad():
            assert same(plain(x), compiled(x))


class Sine(torch.autograd.Function):
    """The numpy extension from torch's tutorial."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * torch.from_numpy(np.cos(ctx.saved_tensors[0].numpy()))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "function": (lambda m, h, x: (h * torch.from_numpy(np.sin(x.numpy()))).sum(), r"numpy's sin(.|\n)*\(torch.sin\)"),
    "autograd function": (lambda m, h, x: Sine.apply(h).sum(), r"numpy's sin"),
    "mean": (lambda m, h, x: (h * torch.from_numpy(x.numpy() - x.numpy().mean(0))).sum(), r"numpy's mean"),
    "sum as an output": (lambda m, h, x: (h.sum(), h.detach().numpy().sum()), r"numpy's sum"),
    "element": (lambda m, h, x: h.sum() * x.numpy()[0, 0], r"numpy's getitem"),
    "loop": (lambda m, h, x: sum(h.sum() * v for v in m.row), r"numpy's getitem"),
    "other dtypes": (lambda m, h, x: (h * torch.from_numpy(x.numpy() * np.arange(6.0))).sum(), r"numpy's mul"),
    "truth value": (lambda m, h, x: (h * np.bool_(True)).sum(), r"numpy's bool(.|\n)*bool\(...\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_computes_otherwise_is_refused_with_its_line(case: str) -> None:
    function, words = REFUSED[case]
    with pytest.raises(mtcompile.CaptureError, match=words) as refusal:
        mtcompile.compile(Model(function), memory="1GiB")(torch.ones(5, 6))
    assert "\n  at " in str(refusal.value) and "test_numpy.py:" in str(refusal.value)
