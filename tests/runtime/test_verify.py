from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from mtcompile.runtime import happens_before, verify_facts, verify_memory
from mtcompile.runtime import verify as module
from mtcompile.runtime.deps import derive
from mtcompile.runtime.schedule import Instruction, Schedule, with_deps
from mtcompile.runtime.verify import ScheduleError, peak, verify
from tests.helpers.proof.corrupt import KINDS, mutants
from tests.helpers.proof.oracle import why_unsafe
from tests.helpers.schedules import (
    UNIT,
    Builder,
    from_disk,
    lines_run,
    module_buffers,
    offload,
    small_schedules,
    straight_from_disk,
    streamed,
    training,
    update_on_device,
)

SCHEDULES = small_schedules()


def rejected(schedule: Schedule) -> str | None:
    """The invariant that fails, or None."""
    try:
        verify(schedule)
    except ScheduleError as error:
        assert error.invariant in module.INVARIANTS
        assert str(error).startswith(f"{error.invariant} ")
        return error.invariant
    return None


def every_hazard(schedule: Schedule) -> Schedule:
    """The same order with a dependency for every conflicting pair on two queues, most of them implied by others."""
    rows, buffers = schedule.instructions, schedule.buffers
    deps: list[tuple[int, ...]] = []
    for i, b in enumerate(rows):
        waits = []
        for j, a in enumerate(rows[:i]):
            pairs = [(x, y) for x in (*a.reads, *a.writes) for y in (*b.reads, *b.writes)]
            hazard = any(buffers[x].overlaps(buffers[y]) and (x in a.writes or y in b.writes) for x, y in pairs)
            if hazard and a.queue != b.queue and a.phase == b.phase:
                waits.append(j)
        deps.append(tuple(waits))
    return with_deps(schedule, deps)


# whole schedules


@pytest.mark.parametrize("name", SCHEDULES)
def test_originals_are_accepted_and_really_safe(name: str) -> None:
    for schedule in (SCHEDULES[name], every_hazard(SCHEDULES[name])):
        verify(schedule)
        assert why_unsafe(schedule) is None


@pytest.mark.slow
def test_every_unsafe_mutant_is_rejected() -> None:
    unsafe: Counter[str] = Counter()
    invariants: Counter[str] = Counter()
    for name, schedule in SCHEDULES.items():
        for what, mutant in mutants(schedule, seed=0):
            why = why_unsafe(mutant)
            if why is not None:
                invariant = rejected(mutant)
                assert invariant is not None, f"{name}, {what}: accepted, although {why}\n{mutant}"
                unsafe[name] += 1
                invariants[invariant] += 1
    assert sum(unsafe.values()) >= 200
    assert len([name for name, count in unsafe.items() if count >= 20]) >= 5
    assert set(invariants) == set(module.INVARIANTS)


@pytest.mark.slow
def test_mutants_of_mutants() -> None:
    """Two faults at once must not hide each other."""
    for schedule in SCHEDULES.values():
        for _, once in mutants(schedule, seed=1, per_kind=1):
            for what, twice in mutants(once, seed=2, per_kind=1):
                if rejected(twice) is None:
                    assert why_unsafe(twice) is None, f"{what}\n{twice}"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_dependency_may_go_exactly_when_it_is_implied(name: str) -> None:
    schedule = every_hazard(SCHEDULES[name])
    for i, ins in enumerate(schedule.instructions):
        for dep in ins.deps:
            left = tuple(d for d in ins.deps if d != dep)
            rows = [left if k == i else row.deps for k, row in enumerate(schedule.instructions)]
            mutant = with_deps(schedule, rows)
            assert (rejected(mutant) is None) == (why_unsafe(mutant) is None), f"#{i} without #{dep}\n{mutant}"


@pytest.mark.slow
def test_some_corruptions_are_safe_and_accepted() -> None:
    schedules = [every_hazard(schedule) for schedule in SCHEDULES.values()]
    dropped = [mutant for s in schedules for what, mutant in mutants(s, 0, 50) if what.startswith("drop_a_dep")]
    safe = [mutant for mutant in dropped if why_unsafe(mutant) is None]
    assert len(safe) >= 50
    assert len(safe) < len(dropped)
    assert all(rejected(mutant) is None for mutant in safe)


