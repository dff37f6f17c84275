"""Operands of optimizer updates, the edges of fp32 among them, and what a kernel makes of them."""

from __future__ import annotations

import functools
import itertools
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from mtcompile.runtime.optim import host_kernels
from mtcompile.runtime.optim.host_kernels import LAYOUTS, joined, split

needs_c = pytest.mark.skipif(
    host_kernels.library() is None, reason="update.c was not built: no C compiler with OpenMP at install"
)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 7}
LION = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1}
UPDATES: dict[str, tuple[str, int, dict[str, Any]]] = {  # name -> (function, states, scalars)
    "adamw": ("adamw", 2, ADAM),
    "adamw, scaled": ("adamw", 2, ADAM | {"scale": 0.37}),
    "adam": ("adam", 2, ADAM),
    "sgd": ("sgd", 1, SGD | {"first": False}),
    "sgd, first": ("sgd", 1, SGD | {"first": True}),
    "nesterov": ("sgd", 1, SGD | {"first": False, "nesterov": True, "scale": 0.37}),
    "nesterov, first": ("sgd", 1, SGD | {"first": True, "nesterov": True}),
    "lion": ("lion", 1, LION),
}
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
    """Draws operands of many magnitudes, a quarter of them from all bit patterns, infinities, NaNs and denormal numbers
    included; the second moment is positive in the rest."""
    generator = torch.Generator().manual_seed(seed)
    operands = []
    for place in range(2 + states):
        values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-6, 2, (count,), generator=generator)
        bits = torch.randint(0, 2**32, (count,), generator=generator)
        values = values.abs() if place == 3 else values
        operands.append(torch.where(torch.rand(count, generator=generator) < 0.25, floats(bits), values))
    return operands


def laid_out(layout: str, parts: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """(weight, grad, *states) in fp32 -> own copies in the layout, and the remainder."""
    weight, grad, *states = (part.clone() for part in parts)
    if layout == "fp32":
        return [weight, grad, *states], None
    hi, lo = split(weight)
    # torch's own conversion would make all NaNs one
    halves = (grad.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return [hi, halves if layout == "split, bf16 gradient" else grad, *states], lo


def run(name: str, layout: str, parts: list[Tensor], by: Any = None, where: Any = host_kernels, **more: Any) -> list[Tensor]:
    """Updates copies and returns weight (joined), states, and bits of the planes, all as int32."""
    function, _, scalars = UPDATES[name]
    tensors, remainder = laid_out(layout, parts)
    more |= {"by": by} if where is host_kernels else {}
    getattr(where, function)(*tensors, remainder, **scalars, **more)
    weight, _, *states = tensors
    whole = weight if remainder is None else joined(weight, remainder)
    results = [result.view(torch.int32) for result in (whole, *states)]
    return results if remainder is None else [*results, weight.view(torch.int16).int(), remainder.int()]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for place, (one, other) in enumerate(zip(actual, expected, strict=True)):
        wrong = (one != other).nonzero().flatten()
        first = f"result {place}: {len(wrong)} differ, first {one[wrong[0]]:#x}, {other[wrong[0]]:#x}" if len(wrong) else ""
        assert not first, first


def cases(names: Any = tuple(UPDATES)) -> Any:
    return pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in names for layout in LAYOUTS])
