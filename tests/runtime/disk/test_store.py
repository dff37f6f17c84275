"""The store of the disk tier: bits, space, faults of the disk, and what is left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtcompile.runtime.disk.errors import DiskCorrupt, DiskError, DiskFull
from mtcompile.runtime.disk.file import file_system
from mtcompile.runtime.disk.store import DiskStore, Move, piece_nbytes
from mtcompile.runtime.schedule import BLOCK

CHUNK = 16 << 10
SIZES = (1, 511, BLOCK, BLOCK + 1, CHUNK - 7, CHUNK, 5 * CHUNK + 777, 70 * CHUNK + 777)
MANY = 128 << 20  # bytes that take many pieces, in aligned memory too


def on_disk(store: DiskStore, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(store.map(nbytes), dtype=torch.uint8)[:nbytes]


def random_bytes(nbytes: int, shift: int = 0) -> torch.Tensor:
    """``shift`` bytes behind an aligned address."""
    memory = torch.randint(0, 256, (nbytes + 1024,), dtype=torch.uint8)
    start = -memory.data_ptr() % 512 + shift
    return memory[start : start + nbytes]


def move(memory: torch.Tensor, home: torch.Tensor, name: str = "w") -> Move:
    return memory.data_ptr(), home.data_ptr(), memory.numel(), name


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "disk", CHUNK, depth=3)


@pytest.mark.parametrize("shift", [0, 64, 1])
def test_what_is_written_is_read_and_seen_through_the_mapping(store: DiskStore, shift: int) -> None:
    values = [random_bytes(n, shift) for n in SIZES]
    homes = [on_disk(store, n) for n in SIZES]
    for _ in range(2):
        store.write([move(value, home) for value, home in zip(values, homes, strict=True)])
        arrived = [random_bytes(n, shift) for n in SIZES]
        store.read([move(value, home) for value, home in zip(arrived, homes, strict=True)], verify=True)
        for value, home, other in zip(values, homes, arrived, strict=True):
            assert torch.equal(value, other) and torch.equal(value, home)
        values = [value.flip(0) for value in values]
    assert store.read_nbytes == store.written_nbytes == 2 * sum(SIZES)


def test_a_read_sees_what_somebody_wrote_through_the_mapping(store: DiskStore) -> None:
    home, value = on_disk(store, 3 * CHUNK), random_bytes(3 * CHUNK)
    store.write([move(value, home)])
    home[CHUNK : CHUNK + 9] = 7
    value[CHUNK : CHUNK + 9] = 7
    arrived = random_bytes(3 * CHUNK)
    store.read([move(arrived, home)])
    assert torch.equal(arrived, value)
    with pytest.raises(DiskCorrupt, match="w: its bytes"):
        store.read([move(arrived, home)], verify=True)
    store.note(home.data_ptr(), home.numel())
    store.read([move(arrived, home)], verify=True)


def test_a_flipped_bit_is_found_and_named(store: DiskStore) -> None:
    home, value = on_disk(store, 2 * CHUNK), random_bytes(2 * CHUNK)
    store.write([move(value, home, "layers.3.weight")])
    at = store.place_of(home.data_ptr())
    assert at is not None
    flipped = bytes([int(value[CHUNK + 5]) ^ 16])
    os.pwrite(store.file.cached, flipped, at + CHUNK + 5)
    arrived = random_bytes(2 * CHUNK)  # which a move does not keep alive
    with pytest.raises(DiskCorrupt, match=r"layers\.3\.weight: its bytes .* are not those that were written"):
        store.read([move(arrived, home, "layers.3.weight")], verify=True)


def test_without_checksums_a_read_compares_nothing(tmp_path: Path) -> None:
    plain = DiskStore(tmp_path, CHUNK, depth=3, summed=False)
    beside = DiskStore(tmp_path, beside=plain)
    for each in (plain, beside):
        home, value, arrived = on_disk(each, 2 * CHUNK), random_bytes(2 * CHUNK), random_bytes(2 * CHUNK)
        each.write([move(value, home)])
        home[7] = value[7] + 1
        each.read([move(arrived, home)], verify=True)
        assert torch.equal(arrived, home) and not torch.equal(arrived, value)


def test_a_failed_piece_ends_a_request_of_many(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    home, value, calls = on_disk(store, MANY), torch.zeros(MANY, dtype=torch.uint8), []
    real = os.pwritev

    def failing_early(number: int, buffers: list[Any], at: int) -> int:
        calls.append(at)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return real(number, buffers, at)

    monkeypatch.setattr(os, "pwritev", failing_early)
    with pytest.raises(DiskError, match="failed: Input/output error"):
        store.write([move(value, home)])
    assert len(calls) < MANY // (8 << 20)  # the others were not begun


def test_the_file_has_no_name_and_its_space_is_reserved(store: DiskStore) -> None:
    assert list(store.folder.iterdir()) == []
    store.reserve(8 << 20)
    status = os.fstat(store.file.cached)
    assert status.st_nlink == 0 and status.st_blocks * 512 >= 8 << 20


@pytest.mark.slow
def test_descriptors_are_closed_with_the_store(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, CHUNK)
    numbers = {store.file.cached, store.file.direct}
    home = on_disk(store, CHUNK)
    del store
    gc.collect()
    for number in numbers:
        with pytest.raises(OSError):
            os.fstat(number)
    home[:] = 3  # whoever holds a mapping may go on using it
    assert int(home.sum()) == 3 * CHUNK


def test_what_a_killed_process_left_goes_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / ".mtcompile-disk-abc.opening").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("mine")
    DiskStore(tmp_path, CHUNK)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def failing(call: Callable[..., int], at: int, result: Any) -> Callable[..., int]:
    """``call``, of which the ``at``-th returns ``result`` or raises it."""
    count = 0

    def called(*args: Any) -> int:
        nonlocal count
        count += 1
        if count != at:
            return call(*args)
        if isinstance(result, BaseException):
            raise result
        return int(result)

    return called


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_fails_is_an_error_that_says_what_of(store: DiskStore, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home, value = on_disk(store, 4 * CHUNK), random_bytes(4 * CHUNK, 64)  # not aligned: in chunks
    store.write([move(value, home)])
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(getattr(os, name), 3, OSError(errno.EIO, "Input/output error")))
        with pytest.raises(DiskError, match=f"{name[1:-1]} of w, {CHUNK} bytes at .* failed: Input/output error"):
            (store.read if name == "preadv" else store.write)([move(value, home)])
    store.write([move(value, home)])
    arrived = random_bytes(4 * CHUNK)
    store.read([move(arrived, home)], verify=True)


def test_a_read_that_ends_early_goes_on(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    home, value = on_disk(store, 4 * CHUNK), random_bytes(4 * CHUNK)
    store.write([move(value, home)])
    real = os.preadv

    def one_block(number: int, buffers: list[Any], at: int) -> int:
        return real(number, [memoryview(buffers[0])[:BLOCK]], at)

    monkeypatch.setattr(os, "preadv", one_block)
    arrived = random_bytes(4 * CHUNK)
    store.read([move(arrived, home)], verify=True)
    assert torch.equal(arrived, value)


@pytest.mark.parametrize("shift", [0, 64])
def test_checksums_do_not_depend_on_how_memory_is_aligned(store: DiskStore, shift: int) -> None:
    home, value = on_disk(store, 70 * CHUNK + 777), random_bytes(70 * CHUNK + 777, shift)
    store.write([move(value, home)])
    arrived = random_bytes(70 * CHUNK + 777, 64 - shift)
    store.read([move(arrived, home)], verify=True)
    assert torch.equal(arrived, value)
    home[41 * CHUNK + 3] += 1
    with pytest.raises(DiskCorrupt, match=f"its bytes {41 * CHUNK} to {42 * CHUNK} on disk"):
        store.read([move(arrived, home)], verify=True)


def test_aligned_memory_takes_few_requests(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    home, value, calls = on_disk(store, 5 << 20), torch.zeros((5 << 20) + 512, dtype=torch.uint8), list[int]()
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda number, buffers, at: calls.append(at) or real(number, buffers, at))
    start = -value.data_ptr() % 512
    store.write([move(value[start : start + (5 << 20)], home)])
    assert len(calls) == 1


def test_a_file_that_is_too_short_is_an_error(store: DiskStore) -> None:
    home, value = on_disk(store, 4 * CHUNK), random_bytes(4 * CHUNK)
    store.write([move(value, home)])
    os.ftruncate(store.file.cached, CHUNK)
    with pytest.raises(DiskError, match="the file is shorter than it was made"):
        store.read([move(value, home)])
    os.ftruncate(store.file.cached, 4 * CHUNK)


def test_a_full_disk_is_an_error_before_anything_is_written(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.fstat(store.file.cached).st_size

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match=r"expected room for \d+ more bytes, found \d+ bytes free \(No space left on device\)"):
        store.reserve(1 << 20)
    assert os.fstat(store.file.cached).st_size == before


def test_without_direct_access_requests_go_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refusing)
    store = DiskStore(tmp_path, CHUNK)
    assert not store.file.is_direct
    home, value = on_disk(store, 3 * CHUNK + 5), random_bytes(3 * CHUNK + 5, 3)
    store.write([move(value, home)])
    arrived = random_bytes(3 * CHUNK + 5)
    store.read([move(arrived, home)], verify=True)
    assert torch.equal(arrived, value) and torch.equal(home, value)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="expected a folder that can be written"):
        DiskStore(tmp_path / "file" / "disk", CHUNK)
    with pytest.raises(DiskError, match="No such file"):  # a drive that is not mounted, or misspelled
        DiskStore(tmp_path / "drive" / "disk", CHUNK)
    assert not (tmp_path / "drive").exists()


def test_pieces_are_small_beside_the_model() -> None:
    assert piece_nbytes(1 << 40) == 1 << 20
    for nbytes in (1, 1 << 20, 1 << 25, 1 << 30):
        assert piece_nbytes(nbytes) == 16 << 10 or piece_nbytes(nbytes) * 8 * 32 <= nbytes


WRITER = """
import sys, torch
from pathlib import Path
from mtcompile.runtime.disk.store import DiskStore
store = DiskStore(Path(sys.argv[1]), 16 << 10)
home = torch.frombuffer(store.map(1 << 22), dtype=torch.uint8)
value = torch.ones(1 << 22, dtype=torch.uint8)
print("ready", flush=True)
while True:
    store.write([(value.data_ptr(), home.data_ptr(), 1 << 22, "w")])
    store.read([(value.data_ptr(), home.data_ptr(), 1 << 22, "w")])
