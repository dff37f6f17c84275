"""What a plan counts on for the updates of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtcompile.passes import rewrite
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.lower import lower
from mtcompile.passes.plan import Plan, Updates
from mtcompile.runtime.schedule import Schedule
from tests.helpers.tracing import traced_case

MACHINE = Machine(host_gbps=7.0)


def updating(updates: Updates) -> Schedule:
    step, plan = traced_case("llama").step, Plan(updates=updates)
    return lower(rewrite(step, plan), plan, MACHINE, {})


@pytest.mark.slow
@pytest.mark.parametrize("copies", [2.0, 5.0])
def test_a_checked_update_reads_each_gradient_once_more(copies: float) -> None:
    updates = Updates(copies)
    plain, checked = (
        [i for i in updating(each).instructions if i.work == "update"] for each in (updates, replace(updates, checked=True))
    )
    assert plain and len(plain) == len(checked)
    for one, other in zip(plain, checked, strict=True):
        assert other.time_us / one.time_us == pytest.approx((4 + 2 * copies) / (3 + 2 * copies))


def test_norms_cost_what_their_gradients_are_cast_to() -> None:
    updates = Updates(held=True)
    plain, cast = (
        [i for i in updating(each).instructions if "norm" in i.label] for each in (updates, replace(updates, norm_copies=5.0))
    )
    assert plain and len(plain) == len(cast)
    assert [other.time_us / one.time_us for one, other in zip(plain, cast, strict=True)] == pytest.approx(
        [5.0] * len(plain), rel=0.01
    )


def test_cores_that_are_slower_than_the_memory_take_longer() -> None:
    slow, fast = replace(MACHINE, update_gbps=1.75), replace(MACHINE, update_gbps=70.0)
    assert slow.update_us(1 << 20, 0, 2.0) == 4 * MACHINE.update_us(1 << 20, 0, 2.0)
    assert fast.update_us(1 << 20, 0, 2.0) == MACHINE.update_us(1 << 20, 0, 2.0)
    assert slow.update_us(0, 1 << 20, 2.0) == MACHINE.update_us(0, 1 << 20, 2.0)
