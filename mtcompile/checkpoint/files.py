"""Files of a checkpoint: checksums, writes that outlast a power cut, reads that trust nothing, and what may be deleted."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtcompile.checkpoint.locks import folder_itself_locked, locked
from mtcompile.errors import CheckpointError
from mtcompile.runtime.interrupts import interrupts_later

FORMAT = "mtcompile-checkpoint-1"
MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-\d{8,12}(-\d{1,12})?")
_UNFINISHED = re.compile(r"\.step-\d{8,12}(-\d{1,12})?\.unfinished-[A-Za-z0-9_]{8}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.(safetensors|json|jinja|txt|model)")
_OURS = re.compile(rf"({_FILE.pattern})|\.tmp[A-Za-z0-9]{{6}}")  # also what safetensors writes before it renames it
_MOST_MANIFEST_NBYTES = 1 << 28
_PIECE_NBYTES = 1 << 22
_TRIES = 10  # to list checkpoints beside a writer


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file as a manifest has it. ``checksum``: XXH3-128 of its bytes, in hexadecimal."""

    nbytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint. ``serial`` counts the saves into its folder. ``tied``: name -> the parameter that it shares
    all of its memory with. ``state``: what else there is, as ``encoding`` writes it."""

    serial: int
    step: int
    files: Mapping[str, FileEntry]
    tied: Mapping[str, str]
    state: Mapping[str, Any]


def folder_named(folder: str | os.PathLike[str]) -> Path:
    """Returns the path of a folder to save into, from the root: it stays the same if the working directory changes. Raises
    ValueError for no name, and OSError for a link that leads nowhere."""
    path = Path(folder).absolute()
    if not os.fspath(folder):
        raise ValueError("expected the name of a folder to save into, found an empty one")
    for parent in (path, *path.parents):
        if parent.is_symlink() and not os.path.exists(parent):
            raise OSError(
                f"expected a folder to save into, found {parent}, a link to {os.readlink(parent)}, which leads nowhere"
            )
    return path


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def may_be_added(name: str) -> bool:
    """Says whether a checkpoint may have a file of this name that is not its own."""
    return bool(_FILE.fullmatch(name)) and not name.endswith(".safetensors")


def unfinished(folder: Path, name: str) -> Path:
    """Makes an empty folder for a checkpoint that is not whole yet, or is no longer. Later saves delete what is left of it."""
    while True:  # tempfile's would be the user's alone, whatever the umask
        new = folder / f".{name}.unfinished-{secrets.token_hex(4)}"
        with contextlib.suppress(FileExistsError):
            new.mkdir()
            return new


@contextlib.contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """Yields a new folder, which becomes ``target`` when everything in it is on the disk, or is deleted if something is raised.
    Deletes what a process that was killed has left of such a folder. Raises OSError, also if ``target`` is not empty."""
    make_folder(target.parent)
    for left in target.parent.glob(f".{glob.escape(target.name)}.unfinished-????????"):
        with contextlib.suppress(OSError), folder_itself_locked(left):
            shutil.rmtree(left)
    new = unfinished(target.parent, target.name)
    try:
        with folder_itself_locked(new):
            yield new
            for path in (*new.rglob("*"), new):
                on_disk(path)
            new.rename(target)
            on_disk(target.parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def checksum(path: Path) -> str:
    """Returns the XXH3-128 of a file."""
    import xxhash

    return _hexdigest(path, xxhash.xxh3_128())


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file. Raises OSError."""
    return _hexdigest(path, hashlib.sha256())


def _hexdigest(path: Path, digest: Any) -> str:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_NBYTES):
            digest.update(piece)
    return str(digest.hexdigest())


def checksum_of(data: bytes) -> str:
    """Returns the XXH3-128 of bytes."""
    import xxhash

    return str(xxhash.xxh3_128(data).hexdigest())


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a new file to the disk. Raises OSError."""
    with interrupts_later():
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            place, done = memoryview(data), 0
            while done < len(place):
                done += os.write(number, place[done:])
            os.fsync(number)
        finally:
            os.close(number)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, all of them on the disk. Raises OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        on_disk(path.parent)


def on_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    with interrupts_later():
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, with its own checksum, to the disk."""
    files = {name: [entry.nbytes, entry.checksum] for name, entry in manifest.files.items()}
    body = {"serial": manifest.serial, "step": manifest.step, "files": files, "tied": manifest.tied, "state": manifest.state}
    text = json.dumps(body)
    whole = {"format": FORMAT, "checksum": checksum_of(text.encode()), "content": text}
    data = json.dumps(whole)
    if len(data) > _MOST_MANIFEST_NBYTES:
        raise ValueError(
            f"expected at most {_MOST_MANIFEST_NBYTES} bytes of numbers and text in a checkpoint, found {len(data)}; put long "
            "lists into tensors"
        )
    write_bytes(folder / MANIFEST, data.encode())


