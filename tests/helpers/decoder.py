"""A small decoder, text to train it on, an AdamW for it, and everything that its steps change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.models.decoders import Decoder
from mtcompile.models.shapes import Shape

SHAPE = Shape(64, 160, 1, 2, 1, 256, head_dim=32, dtype=torch.float32)
TEXT = """Split state: fp32 masters are exact, are what a plain fp32 update makes of the same gradients, and survive whatever an
ordinary program does with a model and its optimizer."""


def small_decoder(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(SHAPE).train()


def batch(seed: int) -> dict[str, Tensor]:
    text = torch.tensor(list(TEXT.encode() * 4))
    at = torch.randint(0, len(text) - 25, (2,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([text[i : i + 25] for i in at])
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **{"lr": 2e-3, "weight_decay": 0.1} | options)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies everything that a step changes."""
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    saved = optimizer.state_dict()["state"]
    return values | {
        f"{index}.{key}": torch.as_tensor(value).clone() for index, row in saved.items() for key, value in row.items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
