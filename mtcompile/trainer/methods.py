"""``mtcompile train --method``: which of TRL's trainers a recipe asks for, checked without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mtcompile import knobs
from mtcompile.reading import check_package

COLUMNS = {"dpo": ("prompt", "chosen", "rejected"), "kto": ("prompt", "completion", "label")}  # of a row
RATE = 1e-6  # TRL's highest learning rate for these; of adapters, ten times as much


def check_method(recipe: Any, model: str | os.PathLike[str]) -> None:
    """Raises ValueError for settings that do not go with a method. ``recipe``: a Recipe, or options like it."""
    how = f"--method {recipe.method}"
    if recipe.method == "sft":
        if recipe.beta is not None:
            raise ValueError(f"expected --beta with --method {' or '.join(COLUMNS)}, found --method sft")
        return
    if not Path(model).is_dir():
        raise ValueError(f"expected {how} with a folder of pretrained weights, found the model {model}")
    if knobs.processes() > 1:
        raise ValueError(f"expected one process with {how}, found {knobs.processes()} of torchrun")
    if recipe.method == "kto" and recipe.batch // recipe.accumulate < 2:
        raise ValueError(f"expected a --batch of at least 2 rows for each of --accumulate with {how}, found {recipe.batch}")
    for package in ("trl", "datasets"):
        check_package(package, how, "trl")
