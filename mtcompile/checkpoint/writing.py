"""Writes the content of a checkpoint: all of it, or nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.api import plain_class
from mtcompile.checkpoint.encoding import encoded, storable
from mtcompile.checkpoint.files import (
    MANIFEST,
    FileEntry,
    Manifest,
    checkpoints,
    checksum,
    delete,
    delete_unfinished,
    locked,
    may_be_added,
    on_disk,
    read_manifest,
    step_folder,
    unfinished,
    write_manifest,
)
from mtcompile.checkpoint.generators import generator_states
from mtcompile.checkpoint.shard_writer import write_shard
from mtcompile.checkpoint.shards import INDEX
from mtcompile.errors import CheckpointError

SHARD_NBYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Content:
    """All that a checkpoint of ``step`` is to hold. ``tied``: name -> the parameter that it shares all of its memory with.
    ``tensors``: those of ``state``, by their numbers. ``files``: further files as bytes by name, config.json among them."""

    step: int
    keep: int
    weights: Mapping[str, Tensor]
    tied: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]
    files: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *self.tensors.values()))

    def copied(self) -> Content:
        """Returns the same content in host memory of its own."""
        return replace(self, weights=_copied(self.weights), tensors=_copied(self.tensors))

    def with_files(self, files: Mapping[str, bytes]) -> Content:
        """Returns the same content with the caller's files. Raises ValueError for a name that they cannot have."""
        for name in files:
            if name in (MANIFEST, "config.json") or name.endswith(INDEX) or not may_be_added(name):
                raise ValueError(
                    f"expected files= to have names of their own that end in .json, .jinja, .txt or .model, found {name!r}"
                )
        return replace(self, files={**self.files, **files})


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def content_of(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    others: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | None,
    keep: int,
) -> Content:
    """Returns what to save: tensors of the model and of the states, not copies. Raises as ``save`` does."""
    if type(step) is not int or type(keep) is not int or not 0 <= step < 10**12 or keep < 0:
        raise ValueError(f"expected step and keep to be whole numbers of 0 or more, found step={step!r}, keep={keep!r}")
    if os.path.lexists(folder / MANIFEST):
        raise CheckpointError(f"{folder} is itself a checkpoint; expected a folder that holds checkpoints")
    if any(getattr(getattr(m, "_mt_model", None), "between_backward_and_step", False) for m in model.modules()):
        raise CheckpointError(
            'update="backward" has updated the parameters, and optimizer.step() has not ended the step; save after it'
        )
    weights, others_of_model, tied = _weights(model)
    tensors: list[Tensor] = []
    parts: dict[str, Any] = {
        "model": others_of_model,
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "others": {name: other.state_dict() for name, other in (others or {}).items()},
        "generators": generator_states(),
        "extra": dict(extra or {}),
    }
    state = {name: encoded(part, tensors, name) for name, part in parts.items()}
    numbered = {str(number): tensor for number, tensor in enumerate(tensors)}
    return Content(step, keep, weights, tied, numbered, state, _configuration(model))


def write(folder: Path, content: Content) -> Path:
    """Writes a checkpoint, and deletes old ones. Returns its folder. Raises CheckpointError and OSError as ``save`` does."""
    step, keep = content.step, content.keep
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            delete_unfinished(folder)
            before = checkpoints(folder)
            serial = 1 + max((manifest.serial for _, manifest in before), default=0)
            new = unfinished(folder, step_folder(step))
            try:
                files = _write_shards(new, "model", content.weights) | _write_shards(new, "state", content.tensors)
                files |= {name: _write_bytes(new / name, data) for name, data in content.files.items()}
                write_manifest(new, Manifest(serial, step, files, content.tied, content.state))
                on_disk(new)
                read_manifest(new)  # what is saved can be read, or the earlier ones stay
                target = _renamed(new, folder, step, serial)
            except BaseException:
                delete(new, os.listdir(new) if new.is_dir() else ())
                raise
            on_disk(folder)
            for path, manifest in before[: len(before) + 1 - keep] if 0 < keep <= len(before) else ():
                delete(path, manifest.files)
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        existing = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), Path.cwd())
        free = shutil.disk_usage(existing).free
        raise OSError(f"expected to write a checkpoint into {folder}, with {free} bytes free there, found: {error}") from error
    return target


def _weights(model: nn.Module) -> tuple[dict[str, Tensor], OrderedDict[str, Any], dict[str, str]]:
    """Returns a model's tensors by name, what else its state dictionary has (versions of modules among it), and the names that
    share a tensor with an earlier one, with that."""
    state: Any = model.state_dict()
    weights: dict[str, Tensor] = {}
    others: OrderedDict[str, Any] = OrderedDict()
    others._metadata = getattr(state, "_metadata", {})  # type: ignore[attr-defined]
    tied: dict[str, str] = {}
    first_of: dict[tuple[object, ...], str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            others[name] = value
            continue
        if name == "__metadata__":
            raise TypeError("expected another name for a tensor than __metadata__, which safetensors files use themselves")
        value = storable(value, name)
        signs = value.is_conj(), value.is_neg()
        place = value.device, value.dtype, value.data_ptr(), tuple(value.shape), value.stride(), signs
        first = first_of.setdefault(place, name) if value.numel() else name
        if first == name:
            weights[name] = value
        else:
            tied[name] = first
    return weights, others, tied


def _write_shards(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> dict[str, FileEntry]:
    """Writes tensors into one file, or into several with an index. Returns the files."""
    shards: list[dict[str, Tensor]] = [{}]
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
    path.write_bytes(data)
    on_disk(path)
    return FileEntry(path.stat().st_size, checksum(path))


def _configuration(model: nn.Module) -> dict[str, bytes]:
    """Returns config.json of a Transformers model, with the name of the plain class, so that ``from_pretrained`` builds it."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    fields = json.loads(config.to_json_string(use_diff=False))
    fields["architectures"] = [plain_class(type(model)).__name__]
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(kinds) == 1:  # a precision of its own, such as masters that were split
        fields["dtype"] = str(kinds.pop()).removeprefix("torch.")
    return {"config.json": (json.dumps(fields, indent=2) + "\n").encode()}


def _renamed(new: Path, folder: Path, step: int, serial: int) -> Path:
    """Gives a finished checkpoint its name. Where the name is taken, such as by an earlier one of the same step, its serial
    number goes behind."""
    for target in (folder / step_folder(step), folder / f"{step_folder(step)}-{serial}"):
        if not os.path.lexists(target):
            new.rename(target)
            return target
    raise CheckpointError(f"expected the name {target} to be free, found that it is taken; it stays as it is")
