"""Computes from a schedule what a timeline shows, as plain lists and dictionaries. The page draws it.

The picture's columns have one entry per instruction, in the schedule's order; values and buffers are positions in their
tables. Times are in µs from the step's start, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtcompile.passes.plan import Plan
from mtcompile.runtime.schedule import QUEUES, TIERS, Instruction, Queue, Schedule, is_direct
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import Trace, busy_us, exposed_us, moments, span_us, takes_time, time_of
from mtcompile.runtime.usage import over_time

FORMAT = "mtcompile-picture-1"
_COLUMNS = ("op", "queue", "phase", "kernel", "label", "block", "nbytes", "workspace")  # of instructions, shown as they are
VERBS: dict[Queue, str] = {"h2d": "fetch", "d2h": "store", "disk_read": "read", "disk_write": "write"}
_SAME = 0.005  # of a step: shorter differences are not told

Times = Sequence[tuple[float, float]]  # start and end of every instruction


@dataclass(frozen=True, slots=True)
class Life:
    """The indices of the instructions that make, move, use and free one value, in any of its buffers."""

    made: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    used: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """One tier over time: after event k, at ``time_us[k]``, series ``which[k]`` holds ``nbytes[k]``. Series are
    (place, role) pairs; what is resident and the arena's size are there all the time, and slots lie in the arena."""

    series: tuple[tuple[str, str], ...]
    time_us: tuple[float, ...]
    which: tuple[int, ...]
    nbytes: tuple[int, ...]
    resident: int
    arena: int

    def peak_nbytes(self) -> int:
        """Return the most bytes held at once: resident, arena, and what is outside both."""
        live = [0] * len(self.series)
        outside = most = 0
        for which, nbytes in zip(self.which, self.nbytes, strict=True):
            if self.series[which][0] != "slot":
                outside += nbytes - live[which]
                most = max(most, outside)
            live[which] = nbytes
        return self.resident + self.arena + most


