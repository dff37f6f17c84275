"""AdamW and SGD with momentum on the device, in Triton: the layouts, formulas and bits of ``host_kernels.py``.

A launch is asynchronous, on the current stream. Contraction is turned off, division and square root are rounded to nearest.

Triton's interpreter, which runs the kernels on tensors of the CPU (``TRITON_INTERPRET=1`` in the environment before triton is
imported), shows that the bits are equal, and so does the PTX that they compile to, in which each operation is rounded once.
On an H200 the tests found the bits of the host, and a block's AdamW took 0.72 ms where its bytes take 0.63. ``proven`` compares
bits before one is used.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mtcompile.runtime.optim import host_kernels
from mtcompile.runtime.optim.formula import Update, adamw, sgd
from mtcompile.runtime.optim.operands import Operands, split

_PROOF = 2**17  # values of each kind


def apply(update: Update, operands: Operands) -> None:
    """Update the operands in place. Raises ValueError for operands that are not those of the update or not on a GPU, and for
    an optimizer without a kernel; RuntimeError where triton is not installed."""
    try:
        import triton

        from mtcompile.runtime.optim import triton_kernels
    except ImportError as error:
        raise RuntimeError('expected triton to be installed, try: pip install "mtcompile[triton]"') from error
    if update.kind == "adam":
        raise ValueError("expected AdamW or SGD on a GPU, found Adam, which has no kernel there; try AdamW")
    device = operands.weight.device
    operands.check(update.state_names, device)
    if device.type != "cuda" and not (device.type == "cpu" and triton.knobs.runtime.interpret):
        raise ValueError(f"expected tensors on a GPU, found them on {device}; try mtcompile.runtime.optim.host_kernels")
    kernel: Any = triton_kernels.adamw
    options = {"SPLIT": operands.remainder is not None, "HALF": operands.grad.dtype == torch.bfloat16}
    if update.kind != "adamw":
        kernel, options = triton_kernels.sgd, options | {"NESTEROV": update.nesterov, "FIRST": update.first}
    if count := operands.weight.numel():
        with torch.cuda.device_of(operands.weight):  # Triton launches on the current device
            kernel[(triton.cdiv(count, triton_kernels.BLOCK),)](
                _plane(operands.weight),
                _plane(operands.grad),
                *(state.detach() for state in operands.states),
                operands.remainder,
                count,
                *update.scalars,
                **options,
                BLOCK=triton_kernels.BLOCK,
                enable_fp_fusion=False,
            )
    operands.count_writes()


@functools.cache
def proven(device: torch.device) -> bool:
    """True where these kernels run on ``device`` and have just given the host's bits on some hundred thousand values of all
    kinds. Only then may a plan choose where an update runs."""
    updates = (
        adamw(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=7, scale=0.7),
        sgd(lr=3e-3, momentum=0.9, first=False, weight_decay=0.1, scale=0.7),
    )
    try:
        return all(_same_bits(device, update, dtype) for update in updates for dtype in (torch.bfloat16, torch.float32))
    except (RuntimeError, ValueError):  # no triton, or a device that it has no code for
        return False


def _same_bits(device: torch.device, update: Update, grad_dtype: torch.dtype) -> bool:
    """True where an update of split weights gives the same bits on ``device`` as on the host."""
    states = len(update.state_names)
    generator = torch.Generator().manual_seed(states)
    # Any bits: numbers of every size, denormals, infinities, NaN; and small ones, as in training.
    bits = torch.randint(-(2**31), 2**31, (2 + states, _PROOF), generator=generator, dtype=torch.int64).to(torch.int32)
    rows = bits.view(torch.float32)
    rows[:, ::2] = torch.randn(rows[:, ::2].shape, generator=generator) * 0.02
    rows[2:, 1::4] = rows[2:, 1::4].abs()
    weight, remainder = split(rows[0])
    here = [weight, remainder, rows[1].to(grad_dtype, copy=True), *(row.clone() for row in rows[2:])]
    there = [tensor.to(device, copy=True) for tensor in here]
    apply(update, Operands(there[0], there[2], tuple(there[3:]), there[1]))
    host_kernels.apply(update, Operands(here[0], here[2], tuple(here[3:]), here[1]))
    return all(torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in zip(here, there, strict=True))


def _plane(tensor: Tensor) -> Tensor:
    """The tensor as the kernels take it: a 16-bit plane as int16."""
    tensor = tensor.detach()
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
