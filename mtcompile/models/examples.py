"""Example inputs for models of Transformers, by what their forward takes: tokens, pictures or spectrograms, and labels."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_OWN = "write a file.py:factory that returns (module, keyword arguments)"
_ONE_LABEL = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def takes_labels(kind: type) -> bool:
    """Tells whether a class of models computes a loss of its own, from labels."""
    return bool(_parameters(kind) & {"labels", "start_positions"})


def example_inputs(model: Any, batch: int, seq: int) -> Mapping[str, Any]:
    """Returns keyword arguments with which a model that takes labels returns its loss. ``seq``: tokens of a text; pictures and
    spectrograms have the size that the configuration names. Raises ValueError for a model that takes neither."""
    kind, main = type(model), str(model.main_input_name)
    makers = {"input_ids": _tokens, "pixel_values": _pictures, "input_features": _spectrograms}
    if main not in makers:
        expected = ", ".join(makers)
        raise ValueError(f"expected a model that takes one of {expected}, found {kind.__name__}, which takes {main}: {_OWN}")
    if main == "input_ids" and "pixel_values" in _parameters(kind):
        warnings.warn(
            f"{kind.__name__} is planned for text alone; a file.py:factory can return (module, keyword arguments) with images",
            stacklevel=2,
        )
    data = makers[main](model.config, batch, seq)
    uncached = {"use_cache": False} if "use_cache" in _parameters(kind) else {}  # as trainers call it
    if "start_positions" in _parameters(kind):
        where = torch.zeros(batch, dtype=torch.int64)
        return {main: data, "start_positions": where, "end_positions": where, **uncached}
    return {main: data, "labels": _labels(model, data, batch, seq), **uncached}


def _labels(model: Any, data: Tensor, batch: int, seq: int) -> Tensor:
    name, config = type(model).__name__, model.config
    if name.endswith(_ONE_LABEL):
        return torch.randint(int(config.num_labels), (batch,))
    if name.endswith("ForTokenClassification"):
        return torch.randint(int(config.num_labels), (batch, seq))
    if data.dtype == torch.int64:
        return data
    if not hasattr(config, "max_target_positions"):
        raise ValueError(f"expected a model that classifies or writes text, found {name}: {_OWN}")
    return torch.randint(int(config.vocab_size), (batch, min(seq, int(config.max_target_positions))))


def _tokens(config: Any, batch: int, seq: int) -> Tensor:
    of_text = config.get_text_config()
    return torch.randint(int(of_text.vocab_size), (batch, seq))


def _pictures(config: Any, batch: int, seq: int) -> Tensor:
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(batch, int(getattr(config, "num_channels", 3)), int(height), int(width))


def _spectrograms(config: Any, batch: int, seq: int) -> Tensor:
    return torch.randn(batch, int(config.num_mel_bins), 2 * int(config.max_source_positions))


def _parameters(kind: Any) -> set[str]:
    return set(inspect.signature(kind.forward).parameters)
