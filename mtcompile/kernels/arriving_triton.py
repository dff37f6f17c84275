"""The Triton kernel of ``arriving.py``, which says what it does; importing this file needs triton.

A flag is read by an atomic addition of zero that acquires, at the scope of the system, as a copy engine writes it; Triton
compiles it to a load that acquires. A barrier then holds back all threads of the program. Where it can, Triton reads tiles of
the weight through the second cache alone (``.cg``). Programs are in the order of the fragments, so those that wait come last.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linear(
    x, weight, bias, y, flags, missing, step, tokens, rows, columns, fragment_rows, fragments,
    BIAS: tl.constexpr, TRIES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes a tile of y = x @ weight.t() + bias. ``TRIES``: as ``arriving.linear`` says; a program that gives up marks the
    fragment in ``missing`` and stores nothing. ``WIDE``: multiply in fp32, as Triton's interpreter cannot multiply bf16."""
    tiles = tl.cdiv(tokens, BLOCK_M)
    at_m = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_row = (tl.program_id(0) // tiles) * BLOCK_N
    at_n = first_row + tl.arange(0, BLOCK_N)

    last_row = tl.minimum(first_row + BLOCK_N, rows) - 1
    last = tl.minimum(last_row // fragment_rows, fragments - 1)
    fragment = tl.minimum(first_row // fragment_rows, fragments - 1)
    arrived = True
    while (fragment <= last) & arrived:
        flag = tl.atomic_add(flags + fragment, 0, sem="acquire", scope="sys")
        if TRIES:
            tried = 1
            while (flag < step) & (tried < TRIES):
                flag = tl.atomic_add(flags + fragment, 0, sem="acquire", scope="sys")
                tried += 1
            arrived = flag >= step
            if flag < step:
                tl.store(missing + fragment, 1)
        else:
            while flag < step:
                flag = tl.atomic_add(flags + fragment, 0, sem="acquire", scope="sys")
        fragment += 1
    tl.debug_barrier()  # no thread of the program reads before the one that looked

    if arrived:
        row_start = at_n.to(tl.int64)[None, :] * columns
        token_start = at_m.to(tl.int64)[:, None] * columns
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, columns, BLOCK_K):
            at_k = start + tl.arange(0, BLOCK_K)
            a = tl.load(x + token_start + at_k[None, :], mask=(at_m < tokens)[:, None] & (at_k < columns)[None, :], other=0.0)
            inside = (at_n < rows)[None, :] & (at_k < columns)[:, None]
            b = tl.load(weight + row_start + at_k[:, None], mask=inside, other=0.0, cache_modifier=".cg")
            if WIDE:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision="ieee")
        if BIAS:
            total += tl.load(bias + at_n, mask=at_n < rows, other=0.0).to(tl.float32)[None, :]
        place = at_m.to(tl.int64)[:, None] * rows + at_n[None, :]
        tl.store(y + place, total.to(y.dtype.element_ty), mask=(at_m < tokens)[:, None] & (at_n < rows)[None, :])
