"""``mtcompile train --method``: which of TRL's trainers a recipe asks for, checked without torch."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from mtcompile import knobs
from mtcompile.reading import check_package

COLUMNS = {  # of a row; rewards of "grpo" may look at others
    "dpo": ("prompt", "chosen", "rejected"),
    "kto": ("prompt", "completion", "label"),
    "grpo": ("prompt",),
}
_OPTIONS = {  # of some methods only: which, and what the others have
    "beta": (tuple(COLUMNS), None),
    "reward": (("grpo",), None),
    "completions": (("grpo",), 8),
    "new_tokens": (("grpo",), 256),
}
RATE = 1e-6  # TRL's highest learning rate for these; of adapters, ten times as much


def check_method(recipe: Any, model: str | os.PathLike[str]) -> None:
    """Raises ValueError for settings that do not go with a method. ``recipe``: a Recipe, or options like it."""
    how = f"--method {recipe.method}"
    for name, (kinds, usual) in _OPTIONS.items():
        if recipe.method not in kinds and getattr(recipe, name) != usual:
            raise ValueError(f"expected --{name.replace('_', '-')} with --method {' or '.join(kinds)}, found {how}")
    if recipe.method == "sft":
        return
    if recipe.beta is not None and not 0 <= recipe.beta < math.inf:
        raise ValueError(f"expected --beta to be a number of at least 0, found {recipe.beta:g}")
    if not Path(model).is_dir():
        raise ValueError(f"expected {how} with a folder of pretrained weights, found the model {model}")
    if knobs.processes() > 1:
        raise ValueError(f"expected one process with {how}, found {knobs.processes()} of torchrun")
    if recipe.method == "kto" and recipe.batch // recipe.accumulate < 2:
        raise ValueError(f"expected a --batch of at least 2 rows for each of --accumulate with {how}, found {recipe.batch}")
    if recipe.method == "grpo":
        path, _, function = (recipe.reward or "").partition(".py:")
        if not function or not Path(f"{path}.py").is_file():
            raise ValueError(f"expected --reward file.py:function with {how}, found {recipe.reward or 'no --reward'}")
        if recipe.too_long == "cut":
            raise ValueError(f"expected --too-long stop or drop with {how}, found cut: it would cut questions")
        if recipe.batch // recipe.accumulate % recipe.completions:
            raise ValueError(
                f"expected a --batch, divided by --accumulate, that is a multiple of --completions {recipe.completions} with "
                f"{how}, found {recipe.batch} and {recipe.accumulate}"
            )
        if recipe.beta and not recipe.lora:
            raise ValueError(f"expected --beta 0 or --lora with {how}, found --beta {recipe.beta:g}: it needs a second model")
    for package in ("trl", "datasets"):
        check_package(package, how, "trl")
