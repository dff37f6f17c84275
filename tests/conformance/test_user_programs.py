"""Programs as users write them, drawn at random: everything they show has the bits of the plain run, or they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.user_programs import Run, Spec, run


def different(plain: Run, compiled: Run) -> str | None:
    """The first thing that differs."""
    for (what, one), (also, other) in zip(plain.seen, compiled.seen, strict=False):
        if what != also or not same(one, other):
            return f"{what}: {one} and {also}: {other}"
    return None if len(plain.seen) == len(compiled.seen) else "one of them ended early"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def equal_programs(seeds: range) -> int:
    """Asserts that none differs; returns how many were not refused."""
    count = 0
    for seed in seeds:
        compiled = run(Spec.of(seed), compiled=True)
        if compiled.refused is None:
            difference = different(run(Spec.of(seed), compiled=False), compiled)
            assert difference is None, f"{Spec.of(seed)}: {difference}"
            count += 1
    return count


@pytest.mark.slow
def test_programs_have_the_bits_of_the_plain_run() -> None:
    assert equal_programs(range(6)) >= 5


@pytest.mark.long
@pytest.mark.parametrize("first", [*range(0, 60, 10), *range(1000, 1500, 10)])
def test_many_programs_have_the_bits_of_the_plain_run(first: int) -> None:
    assert equal_programs(range(first, first + 10)) >= 9
