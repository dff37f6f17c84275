"""LoRA and DoRA for ``mtcompile train``, by PEFT: what a recipe asks for, checked without torch, and the model that has it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mtcompile.errors import did_you_mean
from mtcompile.reading import check_package

_ALL = "all-linear"  # PEFT's name for all linear layers but the head


def targets(recipe: Any) -> list[str]:
    """Returns the names of the modules that get adapters, or that of all."""
    return sorted({name.strip() for text in recipe.lora_targets or () for name in text.split(",")}) or [_ALL]


def alpha(recipe: Any) -> int:
    """Returns what, divided by the rank, is the factor of adapters."""
    return int(2 * recipe.lora if recipe.lora_alpha is None else recipe.lora_alpha)


def check_adapters(recipe: Any, model: str | os.PathLike[str]) -> None:
    """Raises ValueError for settings of adapters that do not go together. ``recipe``: a Recipe, or options like it."""
    given = {"lora_alpha": recipe.lora_alpha, "lora_targets": recipe.lora_targets, "lora_dropout": recipe.lora_dropout}
    given |= {"dora": recipe.dora, "base_bits": recipe.base_bits}
    if not recipe.lora:
        for name in (name for name, value in given.items() if value):
            raise ValueError(f"expected --lora RANK with --{name.replace('_', '-')}, found no --lora")
        return
    if not Path(model).is_dir():
        raise ValueError(
            f"expected --lora with a folder of pretrained weights, found the model {model}: its weights are random, and --lora "
            "would leave them so"
        )
    if not 0 <= recipe.lora_dropout < 1:
        raise ValueError(f"expected --lora-dropout to be at least 0 and below 1, found {recipe.lora_dropout:g}")
    if "" in (names := targets(recipe)) or (_ALL in names and len(names) > 1):
        raise ValueError(f"expected --lora-targets {_ALL}, or names such as q_proj,v_proj, found {','.join(names)!r}")
    check_package("peft", "--lora", "hf")
    if recipe.base_bits is None:
        return
    if recipe.base_bits != 4:
        raise ValueError(f"expected --base-bits 4, or no --base-bits, found {recipe.base_bits}")
    if recipe.precision == "bf16-master32":
        raise ValueError("expected --base-bits 4 without fp32 masters, found --precision bf16-master32: leave it out")
    check_package("bitsandbytes", "--base-bits 4", "qlora")


def with_adapters(model: Any, recipe: Any) -> Any:
    """Freezes a model of Transformers and returns it with adapters, initialized from the recipe's seed, in checkpoints of their
    own. Raises ValueError for names that it has not, and for weights that were not in its folder."""
    import torch
    from peft import LoraConfig, get_peft_model

    from mtcompile.checkpoint.adapters import note_base_apart
    from mtcompile.checkpoint.provenance import new_weights

    names = targets(recipe)
    modules = [name for name, _ in model.named_modules() if name]
    for name in () if names == [_ALL] else names:
        if not any(f".{module}".endswith(f".{name}") for module in modules):
            close = did_you_mean(name, {module.rpartition(".")[2] for module in modules})
            raise ValueError(f"expected --lora-targets to name modules of {type(model).__name__}, found {name!r}{close}")
    if new := new_weights(model):
        raise ValueError(
            f"expected all weights in {recipe.model}: with --lora, those that are new would stay random ({new[0]}). Train "
            "without --lora first"
        )
    model.name_or_path = str(Path(recipe.model).absolute())  # which adapter_config.json names
    config = LoraConfig(
        r=recipe.lora,
        lora_alpha=alpha(recipe),
        target_modules=_ALL if names == [_ALL] else names,
        lora_dropout=recipe.lora_dropout,
        use_dora=recipe.dora,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(recipe.seed)
    adapted = get_peft_model(model, config)
    note_base_apart(adapted)
    return adapted