@pytest.mark.slow
def test_mutants_of_a_schedule_too_large_to_explore() -> None:
    """Some random executions of each; those that find a fault count, whatever the others would have found."""
    schedule = streamed(30)
    assert why_unsafe(schedule, walks=20) is None
    unsafe = [mutant for _, mutant in mutants(schedule, seed=0) if why_unsafe(mutant, walks=5) is not None]
    assert len(unsafe) >= 100
    assert all(rejected(mutant) is not None for mutant in unsafe)


def test_mutants_are_reproducible_and_of_every_kind() -> None:
    made = [list(mutants(schedule, seed=3)) for schedule in SCHEDULES.values()]
    assert made == [list(mutants(schedule, seed=3)) for schedule in SCHEDULES.values()]
    assert {what.split()[0] for some in made for what, _ in some} == set(KINDS)
    assert all(mutant != schedule for some, schedule in zip(made, SCHEDULES.values()) for _, mutant in some)


# one property at a time


def edit(schedule: Schedule, i: int, **changes: Any) -> Schedule:
    rows = list(schedule.instructions)
    rows[i] = replace(rows[i], **changes)
    return replace(schedule, instructions=tuple(rows))


def edit_buffer(schedule: Schedule, buffer: str, **changes: Any) -> Schedule:
    return replace(schedule, buffers={**schedule.buffers, buffer: replace(schedule.buffers[buffer], **changes)})


def find(schedule: Schedule, op: str, name: str) -> int:
    """The instruction ``op`` that writes, or else reads, ``name``."""
    for i, ins in enumerate(schedule.instructions):
        if ins.op == op and name in (*ins.writes, *ins.reads):
            return i
    raise KeyError((op, name))


def without(schedule: Schedule, op: str, name: str) -> Schedule:
    i = find(schedule, op, name)
    return derive(replace(schedule, instructions=schedule.instructions[:i] + schedule.instructions[i + 1 :]))


def appended(schedule: Schedule, *rows: Instruction) -> Schedule:
    return derive(replace(schedule, instructions=(*schedule.instructions, *rows)))


