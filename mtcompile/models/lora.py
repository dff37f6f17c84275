"""LoRA adapters for plans of models that do not have them yet, shaped and computed as PEFT's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoraLinear(nn.Module):
    """A frozen linear layer with two trained matrices beside it: ``base(x) + B(A(x)) * scale``. As in PEFT, they are fp32 where
    the layer is narrower, and the result has the layer's dtype."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        device = base.weight.device
        self.base, self.scale = base, 1.0
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, dtype=dtype, device=device)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, dtype=dtype, device=device)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        narrow = x.to(self.lora_A.weight.dtype)
        added = F.linear(F.linear(narrow, self.lora_A.weight), self.lora_B.weight) * self.scale
        return (result + added).to(result.dtype)


def add_lora(model: nn.Module, rank: int) -> None:
    """Freezes a model and gives each of its linear layers an adapter, except an output head. Raises ValueError for a model
    without linear layers, or with trained adapters of its own."""
    parameters = list(model.parameters())
    if not all(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            "lora expects a model that is trained as a whole, found one with frozen parameters: it may have adapters"
        )
    model.requires_grad_(False)
    head = _head(model)
    linear = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and child is not head
    ]
    if not linear:
        raise ValueError(f"lora expects a model with linear layers, found none in {type(model).__name__}")
    for parent, name, child in linear:
        setattr(parent, name, LoraLinear(child, rank))


def _head(model: nn.Module) -> nn.Module | None:
    """Returns the output layer, which PEFT leaves out of "all-linear": the one a Transformers model names, or ours."""
    if callable(output := getattr(model, "get_output_embeddings", None)):
        return output()  # type: ignore[no-any-return]
    return getattr(model, "head", None)
