"""Loads the scripts in examples/ as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
