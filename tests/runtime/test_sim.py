from __future__ import annotations

from dataclasses import replace

import pytest

from mtcompile.runtime.schedule import Instruction, Phase, Queue, Schedule
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import Record, Trace, busy_us, exposed_us, span_us
from tests.helpers.schedules import small_schedules, training

SCHEDULES = small_schedules()


def run(queue: Queue, time_us: float, deps: tuple[int, ...] = (), phase: Phase = "forward") -> Instruction:
    return Instruction("run", queue, phase, time_us=time_us, deps=deps)


def times(*rows: Instruction) -> list[tuple[float, float]]:
    return [(r.start_us, r.end_us) for r in simulate(Schedule(rows, {}, {}, {}, {})).records]


def test_a_queue_is_first_in_first_out() -> None:
    assert times(run("compute", 2), run("compute", 3), run("h2d", 4)) == [(0, 2), (2, 5), (0, 4)]


def test_a_dependency_waits_for_the_end() -> None:
    assert times(run("h2d", 5), run("compute", 1), run("compute", 2, (0,)), run("d2h", 1, (1, 2))) == [
        (0, 5),
        (0, 1),
        (5, 7),
        (7, 8),
    ]


def test_a_phase_begins_when_all_queues_have_drained() -> None:
    rows = (run("compute", 1), run("d2h", 9), run("compute", 1, (), "backward"), run("h2d", 2, (), "backward"))
    assert times(*rows) == [(0, 1), (0, 9), (9, 10), (9, 11)]


def test_nothing_takes_no_time() -> None:
    trace = simulate(Schedule((), {}, {}, {}, {}))
    assert (trace.records, span_us(trace), busy_us(trace), exposed_us(trace, "h2d")) == ((), 0, {}, 0)
    assert str(trace) == "# predicted: 0 instructions in 0.000 ms"


@pytest.mark.parametrize("name", SCHEDULES)
def test_predictions_keep_every_order(name: str) -> None:
    schedule = SCHEDULES[name]
    trace = simulate(schedule)
    rows, records = schedule.instructions, trace.records
    assert [r.index for r in records] == list(range(len(rows)))
    assert trace.source == "predicted"
    for i, ins in enumerate(rows):
        assert records[i].queue == ins.queue
        assert records[i].end_us - records[i].start_us == pytest.approx(ins.time_us)
        earlier = [j for j in range(i) if rows[j].queue == ins.queue or rows[j].phase != ins.phase or j in ins.deps]
        assert records[i].start_us == max((records[j].end_us for j in earlier), default=0)  # and as soon as it may
    longest = max(busy_us(trace).values())
    assert longest <= span_us(trace) <= sum(ins.time_us for ins in rows)


def test_slower_transfers_are_exposed() -> None:
    def with_copies(time_us: float) -> Trace:
        rows = [replace(ins, time_us=time_us) if ins.op == "copy" else ins for ins in training().instructions]
        return simulate(replace(training(), instructions=tuple(rows)))

    assert exposed_us(with_copies(0), "h2d") == 0
    assert exposed_us(with_copies(1), "h2d") == 2  # the first of each phase; the second hides behind a kernel
    assert exposed_us(with_copies(10), "h2d") == 4 * 10 - 2 * 3
    assert span_us(with_copies(0)) == 4 * 3


def test_busy_and_exposed_count_time_once() -> None:
    def record(queue: Queue, start: float, end: float) -> Record:
        return Record(0, queue, start, end)

    compute = [record("compute", 0, 10), record("compute", 20, 30)]
    copies = [record("h2d", 5, 12), record("h2d", 11, 15), record("h2d", 29, 33), record("d2h", 2, 4)]
    trace = Trace(tuple(copies + compute), "measured")
    assert span_us(trace) == 33
    assert busy_us(trace) == {"compute": 20, "h2d": 14, "d2h": 2}
    assert exposed_us(trace, "h2d") == 5 + 3
    assert exposed_us(trace, "d2h") == 0
    assert exposed_us(trace, "disk_read") == 0
    assert str(trace).splitlines() == [
        "# measured: 6 instructions in 0.033 ms",
        "compute    busy 0.020 ms (61%)",
        "h2d        busy 0.014 ms (42%), 0.008 ms while compute is idle",
        "d2h        busy 0.002 ms (6%), 0.000 ms while compute is idle",
    ]


def test_refuses_what_would_never_end() -> None:
    with pytest.raises(ValueError, match=r"#0: expected waits for earlier instructions, found \(1,\)"):
        times(run("compute", 1, (1,)), run("h2d", 1))
    with pytest.raises(ValueError, match=r"#0: expected a duration of 0 µs or more, found -1"):
        times(run("compute", -1))
