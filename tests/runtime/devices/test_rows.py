"""Named rows, their stretches and places, compared with one number at a time."""

from __future__ import annotations

from random import Random

import pytest
import torch

from mtcompile.runtime.devices.rows import named_rows, places_of, stretches_of


@pytest.mark.parametrize("seed", range(20))
def test_places_are_those_of_the_sorted_rows(seed: int) -> None:
    drawn, count = Random(seed), 12
    dtype = drawn.choice([torch.int32, torch.int64])
    several = [[drawn.randrange(-2, count + 2) for _ in range(drawn.randrange(0, 9))] for _ in range(drawn.randrange(1, 4))]
    indices = [torch.tensor(numbers, dtype=dtype).view(-1, 1).t() for numbers in several]
    known = sorted({number for numbers in several for number in numbers if 0 <= number < count})
    named = named_rows(indices, count)
    assert named.tolist() == known
    assert [row for start, end in stretches_of(indices, count) for row in range(start, end)] == known
    without = drawn.choice([-1, *range(count)])
    for index, numbers in zip(indices, several, strict=True):
        places = places_of(index, named, without, spare=77)
        assert (places.dtype, places.shape, places.stride()) == (index.dtype, index.shape, index.stride())
        expected = [77 if n == without >= 0 else known.index(n) if n in known else -1 for n in numbers]
        assert places.flatten().tolist() == expected
