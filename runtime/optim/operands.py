"""The tensors of an update, and split weights: an fp32 master in a bf16 and an int16 plane."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

Layout = Literal["fp32", "split, bf16 gradient", "split, fp32 gradient"]
LAYOUTS: tuple[Layout, ...] = ("fp32", "split, bf16 gradient", "split, fp32 gradient")  # in update.c's order
_CHUNK = 2**20  # elements that ``split`` and ``joined`` convert at once
_NAN = 0x7FC00000


@dataclass(frozen=True, slots=True)
class Operands:
    """The tensors of one update, all 1-D, contiguous, of one length, on one device, and sharing no memory.

    Without ``remainder``, weight and gradient are fp32. With it the weight is split: ``weight`` is the bf16 plane that is
    computed with, ``remainder`` the int16 plane, and the gradient is bf16 or fp32. ``states``, which are fp32 either way, are
    those that ``Update.state_names`` lists.
    """

    weight: Tensor
    grad: Tensor
    states: tuple[Tensor, ...]
    remainder: Tensor | None = None

    @property
    def layout(self) -> Layout:
        if self.remainder is None:
            return "fp32"
        return "split, bf16 gradient" if self.grad.dtype == torch.bfloat16 else "split, fp32 gradient"

    def check(self, state_names: Sequence[str], device: torch.device) -> None:
        """Raise ValueError unless these are an update's operands on ``device``."""
        if len(self.states) != len(state_names):
            raise ValueError(f"expected the states {', '.join(state_names)}, found {len(self.states)} tensors")
        split_weight = self.remainder is not None
        dtypes = {
            "weight": (torch.bfloat16 if split_weight else torch.float32,),
            "grad": (torch.bfloat16, torch.float32) if split_weight else (torch.float32,),
            "remainder": (torch.int16,),
        }
        tensors = {"weight": self.weight, "grad": self.grad, **dict(zip(state_names, self.states, strict=True))}
        if self.remainder is not None:
            tensors["remainder"] = self.remainder
        length = self.weight.numel()
        for name, tensor in tensors.items():
            allowed = dtypes.get(name, (torch.float32,))
            right = tensor.dtype in allowed and tensor.shape == (length,) and tensor.device == device
            if not right or not tensor.is_contiguous() or tensor.layout != torch.strided:
                expected = f"{' or '.join(map(str, allowed))} [{length}] on {device}, contiguous"
                strides = f"strides {list(tensor.stride())}" if tensor.layout == torch.strided else str(tensor.layout)
                actual = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}, {strides}"
                hint = "; a bf16 weight needs its remainder" if name == "weight" and tensor.dtype == torch.bfloat16 else ""
                raise ValueError(f"expected {name} to be {expected}, found {actual}{hint}")
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in tensors.items())
        for (_, end, first), (start, _, second) in itertools.pairwise(spans):
            if start < end:
                raise ValueError(f"expected tensors that share no memory, found {first} and {second} overlapping")

    def count_writes(self) -> None:
        """Raise the version counters of what an update writes by one, so that autograd sees the write."""
        written = [self.weight, *self.states, *(() if self.remainder is None else (self.remainder,))]
        increment_version([tensor for tensor in written if not tensor.is_inference()])


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 masters of any shape into (``high`` bf16, ``low`` int16) of that shape and device, 4 bytes as before.

    ``high = (bits + 0x8000) >> 16`` and ``low`` is the low half of the bits, signed, so that ``(high << 16) + low`` is
    ``bits``: exactly, for every finite number and both infinities. ``high`` is the master rounded to bf16, ties away from zero
    (torch: to even). From 0x7f7f8000 on (about 3.396e38) it is an infinity, as with torch; the pair still is the finite
    master.

    The bits of a NaN are preserved where ``high`` is a NaN too. The others (0x7f800001..0x7f807fff, whose ``high`` would be an
    infinity, and 0x7fff8000..0x7fffffff, among them the NaN that CUDA makes, whose ``high`` would be a zero; both signs)
    become 0x7fc00000: there are fewer pairs with a NaN in ``high`` than there are NaNs. Raises ValueError.
    """
    if master.dtype != torch.float32:
        raise ValueError(f"expected masters in torch.float32, found {master.dtype}")
    high = torch.empty(master.shape, dtype=torch.bfloat16, device=master.device)
    low = torch.empty(master.shape, dtype=torch.int16, device=master.device)
    flat = master.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        bits = flat[part].view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        hidden = (magnitude > 0x7F800000) & ((magnitude < 0x7F808000) | (magnitude >= 0x7FFF8000))
        split_bits(bits.masked_fill(hidden, _NAN), high.view(-1)[part], low.view(-1)[part])
    return high, low


def joined(high: Tensor, low: Tensor) -> Tensor:
    """Join the planes (bf16, int16) of one shape to fp32 masters: ``(high << 16) + low``. Raises ValueError."""
    if (high.dtype, low.dtype) != (torch.bfloat16, torch.int16) or high.shape != low.shape or high.device != low.device:
        expected = "expected torch.bfloat16 and torch.int16 of one shape on one device"
        planes = ", ".join(f"{plane.dtype} {list(plane.shape)} {plane.device}" for plane in (high, low))
        raise ValueError(f"{expected}, found {planes}")
    master = torch.empty(high.shape, dtype=torch.float32, device=high.device)
    highs, lows = high.detach().reshape(-1), low.reshape(-1)
    for start in range(0, highs.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        join_bits(highs[part], lows[part], master.view(-1)[part])
    return master


def split_bits(bits: Tensor, high: Tensor, low: Tensor) -> None:
    """Write the two planes of fp32 numbers given as int32 ``bits``."""
    low.copy_(bits)  # an integer that is too wide loses its upper bits
    high.view(torch.int16).copy_((bits + 0x8000) >> 16)


def join_bits(high: Tensor, low: Tensor, master: Tensor) -> None:
    """Write the fp32 numbers of two planes into ``master``."""
    bits = master.view(torch.int32)
    bits.copy_(high.view(torch.int16))
    bits <<= 16
    bits += low
