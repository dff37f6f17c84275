"""Reads files that anybody may have written: regular ones, up to a size, JSON that Python can hold; versions of packages."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

from mtcompile.runtime.interrupts import interrupts_later

MANY_NBYTES = 1 << 28  # of a file that programs write
FEW_NBYTES = 1 << 20  # of a file that people write
_PIECE_NBYTES = 1 << 20
_TOGETHER_S = 1.0  # signals of one request: terminals and launchers send it twice, torchrun after its next look at the workers
_MOST_REASON = 200  # characters of a library's
# C0 and C1 without tab and line feed, separators of lines, marks and overrides of direction, lone surrogates
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


@interrupts_later()
def read_bytes(path: Path, most_nbytes: int = MANY_NBYTES) -> bytes:
    """Reads a regular file, or one that a link leads to. Raises ValueError for a larger one and for pipes, devices and folders,
    which are not waited for, and OSError."""
    if (nbytes := regular_nbytes(path)) > most_nbytes:
        raise ValueError(f"{path}: expected at most {most_nbytes:,} bytes, found {nbytes:,}")
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    with open(number, "rb") as file:
        about = os.fstat(number)  # the file may be another one by now
        _check(path, about)
        data = file.read(min(most_nbytes, about.st_size) + 1) or b""
        while len(data) <= most_nbytes and (piece := file.read(_PIECE_NBYTES)):  # files of the system say that they are empty
            data += piece
    if len(data) > most_nbytes:
        raise ValueError(f"{path}: expected at most {most_nbytes:,} bytes, found more")
    return data


def read_text(path: Path, most_nbytes: int = MANY_NBYTES) -> str:
    """Reads a file of UTF-8 text. Raises as ``read_bytes``, and ValueError for other bytes."""
    try:
        return read_bytes(path, most_nbytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, found something else at byte {error.start}") from None


def regular_nbytes(path: Path) -> int:
    """Returns the size of a regular file, or of one that a link leads to. Raises ValueError for anything else, and OSError."""
    about = os.stat(path)
    _check(path, about)
    return about.st_size


def printable(text: object) -> str:
    """Returns text as it may be printed: what comes from files may hold characters that move the cursor, clear the screen, set
    the title or turn the direction of writing; they become their escapes, such as ``\\x1b``. Lines and tabs stay."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), str(text))


@contextlib.contextmanager
def panics_as_errors(what: str) -> Iterator[None]:
    """Makes a ValueError of a panic of a library in Rust, which no ``except Exception`` catches. ``what``: it was to read."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        reason = printable(str(error).strip().partition("\n")[0])[:_MOST_REASON]
        raise ValueError(f"expected {what} that can be used, found that its library fails on it: {reason}") from None


def is_panic(error: BaseException) -> bool:
    """Tells whether an error is a panic of a library in Rust."""
    return type(error).__name__ == "PanicException"


@interrupts_later()
def write_replacing(path: Path, text: str) -> None:
    """Writes a file in place of what has its name. A link there is replaced, not followed. Raises OSError."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def _check(path: Path, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
        kind = next((name for test, name in kinds.items() if test(about.st_mode)), "a device")
        raise ValueError(f"{path}: expected a file, found {kind}")


def parsed_json(text: str, place: object) -> Any:
    """Parses JSON. Raises ValueError with ``place`` and what is wrong, also for lists that are nested too deep and for whole
    numbers of more than 64 bits."""
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError(f"{place}: expected JSON, found lists or objects that are nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{place}: expected JSON, found something else: {error}") from None


@contextlib.contextmanager
def signals_noted(texts: Mapping[int, str]) -> Iterator[set[int]]:
    """Notes these signals, for a second from the first on, as one request; the handlers before have those that come later.
    Yields those that have come. Nothing is written here, which could raise amid updates: another thread says the signal's text
    on stderr, as it is by then."""
    noted, come, first = set[int](), threading.Event(), list[float]()

    def note(number: int, frame: FrameType | None) -> None:
        if first and time.monotonic() - first[0] > _TOGETHER_S:
            restore()
            act(before[number], number, frame)
            return
        first.append(time.monotonic())
        noted.add(number)
        if len(first) == 1:  # one that comes amid this call would wait for its lock
            come.set()

    def tell() -> None:
        come.wait()
        with contextlib.suppress(OSError, ValueError):  # whoever read it may have been interrupted too
            for text in filter(None, {texts[number]: None for number in tuple(noted)}):
                print(text, file=sys.stderr, flush=True)

    def restore() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)

    def act(handler: Any, number: int, frame: FrameType | None) -> None:
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            signal.signal(number, handler)
            signal.raise_signal(number)

    threading.Thread(target=tell, daemon=True, name="mtcompile signals").start()
    before = {number: signal.signal(number, note) for number in texts}
    try:
        yield noted
    finally:
        restore()
        come.set()


@contextlib.contextmanager
def limited_time(seconds: float, what: str) -> Iterator[None]:
    """Raises TimeoutError inside once ``what`` has taken so many seconds. In other threads than the main one, and where an
    alarm of the caller's runs, there is no limit."""
    main = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if not main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError(f"expected {what} to take at most {seconds:g} seconds, found that it goes on: give a simpler one")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class HeldInterrupts:
    """Holds Ctrl-C back from ``hold`` to ``release``, which may be in other functions. A second one comes through at once."""

    def __init__(self) -> None:
        self._before: Any = None  # the handler while Ctrl-C is held back
        self._noted: tuple[int, FrameType | None] | None = None

    @property
    def holds(self) -> bool:
        return self._before is not None

    def hold(self) -> None:
        """Holds Ctrl-C back from now on. Does nothing in other threads than the main one, which gets it."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(before) and self._before is None:
            self._before = before
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is None:
            self._noted = number, frame
            return
        self.release()

    def let_through(self) -> None:
        """Lets one through that has come."""
        if (noted := self._noted) is not None and threading.current_thread() is threading.main_thread():
            self._noted = None
            self._before(*noted)

    def forget(self) -> None:
        """Holds none back any more. One that has come is dropped, as another error is raised in its place."""
        self._noted = None
        self.release()

    def release(self) -> None:
        """Holds none back any more, and lets one through that has come."""
        if self._before is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) == self._note:  # else somebody else has taken over
            signal.signal(signal.SIGINT, self._before)
        before, noted, self._before, self._noted = self._before, self._noted, None, None
        if noted is not None:
            before(*noted)


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**64:
        raise ValueError(f"a whole number of {len(digits)} digits, which 64 bits do not hold")
    return number


def installed_version(package: str) -> str:
    """Reads the version of an installed package, without importing it; empty if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def check_package(package: str, why: str, extra: str) -> None:
    """Raises ValueError unless a package is installed. ``why``: what needs it; ``extra``: of mtcompile, which brings it."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f'{why} needs the package {package}: pip install "mtcompile[{extra}]"')
