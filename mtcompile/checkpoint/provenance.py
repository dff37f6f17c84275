"""The provenance of a training, which its checkpoints tell: weights, data, options, versions and plan."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtcompile.checkpoint.files import regular, sha256
from mtcompile.errors import CheckpointError
from mtcompile.reading import installed_version

_ORIGIN = "_mt_origin"  # of a module, beside its weights
_TRAINING = "_mt_training"


@dataclass(frozen=True, slots=True)
class Origin:
    """The folder that weights were read from, and the names of those that were not: they were as initialized."""

    folder: str
    new: tuple[str, ...]


def note_origin(model: nn.Module, folder: Path, new: Sequence[str]) -> None:
    """Lets checkpoints of a model, also of one that it becomes a part of, say where its weights came from."""
    model.__dict__[_ORIGIN] = Origin(str(folder), tuple(new))


def note_training(model: nn.Module, data: Sequence[Path], options: Mapping[str, Any]) -> None:
    """Lets checkpoints of a model name these files and options, and the files of the weights that it began with, by their
    SHA-256. Each file is read once. Raises OSError."""
    origins = [file for origin in _origins(model) for file in _weight_files(Path(origin.folder))]
    named = {"data": list(data), "weights": origins}
    hashes = {kind: {str(file.absolute()): sha256(file) for file in files} for kind, files in named.items()}
    model.__dict__[_TRAINING] = {**hashes, "options": {name: str(value) for name, value in options.items()}}


def new_weights(model: nn.Module) -> list[str]:
    """Returns the names of weights that were not in the folder that the others were read from."""
    return [name for origin in _origins(model) for name in origin.new]


def provenance(model: nn.Module) -> dict[str, Any]:
    """Returns what a checkpoint says of where a training came from."""
    told: dict[str, Any] = next((m.__dict__[_TRAINING] for m in model.modules() if _TRAINING in m.__dict__), {})
    compiled: list[Any] = [module for module in model.modules() if getattr(module, "_mt_model", None) is not None]
    plans = [module.plan for module in compiled if module.plan is not None]
    return {
        "weights": [{"folder": origin.folder, "new": list(origin.new)} for origin in _origins(model)],
        "files": {kind: told.get(kind, {}) for kind in ("weights", "data")},
        "options": told.get("options", {}),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "mtcompile": installed_version("mtcompile"),
        },
        "plans": [hashlib.sha256(plan.to_json().encode()).hexdigest() for plan in plans],
    }


def check_told(path: Path, told: Mapping[str, Any]) -> None:
    """Raises CheckpointError if what a checkpoint says of where it came from has not the form that ``provenance`` gives it."""

    def texts(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)

    files, weights, plans = told.get("files", {}), told.get("weights", []), told.get("plans", [])
    fits = isinstance(files, dict) and all(map(texts, files.values()))
    fits &= all(texts(told.get(part, {})) for part in ("options", "versions"))
    fits &= isinstance(plans, list) and all(isinstance(plan, str) for plan in plans)
    fits &= isinstance(weights, list) and all(isinstance(one, dict) and isinstance(one.get("new"), list) for one in weights)
    if not fits:
        raise CheckpointError(f"{path}: expected its provenance to name files, options, versions and plans, found other values")


def compared(told: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields the kind, path and outcome of each file that a checkpoint names: "same", "missing" or "different"."""
    for kind, files in told.get("files", {}).items():
        for path, expected in files.items():
            try:
                found = "same" if sha256(regular(Path(path), linked=True)) == expected else "different"
            except (OSError, ValueError, CheckpointError):  # such as of a device, which has no end
                found = "missing"
            yield kind, path, found


def _weight_files(folder: Path) -> list[Path]:
    return [folder] if folder.is_file() else sorted((*folder.glob("*.safetensors"), *folder.glob("config.json")))


def _origins(model: nn.Module) -> Iterator[Origin]:
    for module in model.modules():
        if isinstance(origin := module.__dict__.get(_ORIGIN), Origin):
            yield origin
