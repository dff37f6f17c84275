"""Calls of a step keep their places while others are put between them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mtcompile.passes.rewrites.repeat import Calls


@pytest.mark.parametrize("seed", range(5))
def test_places_are_in_the_order_of_calls(seed: int) -> None:
    order: list[Any] = list(range(6))
    calls, draw = Calls(order), random.Random(seed)
    for new in range(6, 120):
        before = draw.choice(order)
        calls.put_before(calls.place[before], new)
        order.insert(order.index(before), new)
    assert sorted(order, key=calls.place.__getitem__) == order
    assert [calls.at[calls.place[call]] for call in order] == order
