"""Operands of update kernels, laid out in every way, and their results as bits to compare."""

from __future__ import annotations

import functools
import itertools
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from mtcompile.runtime.optim import formula, host_kernels
from mtcompile.runtime.optim.formula import Update
from mtcompile.runtime.optim.operands import LAYOUTS, Operands, joined, split

needs_c = pytest.mark.skipif(
    host_kernels.library() is None, reason="update.c was not built: no C compiler with OpenMP at install"
)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

ADAM: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 7}
SGD: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1}
UPDATES = {
    "adamw": formula.adamw(**ADAM),
    "adamw, scaled": formula.adamw(**ADAM, scale=0.37),
    "adam": formula.adam(**ADAM),
    "sgd": formula.sgd(**SGD, first=False),
    "sgd, first": formula.sgd(**SGD, first=True),
    "nesterov": formula.sgd(**SGD, first=False, nesterov=True, scale=0.37),
    "nesterov, first": formula.sgd(**SGD, first=True, nesterov=True),
}
STATES = {name: len(update.state_names) for name, update in UPDATES.items()}
# Zeros, the ends of denormal and normal numbers, 1 and its neighbours, ties of bf16, the largest, infinities, NaNs.
MAGNITUDES = (
    0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x00400000, 0x007FFFFF, 0x00800000, 0x00800001, 0x0D8637BD, 0x33D6BF95,
    0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x40490FDB, 0x7E800000, 0x7F7F7FFF,
    0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7F807FFF, 0x7F808000, 0x7FC00000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF,
)  # fmt: skip
EDGES = (*MAGNITUDES, *(bits | 0x80000000 for bits in MAGNITUDES))


def floats(bits: Tensor) -> Tensor:
    """int64 holding unsigned 32 bits -> fp32."""
    return bits.to(torch.int32).view(torch.float32)


def edge_operands(states: int) -> list[Tensor]:
    """Weight, gradient and states: every pair of edges in every two of them, beside other edges."""
    edges = floats(torch.tensor(EDGES))
    first, second = torch.cartesian_prod(edges, edges).T.contiguous()
    streams = (first, second, first.roll(1237), second.roll(2411))
    return [torch.cat(parts) for parts in list(zip(*itertools.permutations(streams)))[: 2 + states]]


@functools.lru_cache(maxsize=2)  # they are copied before they are changed
def random_operands(count: int, states: int, seed: int = 0) -> list[Tensor]:
    """Numbers of many magnitudes, a quarter of them any bit pattern, so with infinities, NaNs and denormal numbers; the second
    moment is positive elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    operands = []
    for place in range(2 + states):
        values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-6, 2, (count,), generator=generator)
        bits = torch.randint(0, 2**32, (count,), generator=generator)
        values = values.abs() if place == 3 else values
        operands.append(torch.where(torch.rand(count, generator=generator) < 0.25, floats(bits), values))
    return operands


def laid_out(layout: str, parts: list[Tensor]) -> Operands:
    """(weight, grad, *states) in fp32 -> operands of their own in the layout."""
    weight, grad, *states = (part.clone() for part in parts)
    if layout == "fp32":
        return Operands(weight, grad, tuple(states))
    high, low = split(weight)
    # torch's own conversion would make all NaNs one
    halves = (grad.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return Operands(high, halves if layout == "split, bf16 gradient" else grad, tuple(states), low)


def run(update: str | Update, layout: str, parts: list[Tensor], by: Any = None, kernels: Any = host_kernels) -> list[Tensor]:
    """Update copies of the operands; returns weight (joined), states, and the planes, all as int32 bits."""
    operands = laid_out(layout, parts)
    options = {"by": by} if kernels is host_kernels else {}
    kernels.apply(UPDATES[update] if isinstance(update, str) else update, operands, **options)
    weight, remainder = operands.weight, operands.remainder
    whole = weight if remainder is None else joined(weight, remainder)
    results = [result.view(torch.int32) for result in (whole, *operands.states)]
    return results if remainder is None else [*results, weight.view(torch.int16).int(), remainder.int()]


def assert_same_bits(results: list[Tensor], expected: list[Tensor]) -> None:
    for place, (one, other) in enumerate(zip(results, expected, strict=True)):
        wrong = (one != other).nonzero().flatten()
        first = f"result {place}: {len(wrong)} differ, first {one[wrong[0]]:#x}, {other[wrong[0]]:#x}" if len(wrong) else ""
        assert not first, first


def cases(names: Any = tuple(UPDATES)) -> Any:
    return pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in names for layout in LAYOUTS])


def good(layout: str = "fp32", count: int = 8) -> Operands:
    return laid_out(layout, [torch.ones(count), torch.ones(count), torch.zeros(count), torch.zeros(count)])