"""


@pytest.mark.slow
def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system in memory here")
def test_a_folder_in_memory_is_said() -> None:
    said = pytest.warns(UserWarning, match=r"is in memory \(tmpfs\): what goes there takes memory that plans do not count")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, said:
        DiskStore(Path(folder), CHUNK)


def test_the_file_system_is_read_from_the_mounts(tmp_path: Path) -> None:
    device, mounts = os.stat(tmp_path).st_dev, tmp_path / "mountinfo"
    here = f"36 35 {os.major(device)}:{os.minor(device)} / /data rw,noatime shared:1 - xfs /dev/nvme0n1 rw"
    mounts.write_text(f"22 28 0:999 / /proc rw shared:13 - proc proc rw\n{here}\n")
    assert file_system(tmp_path, mounts) == "xfs"
    assert file_system(tmp_path, tmp_path / "none") == ""


# ---------------------------------------------------------------------------------------------- what a disk does not take


def refusing(monkeypatch: pytest.MonkeyPatch, refuses: Callable[[int, int], bool]) -> None:
    """Lets writes fail. ``refuses``: given a descriptor and a place, whether one does."""
    real = os.pwritev

    def called(number: int, buffers: list[Any], at: int) -> int:
        if refuses(number, at):
            raise OSError(errno.EIO, "Input/output error")
        return real(number, buffers, at)

    monkeypatch.setattr(os, "pwritev", called)


@pytest.mark.parametrize("shift", [0, 1])
def test_pieces_that_fail_lie_elsewhere_whatever_is_written_and_read_then(
    shift: int, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of all sizes, in parts and whole, while places of the file and of another one fail, more and more of them."""
    random, own = torch.Generator().manual_seed(7), store.file.direct
    store.spare_here(1 << 30)
    homes = [on_disk(store, n) for n in (*SIZES, 600 * CHUNK)]
    values = [random_bytes(home.numel(), shift) for home in homes]
    store.write([move(value, home) for value, home in zip(values, homes, strict=True)])
    bad = set[tuple[int, int]]()
    refusing(monkeypatch, lambda number, at: any(f == number and at <= b < at + CHUNK for f, b in bad))
    for number in range(15):
        other = store.spares.files[0].file
        if number % 3 == 2 and other is not None:  # where the other file has something now
            bad |= {(other.direct, at) for file, at in list(bad)[:number] if file == own}
        bad.add((own, int(torch.randint(0, store.used_nbytes // BLOCK, (), generator=random)) * BLOCK))
        for value, home in zip(values, homes, strict=True):
            first = CHUNK * int(torch.randint(0, -(-value.numel() // CHUNK), (), generator=random))
            part = value[first : first + CHUNK * int(torch.randint(1, 9, (), generator=random))]
            part.add_(1)
            store.write([move(part, home[first : first + part.numel()])])
            arrived = random_bytes(value.numel(), 1 - shift)
            store.read([move(arrived, home)], verify=True)
            assert torch.equal(arrived, value) and torch.equal(home, value)
    taken = [spare.taken_nbytes for spare in store.spares.files]
    assert min(taken) > 0 and store.moved_nbytes == sum(taken)
    (notice,) = store.spares.new_notices()
    assert "went to another file" in notice and not list(store.spares.new_notices())


def test_a_piece_that_no_file_takes_is_an_error_that_says_why(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.spare_here(store.reserved_nbytes + 2 * CHUNK)
    home, value = on_disk(store, CHUNK), random_bytes(CHUNK)
    refusing(monkeypatch, lambda number, at: True)
    with pytest.raises(
        DiskError, match=r"write of w, .* failed: Input/output error; nor .*/disk: .* failed: Input/output error"
    ):
        store.write([move(value, home)])
    monkeypatch.undo()
    store.write([move(value, home)])
    other, many = on_disk(store, 2 * CHUNK), random_bytes(2 * CHUNK)
    refusing(monkeypatch, lambda number, at: number == store.file.direct)
    with pytest.raises(DiskError, match=rf"nor .*/disk: .* expected room for {2 * CHUNK} more bytes, found 0"):
        store.write([move(many, other)])
    assert torch.equal(home, value)


def open_in(folder: Path) -> list[str]:
    """The files of a folder that this process has open, also those without a name."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return [target for target in targets if target.startswith(str(folder))]


def test_what_lies_elsewhere_is_closed_with_the_store_and_a_mapping_of_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, CHUNK)
    store.spare_here(1 << 20)
    home, value = on_disk(store, CHUNK), random_bytes(CHUNK)
    own = store.file.direct
    with monkeypatch.context() as patch:
        refusing(patch, lambda number, at: number == own)
        store.write([move(value, home)])
    assert store.moved_nbytes == CHUNK and list(tmp_path.iterdir()) == []
    del store
    gc.collect()
    assert len(open_in(tmp_path)) == 1  # which the mapping has of its own
    assert torch.equal(home, value)
    del home
    gc.collect()
    assert not open_in(tmp_path)
