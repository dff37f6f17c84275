"""Puts a PEFT adapter into its base for good: a plain folder of Transformers, computed by PEFT's ``merge_and_unload``."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtcompile import checkpoint, progress
from mtcompile.capture.refusals import first_line
from mtcompile.checkpoint.adapters import check_base
from mtcompile.checkpoint.files import MANIFEST, folder_named, made_whole
from mtcompile.checkpoint.provenance import note_training
from mtcompile.checkpoint.shards import stored_tensors
from mtcompile.data.encoding import TOKENIZER_FILES
from mtcompile.errors import CheckpointError
from mtcompile.models.loading import configuration
from mtcompile.models.pretrained import plain_model
from mtcompile.reading import FEW_NBYTES, check_package, parsed_json, read_text

_ADAPTER = "default"  # PEFT's name for the only one


def merge(adapter: Path, out: Path, base: Path | None = None) -> tuple[Path, Path]:
    """Writes a base with an adapter merged into it to ``out``, which appears when it is whole. ``adapter``: a folder of PEFT,
    or one that ``train --save`` wrote, whose last checkpoint counts; ``base``: where adapter_config.json does not name it.
    Returns the folders of the adapter and of the base. Raises ValueError, OSError, CheckpointError and BudgetError."""
    check_package("peft", "merge", "hf")
    target = folder_named(out).resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        what = "a folder that is not empty" if target.is_dir() else "a file"
        raise ValueError(f"expected the name of a new folder to write into, found {out}, {what}: name another one, or empty it")
    adapter = checkpoint.latest(adapter) or adapter
    base = _base_of(adapter, base)
    model = plain_model(base)
    with progress.doing("comparing the base"):
        _check_base(adapter, model)
    merged = _merged(adapter, base, model)
    with progress.doing(f"writing {out}"), made_whole(target) as new:
        merged.save_pretrained(new)
        for name in TOKENIZER_FILES:  # those of the adapter, which may have a chat template of its own, come first
            found = next((folder / name for folder in (adapter, base) if (folder / name).is_file()), None)
            if found is not None and not (new / name).exists():
                shutil.copyfile(found, new / name)
    return adapter, base


def _base_of(adapter: Path, given: Path | None) -> Path:
    """Returns the folder of an adapter's base. Raises ValueError unless both are there."""
    config = adapter / "adapter_config.json"
    if not config.is_file():
        whole = (adapter / "config.json").is_file()
        found = "whole weights, which need no merging" if whole else "none" if adapter.is_dir() else "no such folder"
        raise ValueError(
            f"expected a folder of PEFT with an adapter_config.json, found {found}: {adapter}. Name one that mtcompile train "
            "--lora --save or PEFT's save_pretrained wrote"
        )
    if not (adapter / "adapter_model.safetensors").is_file():
        found = "adapter_model.bin, a pickle, which is not read" if (adapter / "adapter_model.bin").is_file() else "none"
        raise ValueError(f"expected adapter_model.safetensors in {adapter}, found {found}: save the adapter with PEFT again")
    fields = parsed_json(read_text(config, FEW_NBYTES), str(config))
    named = fields.get("base_model_name_or_path") if isinstance(fields, dict) else None
    folder = given or Path(named if isinstance(named, str) and named else "")
    if not (folder / "config.json").is_file() or folder == Path():
        where = "--base" if given else f"{config}, as base_model_name_or_path,"
        what = "which has no config.json" if folder.is_dir() else "which is not there (nothing is downloaded)"
        raise ValueError(
            f"expected {where} to name the folder of the base, found {str(given or named)!r}, {what}: pass --base FOLDER"
        )
    if getattr(configuration(folder / "config.json")[0], "quantization_config", None):
        raise ValueError(
            f"expected a base that is not quantized, found {folder}: a merge would be rounded to its bits. Pass the folder "
            "with the original weights, --base FOLDER"
        )
    return folder


def _check_base(adapter: Path, model: Any) -> None:
    """Raises CheckpointError if a checkpoint says that its adapter was trained on other weights."""
    if (adapter / MANIFEST).is_file():
        note_training(model, (), {})
        check_base(adapter, checkpoint.inspect(adapter).provenance, model)


def _merged(adapter: Path, base: Path, model: Any) -> Any:
    """Returns a model of Transformers with the weights of an adapter in its own. Raises CheckpointError unless each of them has
    a place in it."""
    import peft

    names = stored_tensors(adapter / "adapter_model.safetensors")
    other = f"expected {adapter} to be an adapter of {base}, found"
    step = "pass the base that it was trained on, --base FOLDER"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is missing, which is looked at below, and of what is tied
            config = peft.PeftConfig.from_pretrained(str(adapter))
            if not getattr(config, "ensure_weight_tying", False):
                _untie(model, names)
            adapted = peft.PeftModel.from_pretrained(model, str(adapter), config=config, torch_device="cpu")
            found: Any = peft.set_peft_model_state_dict(adapted, peft.load_peft_weights(str(adapter), device="cpu"), _ADAPTER)
    except Exception as error:
        raise CheckpointError(f"{other} that PEFT refuses it ({first_line(error)}): {step}") from error
    missing = [name for name in found.missing_keys if f".{_ADAPTER}." in f"{name}."]
    for others, what in ((found.unexpected_keys, "which has no place there"), (missing, "which is not in its file")):
        if others:
            raise CheckpointError(f"{other} {len(others)} tensors, {others[0]} among them, {what}: {step}")
    if not hasattr(adapted, "merge_and_unload"):
        raise ValueError(f"expected an adapter that can be merged, such as LoRA, found {config.peft_type} in {adapter}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return adapted.merge_and_unload()


def _untie(model: Any, names: Iterable[str]) -> None:
    """Gives the head weights of its own if it shares those of the embeddings and there is an adapter for one of both: merging
    it would change the other one too, as the adapted model does not."""
    from torch import nn

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or getattr(head, "weight", None) is not getattr(embedding, "weight", None):
        return
    paths = [path for path, module in model.named_modules() if module is head or module is embedding]
    if any(f".{path}." in name for name in names for path in paths):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.get_text_config(decoder=True).tie_word_embeddings = False
        model.config.tie_word_embeddings = False
