"""A linear layer that reads fragments of its weight as they arrive, in one Triton kernel. *Not yet measured* on a GPU.

    copy stream     W[0:n] -> slot, flag 0 = step | W[n:2n] -> slot, flag 1 = step | ...
    compute stream  one launch: each program waits for the flags of its rows, and then computes its tile of x @ W.t() + b

``send`` issues the copies, each followed by a copy of the step's number into the flag of the fragment; ``linear`` launches the
kernel of ``arriving_triton.py``. Numbers of steps grow, so no flag is ever reset: a smaller number is an earlier step's.

No plan uses it: a schedule proves that every operand has arrived before a kernel starts. Sums are made in fp32 in blocks of
columns, an order unlike that of cuBLAS, so results are within rounding of ``torch.nn.functional.linear``. Triton's interpreter
shows that the results are right and that no tile is read before its flag; ``benchmarks/arriving.py`` measures on a GPU where it
is faster than one copy, or regions by fragment.

Why it ends: programs that wait hold processors of the GPU, as many as there are, but no copy engine, and copies and flags are
written by copy engines alone, never by a kernel. So every copy that may start goes on, however many programs wait. A copy may
start if nothing in front of it waits for this kernel. Hence the rule: call ``send`` before ``linear``, from the same thread,
on another stream, out of pinned memory, and let nothing that the copies wait for come after this kernel. Even if both streams
share one queue of the hardware, the copies are then in front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LAST_STEP = 2**31 - 1
_BLOCK_N, _BLOCK_K = 64, 64  # rows and columns of a weight's tile


@dataclass(frozen=True, slots=True)
class Arriving:
    """A weight [out, in] on the device whose fragments arrive one by one, each of ``rows`` rows; the last one takes what is
    left, more or less. ``flags``: int32 [fragments] on the device; fragment i is there once ``flags[i] >= step``."""

    weight: Tensor
    rows: int
    flags: Tensor
    step: int

    def __post_init__(self) -> None:
        weight, flags = self.weight, self.flags
        _expect(
            weight.dim() == 2 and weight.is_contiguous(), "a contiguous weight [out, in]", _told(weight), "weight.contiguous()"
        )
        _expect(weight.dtype in _DTYPES, "a float32, float16 or bfloat16 weight", _told(weight), "torch.nn.functional.linear")
        _expect(self.rows > 0, "at least one row in a fragment", self.rows, "the rows of a fragment")
        most = max(1, -(-len(weight) // self.rows))
        right = flags.dtype == torch.int32 and flags.is_contiguous() and flags.dim() == 1 and 0 < len(flags) <= most
        _expect(right, f"contiguous int32 flags, 1 to {most}", _told(flags), f"torch.zeros({most}, dtype=torch.int32)")
        _expect(flags.device == weight.device, f"flags on {weight.device}", flags.device, "the device of the weight")
        _expect(0 < self.step <= _LAST_STEP, f"a step from 1 to {_LAST_STEP}", self.step, "new flags, and steps from 1")

    @property
    def fragments(self) -> list[tuple[int, int]]:
        """Lists where each fragment starts and ends."""
        starts = [i * self.rows for i in range(len(self.flags))]
        return list(zip(starts, [*starts[1:], len(self.weight)], strict=True))


def send(arriving: Arriving, source: Tensor, stream: Any = None) -> None:
    """Copies a weight fragment by fragment, and sets the flag of each behind it. ``source``: on the host, pinned for a GPU.
    ``stream``: of the copies, not the one that computes; None on a CPU. Raises ValueError."""
    weight, flags = arriving.weight, arriving.flags
    same = (source.shape, source.dtype, source.is_contiguous()) == (weight.shape, weight.dtype, True)
    _expect(same, f"a contiguous source like {_told(weight)}", _told(source), "the weight's home")
    if not weight.is_cuda:
        for i, (start, end) in enumerate(arriving.fragments):
            weight[start:end].copy_(source[start:end])
            flags[i] = arriving.step
        return
    computing = torch.cuda.current_stream(weight.device)
    _expect(stream is not None and stream != computing, "a stream for copies alone", stream, "torch.cuda.Stream()")
    _expect(source.is_pinned(), "a pinned source: other copies may wait for kernels", "pageable memory", "source.pin_memory()")
    step = torch.tensor([arriving.step], dtype=torch.int32).pin_memory()  # torch keeps it until it is copied
    with torch.cuda.stream(stream):
        for i, (start, end) in enumerate(arriving.fragments):
            weight[start:end].copy_(source[start:end], non_blocking=True)
            flags[i : i + 1].copy_(step, non_blocking=True)


def linear(x: Tensor, arriving: Arriving, bias: Tensor | None = None, tries: int = 0) -> Tensor:
    """Returns x @ weight.t() + bias: [..., in] -> [..., out], asynchronously on a GPU, whose current stream computes.

    ``tries``: how often a program looks at a flag before it gives up; 0: until it is set. With a limit, waits for the result,
    and raises RuntimeError if a fragment has not arrived. Raises ValueError for operands that do not belong together, and
    RuntimeError where triton is not installed."""
    try:
        import triton

        from mtcompile.kernels import arriving_triton
    except ImportError as error:
        raise RuntimeError('expected triton to be installed, try: pip install "mtcompile[triton]"') from error
    weight = arriving.weight
    where, (rows, columns) = weight.device, weight.shape
    interpreted = where.type == "cpu" and triton.knobs.runtime.interpret
    _expect(where.type == "cuda" or interpreted, "a weight on a GPU", where, "torch.nn.functional.linear")
    right = x.dtype == weight.dtype and x.device == where and x.dim() > 0 and x.shape[-1] == columns
    _expect(right, f"x [..., {columns}] of {weight.dtype} on {where}", _told(x), "x.to(weight)")
    fits = bias is None or (bias.shape, bias.dtype, bias.device, bias.is_contiguous()) == ((rows,), x.dtype, where, True)
    _expect(fits, f"a contiguous bias [{rows}] of {x.dtype} on {where}", bias is None or _told(bias), "bias.to(weight)")
    flat = x.detach().reshape(-1, columns).contiguous()
    y = torch.empty(len(flat), rows, dtype=x.dtype, device=where)
    missing = torch.zeros_like(arriving.flags) if tries else arriving.flags  # which is then not written
    block_m = min(64, max(16, triton.next_power_of_2(max(1, len(flat)))))
    if y.numel():
        with torch.cuda.device_of(weight):  # Triton launches on the current device
            arriving_triton.linear[(triton.cdiv(len(flat), block_m) * triton.cdiv(rows, _BLOCK_N),)](
                flat,
                weight.detach(),
                y if bias is None else bias.detach(),
                y,
                arriving.flags,
                missing,
                arriving.step,
                len(flat),
                rows,
                columns,
                arriving.rows,
                len(arriving.flags),
                BIAS=bias is not None,
                TRIES=tries,
                WIDE=interpreted,
                BLOCK_M=block_m,
                BLOCK_N=_BLOCK_N,
                BLOCK_K=_BLOCK_K,
            )
    if tries and (late := missing.nonzero().flatten().tolist()):
        spans = ", ".join("rows {} to {}".format(*arriving.fragments[i]) for i in late)
        raise RuntimeError(f"expected all fragments in step {arriving.step}, {spans} had not arrived; call send before linear")
    return y.view(*x.shape[:-1], rows)


def _told(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}, strides {list(tensor.stride())}"


def _expect(right: bool, expected: str, found: object, step: str) -> None:
    if not right:
        raise ValueError(f"expected {expected}, found {found}; try {step}")
