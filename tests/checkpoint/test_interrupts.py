"""Ctrl-C at any instruction of a save: no thread waits, no descriptor stays open, and the next save works."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile.reading
from mtcompile import checkpoint
from mtcompile.checkpoint import files, locks, shard_writer, writing

_WATCHED = {module.__file__ for module in (files, locks, shard_writer, writing, mtcompile.reading, threading, queue)}
_TRIALS = 150


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """The handler that Python begins with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def instructions(function: Callable[[], Any], interrupted: int = 0) -> int:
    """Calls a function, and Ctrl-C before one of its instructions in the files above. Returns how many there were."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in _WATCHED:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == interrupted:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 has opcodes traced only if a frame asked for it before settrace
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def digesting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mtcompile digests"]


def test_an_interrupt_before_any_instruction_of_a_save_leaves_nothing(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    save = lambda: checkpoint.save(tmp_path, model, step=1, keep=1)  # noqa: E731
    save()
    descriptors = len(os.listdir("/proc/self/fd"))
    count = instructions(save)
    interrupts = 0
    for at in range(1, count, max(1, count // _TRIALS)):
        try:
            instructions(save, at)
        except KeyboardInterrupt:
            interrupts += 1
        for thread in digesting():
            thread.join(timeout=10)
        assert not digesting() and len(os.listdir("/proc/self/fd")) == descriptors, f"instruction {at} of {count}"
        assert checkpoint.latest(tmp_path) is not None
    assert interrupts > _TRIALS // 2
    save()
    checkpoint.load(tmp_path, model)
    assert not list(tmp_path.glob(".step-*"))


def test_a_digest_that_is_left_ends_its_thread() -> None:
    """Such as by a handler of another signal that raises."""
    digest = shard_writer._Digest().__enter__()
    digest.add(memoryview(b"a"))
    (thread,) = digesting()
    assert thread.daemon
    del digest
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_an_interrupt_ends_a_file_between_two_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "_PIECE_NBYTES", 64)
    plain, written = os.pwrite, []

    def interrupted(*args: Any) -> int:
        if len(written) == 2:
            signal.raise_signal(signal.SIGINT)
        written.append(plain(*args))
        return written[-1]

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shard_writer.write_shard(tmp_path / "a.safetensors", {"a": torch.ones(1000)})
    assert len(written) == 3 and not digesting()