def picture(
    schedule: Schedule,
    measured: Trace | None = None,
    plan: object = None,
    *,
    title: str = "",
    names: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns all that a page shows of a schedule.

    Beside what was ``measured``, that is what the simulator predicts (for a schedule that runs ahead, of a step that follows
    another one). ``names``: value -> the user's name for it. ``plan`` is shown as it prints; the header has its step time and
    its certificate, and what optimizer.step() adds is drawn after what the simulator predicts."""
    predicted = simulate(schedule)
    if schedule.run_ahead:
        predicted = simulate(schedule, predicted)
    instructions, buffers = schedule.instructions, list(schedule.buffers.values())
    place = {buffer.name: position for position, buffer in enumerate(buffers)}
    values = list(dict.fromkeys(buffer.value for buffer in buffers))
    which = {value: position for position, value in enumerate(values)}
    every = lives(schedule)
    traces = [_trace(schedule, trace) for trace in (predicted, measured) if trace is not None and trace.records]
    return {
        "format": FORMAT,
        "title": title,
        "plan": "" if plan is None else str(plan),
        "step": _step(plan, traces),
        "update_us": plan.update_us if isinstance(plan, Plan) else 0.0,
        "bound": plan.certificate.of(plan.total_us) if isinstance(plan, Plan) and plan.certificate else "",
        "run_ahead": schedule.run_ahead,
        "queues": [queue for queue in QUEUES if any(i.queue == queue for i in instructions)],
        "instructions": {
            **{name: [getattr(i, name) for i in instructions] for name in _COLUMNS},
            "text": [_text(schedule, i) for i in instructions],
            "paint": [_paint(schedule, i) for i in instructions],
            "reads": [[place[name] for name in i.reads] for i in instructions],
            "writes": [[place[name] for name in i.writes] for i in instructions],
            "deps": [list(i.deps) for i in instructions],
            "previous_step_deps": [list(i.previous_step_deps) for i in instructions],
        },
        "buffers": {
            **{name: [getattr(b, name) for b in buffers] for name in ("name", "tier", "kind", "role", "nbytes")},
            "value": [which[b.value] for b in buffers],
        },
        "values": {
            "name": values,
            "alias": [(names or {}).get(value, "") for value in values],
            **{part: [list(getattr(every[value], part)) for value in values] for part in Life.__slots__},
        },
        "tiers": {
            tier: {"peak": schedule.peak_nbytes[tier], "limit": schedule.budget_nbytes.get(tier)}
            for tier in TIERS
            if schedule.peak_nbytes.get(tier)
        },
        "traces": traces,
    }


def _step(plan: object, traces: Sequence[Mapping[str, Any]]) -> str:
    """Says how long a step takes, by the plan. A schedule has no update after the backward."""
    drawn = ", ".join(f"{time_of(trace['span_us'])} {trace['source']}" for trace in traces)
    if not isinstance(plan, Plan) or not traces or abs(plan.total_us - traces[0]["span_us"]) < _SAME * plan.total_us:
        return drawn
    return f"{time_of(plan.total_us)} a step planned, {time_of(plan.update_us)} of it for optimizer.step(); the rest: {drawn}"


def _trace(schedule: Schedule, trace: Trace) -> dict[str, Any]:
    times = timed(schedule, trace)
    path = critical_path(schedule, times, trace)
    on_path: dict[str, float] = {}
    for index, _ in path:
        queue = schedule.instructions[index].queue
        on_path[queue] = on_path.get(queue, 0.0) + times[index][1] - times[index][0]
    ran = {record.index for record in trace.records}
    held = {tier: memory(schedule, times, tier) for tier in TIERS if schedule.peak_nbytes.get(tier)}
    return {
        "source": trace.source,
        "start_us": [start for start, _ in times],
        "end_us": [end for _, end in times],
        "missing": [i for i, each in enumerate(schedule.instructions) if takes_time(each) and i not in ran],
        "span_us": span_us(trace),
        "busy_us": dict(busy_us(trace)),
        "exposed_us": {queue: exposed_us(trace, queue) for queue in busy_us(trace) if queue != "compute"},
        "critical": [index for index, _ in path],
        "because": [why for _, why in path],
        "critical_us": on_path,
        "limit": max(on_path, key=lambda queue: on_path[queue], default=""),
        "memory": {
            tier: {**{part: getattr(each, part) for part in Memory.__slots__}, "peak": each.peak_nbytes()}
            for tier, each in held.items()
        },
    }


def timed(schedule: Schedule, trace: Trace) -> list[tuple[float, float]]:
    """Returns start and end of every instruction. One without a record takes no time and is placed where it may start."""
    return list(moments(schedule, trace, every=True).values())


def critical_path(schedule: Schedule, times: Times, trace: Trace) -> list[tuple[int, str]]:
    """Returns the chain of instructions that leads to the last end, each as (instruction, what it started after): ``queue``
    the one before it on its queue, ``dep`` one it waits for, ``phase`` the end of the earlier phase, ``ahead`` the previous
    step, ``start`` nothing."""
    causes: list[list[tuple[int, str]]] = []  # of each instruction, what it could have been waiting for
    newest: dict[str, int] = {}
    last = drained = None
    for index, instruction in enumerate(schedule.instructions):
        if index and instruction.phase != schedule.instructions[index - 1].phase:
            drained = last
        candidates = [(newest[instruction.queue], "queue")] if instruction.queue in newest else []
        candidates += [(dep, "dep") for dep in instruction.deps]
        causes.append(candidates + ([(drained, "phase")] if drained is not None else []))
        newest[instruction.queue] = index
        if last is None or times[index][1] > times[last][1]:
            last = index
    path: list[tuple[int, str]] = []
    while last is not None:
        cause, why = max(causes[last], key=lambda pair: times[pair[0]][1], default=(None, "start"))
        if trace.source == "predicted" and schedule.instructions[last].previous_step_deps:
            if cause is None or times[last][0] > times[cause][1]:
                cause, why = None, "ahead"
        path.append((last, why))
        last = cause
    return path[::-1]


def memory(schedule: Schedule, times: Times, tier: str) -> Memory:
    """Returns what a tier holds at each moment."""
    changes = [(at, change) for at, change in over_time(schedule, dict(enumerate(times))) if change.tier == tier]
    places = [("pooled" if change.place == "tangent" else change.place, change.role) for _, change in changes]
    series = tuple(dict.fromkeys(places))
    number = {place: position for position, place in enumerate(series)}
    live, nbytes = [0] * len(series), []
    for place, (_, change) in zip(places, changes, strict=True):
        live[number[place]] += change.nbytes
        nbytes.append(live[number[place]])
    resident, arena = schedule.resident_nbytes.get(tier, 0), schedule.arena_nbytes.get(tier, 0)
    which = tuple(number[place] for place in places)
    return Memory(series, tuple(at for at, _ in changes), which, tuple(nbytes), resident, arena)


def lives(schedule: Schedule) -> dict[str, Life]:
    """Returns value -> its life. No instruction makes what exists before the step (a home that nothing writes)."""
    parts: dict[str, dict[str, list[int]]] = {
        buffer.value: {part: [] for part in Life.__slots__} for buffer in schedule.buffers.values()
    }
    for index, instruction in enumerate(schedule.instructions):
        reads = dict.fromkeys(schedule.buffers[name].value for name in instruction.reads)
        writes = dict.fromkeys(schedule.buffers[name].value for name in instruction.writes)
        if instruction.op == "run":
            for value in reads:
                parts[value]["used"].append(index)
        for value in writes if instruction.op != "alloc" else ():
            parts[value][{"run": "made", "copy": "moved", "free": "freed"}[instruction.op]].append(index)
    return {value: Life(**{part: tuple(rows) for part, rows in life.items()}) for value, life in parts.items()}


def _roles(schedule: Schedule, instruction: Instruction) -> list[str]:
    """Returns the roles of what it writes, the one with the most bytes first."""
    nbytes: dict[str, int] = {}
    for name in instruction.writes:
        buffer = schedule.buffers[name]
        nbytes[buffer.role] = nbytes.get(buffer.role, 0) + buffer.nbytes
    return sorted(nbytes, key=lambda role: -nbytes[role])


def _text(schedule: Schedule, instruction: Instruction) -> str:
    """Describes an instruction in a few words: what it does, for which block."""
    if instruction.op in ("alloc", "free"):
        return instruction.op
    if instruction.op == "copy":
        moved = "+".join(_roles(schedule, instruction)[:2])
        whence = "from disk" if is_direct(instruction, schedule.buffers) else ""
        return " ".join(filter(None, (VERBS.get(instruction.queue, "copy"), instruction.block, moved, whence)))
    if not instruction.block:
        return instruction.label or instruction.kernel
    if instruction.work == "collective":
        return f"combine {instruction.block} {'+'.join(_roles(schedule, instruction)[:2])}"
    if instruction.work == "update" and instruction.queue == "h2d":
        return f"fetch {instruction.block} for its update"
    if instruction.work in ("update", "convert"):
        return f"{instruction.work} {instruction.block}"
    return f"{instruction.block} {instruction.phase}" + (" (recompute)" if instruction.work == "recompute" else "")


def _paint(schedule: Schedule, instruction: Instruction) -> str:
    """Says what decides a box's colour: what a kernel is for, or the role of what a copy moves."""
    if instruction.op != "run" or instruction.work == "collective":
        return next(iter(_roles(schedule, instruction)), "")
    if instruction.work == "update" or instruction.queue == "host":
        return "update"
    return "recompute" if instruction.work == "recompute" else instruction.phase
