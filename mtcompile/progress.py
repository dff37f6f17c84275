"""Progress: says on stderr what mtcompile is doing, once that has taken more than a moment."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from mtcompile import knobs

_PATIENCE_S = 1.5
_REPEAT_S = 10.0  # between lines where nothing new is to be said


@dataclass(slots=True)
class _Work:
    """Work that may take long. ``activity``: what is being done now, and after a comma how far it is; "" while a step runs, of
    which nothing is said. ``told``: what was said last. ``closing``: give further lines for the end, if anything was said."""

    activity: str
    write: Callable[[str], object]
    began: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)
    told: str = ""
    spoke: bool = False
    ready_s: float | None = None
    closing: list[Callable[[], Iterable[str]]] = field(default_factory=list)

    def watch(self) -> None:
        """Says what is being done, until the work has ended."""
        last, wait = self.began, _PATIENCE_S
        while not self.ended.wait(wait):
            now, wait = time.monotonic(), 0.5
            kind = self.activity.partition(",")[0]
            if kind and now - last >= (_REPEAT_S if kind == self.told else _PATIENCE_S):
                last, self.told, self.spoke = now, kind, True
                self.write(f"mtcompile: {self.activity} ({now - self.began:.0f} s)")

    def end(self, word: str) -> None:
        self.ended.set()
        if self.spoke:
            seconds = time.monotonic() - self.began if self.ready_s is None else self.ready_s
            self.write(f"mtcompile: {word} after {seconds:.0f} s")
            for line in (line for lines in self.closing for line in lines()):
                self.write(f"mtcompile: {line}")


_current: list[_Work] = []  # at most one: one model compiles at a time


@contextlib.contextmanager
def doing(activity: str) -> Iterator[None]:
    """Names what is being done inside. The outermost one tells of it, and of those inside it, if it takes long."""
    if _current:
        work, before = _current[0], _current[0].activity
        work.activity = activity
        try:
            yield
        finally:
            work.activity = before
        return
    if not knobs.progress() or not activity:
        yield
        return
    work = _Work(activity, _write)
    _current.append(work)
    word = "stopped"
    try:
        threading.Thread(target=work.watch, daemon=True, name="mtcompile progress").start()
        yield
        word = "ready"
    finally:
        _current.clear()
        work.end(word)


@contextlib.contextmanager
def silently() -> Iterator[None]:
    """Inside, nothing is told: the caller shows progress in its own way."""
    _current.append(_Work("", lambda line: None))
    try:
        yield
    finally:
        _current.clear()


def tell(activity: str) -> None:
    """Changes what is said to be done, from here to the end of the innermost ``doing``. "": all is ready, a program runs."""
    if _current:
        work = _current[0]
        work.activity = activity
        work.ready_s = None if activity else time.monotonic() - work.began


def add(lines: Callable[[], Iterable[str]]) -> None:
    """Adds lines to what is said when all is ready. They are made only if something took so long that it was told."""
    if _current:
        _current[0].closing.append(lines)


def _write(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(line, file=sys.stderr, flush=True)
