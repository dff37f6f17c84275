"""Training loops drawn from a grammar show what they show in plain PyTorch, or are refused before anything has changed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.loops.draw import drawn
from benchmarks.loops.judge import DEFECTS, EQUAL, judge
from benchmarks.loops.program import script


def equal_programs(seeds: range) -> int:
    """Asserts that none differs, and that no internal error shows; returns how many were not refused."""
    torch.set_num_threads(1)
    verdicts = {seed: judge(drawn(seed)) for seed in seeds}
    for seed, verdict in verdicts.items():
        assert verdict.kind not in DEFECTS, script(drawn(seed), verdict.memory, f"seed {seed}: {verdict.says}")
    return sum(verdict.kind == EQUAL for verdict in verdicts.values())


@pytest.mark.slow
def test_drawn_loops_agree_with_plain_pytorch() -> None:
    assert equal_programs(range(10)) >= 6


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 2000, 20))
def test_many_drawn_loops_agree_with_plain_pytorch(first: int) -> None:
    assert equal_programs(range(first, first + 20)) >= 8
