"""AdamW and SGD with momentum on the device, in Triton: ``runtime/host_adam.py``'s layouts, formulas and bits.

Arguments and errors are those of the functions there, but that tensors are on a GPU. A launch is asynchronous, on the
current stream. Contraction is turned off, division and square root are rounded to nearest.

That bits are equal is shown by Triton's interpreter, which runs the kernels on tensors of the CPU (``TRITON_INTERPRET=1`` in
the environment before triton is imported), and by the PTX that they compile to, in which each operation is rounded once. On a
GPU they have not run yet: launch, bits and speed are *not yet measured* there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mtcompile.runtime.host_adam import Operands, operands
from mtcompile.runtime.update_formula import Update, adam_update, sgd_update


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


def _kernels() -> ModuleType:
    try:
        from mtcompile import device_update_kernels
    except ImportError as error:
        raise RuntimeError('expected triton to be installed, try: pip install "mtcompile[triton]"') from error
    return device_update_kernels


def _launch(kernel: Any, update: Update, tensors: Operands, flags: Mapping[str, bool], kernels: ModuleType) -> None:
    import triton

    where = tensors.weight.device
    if where.type != "cuda" and not (where.type == "cpu" and triton.knobs.runtime.interpret):
        raise ValueError(f"expected tensors on a GPU, found them on {where}; try mtcompile.runtime.host_adam")
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
