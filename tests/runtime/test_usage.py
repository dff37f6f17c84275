from __future__ import annotations

from random import Random

import pytest

from mtcompile.runtime.schedule import TIERS, Buffer, Schedule, placed
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.usage import changes, most_in_slots, over_time, peaks, walk
from mtcompile.runtime.verify import peak
from tests.helpers.schedules import offload, small_schedules, training

SCHEDULES = small_schedules()


@pytest.mark.parametrize("name", SCHEDULES)
def test_peaks_are_those_that_the_proof_counts_by_itself(name: str) -> None:
    schedule = SCHEDULES[name]
    assert peaks(schedule) == peak(schedule)
    for tier, nbytes in peaks(schedule).items():
        most = max(usage.pooled + usage.workspace + usage.tangents for usage in walk(schedule, tier))
        fixed = schedule.resident_nbytes.get(tier, 0) + schedule.arena_nbytes.get(tier, 0)
        assert fixed + most == nbytes
        assert max(usage.slots for usage in walk(schedule, tier)) <= schedule.arena_nbytes.get(tier, 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_not_returned_is_given_back(name: str) -> None:
    schedule = SCHEDULES[name]
    returned = {tier: 0 for tier in TIERS}
    for buffer in schedule.buffers.values():
        returned[buffer.tier] += buffer.nbytes if buffer.returned else 0
    for tier in TIERS:
        *_, last = walk(schedule, tier)
        assert (last.slots, last.pooled, last.workspace) == (0, returned[tier], 0)


def test_an_empty_schedule_holds_its_homes() -> None:
    schedule = Schedule((), {"w": Buffer("w", "w", "host", "home", 64, "param")}, {}, {"host": 64}, {})
    assert peaks(schedule) == {"host": 64} and len([*walk(schedule)]) == 1


def test_slots_of_one_role_count_with_their_padding() -> None:
    schedule = offload()
    assert most_in_slots(schedule, "host", "activation") == 2 * placed(schedule.buffers["s0"].nbytes)
    assert most_in_slots(schedule, "host", "grad") == most_in_slots(schedule, "disk", "param") == 0


def test_in_time_all_changes_come_in_order_and_tangents_first_in_the_backward() -> None:
    schedule = training()
    times = {record.index: (record.start_us, record.end_us) for record in simulate(schedule).records}
    timed = over_time(schedule, times)
    assert sorted(change for _, change in timed) == sorted(changes(schedule))
    assert [at for at, _ in timed] == sorted(at for at, _ in timed)
    start = min(times[index][0] for index, _ in schedule.phase("backward"))
    assert [at for at, change in timed if change.place == "tangent"] == [start]
    some = Random(0).sample(sorted(times), len(times) // 2)
    part = over_time(schedule, {index: times[index] for index in some})
    assert {change.instruction for _, change in part if change.place != "tangent"} <= set(some)
