"""Where a model comes from that is named on the command line: a built-in shape, a Hugging Face config.json, file.py:factory."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtcompile.models.decoders import SHAPES, fake

Made = tuple[nn.Module, Mapping[str, Any]]


def model_named(text: str) -> str | Callable[[int, int], Made]:
    """A built-in shape's name, or what makes (module, arguments) of a batch and sequence. Raises ValueError, then or later."""
    path, _, factory = text.rpartition(":")
    if text.endswith(".py"):
        raise ValueError(f"expected file.py:factory, found {text}: which function of it makes (module, keyword arguments)?")
    if not path.endswith(".py") and not text.endswith(".json"):
        return text

    def make(batch: int, seq: int) -> Made:
        return _from_factory(path, factory, batch, seq) if path.endswith(".py") else _from_config(text, batch, seq)

    make.__name__ = text
    return make


def made(model: str | Callable[[int, int], Any], batch: int, seq: int) -> Made:
    """The module itself with random weights, and random tokens for it. Raises ValueError."""
    if not isinstance(model, str):
        found = model(batch, seq)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise ValueError(f"expected a factory to return (module, keyword arguments), found {type(found).__name__}")
        return found[0], found[1]
    tokens, targets = torch.randint(_shape(model).vocabulary, (2, batch, seq))
    return fake(_shape(model)), {"tokens": tokens, "targets": targets}


def language_model(text: str) -> tuple[nn.Module, int]:
    """A module that takes (tokens, targets) and returns the mean loss, and the size of its vocabulary; of a built-in shape or
    of a Hugging Face configuration. Raises ValueError."""
    if not text.endswith(".json"):
        return fake(_shape(text)), _shape(text).vocabulary
    model = _causal(text)
    return LanguageModel(model), int(model.config.vocab_size)


class LanguageModel(nn.Module):
    """A model of Transformers that gives logits, with the cross-entropy of the tokens that follow."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _shape(name: str) -> Any:
    if name not in SHAPES:
        raise ValueError(f"expected a model among {', '.join(SHAPES)}, or a config.json, or file.py:factory, found {name!r}")
    return SHAPES[name]


def _from_factory(path: str, name: str, batch: int, seq: int) -> Made:
    factory = _loaded(path, name)
    try:
        found = factory(batch, seq)
    except Exception as error:
        what = f"{path}:{name}({batch}, {seq})"
        raise ValueError(
            f"expected {what} to return (module, keyword arguments), found that it raised {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module) and isinstance(found[1], Mapping)):
        kinds = ", ".join(type(part).__name__ for part in found) if isinstance(found, tuple) else type(found).__name__
        raise ValueError(f"expected {path}:{name}({batch}, {seq}) to return (module, keyword arguments), found {kinds}")
    return found


def _loaded(path: str, name: str) -> Callable[[int, int], Any]:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path) if path.endswith(".py") else None
    if spec is None or spec.loader is None or not Path(path).exists():
        raise ValueError(f"expected file.py:factory, found no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"expected {path} to be imported, found {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ValueError(f"expected a function {name!r} in {path}, found none")
    made: Callable[[int, int], Any] = factory
    return made


def _from_config(path: str, batch: int, seq: int) -> Made:
    model = _causal(path)
    tokens = torch.randint(int(model.config.vocab_size), (batch, seq))
    return model, {"input_ids": tokens, "labels": tokens}


def _causal(path: str) -> Any:
    """A causal language model of a Hugging Face configuration, with random weights: nothing is fetched."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError("a Hugging Face configuration needs the package transformers: pip install transformers") from None
    try:
        fields = json.loads(Path(path).read_text())
        config = AutoConfig.for_model(**{"use_cache": False, **fields})
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"expected a Hugging Face config file with a model_type, found {path}: {error}") from None
    dtype = getattr(torch, str(fields.get("dtype") or fields.get("torch_dtype") or "float32"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(before)
