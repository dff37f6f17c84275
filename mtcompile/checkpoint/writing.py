"""Writes the content of a checkpoint: all of it, or nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from mtcompile.checkpoint.adapters import stem_of
from mtcompile.checkpoint.content import Content, folder_of_rank
from mtcompile.checkpoint.encoding import Storable
from mtcompile.checkpoint.files import (
    MANIFEST,
    FileEntry,
    Manifest,
    checkpoints,
    checksum_of,
    delete,
    delete_unfinished,
    make_folder,
    on_disk,
    read_manifest,
    step_folder,
    try_folder,
    unfinished,
    write_bytes,
    write_manifest,
)
from mtcompile.checkpoint.locks import locked
from mtcompile.checkpoint.shard_writer import write_shard
from mtcompile.checkpoint.shards import INDEX
from mtcompile.checkpoint.signatures import SIGNATURE, sign
from mtcompile.errors import CheckpointError
from mtcompile.runtime.schedule import gib

SHARD_NBYTES = 4 << 30


def check_room(folder: Path, nbytes: int) -> None:
    """Tries the folder of the checkpoints to come. Raises CheckpointError and OSError as ``save`` would, also where one of
    ``nbytes`` has no room."""
    try_folder(folder)
    if nbytes > (free := shutil.disk_usage(folder).free):
        raise OSError(
            f"expected room for a checkpoint of {gib(nbytes)} in {folder}, found {gib(free)} free there: free some, or save on "
            "another disk"
        )


def write(folder: Path, content: Content) -> Path:
    """Writes a checkpoint, and deletes old ones. Returns its folder. Raises CheckpointError and OSError as ``save`` does."""
    step, keep, folder = content.step, content.keep, folder_of_rank(folder, content.rank)
    try:
        make_folder(folder)
        with locked(folder):
            delete_unfinished(folder)
            before = checkpoints(folder)
            serial = 1 + max((manifest.serial for _, manifest in before), default=0)
            new = unfinished(folder, step_folder(step))
            try:
                files = _write_shards(new, stem_of(content.state), content.weights) | _write_shards(
                    new, "state", content.tensors
                )
                files |= {name: _write_bytes(new / name, data) for name, data in content.files.items()}
                write_manifest(new, Manifest(serial, step, files, content.tied, content.state))
                if content.key is not None:
                    sign(new, {MANIFEST, *files}, content.key)
                on_disk(new)
                read_manifest(new)  # what is saved can be read, or the earlier ones stay
                target = _renamed(new, folder, step, serial)
                content.own.add(target.name)
            except BaseException:
                delete(new, os.listdir(new) if new.is_dir() else ())
                raise
            on_disk(folder)
            own = [(path, manifest) for path, manifest in before if path.name in content.own]
            for path, manifest in own[: len(own) + 1 - keep] if 0 < keep <= len(own) else ():
                delete(path, {SIGNATURE, *manifest.files})
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        existing = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), Path.cwd())
        free = shutil.disk_usage(existing).free
        raise OSError(f"expected to write a checkpoint into {folder}, with {free} bytes free there, found: {error}") from error
    return target


def _write_shards(folder: Path, stem: str, tensors: Mapping[str, Storable]) -> dict[str, FileEntry]:
    """Writes tensors into one file, or into several with an index. Returns the files."""
    shards: list[dict[str, Storable]] = [{}]
    nbytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and nbytes + tensor.nbytes > SHARD_NBYTES:
            shards.append({})
            nbytes = 0
        shards[-1][name] = tensor
        nbytes += tensor.nbytes
    if len(shards) == 1:
        return {f"{stem}.safetensors": write_shard(folder / f"{stem}.safetensors", shards[0])}
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    files = {file: write_shard(folder / file, shard) for file, shard in zip(names, shards, strict=True)}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
    }
    files[f"{stem}{INDEX}"] = _write_bytes(folder / f"{stem}{INDEX}", json.dumps(index, indent=1).encode())
    return files


def _write_bytes(path: Path, data: bytes) -> FileEntry:
    write_bytes(path, data)
    return FileEntry(len(data), checksum_of(data))


def _renamed(new: Path, folder: Path, step: int, serial: int) -> Path:
    """Gives a finished checkpoint its name. Where the name is taken, such as by an earlier one of the same step, its serial
    number goes behind."""
    for target in (folder / step_folder(step), folder / f"{step_folder(step)}-{serial}"):
        if not os.path.lexists(target):
            new.rename(target)
            return target
    raise CheckpointError(f"expected the name {target} to be free, found that it is taken; it stays as it is")
