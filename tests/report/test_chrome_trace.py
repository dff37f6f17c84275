"""Traces as JSON: valid against the trace-event format, and the same figures as the schedule and the trace they come from."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import mtcompile
from mtcompile.report.chrome_trace import THREADS, trace_events, write
from mtcompile.runtime.schedule import QUEUES, Schedule
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import Trace, busy_us, span_us
from tests.helpers.stacks import KINDS, planned, stack
from tests.helpers.trace_events import check_format
from tests.helpers.training import adamw, train

pytestmark = pytest.mark.slow  # it compiles many models


def check_flows(events: list[dict[str, Any]], schedule: Schedule) -> int:
    """Each begins within a piece and ends at the start of one in another lane; there is one for every dependency."""
    pieces = {e["args"]["index"]: e for e in events if e["ph"] == "X"}
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == sum(e["ph"] == "s" for e in events) and len(ends) == sum(e["ph"] == "f" for e in events)
    drawn = set()
    for number, begin in begins.items():
        end = ends[number]
        one, other = pieces[begin["args"]["from"]], pieces[begin["args"]["to"]]
        assert one["ts"] <= begin["ts"] <= one["ts"] + one["dur"] and begin["tid"] == one["tid"]
        assert end["ts"] == other["ts"] >= begin["ts"] and end["bp"] == "e" and end["tid"] == other["tid"]
        assert begin["tid"] != end["tid"]
        drawn.add((one["args"]["index"], other["args"]["index"]))
    wanted = set()
    rows = schedule.instructions
    for index, instruction in enumerate(rows):
        for dep in instruction.deps:
            if rows[dep].queue != instruction.queue:
                one = [i for i in range(dep + 1) if rows[i].queue == rows[dep].queue and i in pieces]
                other = [i for i in range(index, len(rows)) if rows[i].queue == instruction.queue and i in pieces]
                if one and other:
                    wanted.add((one[-1], other[0]))
    assert drawn == wanted
    return len(drawn)


def check_figures(events: list[dict[str, Any]], schedule: Schedule, trace: Trace) -> None:
    """Busy times, peaks and budgets, added up from the JSON alone."""
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    busy: dict[str, float] = defaultdict(float)
    pieces = [e for e in events if e["ph"] == "X"]
    for event in pieces:
        busy[lanes[event["tid"]]] += event["dur"]
    assert dict(busy) == pytest.approx(busy_us(trace), rel=1e-9)
    first, last = min(e["ts"] for e in pieces), max(e["ts"] + e["dur"] for e in pieces)
    assert last - first == pytest.approx(span_us(trace), rel=1e-9)
    for event in pieces:
        instruction = schedule.instructions[event["args"]["index"]]
        assert event["args"]["reads"] == list(instruction.reads) and event["args"]["writes"] == list(instruction.writes)
        assert event["args"]["phase"] == instruction.phase and THREADS[instruction.queue] == event["tid"]
        if instruction.op == "copy":
            assert event["args"]["bytes"] == instruction.nbytes
    for tier, peak in schedule.peak_nbytes.items():
        totals = [e["args"]["bytes"] for e in events if e["name"] == f"{tier} memory"]
        roles = [sum(e["args"].values()) for e in events if e["name"] == f"{tier} memory by role"]
        assert totals == roles
        assert max(totals, default=0) == peak
        if tier in schedule.budget_nbytes:
            limits = {e["args"]["bytes"] for e in events if e["name"] == f"{tier} budget"}
            assert limits == {schedule.budget_nbytes[tier]} and max(totals) <= schedule.budget_nbytes[tier]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_predicted_step(kind: str) -> None:
    schedule = planned(kind).schedule
    trace = simulate(schedule)
    data = trace_events(schedule, trace, "stack")
    events = check_format(data)
    arrows = check_flows(events, schedule)
    check_figures(events, schedule, trace)
    queues = {i.queue for i in schedule.instructions if i.op in ("copy", "run")}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == queues
    assert arrows >= len(queues) - 1
    assert data["otherData"]["source"] == "predicted" and set(QUEUES) == THREADS.keys()


def test_a_measured_step(tmp_path: Path) -> None:
    """Allocations and frees have no records there; peaks and budgets are the schedule's all the same."""
    model, data = stack()
    optimizer = adamw(model.parameters())
    compiled: Any = mtcompile.compile(model, memory="2MiB", optimizer=optimizer, device="cpu", policy="megatrain")
    train(compiled, optimizer, data, steps=2)
    write(tmp_path / "step.json", compiled.schedule, compiled.last_trace)
    events = check_format(json.loads((tmp_path / "step.json").read_text()))
    assert check_flows(events, compiled.schedule)
    check_figures(events, compiled.schedule, compiled.last_trace)


def test_a_forward_alone_holds_nothing_of_a_backward() -> None:
    schedule = planned("megatrain").schedule
    whole = simulate(schedule)
    forward = Trace(tuple(r for r in whole.records if schedule.instructions[r.index].phase == "forward"), "predicted")
    events = check_format(trace_events(schedule, forward))
    assert {e["args"]["phase"] for e in events if e["ph"] == "X"} == {"forward"}
    assert all("tangent" not in e["args"] or not e["args"]["tangent"] for e in events if e["ph"] == "C")
    most = max(e["args"]["bytes"] for e in events if e["name"] == "device memory")
    assert 0 < most < schedule.peak_nbytes["device"]
