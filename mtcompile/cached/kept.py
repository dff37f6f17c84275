"""Lists and clears what the cache on disk holds, by kind. Follows no links, and counts only what is named like an entry."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FILE = re.compile(r"[0-9a-f]{16,64}\.(txt|json)|tmp\w+\.new")
_KERNELS = re.compile(r"[a-z0-9]{2}|aotautograd|cache|fxgraph|locks|mtcompile|triton")  # folders that Inductor makes, and ours
KINDS = {  # folder -> what its entries are
    "answers": "answers of mtcompile plan",
    "chains": "chains of operations: are they equal when compiled?",
    "inductor": "compiled kernels",
    "joints": "traces of models",
    "machines": "machines, as mtcompile doctor measured them",
    "plans": "plans",
    "times": "measured times of kernels",
}


@dataclass(frozen=True, slots=True)
class Kept:
    """The files of one kind. ``last_used``: seconds since 1970, at least a day exact where the system notes reads; 0: none."""

    kind: str
    files: int = 0
    nbytes: int = 0
    last_used: float = 0.0


def kept(folder: Path, kind: str) -> Kept:
    """Returns what a cache's folder holds of a kind."""
    about = [found for entry in _entries(folder / kind) for found in _files(entry)]
    last_used = max((max(each.st_atime, each.st_mtime) for each in about), default=0.0)
    return Kept(kind, len(about), sum(each.st_size for each in about), last_used)


def clear(folder: Path, kind: str) -> None:
    """Deletes what ``kept`` counts, and the kind's folder if nothing else is in it. Raises OSError."""
    for entry in _entries(folder / kind):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)  # another process may have replaced or deleted it
    with contextlib.suppress(OSError):
        (folder / kind).rmdir()


def _entries(folder: Path) -> Iterator[Path]:
    """Yields the entries of a kind's folder, which this user must own."""
    with contextlib.suppress(FileNotFoundError):
        about = folder.lstat()
        if stat.S_ISDIR(about.st_mode) and (not hasattr(os, "geteuid") or about.st_uid == os.geteuid()):
            is_kind, name = (stat.S_ISDIR, _KERNELS) if folder.name == "inductor" else (stat.S_ISREG, _FILE)
            for path in sorted(folder.iterdir()):
                if name.fullmatch(path.name) and is_kind(path.lstat().st_mode):
                    yield path


def _files(entry: Path) -> Iterator[os.stat_result]:
    below = [Path(root, name) for root, _, names in os.walk(entry) for name in names]
    for path in below if entry.is_dir() else [entry]:
        with contextlib.suppress(FileNotFoundError):
            yield path.lstat()
