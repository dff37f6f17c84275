"""Checkpoints of adapters: a folder as PEFT has it, without the frozen base, whose weights are in the folder they came from."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from mtcompile.checkpoint.provenance import provenance
from mtcompile.errors import CheckpointError

_APART = "_mt_base_apart"  # of a PEFT model, beside its weights
_CONFIG = "adapter_config.json"


def note_base_apart(model: nn.Module) -> None:
    """Lets checkpoints of a PEFT model hold its adapter alone. The caller vouches for the frozen weights: ``load`` leaves them
    as they are."""
    model.__dict__[_APART] = True


def base_is_apart(model: nn.Module) -> bool:
    return any(_APART in module.__dict__ for module in model.modules())


def base_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the frozen parameters by all of their names."""
    named = nn.Module.named_parameters(model, remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}


def is_of_base(name: str, base: Mapping[str, Any]) -> bool:
    """Tells whether a name in a state_dict is of a parameter of the base, or of what it has beside it: bitsandbytes' scales."""
    return any(name[:end] in base for end, character in enumerate(f"{name}.") if character == ".")


def stem_of(state: Mapping[str, Any]) -> str:
    """Returns what the files of a checkpoint's weights are called, before .safetensors: as PEFT or Transformers names them."""
    return "adapter_model" if "adapter" in state else "model"


def names_in_file(model: Any, weights: Mapping[str, Any]) -> dict[str, str]:
    """Returns name -> name in PEFT's file, of the adapter's weights."""
    from peft import get_peft_model_state_dict

    name_of = {id(value): name for name, value in weights.items()}
    stored = get_peft_model_state_dict(model, dict(weights), save_embedding_layers=False)
    return {name_of[id(value)]: name for name, value in stored.items()}


def adapter_config(model: Any) -> dict[str, bytes]:
    """Returns adapter_config.json, as PEFT writes it for models that are not trained any more."""
    config = copy.copy(model.peft_config["default"])
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # a set has another order in each process
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return {_CONFIG: Path(folder, _CONFIG).read_bytes()}


def check_base(path: Path, told: Mapping[str, Any], model: nn.Module) -> None:
    """Raises CheckpointError unless the base has the files that it had when its training was saved. ``told``: the checkpoint's
    provenance; that of the model has been noted."""
    then, now = (
        {Path(file).name: digest for file, digest in each.get("files", {}).get("weights", {}).items()}
        for each in (told, provenance(model))
    )
    if changed := sorted(name for name in then | now if then.get(name) != now.get(name)):
        raise CheckpointError(
            f"{path}: expected the model that this training began with, found another {', '.join(changed[:3])}: give the "
            "folder as it was"
        )
