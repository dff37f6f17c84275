"""Checks whether a model's tensors may move to another device or change their kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from mtcompile.errors import MtcompileError
from mtcompile.torch_private import shares_storage, storage_id


def changes_of(convert: Callable[[torch.Tensor], torch.Tensor], dtypes: Iterable[torch.dtype]) -> str:
    """Says what ``convert``, as ``nn.Module._apply`` takes it, would change of parameters and buffers of these dtypes beside
    their device; "" for nothing. It is called with small tensors of its own."""
    for dtype in sorted(dtypes, key=str):
        for shape in ((2, 2, 2, 2), (1, 2, 2, 2, 2)):  # as memory formats of images and volumes concern
            sample = torch.arange(16).view(shape).to(dtype)
            converted = convert(sample.clone())
            if converted.dtype != dtype:
                return f"dtype from {dtype} to {converted.dtype}"
            if converted.device.type == "meta" or converted.layout != sample.layout:
                return "what tensors hold"
            if converted.stride() != sample.stride():
                return "strides (a memory format)"
            if converted.device.type == "cpu" and converted.is_shared():
                return "memory to that which processes share"
            if not torch.equal(converted.detach().cpu().view(torch.uint8), sample.view(torch.uint8)):
                return "values"
    return ""


def check_movable(model: torch.nn.Module) -> None:
    """Raises MtcompileError for a tensor without memory, and for one on a device whose memory another one shares: after a move
    they would be two."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise MtcompileError(
                f"{name} is on the device meta; expected tensors with values. Load weights from a folder of safetensors with "
                "mtcompile.from_pretrained(folder, model, memory=...), or build the model on the CPU"
            )
        if tensor.device.type != "cpu" and shares_storage(tensor):
            sharing = (n for n, t in tensors.items() if t is not tensor and storage_id(t) == storage_id(tensor))
            raise MtcompileError(
                f"{name} on {tensor.device} shares memory with {next(sharing, 'a tensor outside the model')}; compile moves "
                "the model to host memory, where they would be two tensors. Call model.cpu() before they come to share memory"
            )