def read_manifest(folder: Path) -> Manifest:
    """Reads a manifest, and looks whether its files are there with their sizes. Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        data = json.loads(regular(path, _MOST_MANIFEST_NBYTES).read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"expected the format {FORMAT}")
        text = data["content"]
        if checksum_of(text.encode()) != data["checksum"]:
            raise ValueError("expected other bytes: its checksum is wrong")
        body = json.loads(text)
        files = {name: FileEntry(int(nbytes), str(digest)) for name, (nbytes, digest) in body["files"].items()}
        tied = {str(name): str(other) for name, other in body["tied"].items()}
        manifest = Manifest(int(body["serial"]), int(body["step"]), files, tied, dict(body["state"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{path} is no manifest of a checkpoint: {error}") from None
    for name, entry in files.items():
        if not _FILE.fullmatch(name):
            raise CheckpointError(f"{path} names a file {name!r:.120}; expected one of the checkpoint's own folder")
        nbytes = regular(folder / name).stat().st_size
        if nbytes != entry.nbytes:
            raise CheckpointError(f"{folder / name}: expected {entry.nbytes} bytes, found {nbytes}")
    return manifest


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointError if a byte of a file is not the one that was written."""
    for name, entry in manifest.files.items():
        if checksum(folder / name) != entry.checksum:
            raise CheckpointError(f"{folder / name} is damaged: its checksum is not the one that was saved")


def regular(path: Path, most_nbytes: int | None = None, linked: bool = False) -> Path:
    """Returns the path of a regular file; ``linked``: or of a link to one, as the hub's cache has. Raises CheckpointError."""
    try:
        about = path.stat() if linked else path.lstat()
    except OSError as error:
        raise CheckpointError(f"expected a file {path}, found {error.strerror}") from None
    if not stat.S_ISREG(about.st_mode):
        raise CheckpointError(f"expected {path} to be a file, found {'' if linked else 'a link, '}a folder or a device")
    if most_nbytes is not None and about.st_size > most_nbytes:
        raise CheckpointError(f"{path}: expected at most {most_nbytes} bytes, found {about.st_size}")
    return path


def checkpoints(folder: Path, all_whole: bool = False) -> list[tuple[Path, Manifest]]:
    """Returns the complete checkpoints in a folder, the one saved last at the end. ``all_whole``: raises CheckpointError for
    one that is not complete."""
    for _ in range(_TRIES):
        complete, vanished = [], False
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if _FOLDER.fullmatch(path.name) and (all_whole or not path.is_symlink()):
                    try:
                        if path.is_symlink():
                            raise CheckpointError(f"expected {path} to be a folder, found a link")
                        complete.append((path, read_manifest(path)))
                    except CheckpointError:
                        if all_whole and os.path.lexists(path):
                            raise
                        vanished |= not path.exists()
        if not vanished:  # else a writer has deleted an old one meanwhile, and there is a new one
            break
    return sorted(complete, key=lambda pair: (pair[1].serial, pair[0].name))


def refuse_others(folder: Path, own: Collection[str] = ()) -> None:
    """Raises CheckpointError if the last checkpoint in a folder is of another training than ``own``, which are names."""
    found = checkpoints(folder)
    if found and found[-1][0].name not in own:
        raise CheckpointError(
            f"expected a folder without checkpoints, or to resume from it, found {found[-1][0]} of another training: resume "
            "(checkpoint.load before autosave; --resume of mtcompile train), save into another folder, or delete that one"
        )


def no_checkpoint(folder: Path) -> CheckpointError:
    found = "none" if folder.is_dir() else "a file" if folder.exists() else "that it does not exist"
    return CheckpointError(f"expected a checkpoint in {folder}, or a folder that checkpoints were saved into, found {found}")


def delete(folder: Path, names: Collection[str]) -> None:
    """Deletes a checkpoint's files and, if nothing else is in it, its folder. Its name goes first: what is left after an
    interrupt is deleted by the next save."""
    if _FOLDER.fullmatch(folder.name) and not (set(os.listdir(folder)) - {MANIFEST, *names}):
        with contextlib.suppress(OSError):
            aside = unfinished(folder.parent, folder.name)
            folder = folder.rename(aside)  # an empty folder may be replaced
    for name in (MANIFEST, *names):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def delete_unfinished(folder: Path) -> None:
    """Deletes what a save left that did not come to its end. Only one that holds the folder's lock may do so."""
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            delete(path, [child.name for child in path.iterdir() if _OURS.fullmatch(child.name)])


def try_folder(folder: Path, patience_s: float = 0) -> None:
    """Does in a folder what a save does: makes it, writes, syncs, renames and deletes a file, and holds its lock. Raises
    CheckpointError and OSError as ``save`` does."""
    try:
        make_folder(folder)
        new = unfinished(folder, step_folder(0))
        try:
            write_bytes(new / MANIFEST, b"{}")
            on_disk(new)
            new = new.rename(unfinished(folder, step_folder(0)))
            on_disk(folder)
        finally:
            delete(new, ())
        with locked(folder, patience_s):
            delete_unfinished(folder)
    except OSError as error:
        if error.strerror is None:
            raise
        raise OSError(
            f"expected a folder that checkpoints can be written into, found {folder}: {error.strerror}. Name another one, or "
            "change who may write there"
        ) from error
