"""LoRA adapters for plans of models that do not have them yet, shaped and computed as PEFT's, beside all bits or four."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoraLinear(nn.Module):
    """A frozen linear layer with two trained matrices beside it: ``base(x) + B(A(x)) * scale``. As in PEFT, they are fp32 where
    the layer is narrower, and the result has the layer's dtype."""

    def __init__(self, base: nn.Linear | FourBitLinear, rank: int) -> None:
        super().__init__()
        dtype = torch.promote_types(base.weight.dtype, torch.float32)  # also of bytes
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


class FourBitLinear(nn.Module):
    """A frozen linear layer as bitsandbytes computes it with QLoRA's weights: two 4-bit codes a byte, a scale of 8 bits for
    each 64 weights, and one of fp32 for each 256 scales. The weights exist in full only while a product needs them."""

    def __init__(self, full: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = full.in_features, full.out_features, full.bias
        self.dtype, device = full.weight.dtype, full.weight.device
        count = full.weight.numel()
        scales = -(-count // 64)
        self.weight = nn.Parameter(torch.zeros(-(-count // 2), 1, dtype=torch.uint8, device=device), requires_grad=False)
        self.register_buffer("absmax", torch.zeros(scales, dtype=torch.uint8, device=device))
        self.register_buffer("nested_absmax", torch.zeros(-(-scales // 256), dtype=torch.float32, device=device))
        self.register_buffer("code", torch.zeros(256, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        size = self.out_features, self.in_features
        product: Tensor = _FourBitProduct.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.absmax, self.code.float(), self.nested_absmax.float(), size, self.dtype
        )
        return product if self.bias is None else product + self.bias


class _FourBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *packed: Any) -> Tensor:
        ctx.save_for_backward(*packed[:4])
        ctx.rest = packed[4:]
        return F.linear(x, _in_full(*packed))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ _in_full(*ctx.saved_tensors, *ctx.rest), *[None] * 6


def _in_full(weight: Tensor, absmax: Tensor, code: Tensor, nested: Tensor, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    operations = torch.ops.bitsandbytes
    scales = operations.dequantize_blockwise.default(absmax, nested, code, 256, torch.float32)
    full: Tensor = operations.dequantize_4bit.default(weight, scales, 64, "nf4", size, dtype)
    return full


def add_lora(model: nn.Module, rank: int, base_bits: int | None = None) -> None:
    """Freezes a model and gives each of its linear layers an adapter, except an output head. ``base_bits``: 4 for such layers
    in bitsandbytes' 4 bits. Raises ValueError for a model without linear layers, or with trained adapters of its own."""
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
        setattr(parent, name, LoraLinear(child if base_bits is None else FourBitLinear(child), rank))


def _head(model: nn.Module) -> nn.Module | None:
    """Returns the output layer, which PEFT leaves out of "all-linear": the one a Transformers model names, or ours."""
    if callable(output := getattr(model, "get_output_embeddings", None)):
        return output()  # type: ignore[no-any-return]
    return getattr(model, "head", None)
