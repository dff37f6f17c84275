"""A file system that is cut off: what a program does below a folder is noted, and made again as it may be after a power cut.

Until a file is synced, any of its writes may be missing, or be there in part. Until a folder is synced, any name that was made,
moved or removed in it may be as before. Nothing is assumed of the order in which the system writes.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. ``what``: open, write, sync, mkdir, rename, unlink or rmdir; ``path``: as it was called then, below the
    root; ``file``: of an open, a write or a sync, a number for the file or folder; ``other``: of a rename."""

    what: str
    path: str
    file: int = 0
    offset: int = 0
    data: bytes = b""
    other: str = ""


Node = dict[str, Any] | int  # a folder by names, or the number of a file


@dataclass
class Recorder:
    """Notes what is done below ``root``. ``fails``: is asked before each operation, with its number; it raises, or returns how
    many bytes of a write to take."""

    root: Path
    fails: Callable[[int, str], int | None] = lambda number, what: None
    ops: list[Op] = field(default_factory=list)
    _open: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # descriptor -> path, file, offset
    _files: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _number_of: dict[tuple[int, int], int] = field(default_factory=dict)  # inode -> file
    _asked: int = 0

    def name(self, path: Any) -> str | None:
        above, last = os.path.split(os.path.abspath(path))
        whole = os.path.relpath(os.path.join(os.path.realpath(above), last), os.path.realpath(self.root))
        return None if whole.startswith("..") or whole.endswith(".lock") else whole

    def ask(self, what: str) -> int | None:
        self._asked += 1
        return self.fails(self._asked, what)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        real = {
            name: getattr(os, name)
            for name in ("open", "close", "write", "pwrite", "fsync", "mkdir", "rename", "unlink", "rmdir")
        }

        def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            name = self.name(path) if isinstance(path, (str, os.PathLike)) else None
            if name is None:
                return int(real["open"](path, flags, *rest, **options))
            new = not os.path.lexists(path)
            if flags & os.O_CREAT:
                self.ask("open")
            number = int(real["open"](path, flags, *rest, **options))
            about = os.fstat(number)
            file = next(self._files) if new else self._number_of.setdefault((about.st_dev, about.st_ino), 0)
            self._number_of[about.st_dev, about.st_ino] = file
            self._open[number] = name, file, 0
            if new:
                self.ops.append(Op("open", name, file))
            return number

        def closed(number: int) -> None:
            self._open.pop(number, None)
            real["close"](number)

        def pwritten(number: int, data: Any, offset: int) -> int:
            if number not in self._open:
                return int(real["pwrite"](number, data, offset))
            most = self.ask("write")
            data = bytes(data)[:most]
            path, file, _ = self._open[number]
            self.ops.append(Op("write", path, file, offset, data))
            return int(real["pwrite"](number, data, offset))

        def written(number: int, data: Any) -> int:
            if number not in self._open:
                return int(real["write"](number, data))
            path, file, offset = self._open[number]
            count = pwritten(number, data, offset)
            self._open[number] = path, file, offset + count
            return count

        def synced(number: int) -> None:
            if number in self._open:
                self.ask("sync")
                path, file, _ = self._open[number]
                self.ops.append(Op("sync", path, file))

        def simple(what: str) -> Callable[..., None]:
            def call(path: Any, *rest: Any, **options: Any) -> None:
                name = self.name(path)
                if name is not None:
                    self.ask(what)
                real[what](path, *rest, **options)
                if name is not None:
                    other = self.name(rest[0]) if what == "rename" else None
                    self.ops.append(Op(what, name, other=other or ""))

            return call

        patch.setattr(os, "open", opened)
        patch.setattr(os, "close", closed)
        patch.setattr(os, "pwrite", pwritten)
        patch.setattr(os, "write", written)
        patch.setattr(os, "fsync", synced)
        for what in ("mkdir", "rename", "unlink", "rmdir"):
            patch.setattr(os, what, simple(what))


def volatile(ops: Sequence[Op]) -> list[int]:
    """The numbers of the operations that a power cut behind the last of ``ops`` may undo."""
    lost = []
    for number, op in enumerate(ops):
        later = [after for after in ops[number + 1 :] if after.what == "sync"]
        if op.what == "write":
            durable = any(after.file == op.file for after in later)
        elif op.what == "sync":
            durable = True
        else:
            durable = any(after.path == (os.path.dirname(op.path) or ".") for after in later)
        if not durable:
            lost.append(number)
    return lost


def disk_after(
    ops: Sequence[Op], undone: set[int], shortened: random.Random | None = None
) -> tuple[Node, dict[int, bytearray]]:
    """The names and the contents of files after a power cut that undid these operations. ``shortened``: writes that are not
    synced are there in part."""
    tree: dict[str, Any] = {}
    contents: dict[int, bytearray] = {}
    unsynced = set(volatile(ops))

    def folder(path: str) -> tuple[Any, str]:
        *above, last = path.split("/")
        at: Any = tree
        for part in above:
            at = at.get(part) if isinstance(at, dict) else None
        return at, last

    for number, op in enumerate(ops):
        if number in undone:
            continue
        at, last = folder(op.path)
        if op.what == "write":
            data = op.data[: shortened.randrange(len(op.data) + 1)] if shortened and number in unsynced else op.data
            content = contents.setdefault(op.file, bytearray())
            content.extend(b"\0" * (op.offset + len(data) - len(content)))
            content[op.offset : op.offset + len(data)] = data
        elif op.what == "sync" or not isinstance(at, dict):
            continue
        elif op.what == "open":
            at[last] = op.file
        elif op.what == "mkdir":
            at.setdefault(last, {})
        elif op.what == "rename" and last in at:
            target, name = folder(op.other)
            if isinstance(target, dict):
                target[name] = at.pop(last)
        elif op.what in ("unlink", "rmdir"):
            at.pop(last, None)
    return tree, contents


def make(root: Path, node: Any, contents: dict[int, bytearray]) -> None:
    """Makes the folders and files below ``root``."""
    if isinstance(node, dict):
        root.mkdir(exist_ok=True)
        for name, child in node.items():
            make(root / name, child, contents)
    else:
        root.write_bytes(bytes(contents.get(node, b"")))
