"""AdamW and SGD with momentum on the device, in Triton: the layouts, formulas and bits of ``host_kernels.py``.

A launch is asynchronous, on the current stream. Contraction is turned off, division and square root are rounded to nearest.

Triton's interpreter, which runs the kernels on tensors of the CPU (``TRITON_INTERPRET=1`` in the environment before triton is
imported), shows that the bits are equal, and so does the PTX that they compile to, in which each operation is rounded once.
On an H200 the tests found the bits of the host, and a block's AdamW took 0.72 ms where its bytes take 0.63. ``proven`` compares
bits before one is used.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtcompile.runtime.optim import host_kernels
from mtcompile.runtime.optim.formula import Update, adamw, sgd
from mtcompile.runtime.optim.operands import Operands, split

_ALIGNED = 16  # bytes and elements
_PROOF = 2**17  # values of each kind


def apply(update: Update, operands: Operands) -> None:
    """Update the operands in place. Errors: as of ``apply_all``."""
    apply_all([(update, operands)])


def apply_all(tasks: Sequence[tuple[Update, Operands]], found: Tensor | None = None) -> None:
    """Update the operands of all tasks in place, by one launch for those with equal scalars, dtypes and alignment. ``found``:
    fp32 on the device; nothing is written where it is not 0 by then. Version counters rise in any case.

    Raises ValueError, before anything is written, for operands that are not those of their update or not on a GPU, and for an
    optimizer without a kernel; RuntimeError where triton is not installed."""
    try:
        import triton

        from mtcompile.runtime.optim import triton_kernels
    except ImportError as error:
        raise RuntimeError('expected triton to be installed, try: pip install "mtcompile[triton]"') from error
    launches: dict[Any, list[Operands]] = {}
    for update, operands in tasks:
        if update.kind == "adam":
            raise ValueError("expected AdamW or SGD on a GPU, found Adam, which has no kernel there; try AdamW")
        device = operands.weight.device
        operands.check(update.state_names, device)
        if device.type != "cuda" and not (device.type == "cpu" and triton.knobs.runtime.interpret):
            raise ValueError(f"expected tensors on a GPU, found them on {device}; try mtcompile.runtime.optim.host_kernels")
        if operands.weight.numel():
            alignment = _ALIGNED if _is_aligned(operands) else 1
            launches.setdefault((update, operands.layout, alignment, device), []).append(operands)
    for (update, layout, alignment, device), alike in launches.items():
        kernel: Any = triton_kernels.adamw
        options = {"SPLIT": layout != "fp32", "HALF": layout == "split, bf16 gradient"}
        if update.kind != "adamw":
            kernel, options = triton_kernels.sgd, options | {"NESTEROV": update.nesterov, "FIRST": update.first}
        table, programs = _table(alike, triton_kernels.BLOCK)
        with torch.cuda.device_of(alike[0].weight):  # Triton launches on the current device
            kernel[(programs,)](
                table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True),
                len(alike),
                found,
                *update.scalars,
                **options,
                ALIGNED=alignment,
                WIDTH=triton.next_power_of_2(len(alike)),
                BLOCK=triton_kernels.BLOCK,
                enable_fp_fusion=False,
            )
    for _, operands in tasks:
        operands.count_writes()


def _table(tasks: Sequence[Operands], block: int) -> tuple[Tensor, int]:
    """Returns the table of ``triton_kernels``, and the number of its programs."""
    columns, programs = list[tuple[int, ...]](), 0
    for operands in tasks:
        columns.append((programs, operands.weight.numel(), *_addresses(operands)))
        programs += -(-operands.weight.numel() // block)
    return torch.tensor(columns, dtype=torch.int64).t().contiguous(), programs


def _addresses(operands: Operands) -> list[int]:
    tensors = (operands.weight, operands.grad, operands.states[0], operands.states[-1], operands.remainder)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _is_aligned(operands: Operands) -> bool:
    """Tells whether a kernel may load several elements at once, as from the memory of whole parameters."""
    return not any(number % _ALIGNED for number in (operands.weight.numel(), *_addresses(operands)))


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
    cuts = (0, _PROOF // 2, _PROOF // 2 + 33, _PROOF)  # parameters of many programs, of one, of an odd number of elements
    tensors = [[tensor[start:end] for tensor in there] for start, end in itertools.pairwise(cuts)]
    unchanged = torch.ones(1, device=device)
    tasks = [(update, Operands(weight, grad, tuple(states), rest)) for weight, rest, grad, *states in tensors]
    apply_all(tasks, found=unchanged)
    apply_all(tasks, found=unchanged - 1)
    host_kernels.apply(update, Operands(here[0], here[2], tuple(here[3:]), here[1]))
    return all(torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8)) for a, b in zip(here, there, strict=True))
