"""Reads from disk straight to a device: bits, faults, checksums, and what is open afterwards. kvikio itself is a stand-in."""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtcompile.runtime.devices.cpu import CpuDevice
from mtcompile.runtime.disk.direct import Arrival, DirectReader, KvikioReader, StoreReader, works
from mtcompile.runtime.disk.errors import DiskCorrupt, DiskError
from mtcompile.runtime.disk.store import DiskStore
from mtcompile.runtime.schedule import BLOCK
from tests.device.disk import fake_kvikio

CHUNK = 16 << 10
SIZES = (1, 511, BLOCK, CHUNK - 7, 5 * CHUNK + 777)
Open = Callable[[DiskStore], DirectReader]


def by_kvikio(store: DiskStore) -> DirectReader:
    return KvikioReader(store, torch.clone, torch.empty(BLOCK, dtype=torch.uint8))


class ByKvikio(CpuDevice):
    def direct(self, store: DiskStore) -> DirectReader:
        return by_kvikio(store)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> fake_kvikio.Faults:
    return fake_kvikio.installed(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "disk", CHUNK, depth=3)


def written(store: DiskStore, sizes: tuple[int, ...] = SIZES) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Arrival]]:
    """Values, their homes on disk, and where they are to arrive."""
    values = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    homes = [torch.frombuffer(store.map(n), dtype=torch.uint8)[:n] for n in sizes]
    store.write([(v.data_ptr(), h.data_ptr(), v.numel(), f"w{i}") for i, (v, h) in enumerate(zip(values, homes, strict=True))])
    arrivals = [Arrival(torch.zeros_like(v), h.data_ptr(), f"w{i}") for i, (v, h) in enumerate(zip(values, homes, strict=True))]
    return values, homes, arrivals


def same(arrivals: list[Arrival], values: list[torch.Tensor]) -> bool:
    return all(torch.equal(arrival.target, value) for arrival, value in zip(arrivals, values, strict=True))


@pytest.mark.parametrize("reader", [StoreReader, by_kvikio])
def test_what_was_written_arrives(reader: Open, store: DiskStore, faults: fake_kvikio.Faults) -> None:
    values, homes, arrivals = written(store)
    reads = reader(store)
    reads.read(arrivals, verify=True)
    assert same(arrivals, values) and store.read_nbytes == sum(SIZES)
    homes[-1][3 * CHUNK] ^= 1  # through the mapping
    reads.read(arrivals, verify=False)
    assert torch.equal(arrivals[-1].target, homes[-1])
    with pytest.raises(DiskCorrupt, match="w4: its bytes"):
        reads.read(arrivals, verify=True)


@pytest.mark.parametrize("reader", [StoreReader, by_kvikio])
def test_what_lies_in_a_spare_file_arrives(
    reader: Open, store: DiskStore, faults: fake_kvikio.Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.spare_here(1 << 20)
    real, own = os.pwritev, store.file.direct

    def fails_behind(number: int, buffers: list[Any], at: int) -> int:
        if number == own and at >= 4 * CHUNK:
            raise OSError(errno.EIO, "Input/output error")
        return real(number, buffers, at)

    monkeypatch.setattr(os, "pwritev", fails_behind)
    values, _, arrivals = written(store)
    assert 0 < store.moved_nbytes < sum(SIZES)
    reader(store).read(arrivals, verify=True)
    assert same(arrivals, values) and store.read_nbytes == sum(SIZES)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("short", r"kvikio's read of w2, 4096 bytes at \d+, failed: expected all of them, found 4095; MT_DISK_DIRECT=0"),
        ("failing", r"kvikio's read of w2, .* failed: .*Input/output error"),
        ("refused", r"kvikio's read of w2, .* failed: no buffer is free"),
    ],
)
def test_a_read_that_fails_is_named_and_leaves_nothing_in_flight(
    fault: str, message: str, store: DiskStore, faults: fake_kvikio.Faults
) -> None:
    values, _, arrivals = written(store)
    reads = by_kvikio(store)
    setattr(faults, fault, (faults.reads + 3,))
    with pytest.raises(DiskError, match=message):
        reads.read(arrivals, verify=False)
    assert faults.in_flight == 0 and store.read_nbytes == 0
    reads.read(arrivals, verify=True)
    assert same(arrivals, values)


def test_a_file_that_cannot_be_opened_or_reads_otherwise_is_refused(store: DiskStore, faults: fake_kvikio.Faults) -> None:
    written(store)
    for field, value, message in [
        ("short", (1,), "first block, 4096 bytes at 0, failed: expected all of them, found 4095"),
        ("wrong", True, "first block, .* failed: expected what other readers see, found other bytes"),
        ("opens", False, r"expected kvikio to open the file, found cuFile driver .*install mtcompile\[kvikio\]"),
    ]:
        setattr(faults, field, value)
        with pytest.raises(DiskError, match=message):
            by_kvikio(store)
    gc.collect()
    assert faults.opened == faults.closed == 2


def test_without_kvikio_the_error_says_how_to_go_on(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(DiskError, match=r"install mtcompile\[kvikio\], or set MT_DISK_DIRECT=0"):
        by_kvikio(store)


@pytest.mark.slow
def test_whether_a_folder_can_be_read_straight_is_tried(tmp_path: Path, faults: fake_kvikio.Faults) -> None:
    past_the_cache = DiskStore(tmp_path, CHUNK, depth=1).file.is_direct
    assert works(tmp_path, ByKvikio()) == past_the_cache
    faults.wrong = True
    assert not works(tmp_path, ByKvikio())
    assert not works(tmp_path / "not" / "there", ByKvikio())
    assert list(tmp_path.iterdir()) == []
    gc.collect()
    assert faults.opened == faults.closed


def test_an_empty_read_is_none(store: DiskStore, faults: fake_kvikio.Faults) -> None:
    reads = by_kvikio(store)
    before = faults.reads
    reads.read([], verify=True)
    assert faults.reads == before
