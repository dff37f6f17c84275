"""Where the C libraries are that were built when mtcompile was installed."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def built_library(path: Path) -> Path | None:
    """Returns the file of a library; None without one. ``path``: its folder and name, without a suffix. A name of no Python
    version comes first: checkouts may also hold one of an earlier build."""
    files = (path.with_name(path.name + suffix) for suffix in reversed(EXTENSION_SUFFIXES))
    return next((file for file in files if file.is_file()), None)
