"""The files behind ``--data``: which there are, and their text."""

from __future__ import annotations

import codecs
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from mtcompile.data.streaming import text_pieces
from mtcompile.errors import nearest_file
from mtcompile.machine.system_files import memory_rooms, smallest_room
from mtcompile.reading import read_bytes

_PIECE_NBYTES = 1 << 22
STDLIB_BYTES = 16 * 2**20  # length of the default text


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Returns the files that paths name, those in folders in the order of their names and without hidden ones. Raises
    ValueError."""
    return [file for path in paths for file in _files(path)]


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"expected --data to name files or folders, found no such path: {path}{nearest_file(path)}")
    if not path.is_dir():
        return [path]
    inside = (file for file in path.rglob("*") if file.is_file())
    files = sorted(file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts))
    if not files:
        raise ValueError(f"expected files in the folder {path}, found none")
    return files


def text_of(file: Path, strict: bool) -> bytes:
    """Reads a text file. Returns nothing for a file that is not text, unless ``strict``: then raises ValueError."""
    data = read_bytes(file, available_nbytes())
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(data) + 1, _PIECE_NBYTES):  # one str of it all would take up to four times the memory
        held = len(decoder.getstate()[0])
        try:
            decoder.decode(data[start : start + _PIECE_NBYTES], final=start + _PIECE_NBYTES > len(data))
        except UnicodeDecodeError as error:
            if strict:
                place = start - held + error.start
                raise ValueError(f"expected UTF-8 text, found something else in {file} at byte {place}") from None
            return b""
    return b"" if b"\0" in data and not strict else data


def is_text(file: Path, strict: bool) -> bool:
    """Tells whether a file is text, in the memory of a piece of it. Raises as ``text_of``."""
    try:
        return all(strict or "\0" not in piece for piece in text_pieces(file))
    except ValueError as error:
        if strict:
            raise ValueError(f"{file}: {error}") from None
        return False


def available_nbytes() -> int:
    """Returns the bytes of memory that a file may take, at most 2**40."""
    room = smallest_room(memory_rooms())
    return 2**40 if room is None else max(0, room[1])


def standard_library() -> bytes:
    """Returns the first 16 MiB of the sources of Python's standard library."""
    root, text = Path(sysconfig.get_path("stdlib")), bytearray()
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.parts):
            text += path.read_bytes()
        if len(text) >= STDLIB_BYTES:
            break
    return bytes(text[:STDLIB_BYTES])
