"""The files of the cache on disk, read and written without torch: text below a digest of its key and content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

from mtcompile import knobs
from mtcompile.runtime.interrupts import interrupts_later

_MOST_NBYTES = 1 << 30  # of a file that is read


def path_of(kind: str, key: str) -> Path | None:
    folder = knobs.cache()
    return Path(folder, kind, f"{key}.json" if kind == "machines" else f"{key}.txt") if folder else None


def read(kind: str, key: str | None) -> str | None:
    path = path_of(kind, key) if key else None
    digest, _, content = ((own_text(path) if path else None) or "").partition("\n")
    return content if key and content and digest == _seal(kind, key, content) else None


def write(kind: str, key: str, text: str) -> None:
    if path := path_of(kind, key):
        write_whole(path, f"{_seal(kind, key, text)}\n{text}")


def _seal(kind: str, key: str, content: str) -> str:
    return hashlib.sha256(f"{kind} {key}\n{content}".encode()).hexdigest()


@interrupts_later()
def own_text(path: Path) -> str | None:
    """Returns the text of a regular file of this user's that nobody else can write, reached by no link; else None."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(number, encoding="utf-8") as file:
            about = os.fstat(number)
            ours = not hasattr(os, "geteuid") or (about.st_uid == os.geteuid() and not about.st_mode & 0o022)
            return file.read() if ours and stat.S_ISREG(about.st_mode) and about.st_size <= _MOST_NBYTES else None
    return None


@interrupts_later()
def write_whole(path: Path, text: str) -> None:
    """Writes the whole file or nothing. If the disk refuses, the next run has to do the work again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".new", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)


@cache
def own_sources() -> str:
    return source_digest(Path(__file__).parent.parent)


def source_digest(package: Path) -> str:
    """Hashes the path and content of every file below a package's folder, its C source and built library included. Links are
    followed and each folder is read once: passes and runtime are links in a checkout and folders in an installed wheel."""
    digest, visited = hashlib.sha256(), set()
    for folder, subfolders, names in os.walk(package, followlinks=True):
        if (real := os.path.realpath(folder)) in visited:
            subfolders.clear()
            continue
        visited.add(real)
        subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
        for path in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):  # an editor's lock file
            digest.update(f"{path.relative_to(package)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()