T = training()
D = straight_from_disk()
U = update_on_device()
LAST = len(T) - 1
COPY_W0, RUN_A0, FREE_W0 = find(T, "copy", "w0"), find(T, "run", "a0"), find(T, "free", "w0")
CASES: dict[str, tuple[str, int | None, str, Callable[[], Schedule]]] = {
    "op": ("I0", 2, "unknown op 'wait'", lambda: edit(T, 2, op="wait")),
    "queue": ("I0", 2, "expected a queue of", lambda: edit(T, 2, queue="copies")),
    "phase": ("I0", 2, "expected a phase of", lambda: edit(T, 2, phase="update")),
    "phases mixed": ("I0", LAST, "found forward again", lambda: edit(T, LAST, phase="forward")),
    "operand": ("I0", 2, "found 'nobody'", lambda: edit(T, 2, writes=("nobody",))),
    "later dep": ("I0", 2, "it would deadlock", lambda: edit(T, 2, deps=(5,))),
    "two frees in one": ("I0", FREE_W0, "free of one buffer", lambda: edit(T, FREE_W0, writes=("w0", "a0"))),
    "copy pairs": ("I0", COPY_W0, "found 1 -> 2 operands", lambda: edit(T, COPY_W0, writes=("w0", "w1"))),
    "negative workspace": ("I0", RUN_A0, "bytes of workspace", lambda: edit(T, RUN_A0, workspace=-1)),
    "negative buffer": ("I0", None, "expected 0 bytes or more for w0", lambda: edit_buffer(T, "w0", nbytes=-64)),
    "negative table": ("I0", None, "found device: -64", lambda: replace(T, resident_nbytes={"device": -64})),
    "tier": ("I0", None, "expected w0 in one of", lambda: edit_buffer(T, "w0", tier="tape")),
    "kind": ("I0", None, "unknown kind", lambda: edit_buffer(T, "w0", kind="heap")),
    "no offset": ("I0", None, "placed buffers have an offset", lambda: edit_buffer(T, "w0", offset=None)),
    "misnamed": ("I0", None, "under its own name", lambda: edit_buffer(T, "w0", name="w9")),
    "written twice": (
        "I1",
        COPY_W0 + 1,
        "w0 is written again",
        lambda: derive(replace(T, instructions=(*T.instructions[: COPY_W0 + 1], *T.instructions[COPY_W0:]))),
    ),
    "allocated twice": (
        "I1",
        1,
        "w0 is allocated again",
        lambda: derive(replace(T, instructions=(T.instructions[0], *T.instructions))),
    ),
    "not allocated": ("I1", 0, "expected one alloc of w0, found none", lambda: without(T, "alloc", "w0")),
    "never used": ("I1", None, "expected one alloc of w9", lambda: _with_buffer("w9")),
    "not written": ("I1", 0, "expected one instruction that writes w0", lambda: without(T, "copy", "w0")),
    "kernel on a disk's queue": ("I1", RUN_A0, "expected kernels on queues", lambda: edit(T, RUN_A0, queue="disk_read")),
    "kernel on a copy queue": ("I1", RUN_A0, "found w0 on tier device", lambda: edit(T, RUN_A0, queue="h2d")),
    "state that another kernel reads": (
        "I1",
        find(U, "run", "p0.new"),
        "expected no other reader of s0, which this changes",
        lambda: edit(U, find(U, "run", "p1.new"), reads=("g1", "s0", "s1")),
    ),
    "a copy home by a kernel": (
        "I1",
        find(U, "run", "p0.new"),
        "expected next versions of homes from a kernel on d2h, found p0.new",
        lambda: edit_buffer(U, "p0.new", version_of=""),
    ),
    "kernel on another tier": ("I1", RUN_A0, "p0 on tier host", lambda: edit(T, RUN_A0, reads=("p0", "x"))),
    "copy the wrong way": ("I1", COPY_W0, "found host -> device", lambda: edit(T, COPY_W0, queue="d2h")),
    "copy another value": ("I1", COPY_W0, "found p1 -> p0", lambda: edit(T, COPY_W0, reads=("p1",))),
    "copy another size": ("I1", COPY_W0, "found 64 -> 256 B", lambda: edit_buffer(T, "p0", nbytes=64)),
    "read too early": ("I1", RUN_A0, "w0 complete before it is read", lambda: edit(T, RUN_A0, deps=())),
    "tangent in forward": ("I1", RUN_A0, "arrives with backward", lambda: edit(T, RUN_A0, reads=("w0", "t"))),
    "gradient read before it lands": ("I1", 4, "unordered", lambda: _no_deps(SCHEDULES["update_on_host"], "run", "n0")),
    "freed too early": ("I1", find(T, "copy", "home.g1"), "may have freed it", lambda: _free_on("g1", "compute")),
    "allocated elsewhere": ("I1", COPY_W0, "need not have happened", lambda: edit(T, 0, queue="d2h")),
    "slot reused too early": ("I2", None, "the bytes of s0 and s1", lambda: _no_deps(from_disk(), "alloc", "s1")),
    "read before it is there from disk": (
        "I1",
        find(D, "run", "y1"),
        "w1 complete before it is read",
        lambda: edit(D, find(D, "run", "y1"), deps=()),
    ),
    "read from disk over what is read": ("I2", None, "the bytes of w0 and w2", lambda: _no_deps(D, "alloc", "w2")),
    "from disk and host at once": ("I1", 2, "expected p1 on tier disk, found host", lambda: _of_two_tiers()),
    "rows straight from disk": (
        "I1",
        find(D, "copy", "w0"),
        "expected p0 on tier host, for a part of it, found disk",
        lambda: edit(D, find(D, "copy", "w0"), reads=("p0", "x"), rows=("x",)),
    ),
    "misaligned": ("I3", 0, "steps of 256, found w0 at 64", lambda: derive(edit_buffer(T, "w0", offset=64))),  # as for a CPU
    "outside": ("I3", 0, "found w0 at 1024 .. 1280", lambda: derive(edit_buffer(T, "w0", offset=1024))),
    "below": ("I3", 0, "found w0 at -256 .. 0", lambda: edit_buffer(T, "w0", offset=-256)),
    "two lives in one slot": (
        "I3",
        find(offload(), "alloc", "s1"),
        "s1 overlaps s0",
        lambda: derive(edit_buffer(offload(), "s1", offset=0)),
    ),
    "pooled on another queue": (
        "I3",
        LAST,
        "expected free of pooled d on queue compute, found d2h",
        lambda: derive(edit(T, LAST, queue="d2h")),
    ),
    "pooled size": ("I3", None, "found d of 100", lambda: edit_buffer(T, "d", nbytes=100)),
    "workspace elsewhere": ("I3", 0, "expected workspace on queue compute", lambda: edit(T, 0, workspace=64)),
    "peak": (
        "I3",
        14,
        "device peak of at least 1856 B",
        lambda: replace(T, peak_nbytes={**T.peak_nbytes, "device": 896}),
    ),
    "no peak": ("I3", None, "found none", lambda: replace(T, peak_nbytes={})),
    "limit": ("I3", None, "within the limit of 64 B", lambda: replace(T, budget_nbytes={"host": 64})),
    "home allocated": ("I4", LAST + 1, "home x exists", lambda: appended(T, _manage("free", "x"))),
    "freed twice": ("I4", LAST + 1, "not allocated at this point", lambda: appended(T, _manage("free", "d"))),
    "never freed": ("I4", find(T, "alloc", "d"), "never freed", lambda: without(T, "free", "d")),
    "returned and freed": ("I4", LAST + 1, "a1 is returned", lambda: appended(T, _manage("free", "a1"))),
    "a slot is returned": (
        "I4",
        find(T, "alloc", "g0"),
        "make it pooled",
        lambda: without(edit_buffer(T, "g0", returned=True), "free", "g0"),
    ),
    "a slot in both phases": ("I4", find(T, "alloc", "w1"), "arenas are lent in between", lambda: _across_phases()),
    "home gradient unwritten": ("I4", None, "one write of home home.g1", lambda: without(T, "copy", "home.g1")),
    "gradient lost": ("I4", 14, "grad dp1 to be returned", lambda: _forget_home("home.g1")),
    "gradient twice": ("I4", 17, "found #16, #17", lambda: _second_home()),
    "version lost": ("I4", None, "without mean.1", lambda: without(module_buffers(), "copy", "home.mean.1")),
}


