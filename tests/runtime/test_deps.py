from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtcompile.runtime.deps import derive
from mtcompile.runtime.schedule import QUEUES, Buffer, Instruction, Schedule, with_deps
from tests.helpers.schedules import Builder, from_disk, inference, lines_run, small_schedules, streamed, training


def conflict(schedule: Schedule, a: Instruction, b: Instruction) -> bool:
    def meet(left: tuple[str, ...], right: tuple[str, ...]) -> bool:
        return any(schedule.buffers[x].overlaps(schedule.buffers[y]) for x in left for y in right)

    return meet(a.writes, b.writes) or meet(a.writes, b.reads) or meet(a.reads, b.writes)


def closure(schedule: Schedule) -> list[set[int]]:
    """Per instruction, all that has completed before it starts, by following every edge there is."""
    rows = schedule.instructions
    before: list[set[int]] = []
    for i, ins in enumerate(rows):
        direct = {j for j in range(i) if rows[j].queue == ins.queue or rows[j].phase != ins.phase} | set(ins.deps)
        before.append(direct.union(*(before[j] for j in direct)))
    return before


def unordered(schedule: Schedule) -> list[tuple[int, int]]:
    before = closure(schedule)
    rows = schedule.instructions
    pairs = ((a, b) for b in range(len(rows)) for a in range(b))
    return [(a, b) for a, b in pairs if a not in before[b] and conflict(schedule, rows[a], rows[b])]


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    """Instructions that make no sense over slots that overlap at random: only the hazards count."""
    buffers = {}
    for k in range(draw(st.integers(1, 6))):
        tier = draw(st.sampled_from(("device", "host")))
        if draw(st.integers(0, 3)):
            offset, nbytes = 64 * draw(st.integers(0, 5)), 64 * draw(st.integers(1, 3))
            buffers[f"b{k}"] = Buffer(f"b{k}", f"v{k}", tier, "placed", nbytes, "activation", offset=offset)
        else:
            buffers[f"b{k}"] = Buffer(f"b{k}", f"v{k}", tier, "home", 64, "param")
    names = st.lists(st.sampled_from(sorted(buffers)), max_size=2).map(tuple)
    rows = [
        Instruction("run", draw(st.sampled_from(QUEUES[:3])), "forward", draw(names), draw(names))
        for _ in range(draw(st.integers(1, 14)))
    ]
    cut = draw(st.integers(0, len(rows)))
    rows[cut:] = [replace(row, phase="backward") for row in rows[cut:]]
    return Schedule(tuple(rows), buffers, {}, {}, {})


@given(any_schedule())
@settings(max_examples=150, deadline=None)
def test_orders_every_conflict_with_nothing_to_spare(schedule: Schedule) -> None:
    derived = derive(schedule)
    assert not unordered(derived)
    rows = derived.instructions
    for i, ins in enumerate(rows):
        assert list(ins.deps) == sorted(ins.deps)
        assert len({rows[d].queue for d in ins.deps}) == len(ins.deps)
        assert all(d < i and rows[d].queue != ins.queue and rows[d].phase == ins.phase for d in ins.deps)
        for dep in ins.deps:
            without = [tuple(d for d in r.deps if (k, d) != (i, dep)) for k, r in enumerate(rows)]
            assert unordered(with_deps(derived, without)), f"#{i} need not wait for #{dep}"


@pytest.mark.parametrize("name", small_schedules())
def test_small_schedules_are_ordered(name: str) -> None:
    assert not unordered(small_schedules()[name])


def test_a_copy_waits_for_the_slot_and_a_kernel_for_the_copy() -> None:
    rows = inference().instructions
    text = {f"{ins.op} {' '.join(ins.writes)}": ins.deps for ins in rows}
    at = {f"{ins.op} {' '.join(ins.writes)}": i for i, ins in enumerate(rows)}
    assert text["alloc w0"] == text["alloc w1"] == ()
    assert text["alloc w2"] == (at["free w0"],)  # the slot that layer 0 gives back
    assert text["run y2"] == (at["copy w2"],)
    assert text["free w2"] == ()  # behind the kernel on its own queue


def test_nothing_waits_across_the_phases() -> None:
    for schedule in small_schedules().values():
        for ins in schedule.instructions:
            assert all(schedule.instructions[d].phase == ins.phase for d in ins.deps)


def test_old_dependencies_are_ignored_and_derive_is_idempotent() -> None:
    schedule = from_disk()
    every = [tuple(range(i)) for i in range(len(schedule))]
    assert derive(with_deps(schedule, every)) == derive(schedule) == schedule


def test_bytes_not_names_decide() -> None:
    b = Builder()
    b.slot("low", "u", 0, "activation", "h2d", nbytes=192)
    b.slot("high", "v", 128, "activation", "d2h", nbytes=128)  # 64 bytes in common
    b.slot("next", "w", 256, "activation", "disk_read", nbytes=64)  # touches neither
    b.slot("far", "x", 0, "activation", "host", "host")  # another tier
    assert [ins.deps for ins in b.build().instructions] == [(), (0,), (), ()]


def test_a_reader_on_each_queue_is_waited_for() -> None:
    b = Builder()
    b.slot("s", "v", 0, "activation", "h2d")
    for queue in ("compute", "d2h", "compute"):
        b.run("read", ("s",), (), queue=queue)  # type: ignore[arg-type]
    b.free("s", "host")
    assert [ins.deps for ins in b.build().instructions] == [(), (0,), (0,), (), (2, 3)]


def test_refuses_what_it_cannot_order() -> None:
    schedule = training()
    rows = schedule.instructions
    with pytest.raises(ValueError, match=r"#2: expected operands from the buffer table, found 'nobody'"):
        derive(replace(schedule, instructions=(*rows[:2], replace(rows[2], writes=("nobody",)), *rows[3:])))
    with pytest.raises(ValueError, match=r"expected the phases one after the other, found forward after backward"):
        derive(replace(schedule, instructions=rows[::-1]))
    below = {**schedule.buffers, "w0": replace(schedule.buffers["w0"], offset=-64)}
    with pytest.raises(ValueError, match=r"expected an offset of 0 or more, found w0 at -64"):
        derive(replace(schedule, buffers=below))


def test_work_grows_with_the_instructions() -> None:
    assert lines_run(derive, streamed(1600)) < 4.5 * lines_run(derive, streamed(400))
