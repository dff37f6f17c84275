"""Entries in processes of their own, so that a crash or an endless loop costs one row."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Work = Callable[[str], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one entry may take: seconds, and bytes beyond those of the process it was forked from."""

    seconds: float = 300
    nbytes: int = 6 << 30


def preload(work: Callable[[], Any]) -> None:
    """Imports here whatever modules ``work`` imports in a child, so that no later child has to."""
    receive, send = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            _quiet()
            work()
        send.send(list(sys.modules))
        os._exit(0)
    send.close()
    names = receive.recv()
    os.waitpid(pid, 0)
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def rows(entries: Iterable[str], work: Work, jobs: int, limits: Limits) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (entry, row) as they end. A row with the key ``crash`` says how its process ended."""
    waiting, running = iter(entries), dict[Connection, tuple[str, int, float]]()
    while True:
        while len(running) < jobs and (entry := next(waiting, None)) is not None:
            connection, pid = _start(entry, work, limits)
            running[connection] = entry, pid, time.monotonic() + limits.seconds
        if not running:
            return
        next_end = min(deadline for _, _, deadline in running.values())
        ready = wait(list(running), timeout=max(0.0, next_end - time.monotonic()))
        late = [c for c, (_, _, deadline) in running.items() if deadline <= time.monotonic() and c not in ready]
        for connection in late:
            entry, pid, _ = running.pop(connection)
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            connection.close()
            yield entry, {"crash": f"no result within {limits.seconds:.0f} s"}
        for connection in ready:
            assert isinstance(connection, Connection)
            entry, pid, _ = running.pop(connection)
            try:
                row = connection.recv()
            except EOFError:
                row = None
            _, status = os.waitpid(pid, 0)
            connection.close()
            yield entry, row or {"crash": f"its process ended with status {os.waitstatus_to_exitcode(status)}"}


def _start(entry: str, work: Work, limits: Limits) -> tuple[Connection, int]:
    receive, send = multiprocessing.Pipe(duplex=False)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        send.close()
        return receive, pid
    code = 1
    try:
        _quiet()
        held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()  # bytes of data and stack
        resource.setrlimit(resource.RLIMIT_DATA, (held + limits.nbytes, held + limits.nbytes))
        with tempfile.TemporaryDirectory() as folder:
            os.environ["MT_CACHE"] = folder  # one search of plans serves the three budgets
            send.send(work(entry))
        code = 0
    except BaseException as error:  # MemoryError also
        with contextlib.suppress(BaseException):
            send.send({"crash": f"{type(error).__name__}: {error}"[:300], "traceback": traceback.format_exc()[-2000:]})
    finally:
        os._exit(code)


def _quiet() -> None:
    """Sends what models print to nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
