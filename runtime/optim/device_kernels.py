"""AdamW and SGD with momentum on the device, in Triton: ``runtime/optim/host_kernels.py``'s layouts, formulas and bits.

Arguments and errors are those of the functions there, but that tensors are on a GPU. A launch is asynchronous, on the
current stream. Contraction is turned off, division and square root are rounded to nearest.

That bits are equal is shown by Triton's interpreter, which runs the kernels on tensors of the CPU (``TRITON_INTERPRET=1`` in
the environment before triton is imported), and by the PTX that they compile to, in which each operation is rounded once. On a
GPU they have not run yet: launch, bits and speed are *not yet measured* there; ``proven`` compares bits before any is used.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mtcompile.runtime.optim.formula import Update, adam_update, sgd_update
from mtcompile.runtime.optim.host_kernels import Operands, operands, split
from mtcompile.runtime.optim.host_kernels import adamw as host_adamw
from mtcompile.runtime.optim.host_kernels import sgd as host_sgd

_PROOF = 2**17  # values of each kind


def adamw(
    weight: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    remainder: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    scale: float = 1.0,
) -> None:
    """``host_adam.adamw``. Raises ValueError, and RuntimeError where triton is not installed."""
    kernels = _kernels()
    update = adam_update(True, lr, beta1, beta2, eps, weight_decay, step, scale)
    _launch(kernels.adamw, update, operands(weight, grad, {"m": m, "v": v}, remainder, weight.device), {}, kernels)


def sgd(
    weight: Tensor,
    grad: Tensor,
    buffer: Tensor,
    remainder: Tensor | None = None,
    *,
    lr: float,
    momentum: float,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    first: bool,
    scale: float = 1.0,
) -> None:
    """``host_adam.sgd``. Raises ValueError, and RuntimeError where triton is not installed."""
    kernels = _kernels()
    update = sgd_update(lr, momentum, dampening, nesterov, weight_decay, first, scale)
    flags = {"NESTEROV": bool(nesterov), "FIRST": bool(first)}
    _launch(kernels.sgd, update, operands(weight, grad, {"buffer": buffer}, remainder, weight.device), flags, kernels)


@functools.cache
def proven(where: torch.device) -> bool:
    """Whether these kernels run there, and gave the host's bits on some hundred thousand values of all kinds, just now. Only
    then may a plan choose where an update runs."""
    try:
        return all(_same_bits(where, name, half) for name in ("adamw", "sgd") for half in (True, False))
    except (RuntimeError, ValueError):  # no triton, or a device that it has no code for
        return False


def _same_bits(where: torch.device, name: str, half: bool) -> bool:
    """``half``: of bf16 gradients, else fp32; weights are split."""
    drawn = torch.Generator().manual_seed(len(name) + half)
    states = 2 if name == "adamw" else 1
    # Any bits: numbers of every size, denormals, infinities, NaN; and small ones, as in training.
    bits = torch.randint(-(2**31), 2**31, (3 + states, _PROOF), generator=drawn, dtype=torch.int64).to(torch.int32)
    rows = bits.view(torch.float32)
    rows[:, ::2] = torch.randn(rows[:, ::2].shape, generator=drawn) * 0.02
    rows[2:, 1::4] = rows[2:, 1::4].abs()
    weight, remainder = split(rows[0])
    grad = rows[1].to(torch.bfloat16) if half else rows[1].clone()
    kept = [row.clone() for row in rows[2 : 2 + states]]
    options: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1, "scale": 0.7}
    if name == "adamw":
        options |= {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "step": 7}
    else:
        options |= {"momentum": 0.9, "first": False}
    there = [tensor.to(where, copy=True) for tensor in (weight, grad, *kept, remainder)]
    here = [weight, grad, *kept, remainder]
    (adamw if name == "adamw" else sgd)(*there, **options)
    (host_adamw if name == "adamw" else host_sgd)(*here, **options)
    bits_of = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int16: torch.int16}
    pairs = zip(here, there, strict=True)
    return all(torch.equal(a.view(bits_of[a.dtype]), b.cpu().view(bits_of[b.dtype])) for a, b in pairs)


def _kernels() -> ModuleType:
    try:
        from mtcompile.runtime.optim import triton_kernels
    except ImportError as error:
        raise RuntimeError('expected triton to be installed, try: pip install "mtcompile[triton]"') from error
    return triton_kernels


def _launch(kernel: Any, update: Update, tensors: Operands, flags: Mapping[str, bool], kernels: ModuleType) -> None:
    import triton

    where = tensors.weight.device
    if where.type != "cuda" and not (where.type == "cpu" and triton.knobs.runtime.interpret):
        raise ValueError(f"expected tensors on a GPU, found them on {where}; try mtcompile.runtime.optim.host_kernels")
    count = tensors.weight.numel()
    if count:
        layout = {"SPLIT": tensors.remainder is not None, "HALF": tensors.grad.dtype == torch.bfloat16}
        with torch.cuda.device_of(tensors.weight):  # Triton launches on the current device
            kernel[(triton.cdiv(count, kernels.BLOCK),)](
                _bits(tensors.weight),
                _bits(tensors.grad),
                *(state.detach() for state in tensors.states),
                tensors.remainder,
                count,
                *update.scalars,
                **flags,
                **layout,
                BLOCK=kernels.BLOCK,
                enable_fp_fusion=False,
            )
    increment_version([tensor for tensor in tensors.written() if not tensor.is_inference()])


def _bits(tensor: Tensor) -> Tensor:
    """16-bit planes as the kernels take them."""
    tensor = tensor.detach()
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
