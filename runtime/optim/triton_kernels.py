"""The Triton kernels of ``runtime/optim/device_kernels.py``, which says what they do; importing this file needs triton.

16-bit planes come as int16: only their bits are used. Integers wrap, as in C. ``/`` and ``tl.sqrt`` are approximations on
NVIDIA GPUs, ``div_rn`` and ``sqrt_rn`` are not. A Triton kernel takes pointers and numbers, no objects: hence the long
parameter lists, the scalars in the order of ``formula.py``.

One launch updates several parameters, ``width`` of them. ``table``: for each, in rows, the first program and the elements, then
the addresses of weight, gradient, first and last state, and remainder. ``found``: where it is not 0, nothing is changed.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 1024  # elements of a program


@triton.jit
def _place(table, width, found, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The column of the parameter that this program updates, where its elements are, and which of them to update."""
    columns = tl.arange(0, WIDTH)
    firsts = tl.load(table + columns, mask=columns < width, other=1 << 62)
    column = tl.sum((firsts <= tl.program_id(0)).to(tl.int32)) - 1
    at = (tl.program_id(0) - tl.load(table + column)) * BLOCK + tl.arange(0, BLOCK)
    elements = tl.load(table + width + column)
    if found is not None:
        elements = tl.where(tl.load(found) == 0.0, elements, 0)
    return column, at, at < tl.multiple_of(elements, ALIGNED)


@triton.jit
def _address(table, width, row: tl.constexpr, column, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(table + row * width + column)
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGNED)


@triton.jit
def _weight_at(weight, remainder, at, inside, SPLIT: tl.constexpr):
    if SPLIT:
        hi = tl.load(weight + at, mask=inside, other=0).to(tl.int32)
        lo = tl.load(remainder + at, mask=inside, other=0).to(tl.int32)
        return ((hi << 16) + lo).to(tl.float32, bitcast=True)
    else:
        return tl.load(weight + at, mask=inside, other=0.0)


@triton.jit
def _grad_at(grad, at, inside, HALF: tl.constexpr):
    if HALF:
        return (tl.load(grad + at, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(grad + at, mask=inside, other=0.0)


@triton.jit
def _stored_bits(x):
    """The bits to store, one pattern for every NaN: NVIDIA GPUs make 0x7fffffff, whose high half rounds to a zero."""
    return tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def _set_weight(weight, remainder, at, inside, w, SPLIT: tl.constexpr):
    bits = _stored_bits(w)
    if SPLIT:
        tl.store(weight + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(remainder + at, bits.to(tl.int16), mask=inside)
    else:
        tl.store(weight + at, bits.to(tl.float32, bitcast=True), mask=inside)


@triton.jit
def _set_state(state, at, inside, x):
    tl.store(state + at, _stored_bits(x).to(tl.float32, bitcast=True), mask=inside)


@triton.jit
def adamw(
    table, width, found,
    scale, keep, decay, take1, beta2, take2, size, rise, eps,
    SPLIT: tl.constexpr, HALF: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates by AdamW. ``decay`` is Adam's, not used here."""
    column, at, inside = _place(table, width, found, ALIGNED, WIDTH, BLOCK)
    weight = _address(table, width, 2, column, tl.int16 if SPLIT else tl.float32, ALIGNED)
    grad = _address(table, width, 3, column, tl.int16 if HALF else tl.float32, ALIGNED)
    m_at = _address(table, width, 4, column, tl.float32, ALIGNED)
    v_at = _address(table, width, 5, column, tl.float32, ALIGNED)
    remainder = _address(table, width, 6, column, tl.int16, ALIGNED)
    w = _weight_at(weight, remainder, at, inside, SPLIT)
    g = _grad_at(grad, at, inside, HALF) * scale
    m = tl.load(m_at + at, mask=inside, other=0.0)
    v = tl.load(v_at + at, mask=inside, other=0.0)
    m = m + take1 * (g - m)
    v = beta2 * v + (take2 * g) * g
    d = tl.math.sqrt_rn(v) * rise + eps
    w = keep * w
    w = w - tl.math.div_rn(size * m, d)
    _set_state(m_at, at, inside, m)
    _set_state(v_at, at, inside, v)
    _set_weight(weight, remainder, at, inside, w, SPLIT)


@triton.jit
def sgd(
    table, width, found,
    scale, decay, momentum, take, lr,
    NESTEROV: tl.constexpr, FIRST: tl.constexpr,
    SPLIT: tl.constexpr, HALF: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column, at, inside = _place(table, width, found, ALIGNED, WIDTH, BLOCK)
    weight = _address(table, width, 2, column, tl.int16 if SPLIT else tl.float32, ALIGNED)
    grad = _address(table, width, 3, column, tl.int16 if HALF else tl.float32, ALIGNED)
    buffer = _address(table, width, 4, column, tl.float32, ALIGNED)
    remainder = _address(table, width, 6, column, tl.int16, ALIGNED)
    w = _weight_at(weight, remainder, at, inside, SPLIT)
    g = _grad_at(grad, at, inside, HALF) * scale
    g = g + decay * w
    if FIRST:
        b = g
    else:
        b = momentum * tl.load(buffer + at, mask=inside, other=0.0) + take * g
    if NESTEROV:
        u = g + momentum * b
    else:
        u = b
    w = w - lr * u
    _set_state(buffer, at, inside, b)
    _set_weight(weight, remainder, at, inside, w, SPLIT)
