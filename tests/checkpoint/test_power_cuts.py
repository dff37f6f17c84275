"""A save that is cut off at any operation on the disk, or in which any operation fails: the old or the new, never a mix."""

from __future__ import annotations

import errno
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtcompile import checkpoint
from mtcompile.checkpoint.shards import stored_tensors
from mtcompile.errors import CheckpointError
from tests.checkpoint.power_cuts import Op, Recorder, disk_after, make, volatile


class Small(nn.Module):
    """Large enough for a file of several pieces."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.full((300,), float(value))), nn.Parameter(torch.full((7, 9), float(value)))
        self.register_buffer("seen", torch.tensor(int(value)))


TRAINED = Small(0)


def save(folder: Path, value: int, **options: Any) -> Path:
    files = {"tokenizer.json": f'"{value}"'.encode()}
    model = TRAINED  # one model: only its own earlier checkpoints are deleted
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)
    return checkpoint.save(folder, model, torch.optim.SGD(model.parameters(), lr=value), step=value, files=files, **options)


def loaded(folder: Path) -> int:
    """Loads what was saved last; 0 if there is nothing. Every part must be of one save."""
    if checkpoint.latest(folder) is None:
        return 0
    model = Small(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = checkpoint.load(folder, model, optimizer, generators=False)
    parts: list[Any] = [*model.parameters(), model.seen]
    assert all(bool(part.eq(result.step).all()) for part in parts if isinstance(part, Tensor))
    assert optimizer.param_groups[0]["lr"] == result.step
    assert (result.path / "tokenizer.json").read_text() == f'"{result.step}"'
    return result.step


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtcompile.checkpoint.shard_writer._PIECE_NBYTES", 512)
    monkeypatch.setattr("mtcompile.checkpoint.content.generator_states", dict)
    monkeypatch.setattr("mtcompile.checkpoint.reading.check_generator_states", lambda states: None)


def recorded(root: Path, saves: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[Op], list[int]]:
    """What ``saves`` saves do, and how many operations there are after each."""
    recorder, ends = Recorder(root), []
    with monkeypatch.context() as patch:
        recorder.install(patch)
        for value in range(1, saves + 1):
            save(root / "runs" / "run", value, **options)
            ends.append(len(recorder.ops))
    return recorder.ops, ends


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_power_cut_at_any_operation(
    keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """What had been saved when ``save`` returned is there; later, the old or the new is."""
    (tmp_path / "disk").mkdir()
    ops, ends = recorded(tmp_path / "disk", 1 + keep, monkeypatch, keep=keep)
    assert loaded(tmp_path / "disk" / "runs" / "run") == 1 + keep and len(ops) > 40
    generator = random.Random(0)
    draws = 30 if request.config.getoption("-m") == "long" else 1
    seen = set()
    for end in range(1, len(ops) + 1):
        done, lost = ops[:end], volatile(ops[:end])
        writes = {number for number in lost if ops[number].what == "write"}
        cuts: list[tuple[set[int], random.Random | None]] = [
            (set(), None),
            (set(lost), None),
            (writes, None),
            (set(lost) - writes, None),
            (set(), generator),
        ]
        cuts += [({number for number in lost if generator.random() < 0.5}, generator) for _ in range(draws)]
        saved = sum(end >= each for each in ends)
        for undone, shortened in cuts:
            applied = frozenset(range(end)) - undone
            if shortened is None and applied in seen:
                continue
            seen.add(applied)
            root = tmp_path / "after"
            make(root, *disk_after(done, undone, shortened))
            step = loaded(root / "runs" / "run")
            assert step in (saved, saved + 1), f"cut behind operation {end}: {ops[end - 1]}, without {sorted(undone)}"
            if end % 8 == 0:
                save(root / "runs" / "run", 9, keep=keep)
                assert loaded(root / "runs" / "run") == 9 and not list(root.glob("runs/run/.step-*"))
            shutil.rmtree(root)


def refusing(first: int, forever: bool, what: int) -> Callable[[int, str], int | None]:
    def fails(number: int, name: str) -> int | None:
        if number == first or (forever and number > first):
            raise OSError(what, "refused")
        return None

    return fails


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forever", "what"),
    [(False, errno.EIO), pytest.param(True, errno.ENOSPC, marks=pytest.mark.long)],
    ids=["once", "from then on"],
)
def test_an_operation_that_fails(forever: bool, what: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them, once or from then on: the old is as it was, or the new is there. The next save removes what is left."""
    folder = tmp_path / "run"
    for number in range(1, 200):
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, 1)
        recorder, failed = Recorder(tmp_path, refusing(number, forever, what)), False
        with monkeypatch.context() as patch:
            recorder.install(patch)
            try:
                save(folder, 2, keep=1)
            except (OSError, CheckpointError):
                failed = True
        step = loaded(folder)
        assert step in (1, 2) and (failed or step == 2)
        save(folder, 3, keep=1)
        assert loaded(folder) == 3 and {path.name for path in folder.iterdir()} == {".lock", "step-00000003"}
        if recorder._asked < number:
            break
    assert not failed and number > 20


@pytest.mark.slow
def test_writes_that_take_a_part_of_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(0)
    recorder = Recorder(tmp_path, lambda number, what: generator.randrange(1, 100) if what == "write" else None)
    with monkeypatch.context() as patch:
        recorder.install(patch)
        save(tmp_path / "run", 1)
    assert loaded(tmp_path / "run") == 1 and sum(op.what == "write" for op in recorder.ops) > 40


def places(path: Path) -> list[int]:
    """Bytes of every region of a file: all of a header's, or of text, by steps; the ends and the middle of each tensor."""
    nbytes = path.stat().st_size
    if path.suffix != ".safetensors":
        return [*range(0, nbytes, max(1, nbytes // 150)), nbytes - 1]
    tensors = stored_tensors(path).values()
    header = min((tensor.offset for tensor in tensors if tensor.nbytes), default=nbytes)
    inside = [
        tensor.offset + part for tensor in tensors for part in (0, tensor.nbytes // 2, tensor.nbytes - 1) if tensor.nbytes
    ]
    return [*range(8), *range(8, header, 5), *inside]


@pytest.mark.slow
def test_one_flipped_bit_in_every_region_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtcompile.checkpoint.writing.SHARD_NBYTES", 600)  # two files of weights, with an index
    path = save(tmp_path, 1)
    generator, names = random.Random(0), {file.name for file in path.iterdir()}
    assert len(names) == 6 and "model.safetensors.index.json" in names
    for name in sorted(names):
        data = (path / name).read_bytes()
        for place in places(path / name):
            changed = bytearray(data)
            changed[place] ^= 1 << generator.randrange(8)
            (path / name).write_bytes(changed)
            model = Small(0)
            with pytest.raises(CheckpointError, match=re.escape(name)):
                checkpoint.load(path, model, generators=False)
            assert not any(bool(part.any()) for part in model.state_dict().values()), "nothing was loaded"
        (path / name).write_bytes(data)
    assert loaded(tmp_path) == 1
