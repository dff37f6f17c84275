"""Verifies a checkpoint: every byte of it, of the other ranks' parts beside it, and that nothing else is there."""

from __future__ import annotations

import os
from pathlib import Path

from mtcompile.checkpoint.files import MANIFEST, Manifest, checkpoints, no_checkpoint, read_manifest, verify_files
from mtcompile.checkpoint.provenance import check_told
from mtcompile.checkpoint.reading import Loaded, inspect
from mtcompile.checkpoint.saving import wait_for_saving
from mtcompile.checkpoint.signatures import SIGNATURE, signer
from mtcompile.errors import CheckpointError

_TRIES = 10  # beside a training that deletes old checkpoints


def verified(folder: Path) -> tuple[Loaded, str | None]:
    """Returns what ``inspect`` does, and the public key that has signed the checkpoint, None without one. Raises
    CheckpointError if a byte is not the one that was saved; if anything else is in a signed one; and for a folder of
    checkpoints, if one in it is damaged, which ``load`` would pass over."""
    wait_for_saving(folder)
    if not os.path.lexists(folder):
        raise no_checkpoint(folder)
    for _ in range(_TRIES):
        path = folder
        try:
            path, manifest = _newest(folder)
            key = _signed_by(path, manifest)
            loaded = inspect(path)
            check_told(path, loaded.provenance)
            for part, of_rank in _parts_of_ranks(path, manifest):
                if (other := _signed_by(part, of_rank)) != key:
                    by = "the same key" if key is not None else "no key"
                    raise CheckpointError(f"{part}: expected a signature by {by} as {path} has, found {other or 'none'}")
        except CheckpointError:
            if os.path.lexists(path):
                raise
        else:
            if os.path.lexists(path):
                return loaded, key
    raise CheckpointError(f"expected a checkpoint in {folder} that stays while it is read, found that each was deleted")


def _newest(folder: Path) -> tuple[Path, Manifest]:
    if os.path.lexists(folder / MANIFEST):
        return folder, read_manifest(folder)
    found = checkpoints(folder, all_whole=True)
    if not found:
        raise no_checkpoint(folder)
    return found[-1]


def _signed_by(path: Path, manifest: Manifest) -> str | None:
    verify_files(path, manifest)
    key = signer(path, {MANIFEST, *manifest.files})
    if key is not None and (others := sorted(set(os.listdir(path)) - {MANIFEST, SIGNATURE, *manifest.files})):
        raise CheckpointError(
            f"{path}: expected only files that were signed, found {', '.join(others[:3])} too, which libraries may read. "
            "Delete what you do not know"
        )
    return key


def _parts_of_ranks(path: Path, manifest: Manifest) -> list[tuple[Path, Manifest]]:
    """Returns what the other ranks saved of a step."""
    folders = sorted(path.absolute().parent.glob("rank-[0-9]*"))
    return [each for folder in folders for each in checkpoints(folder, all_whole=True) if each[1].step == manifest.step]
