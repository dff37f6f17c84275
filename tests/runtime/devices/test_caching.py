"""A simulator of torch's caching allocator, by cases worked out by hand, and what it reserves for schedules."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mtcompile
from mtcompile import knobs
from mtcompile.execution import door, model
from mtcompile.machine import device
from mtcompile.options import Options
from mtcompile.runtime.devices.caching import MIB, CachingAllocator, OutOfMemory, fits, needed_nbytes, reserved_nbytes
from mtcompile.runtime.schedule import Schedule
from tests.helpers.proof.subjects import few_subjects, subjects

PAGE = 20 * MIB


def test_requests_take_segments_of_documented_sizes() -> None:
    allocator = CachingAllocator(expandable=False)
    for nbytes, reserved in ((1, 2), (MIB, 2), (5 * MIB, 22), (14 * MIB, 22), (30 * MIB + 1, 54)):
        allocator.allocate(nbytes)
        assert allocator.reserved == reserved * MIB, nbytes


def test_the_smallest_block_that_is_large_enough_is_split_and_joined_again() -> None:
    allocator = CachingAllocator(expandable=False)
    blocks = [allocator.allocate(n * MIB) for n in (4, 2, 6, 8)]  # 20 MiB, one segment
    assert allocator.reserved == PAGE
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    again = allocator.allocate(3 * MIB)
    assert again.offset == 0 and again.nbytes == 4 * MIB, "the rest, of 1 MiB, is not split off"
    allocator.free(again)
    for block in (blocks[1], blocks[3]):
        allocator.free(block)
    assert allocator.allocate(PAGE).offset == 0 and allocator.reserved == PAGE


@pytest.mark.parametrize("expandable", [False, True])
def test_free_memory_is_given_back_before_a_request_fails(expandable: bool) -> None:
    for limit, retries in ((None, 0), (160 * MIB, 1)):
        allocator = CachingAllocator(expandable, limit)
        held = [allocator.allocate(40 * MIB) for _ in range(4)]
        for block in held[::2]:
            allocator.free(block)
        allocator.allocate(60 * MIB)  # fits in neither hole
        assert (allocator.retries, allocator.peak // MIB) == (retries, 220 if limit is None else 160)


def test_a_limit_is_kept_and_pages_within_free_blocks_are_given_back() -> None:
    for expandable, fails in ((False, True), (True, False)):
        allocator = CachingAllocator(expandable, limit=5 * PAGE)
        whole = allocator.allocate(5 * PAGE)
        allocator.free(whole)
        held = [allocator.allocate(PAGE) for _ in range(5)]  # parts of it
        allocator.free(held[0])
        allocator.free(held[2])
        if fails:  # the segment holds something, so no part of it can be given back
            with pytest.raises(OutOfMemory):
                allocator.allocate(2 * PAGE)
        else:
            assert allocator.allocate(2 * PAGE).nbytes == 2 * PAGE
        assert allocator.reserved <= 5 * PAGE


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_in_use_never_overlap_and_nothing_is_lost(expandable: bool) -> None:
    chance = random.Random(0)
    allocator = CachingAllocator(expandable, limit=400 * MIB)
    used = []
    for _ in range(3000):
        if used and chance.random() < 0.5:
            allocator.free(used.pop(chance.randrange(len(used))))
        try:
            used.append(allocator.allocate(int(2 ** chance.uniform(5, 26))))
        except OutOfMemory:
            allocator.free(used.pop())
        assert sum(block.nbytes for block in used) <= allocator.reserved <= 400 * MIB
    spans = sorted((block.is_small, block.segment, block.offset, block.offset + block.nbytes) for block in used)
    assert all(a[:2] != b[:2] or a[3] <= b[2] for a, b in itertools.pairwise(spans))
    for block in used:
        allocator.free(block)
    allocator.release()
    assert allocator.reserved == 0


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_schedules_fit_what_a_default_budget_leaves(every: bool) -> None:
    """A default budget is nine tenths of what is free: the rest is enough for pages and for what lies between blocks."""
    for case in subjects(2) if every else itertools.islice(few_subjects(), 3):
        schedule = case.schedule
        peak, needed = schedule.peak_nbytes["device"], needed_nbytes(schedule)
        assert reserved_nbytes(schedule) > 0 and not fits(schedule, peak - MIB), case.name
        assert needed <= peak / 0.9 + 2 * PAGE, case.name
        assert fits(schedule, needed), case.name


@pytest.mark.long
def test_a_large_step_reserves_no_more_than_a_tenth_beside_its_budget() -> None:
    forecast = mtcompile.plan("qwen2.5-7b", batch=16, seq=4096, machine="h200-sxm")
    assert forecast.planned is not None
    schedule = forecast.planned.schedule
    peak = schedule.peak_nbytes["device"]
    assert peak <= needed_nbytes(schedule) <= peak / 0.9
    assert needed_nbytes(schedule, expandable=False) > needed_nbytes(schedule)


def test_segments_expand_unless_the_user_has_set_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    device._set_up_allocator()
    assert settings == ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert knobs.allocator_is_the_users()
    device._set_up_allocator()
    assert len(settings) == 1
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(ValueError, match=r"expected torch's own allocator, found cudaMallocAsync"):
        device._set_up_allocator()


@pytest.mark.parametrize(
    ("memory", "room", "lower"), [(900, 1000, 855), (900, None, None), (900, 5000, None), (700, 1000, 665), (620, 1000, None)]
)
def test_a_default_budget_goes_down_by_steps(
    memory: int, room: int | None, lower: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where everything fits, nor below what plans need."""
    monkeypatch.setattr(door, "fits", lambda schedule, room, expandable: room > schedule)
    planned: Any = SimpleNamespace(schedule=1010, plan=SimpleNamespace(minimum_device_bytes=600))
    own: Any = SimpleNamespace(options=Options(memory=memory), alone=True, device_room=room)
    assert door.Door.limit_device(own, planned) == (lower is not None)
    assert own.options.memory == (lower or memory)


@pytest.mark.long
def test_a_default_budget_is_lowered_until_the_allocator_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that was asked for is not."""
    torch.manual_seed(0)
    peak = traced_peak(None)
    rooms: list[tuple[int, bool]] = []

    def has_room(schedule: Schedule, room: int, expandable: bool) -> bool:
        rooms.append((schedule.peak_nbytes["device"], expandable))
        return schedule.peak_nbytes["device"] < 0.9 * peak

    monkeypatch.setattr(door, "fits", has_room)
    assert traced_peak(None) == peak and not rooms  # on the emulated device
    monkeypatch.setattr(model, "reservable_nbytes", lambda device: peak)
    assert traced_peak(peak) == peak and not rooms
    monkeypatch.setattr(model, "free_nbytes", lambda device: peak)
    assert traced_peak(None) < 0.9 * peak and rooms[0] == (pytest.approx(peak, rel=0.01), True) and len(rooms) > 1


def traced_peak(memory: int | None) -> int:
    """The planned peak of a small model that trains once."""
    torch.compiler.reset()
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)))
    compiled = mtcompile.compile(layers, memory=memory)
    compiled(torch.randn(256, 64)).sum().backward()
    peak: int = compiled.plan.peak_bytes["device"]
    return peak
