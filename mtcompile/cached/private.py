"""Folders that hold code to be loaded: only those that nobody else can write into."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from mtcompile import knobs

_OTHERS = 0o022  # may write: the group, everybody
_MOST_ENTRIES = 1_000_000


@functools.cache
def settle_inductor_cache() -> None:
    """Lets Inductor keep and load shared objects in a folder of this user's alone. That is TORCHINDUCTOR_CACHE_DIR if the user
    has set it, else a folder below MT_CACHE. If others own or can write anything there, or without MT_CACHE, it is a new
    folder, which is deleted when this process ends."""
    given = knobs.inductor_cache()
    if given == _default():
        given = ""
    if given:
        if why := why_not_private(Path(given)):
            warnings.warn(
                f"expected the folder of compiled kernels, {given}, to be yours alone, found that {why}. A new folder is used "
                "for this process: set TORCHINDUCTOR_CACHE_DIR to a folder of your own to keep them",
                stacklevel=2,
            )
            knobs.set_inductor_cache(_temporary())
        return
    folder = knobs.cache() and os.path.join(knobs.cache(), "inductor")
    if folder:
        try:
            os.makedirs(folder, 0o700, exist_ok=True)
        except OSError:  # such as a read-only home
            folder = ""
    knobs.set_inductor_cache(folder if folder and not why_not_private(Path(folder)) else _temporary())


def _default() -> str:
    """Returns the folder that Inductor sets TORCHINDUCTOR_CACHE_DIR to by itself, once it was imported; else ""."""
    module = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return os.path.abspath(module.default_cache_dir()) if module is not None else ""


@contextlib.contextmanager
def another_inductor_cache(why: str) -> Iterator[None]:
    """Lets Inductor compile into a new folder, as what it has kept cannot be used: if that works inside, until this process
    ends. Warns then."""
    before = knobs.inductor_cache()
    knobs.set_inductor_cache(_temporary())
    try:
        yield
    except BaseException:
        knobs.set_inductor_cache(before)
        raise
    warnings.warn(
        f"compiled kernels in {before} cannot be used, perhaps because a process was killed while it compiled them: {why}. "
        f"This process uses a temporary folder instead. Delete {before} to keep compiled kernels again",
        stacklevel=2,
    )


def _temporary() -> str:
    folder = tempfile.mkdtemp(prefix="mtcompile-inductor-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def why_not_private(folder: Path) -> str:
    """Says why others may have put files into a folder, or may do so; "" if nobody may, or if it is not there yet."""
    if not hasattr(os, "geteuid"):
        return ""
    me, folder = os.geteuid(), Path(os.path.abspath(folder))
    for parent in folder.parents:  # whoever may rename the folder may put another one in its place
        about = _about(parent)
        if about is not None and about.st_mode & 0o002 and not about.st_mode & stat.S_ISVTX:
            return f"others can rename {parent}"
    if (about := _about(folder)) is None:
        return ""
    if about.st_uid != me:
        return f"user {about.st_uid} owns it"
    if stat.S_ISLNK(about.st_mode):
        return why_not_private(Path(os.path.realpath(folder)))
    if about.st_mode & _OTHERS:
        return "others can write there"
    for number, (root, folders, files) in enumerate(os.walk(folder)):
        for name in (*folders, *files):
            entry = _about(Path(root, name))
            if entry is not None and entry.st_uid != me:
                return f"user {entry.st_uid} owns {Path(root, name)}"
            if entry is not None and entry.st_mode & 0o002 and not stat.S_ISLNK(entry.st_mode):
                return f"others can write {Path(root, name)}"
        if number > _MOST_ENTRIES:
            return f"it holds more than {_MOST_ENTRIES:,} folders"
    return ""


def _about(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None
