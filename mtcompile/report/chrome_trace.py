"""A schedule and a trace of it in the trace-event format: what https://ui.perfetto.dev and chrome://tracing open.

One process; a thread per queue with a complete event per copy and kernel; an arrow (a flow) per dependency between two
queues; counters of the bytes in each tier, in total, by role, and of the tier's budget. Allocations and frees take no time:
they show in the counters. The format: "Trace Event Format", by the authors of chrome://tracing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtcompile.runtime.schedule import QUEUES, Instruction, Schedule, Tier
from mtcompile.runtime.trace import Moments, Trace, moments, span_us, takes_time
from mtcompile.runtime.usage import over_time

PID = 1
THREADS = {queue: number for number, queue in enumerate(QUEUES, 1)}
STATE, UNUSED, WORKSPACE = "training state", "unused slots", "workspace"  # beside the roles of buffers
Event = dict[str, Any]


def write(path: str | Path, schedule: Schedule, trace: Trace, name: str = "a training step") -> None:
    """Writes the trace file. ``trace``: from ``runtime/sim.simulate(schedule)``, or a model's ``last_trace``."""
    Path(path).write_text(json.dumps(trace_events(schedule, trace, name)) + "\n")


def trace_events(schedule: Schedule, trace: Trace, name: str = "a training step") -> dict[str, Any]:
    """Returns the JSON object: metadata first, then all events by time, in µs."""
    when = moments(schedule, trace)
    ran = [i for i in when if takes_time(schedule.instructions[i])]
    events = [*_pieces(schedule, when, ran), *_arrows(schedule, when, ran), *_counters(schedule, when)]
    events.sort(key=lambda event: event["ts"])
    about = {"source": trace.source, "step_us": span_us(trace), "peak_nbytes": dict(schedule.peak_nbytes)}
    head = [*_names(f"{name} ({trace.source})", {schedule.instructions[i].queue for i in ran})]
    return {"traceEvents": [*head, *events], "displayTimeUnit": "ms", "otherData": about}


# --------------------------------------------------------------------------------------------------------------- events


def _names(process: str, used: set[Any]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": PID, "args": {"name": process}}
    for queue, thread in THREADS.items():
        if queue in used:
            yield {"ph": "M", "name": "thread_name", "pid": PID, "tid": thread, "args": {"name": queue}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": PID, "tid": thread, "args": {"sort_index": thread}}


def _pieces(schedule: Schedule, when: Moments, ran: list[int]) -> Iterator[Event]:
    for index in ran:
        instruction, (start, end) = schedule.instructions[index], when[index]
        written = sum(schedule.buffers[name].nbytes for name in instruction.writes)
        about = {
            "index": index,
            "phase": instruction.phase,
            "block": instruction.block,
            "work": instruction.work,
            "kernel": instruction.kernel,
            "reads": list(instruction.reads),
            "writes": list(instruction.writes),
            "bytes": instruction.nbytes if instruction.op == "copy" else written,
            "workspace": instruction.workspace,
            "predicted_us": instruction.time_us,
        }
        name = instruction.label or instruction.kernel or instruction.op
        yield {"ph": "X", "name": name, "cat": instruction.op, **_at(instruction, start), "dur": end - start, "args": about}


def _arrows(schedule: Schedule, when: Moments, ran: list[int]) -> Iterator[Event]:
    """Yields an arrow from what was waited for to what waited. A dependency of an allocation or on a free is drawn between
    the pieces of work next to it in their queues, which are what it keeps apart."""
    before, after = _neighbours(schedule, when, ran)
    drawn: dict[tuple[int, int], None] = {}
    for index in when:
        instruction = schedule.instructions[index]
        for dep in instruction.deps:
            if schedule.instructions[dep].queue != instruction.queue and dep in before and index in after:
                drawn[before[dep], after[index]] = None
    for number, (one, other) in enumerate(drawn):
        (start, end), (then, _) = when[one], when[other]
        if then < start:  # by clocks that do not agree; an arrow cannot go back in time
            continue
        about = {"name": "waits for", "cat": "dependency", "id": number, "args": {"from": one, "to": other}}
        yield {"ph": "s", **about, **_at(schedule.instructions[one], min(then, (start + end) / 2))}
        yield {"ph": "f", "bp": "e", **about, **_at(schedule.instructions[other], then)}


def _neighbours(schedule: Schedule, when: Moments, ran: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Returns, for each instruction, the last piece of work of its queue up to it, and the first one from it on."""
    timed = set(ran)
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    for order, neighbour in ((list(when), before), (list(when)[::-1], after)):
        last: dict[str, int] = {}
        for index in order:
            queue = schedule.instructions[index].queue
            if index in timed:
                last[queue] = index
            if queue in last:
                neighbour[index] = last[queue]
    return before, after


def _at(instruction: Instruction, ts: float) -> Event:
    return {"ts": ts, "pid": PID, "tid": THREADS[instruction.queue]}


# ------------------------------------------------------------------------------------------------------------- counters


def _counters(schedule: Schedule, when: Moments) -> Iterator[Event]:
    tiers: tuple[Tier, ...] = ("device", "host", "disk")
    for tier in tiers:
        limit = schedule.budget_nbytes.get(tier)
        if not schedule.peak_nbytes.get(tier) and limit is None:
            continue
        end = max((end for _, end in when.values()), default=0.0)
        for ts in (0.0, end) if limit is not None else ():
            yield _counter(f"{tier} budget", ts, {"bytes": limit})
        for ts, roles in memory(schedule, when, tier):
            yield _counter(f"{tier} memory", ts, {"bytes": sum(roles.values())})
            yield _counter(f"{tier} memory by role", ts, roles)


def _counter(name: str, ts: float, values: Mapping[str, Any]) -> Event:
    return {"ph": "C", "name": name, "pid": PID, "ts": ts, "args": values}


def memory(schedule: Schedule, when: Moments, tier: Tier) -> Iterator[tuple[float, dict[str, int]]]:
    """Yields (µs, role -> bytes) at the start and after every change, as the planned peak is counted: the training state and
    the arena at all times, pooled values and workspace while they are live, tangents throughout the backward."""
    state, arena = schedule.resident_nbytes.get(tier, 0), schedule.arena_nbytes.get(tier, 0)
    nbytes: dict[str, int] = {b.role: 0 for b in schedule.buffers.values() if b.tier == tier and b.kind != "home"}
    places: Counter[str] = Counter()

    def parts() -> dict[str, int]:
        unused = {UNUSED: arena - places["slot"]} if arena else {}
        workspace = {WORKSPACE: places["workspace"]} if tier == "device" else {}
        return {STATE: state, **nbytes, **unused, **workspace}

    yield 0.0, parts()
    for ts, change in over_time(schedule, when):
        if change.tier == tier:
            places[change.place] += change.nbytes
            if change.role:
                nbytes[change.role] = nbytes.get(change.role, 0) + change.nbytes
            yield ts, parts()
