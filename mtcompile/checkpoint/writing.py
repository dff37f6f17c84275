"""``save``: writes a whole checkpoint, or none."""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
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
from mtcompile.errors import CheckpointError

SHARD_NBYTES = 4 << 30


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    others: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Saves a checkpoint of a plain or compiled model. Returns its folder, ``folder/step-00000012``.

    step     how many steps the model has trained
    others   objects with ``state_dict()`` by name, such as a scheduler, a GradScaler or a data loader
    extra    numbers, text and tensors of your own by name, such as the position in the data
    keep     how many checkpoints stay in ``folder``; older ones are deleted last, 0 keeps all
    files    bytes of further files of the checkpoint by name, such as a tokenizer's: .json, .jinja, .txt or .model

    The states of torch's, Python's and numpy's random generators are saved too. Takes host memory for one file of at most 4 GiB
    beside what the state dictionaries take. Raises CheckpointError if another process saves into ``folder`` or what is there is
    no checkpoint, TypeError for state that is neither numbers, text nor tensors, and OSError if the disk refuses: then the
    earlier checkpoints are as they were.
    """
    folder = Path(folder)
    if type(step) is not int or type(keep) is not int or not 0 <= step < 10**12 or keep < 0:
        raise ValueError(f"expected step and keep to be whole numbers of 0 or more, found step={step!r}, keep={keep!r}")
    if os.path.lexists(folder / MANIFEST):
        raise CheckpointError(f"{folder} is itself a checkpoint; expected a folder that holds checkpoints")
    if getattr(getattr(model, "_mt_model", None), "between_backward_and_step", False):
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            delete_unfinished(folder)
            before = checkpoints(folder)
            serial = 1 + max((manifest.serial for _, manifest in before), default=0)
            new = unfinished(folder, step_folder(step))
            try:
                numbered = {str(number): tensor for number, tensor in enumerate(tensors)}
                names = [*_write_shards(new, "model", weights), *_write_shards(new, "state", numbered)]
                names += _write_configuration(new, model)
                names += _write_others(new, files or {}, taken={*names, MANIFEST})
                entries = {name: _written(new / name) for name in names}
                write_manifest(new, Manifest(serial, step, entries, tied, state))
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


def _write_shards(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Writes tensors into one file, or into several with an index. Returns the files' names."""
    shards: list[dict[str, Tensor]] = [{}]
    nbytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and nbytes + tensor.nbytes > SHARD_NBYTES:
            shards.append({})
            nbytes = 0
        shards[-1][name] = tensor
        nbytes += tensor.nbytes
    if len(shards) == 1:
        _write_shard(folder / f"{stem}.safetensors", shards[0])
        return [f"{stem}.safetensors"]
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        _write_shard(folder / file, shard)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
    }
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return [*names, f"{stem}.safetensors.index.json"]


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    storages: set[int] = set()
    try:
        save_file({name: _alone(tensor, storages) for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except Exception as error:  # the library has an error of its own for a disk that refuses
        raise OSError(str(error)) from error


def _alone(tensor: Tensor, storages: set[int]) -> Tensor:
    """Returns a contiguous host tensor that shares its memory with no other one of the file, whose ``storages`` are noted."""
    alone = tensor.to("cpu").resolve_conj().resolve_neg().contiguous()
    storage = alone.untyped_storage()
    if storage.nbytes() != alone.nbytes or storage.data_ptr() in storages:
        alone = alone.clone()
    storages.add(alone.untyped_storage().data_ptr())
    return alone


def _write_configuration(folder: Path, model: nn.Module) -> Iterable[str]:
    """Writes config.json of a Transformers model, with the name of the plain class, so that ``from_pretrained`` builds it."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return ()
    fields = json.loads(config.to_json_string(use_diff=False))
    fields["architectures"] = [plain_class(type(model)).__name__]
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(kinds) == 1:  # a precision of its own, such as masters that were split
        fields["dtype"] = str(kinds.pop()).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return ("config.json",)


def _write_others(folder: Path, files: Mapping[str, bytes], taken: Collection[str]) -> Iterable[str]:
    """Writes the caller's files beside the others of a checkpoint. Raises ValueError for a name that they cannot have."""
    for name, data in files.items():
        if name in taken or not may_be_added(name):
            raise ValueError(
                f"expected files= to have names of their own that end in .json, .jinja, .txt or .model, found {name!r}"
            )
        (folder / name).write_bytes(data)
    return files


def _written(path: Path) -> FileEntry:
    on_disk(path)
    return FileEntry(path.stat().st_size, checksum(path))


def _renamed(new: Path, folder: Path, step: int, serial: int) -> Path:
    """Gives a finished checkpoint its name. Where the name is taken, such as by an earlier one of the same step, its serial
    number goes behind."""
    for target in (folder / step_folder(step), folder / f"{step_folder(step)}-{serial}"):
        if not os.path.lexists(target):
            new.rename(target)
            return target
    raise CheckpointError(f"expected the name {target} to be free, found that it is taken; it stays as it is")
