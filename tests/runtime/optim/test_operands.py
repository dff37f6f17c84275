"""Split weights are exact, and operands that are not those of an update are refused."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from mtcompile.runtime.optim import formula, host_kernels
from mtcompile.runtime.optim.operands import LAYOUTS, Operands, joined, split
from tests.helpers.updates import ADAM, UPDATES, floats, good


def test_every_high_pattern_with_chosen_low_ones_is_split_and_joined_exactly() -> None:
    high = torch.arange(2**16)[:, None] << 16
    generator = torch.Generator().manual_seed(1)
    low = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    low = torch.cat((low, torch.randint(0, 2**16, (8,), generator=generator)))
    bits = (high | low).flatten()
    master = floats(bits)
    hi, lo = split(master)
    back = joined(hi, lo).view(torch.int32).long() & 0xFFFFFFFF
    seen = bits & 0x7FFFFFFF
    hidden = (seen > 0x7F800000) & ((seen < 0x7F808000) | (seen >= 0x7FFF8000))
    assert torch.equal(back[~hidden], bits[~hidden])
    assert (back[hidden] == 0x7FC00000).all()
    assert torch.equal(hi.isnan(), master.isnan())  # the planes that are computed with show every NaN
    rounded = ((bits + 0x8000) >> 16) & 0xFFFF
    numbers = ~master.isnan()
    assert torch.equal((hi.view(torch.int16).long() & 0xFFFF)[numbers], rounded[numbers])
    ties = (bits & 0xFFFF) == 0x8000
    assert torch.equal(hi[numbers & ~ties], master.bfloat16()[numbers & ~ties])  # torch's rounding, but for ties


def test_random_masters_are_split_and_joined_exactly() -> None:
    master = torch.randn(3, 700, 1000, generator=torch.Generator().manual_seed(2))
    hi, lo = split(master)
    assert (hi.dtype, lo.dtype, hi.shape, lo.shape) == (torch.bfloat16, torch.int16, master.shape, master.shape)
    assert torch.equal(joined(hi, lo), master)
    assert torch.equal(joined(*split(master.transpose(0, 2))), master.transpose(0, 2))


def test_a_master_whose_high_plane_is_infinite_is_kept() -> None:
    hi, lo = split(torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, math.inf, -math.inf]))
    assert hi.isinf().all() and joined(hi, lo).tolist() == [3.4028234663852886e38, -3.4028234663852886e38, math.inf, -math.inf]


def test_split_and_joined_say_what_they_expect() -> None:
    with pytest.raises(ValueError, match=r"expected masters in torch.float32, found torch.float64"):
        split(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"expected torch.bfloat16 and torch.int16 of one shape .* found torch.float32 \[2\]"):
        joined(torch.zeros(2), torch.zeros(2, dtype=torch.int16))


@pytest.mark.parametrize(
    ("layout", "place", "wrong", "message"),
    [
        ("fp32", 0, torch.ones(8).bfloat16(), "weight to be torch.float32 [8] on cpu, contiguous, found torch.bfloat16 [8]"),
        ("fp32", 0, torch.ones(8).bfloat16(), "a bf16 weight needs its remainder"),
        ("fp32", 0, torch.ones(2, 4), "weight to be torch.float32 [8] on cpu, contiguous, found torch.float32 [2, 4]"),
        ("fp32", 1, torch.ones(7), "grad to be torch.float32 [8] on cpu, contiguous, found torch.float32 [7]"),
        ("fp32", 1, torch.ones(8).bfloat16(), "expected grad to be torch.float32 [8]"),
        ("fp32", 2, torch.ones(8).double(), "m to be torch.float32 [8] on cpu, contiguous, found torch.float64 [8]"),
        ("fp32", 3, torch.ones(16)[::2], "contiguous, found torch.float32 [8] on cpu, strides [2]"),
        ("fp32", 3, torch.ones(8, device="meta"), "contiguous, found torch.float32 [8] on meta"),
        ("split, bf16 gradient", 0, torch.ones(8), "expected weight to be torch.bfloat16 [8]"),
        ("split, bf16 gradient", 1, torch.ones(8).half(), "expected grad to be torch.bfloat16 or torch.float32 [8]"),
        ("split, bf16 gradient", 4, torch.ones(8), "expected remainder to be torch.int16 [8]"),
        ("fp32", 1, torch.ones(8).to_sparse(), "torch.sparse_coo"),
    ],
)  # fmt: skip
def test_wrong_operands_are_refused(layout: str, place: int, wrong: Tensor, message: str) -> None:
    operands = good(layout)
    tensors: list[Any] = [operands.weight, operands.grad, *operands.states, operands.remainder]
    tensors[place] = wrong
    with pytest.raises(ValueError, match=re.escape(message)):
        host_kernels.apply(UPDATES["adamw"], Operands(tensors[0], tensors[1], tuple(tensors[2:4]), tensors[4]))


def test_states_of_another_optimizer_are_refused() -> None:
    with pytest.raises(ValueError, match="expected the states buffer, found 2 tensors"):
        host_kernels.apply(UPDATES["sgd"], good())


def test_overlapping_operands_are_refused() -> None:
    room = torch.zeros(15)
    with pytest.raises(ValueError, match="share no memory, found m and v overlapping"):
        host_kernels.apply(UPDATES["adamw"], Operands(torch.ones(8), torch.ones(8), (room[:8], room[7:])))
    room = torch.zeros(16)
    host_kernels.apply(UPDATES["adamw"], Operands(torch.ones(8), torch.ones(8), (room[:8], room[8:])))


def test_a_step_before_the_first_and_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="expected the first step to be number 1, found step 0"):
        formula.adamw(**ADAM | {"step": 0})
    there = [torch.zeros(8, device="meta") for _ in range(4)]
    with pytest.raises(ValueError, match=r"expected weight to be .* on cpu, contiguous, found torch.float32 \[8\] on meta"):
        host_kernels.apply(UPDATES["adamw"], Operands(there[0], there[1], tuple(there[2:])))


def test_nothing_to_update_is_no_error() -> None:
    for layout in LAYOUTS:
        host_kernels.apply(UPDATES["adamw"], good(layout, 0))
