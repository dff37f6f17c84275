"""The origin of a training's weights, as its checkpoints tell it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

_ORIGIN = "_mt_origin"  # of a module, beside its weights


@dataclass(frozen=True, slots=True)
class Origin:
    """The folder that weights were read from, and the names of those that were not: they were as initialized."""

    folder: str
    new: tuple[str, ...]


def note_origin(model: nn.Module, folder: Path, new: Sequence[str]) -> None:
    """Lets checkpoints of a model, also of one that it becomes a part of, say where its weights came from."""
    model.__dict__[_ORIGIN] = Origin(str(folder), tuple(new))


def provenance(model: nn.Module) -> dict[str, Any]:
    """Returns what a checkpoint says of where a training came from."""
    return {"weights": [{"folder": origin.folder, "new": list(origin.new)} for origin in _origins(model)]}


def _origins(model: nn.Module) -> Iterator[Origin]:
    for module in model.modules():
        if isinstance(origin := module.__dict__.get(_ORIGIN), Origin):
            yield origin