def _manage(op: Any, name: str) -> Instruction:
    return Instruction(op, "compute", "backward", writes=(name,))


def _of_two_tiers() -> Schedule:
    """One copy brings parameters from the disk and from the host."""
    whole = without(edit_buffer(D, "p1", tier="host"), "copy", "w1")
    whole = without(whole, "alloc", "w1")
    first = Instruction("alloc", "h2d", "forward", writes=("w1",))
    whole = replace(whole, instructions=(first, *whole.instructions))
    return derive(edit(whole, find(whole, "copy", "w0"), reads=("p0", "p1"), writes=("w0", "w1")))


def _with_buffer(name: str) -> Schedule:
    return replace(T, buffers={**T.buffers, name: replace(T.buffers["w0"], name=name)})


def _free_on(name: str, queue: Any) -> Schedule:
    return edit(T, find(T, "free", name), queue=queue)


def _no_deps(schedule: Schedule, op: str, name: str) -> Schedule:
    return edit(schedule, find(schedule, op, name), deps=())


def _across_phases() -> Schedule:
    i, start = find(T, "free", "w1"), find(T, "alloc", "v1")
    rows = list(T.instructions)
    moved = replace(rows.pop(i), phase="backward")
    rows.insert(start - 1, moved)
    return derive(replace(T, instructions=tuple(rows)))


def _forget_home(name: str) -> Schedule:
    fewer = without(T, "copy", name)
    return replace(fewer, buffers={k: b for k, b in fewer.buffers.items() if k != name})


