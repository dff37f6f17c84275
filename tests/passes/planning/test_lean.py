"""Plans that need little of the host have as many homes on the device as there is room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.figures.lean import leanest_within

NEEDED, STATE = 300, 3  # bytes of the device whatever is there, and times as many with a home's state
SIZES = {"a": 50, "b": 10, "c": 20, "d": 10, "e": 40}


def evaluated(plan: Plan) -> Plan:
    on_device = STATE * sum(nbytes for home, nbytes in SIZES.items() if plan.params(home) == "device")
    return replace(plan, peak_bytes={"device": NEEDED + on_device, "host": STATE * sum(SIZES.values()) - on_device})


@pytest.mark.parametrize(
    ("device", "on_device"),
    [
        (299, set[frozenset[str]]()),
        (300, {frozenset[str]()}),
        (420, {frozenset[str](), frozenset("e"), frozenset("bcd")}),
        (450, {frozenset("a"), frozenset("de"), frozenset("bcd")}),
        (690, {frozenset(SIZES)}),
        (None, {frozenset(SIZES)}),
    ],
)
def test_as_many_homes_are_on_the_device_as_have_room(device: int | None, on_device: set[frozenset[str]]) -> None:
    base = Plan()
    plans = list(leanest_within(device, [base], SIZES, evaluated))
    taken = {frozenset(home for home in SIZES if plan.params(home) == "device") for plan in plans}
    assert all(device is None or plan.peak_bytes["device"] <= device for plan in plans)
    assert taken == on_device
