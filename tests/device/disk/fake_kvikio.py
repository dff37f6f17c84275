"""Stands in for the module ``kvikio``, as far as mtcompile uses it: files are read into memory by a thread, a little later."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch


class IOFuture:
    def __init__(self, work: Callable[[], int]) -> None:
        self.count = 0
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(work,))
        self.thread.start()

    def _run(self, work: Callable[[], int]) -> None:
        try:
            self.count = work()
        except BaseException as error:
            self.error = error

    def get(self) -> int:
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.count


class Faults:
    """``short``, ``failing``: the numbers of reads (from 1 on) that end early or fail; ``refused``: those that do not begin.
    ``opens``: whether a file can be opened; ``wrong``: whether other bytes arrive."""

    def __init__(self) -> None:
        self.reads = self.in_flight = self.opened = self.closed = 0
        self.short: tuple[int, ...] = ()
        self.failing: tuple[int, ...] = ()
        self.refused: tuple[int, ...] = ()
        self.opens = True
        self.wrong = False


def installed(patch: pytest.MonkeyPatch) -> Faults:
    """Makes ``import kvikio`` find the stand-in. Returns what can go wrong there, and counts."""
    faults, lock = Faults(), threading.Lock()

    class CuFile:
        def __init__(self, file: str, flags: str = "r") -> None:
            if not faults.opens:
                raise RuntimeError("cuFile driver is not there")
            assert flags == "r"
            self.number = os.open(file, os.O_RDONLY)
            faults.opened += 1

        def pread(self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: int | None = None) -> IOFuture:
            with lock:
                faults.reads += 1
                number = faults.reads
            if number in faults.refused:
                raise RuntimeError("no buffer is free")
            assert size is not None and size <= buf.numel() and buf.element_size() == 1 and buf.is_contiguous()
            address = (buf if buf.device.type == "cpu" else torch.ops.second_device.bytes(buf)).data_ptr()

            def work() -> int:
                with lock:
                    faults.in_flight += 1
                time.sleep(1e-3)
                try:
                    if number in faults.failing:
                        raise OSError(5, "Input/output error")
                    read = os.pread(self.number, size - 1 if number in faults.short else size, file_offset)
                    ctypes.memmove(address, bytes(len(read)) if faults.wrong else read, len(read))
                    return len(read)
                finally:
                    with lock:
                        faults.in_flight -= 1

            return IOFuture(work)

        def close(self) -> None:
            os.close(self.number)
            faults.closed += 1

    module: Any = types.ModuleType("kvikio")
    module.CuFile = CuFile
    patch.setitem(sys.modules, "kvikio", module)
    return faults
