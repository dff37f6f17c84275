"""More homes go to disk than the host's budget needs where that makes a step faster."""

from __future__ import annotations

from typing import Any

import pytest

from mtcompile.machine.presets import PRESETS
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Certificate, Plan
from mtcompile.passes.planning.disk.more_homes import with_more_homes
from mtcompile.passes.planning.problem import DoesNotFit, Planned, PlanningProblem

MACHINE = PRESETS["rtx4090"]
HOMES = [f"home {number}" for number in range(40)]


def planned(us: float, bound_us: float = 0.0, read_bytes: int = 0) -> tuple[PlanningProblem, Planned]:
    step: Any = None
    certificate = Certificate(bound_us, "compute") if bound_us else None
    plan = Plan(step_time_us=us, certificate=certificate, disk_read_bytes=read_bytes)
    return PlanningProblem(step, MACHINE, Budgets(disk=1)), Planned(plan, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("us", "more", "counts", "taken"),
    [
        ({22: 100.0, 24: 90.0, 28: 80.0, 36: 85.0}, 2, [24, 28, 36], 28),
        ({22: 100.0, 24: 101.0}, 2, [24], 22),
        ({5: 100.0, 6: 90.0, 8: 80.0}, 1, [6, 8, 12], 8),  # no more fit the disk
        ({39: 100.0, 40: 90.0}, 1, [40], 40),  # all are there
        ({0: 100.0, 9: 90.0, 27: 95.0}, 9, [9, 27], 9),  # a step that fits without a disk, and barely
        ({0: 100.0}, 0, [], 0),  # and with room
    ],
)
def test_more_homes_go_to_disk_as_long_as_that_is_faster(
    us: dict[int, float], more: int, counts: list[int], taken: int
) -> None:
    asked = list[int]()

    def plan(there: tuple[str, ...]) -> tuple[PlanningProblem, Planned]:
        assert there == tuple(HOMES[: len(there)])
        asked.append(len(there))
        if len(there) not in us:
            raise DoesNotFit("disk", 2, ())
        return planned(us[len(there)])

    first = min(us)
    assert with_more_homes(planned(us[first]), HOMES, first, more, plan)[1].plan.total_us == us[taken]
    assert asked == counts


def test_no_more_go_there_where_a_step_is_near_its_bound_or_waits_for_the_disk() -> None:
    def plan(there: tuple[str, ...]) -> tuple[PlanningProblem, Planned]:
        raise AssertionError(there)

    busy = int(95.0 * MACHINE.disk_read_gbps * 1e3)  # bytes that are read in 95 µs
    for fastest in (planned(100.0, bound_us=96.0), planned(100.0, read_bytes=busy)):
        assert with_more_homes(fastest, HOMES, 4, 1, plan) is fastest