def _second_home() -> Schedule:
    i = find(T, "copy", "home.g1")
    second = replace(T.buffers["home.g1"], name="home.g1.too")
    rows = (*T.instructions[: i + 1], replace(T.instructions[i], writes=(second.name,)), *T.instructions[i + 1 :])
    return derive(replace(T, instructions=rows, buffers={**T.buffers, second.name: second}))


@pytest.mark.parametrize("name", CASES)
def test_each_property_has_its_error(name: str) -> None:
    invariant, index, words, make = CASES[name]
    with pytest.raises(ScheduleError) as caught:
        verify(make())
    assert caught.value.invariant == invariant, str(caught.value)
    assert words in str(caught.value)
    if index is not None:
        assert caught.value.index == index


def test_the_error_shows_ten_lines_around_the_instruction() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(edit(T, 22, deps=()))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("I1 present, at #22: expected v0 complete before it is read, found its producer #20")
    assert len(lines) == 11
    marked = [line for line in lines[1:] if line.startswith(">")]
    assert len(marked) == 1 and "   22 bac compute run   layer_backward(v0, x, d)" in marked[0]
    again = copy.copy(caught.value)  # as multiprocessing and pytest-xdist take errors apart and rebuild them
    assert (str(again), again.invariant, again.index) == (str(caught.value), "I1", 22)


def test_host_slots_may_outlive_a_phase_but_device_slots_may_not() -> None:
    schedule = offload()
    held = schedule.instructions[find(schedule, "alloc", "s0")], schedule.instructions[find(schedule, "free", "s0")]
    assert [ins.phase for ins in held] == ["forward", "backward"]
    verify(schedule)


def test_no_limit_and_room_to_spare_are_fine() -> None:
    verify(replace(T, budget_nbytes={}))
    verify(replace(T, peak_nbytes={tier: n + 64 for tier, n in T.peak_nbytes.items()}, budget_nbytes={}))
    verify(Schedule((), {}, {}, {}, {}))


def test_peak_counts_everything_held() -> None:
    # backward of layer 1: three slots, a0, a1 (the user's by now), d, the tangent, 64 of workspace
    assert peak(T) == {"device": 7 * UNIT + 64, "host": 4 * UNIT}
    b = Builder()
    x = b.home("x", "input", "device")
    for k in range(2):
        b.run("f", (x,), (b.pooled(f"y{k}", "output", returned=True),), workspace=64 * (2 - k))
    schedule = b.build()
    assert peak(schedule) == {"device": 2 * UNIT + 64}  # 256 + 128 first, then 512 + 64
    assert peak(replace(schedule, resident_nbytes={"device": 640, "disk": 64})) == {"device": 1216, "disk": 64}


def test_happens_before() -> None:
    before = happens_before.Order(T).before
    rows = T.instructions
    assert all(before(a, b) for a in range(len(T)) for b in range(a, len(T)) if rows[a].phase != rows[b].phase)
    for queue in {ins.queue for ins in rows}:
        same = [i for i, ins in enumerate(rows) if ins.queue == queue]
        assert all(before(a, b) and not before(b, a) for a, b in pairwise(same))
    copy, run, free = find(T, "copy", "w1"), find(T, "run", "a1"), find(T, "free", "w1")
    assert before(copy, run) and before(copy, free)  # by a wait, and through it
    assert not before(find(T, "run", "a0"), copy) and not before(copy, find(T, "run", "a0"))
    assert not before(run, run)


def test_the_proof_uses_nothing_that_derives() -> None:
    for file in (module.__file__, verify_facts.__file__, verify_memory.__file__, happens_before.__file__):
        assert file is not None
        with open(file, encoding="utf-8") as source:
            tree = ast.parse(source.read())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        own = {name for name in imported if name and name.startswith("mtcompile")}
        parts = ("schedule", "happens_before", "verify_facts", "verify_memory")
        assert own <= {f"mtcompile.runtime.{part}" for part in parts}


@pytest.mark.slow
def test_work_grows_with_the_instructions() -> None:
    assert lines_run(verify, streamed(1600)) < 4.5 * lines_run(verify, streamed(400))
