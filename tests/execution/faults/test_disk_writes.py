"""Writes to the disk that fail at any moment of a step: the model is that after the step, or that before it, and goes on; or it
says that it is neither."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mtcompile
from mtcompile.errors import StepError
from mtcompile.execution.memory import disk_room
from mtcompile.runtime.disk.errors import DiskError, DiskFull
from tests.helpers.disk.training import Model, adamw, compiled, on_disk, same, step
from tests.helpers.stacks import WIDTH

pytestmark = pytest.mark.slow  # it trains many times

Place = tuple[int, int]  # a descriptor, and a place in its file, or what else is asked of it
SPACE, NEW = -1, -2
Fails = Callable[[int, Place], int | None]  # given how many writes have begun and the place of this one: an error's number


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_DISK_CHECK", "1")
    torch.manual_seed(5)


@contextlib.contextmanager
def writes(folder: Path, fails: Fails) -> Iterator[list[Place]]:
    """Lets writes to files of a folder fail, and what makes files there or takes space. Yields the places of those that have
    begun."""
    begun, lock = list[Place](), threading.Lock()

    def fail(place: Place) -> None:
        with lock:
            begun.append(place)
            number = fails(len(begun), place)
        if number is not None:
            raise OSError(number, os.strerror(number))

    def failing(call: Callable[..., Any], is_write: bool) -> Callable[..., Any]:
        def called(descriptor: int, what: Any, at: int) -> Any:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/"):
                fail((descriptor, at if is_write else SPACE))
            return call(descriptor, what, at)

        return called

    def making(**about: Any) -> Any:
        if about["dir"] == folder:
            fail((-1, NEW))
        return make(**about)

    make = tempfile.mkstemp
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", failing(os.pwritev, True))
        patch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, False))
        patch.setattr(tempfile, "mkstemp", making)
        yield begun


def never(number: int, place: Place) -> None:
    return None


def one_place(nth: int) -> Fails:
    """The ``nth`` write fails, and each to the same place of the same file."""
    bad: list[Place] = []

    def fails(number: int, place: Place) -> int | None:
        if number == nth:
            bad.append(place)
        return errno.EIO if place in bad else None

    return fails


def from_then_on(nth: int, code: int) -> Fails:
    return lambda number, place: code if number >= nth else None


def trained(way: str, folder: Path) -> tuple[Any, Any, Any, Any]:
    """A model with weights on disk and one without, and their optimizers, after one step."""
    plain = Model()
    options: dict[str, Any] = {} if way == "model" else {"precision": "bf16-master32"}
    small = {} if way == "model" else {"memory": "800KB", "host": "1.9MB"}
    ours, theirs = on_disk(folder, plain, **options, **small), compiled(plain, memory="64MiB", **options)
    both = *ours, *theirs
    together(*both)
    assert ours[0].plan.disk_write_bytes > 0
    return both


def together(model: Any, optimizer: Any, other: Any, its_optimizer: Any) -> None:
    assert torch.equal(step(model, optimizer), step(other, its_optimizer))
    same(model, optimizer, other, its_optimizer)


def written(both: Any, folder: Path) -> int:
    """How many writes a step has."""
    with writes(folder, never) as begun:
        together(*both)
    return len(begun)


def moments(count: int, many: int) -> list[int]:
    """The first of ``count`` writes, the last, and some in between."""
    return sorted({1 + (count - 1) * index // (many - 1) for index in range(many)})


MANY = [3, pytest.param(10**6, marks=pytest.mark.long)]
WAYS = ["model", pytest.param("masters", marks=pytest.mark.long)]


@pytest.mark.parametrize("many", MANY)
@pytest.mark.parametrize("way", WAYS)
def test_after_a_write_that_fails_at_one_place_the_step_ends_and_training_goes_on(way: str, many: int, tmp_path: Path) -> None:
    """Places fail in turn, of a file in which others have moved; also of the file where these are."""
    both, folder = trained(way, tmp_path / "disk"), tmp_path / "disk"
    count = written(both, folder)
    for nth in moments(count, min(many, count)):
        with writes(folder, one_place(nth)), pytest.warns(UserWarning, match=r"failed: Input/output error; it went to another"):
            together(*both)
        together(*both)
    assert both[0]._mt_model.session.parameters.disk.moved_nbytes > 0
    report = both[0].memory_report()
    assert report["peak_disk_bytes"] <= report["budget_disk_bytes"]


@pytest.mark.parametrize(
    ("way", "code", "many"),
    [
        ("model", errno.EROFS, 3),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("model", errno.ENOSPC, 12), ("masters", errno.EROFS, 3))),
    ],
)
def test_with_a_spare_folder_a_disk_that_takes_nothing_more_ends_its_step(
    way: str, code: int, many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_DISK_SPARE", str(tmp_path / "spare"))
    count = written(trained(way, tmp_path / "first"), tmp_path / "first")
    for nth in moments(count, min(many, count)):
        folder = tmp_path / f"disk{nth}"
        both = trained(way, folder)
        told = pytest.warns(UserWarning, match="went to another file, in .*spare")
        with writes(folder, from_then_on(nth, code)), told:  # for good
            for _ in range(3):
                together(*both)


def test_a_spare_folder_without_room_is_refused_before_anything_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Model()
    monkeypatch.setenv("MT_DISK_SPARE", str(tmp_path / "spare"))
    model, optimizer = on_disk(tmp_path / "disk", plain)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    told = pytest.raises(DiskFull, match="spare: expected room for")
    with writes(tmp_path / "spare", lambda number, place: errno.ENOSPC if place[1] == SPACE else None), told:
        step(model, optimizer)
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    other = adamw(plain)
    together(model, optimizer, plain, other)


@pytest.mark.parametrize("many", MANY)
def test_without_one_its_step_ends_in_memory_and_no_other_begins(many: int, tmp_path: Path) -> None:
    first = trained("model", tmp_path / "first")
    count = written(first, tmp_path / "first")
    for nth in moments(count, min(many, count)):
        folder = tmp_path / f"disk{nth}"
        both = trained("model", folder)
        model, optimizer = both[:2]
        with writes(folder, from_then_on(nth, errno.EROFS)), pytest.warns(UserWarning, match=r"file system; it went to memory"):
            together(*both)
        for _ in range(2):
            with pytest.raises(StepError, match=r"took no more writes, so .* are in memory. That step has ended"):
                step(model, optimizer)
        x = torch.linspace(-1, 1, WIDTH).expand(16, -1).contiguous()
        with torch.no_grad():
            assert torch.equal(model(x), both[2](x))
        same(*both)


@pytest.mark.parametrize("many", MANY)
def test_without_room_in_memory_it_leaves_the_model_as_before_the_step_or_says_that_it_is_neither(
    many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_room, "host_room", lambda: ("available", 0))
    both, folder = trained("model", tmp_path), tmp_path
    model, optimizer = both[:2]
    count, left = written(both, folder), list[str]()
    for nth in moments(count, min(many, count)):
        saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        why = r"write of .* failed: Read-only file system; nor .* expected a folder.*; nor memory: expected room"
        told = pytest.raises(DiskError, match=why)
        with writes(folder, from_then_on(nth, errno.EROFS)), told:
            step(model, optimizer)
        try:
            together(*both)
            left.append("before")
        except StepError as error:
            assert "some parameters have been updated, others not" in str(error) and "Load a checkpoint" in str(error)
            left.append("said")
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            together(*both)
    assert left == ["before", *["said"] * (len(left) - 1)]


@pytest.mark.parametrize("many", MANY)
def test_a_write_that_fails_beside_updates_in_optimizer_step_leaves_the_model_as_before(many: int, tmp_path: Path) -> None:
    """Only activations are on disk then: what updates do is done where they are."""
    plain, x = Model(), torch.linspace(-1, 1, 512 * WIDTH).view(512, -1)
    model, other = copy.deepcopy(plain), plain
    optimizer, its_optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other))
    options = {"memory": "6MiB", "policy": "offload-all", "host": "5.5MB", "disk": f"{tmp_path}:16MiB"}
    compiled_model: Any = mtcompile.compile(model, optimizer=optimizer, update="step", **options)

    def train(one: Any, its: torch.optim.Optimizer) -> torch.Tensor:
        loss = one(x)
        loss.backward()
        its.step()
        its.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    both = compiled_model, optimizer, other, its_optimizer
    for _ in range(2):
        with writes(tmp_path, never) as begun:
            assert torch.equal(train(*both[:2]), train(*both[2:]))
    assert begun
    for nth in moments(len(begun), min(many, len(begun))):
        with writes(tmp_path, from_then_on(nth, errno.EIO)), pytest.raises(DiskError, match="Input/output error"):
            train(*both[:2])
        same(*both)
        assert torch.equal(train(*both[:2]), train(*both[2:]))
    same(*both)
