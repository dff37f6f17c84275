"""Rates of computing: products and attention in TFLOP/s, elements per second of operations on values of different strides, and
the microseconds it takes to issue an operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from mtcompile.machine.timing import PARAMETERS, Effort, Measurement, median_s, waiter
from mtcompile.sizes import three_digits

_ISSUED = 1000  # tiny operations per measurement


def matmul(where: torch.device, effort: Effort) -> tuple[dict[str, float], Measurement]:
    """Measures square products in the dtypes that training uses there. Returns FLOP/s by the name of ``Machine``'s field, and
    the row."""
    kinds = {"float32": "fp32_flops", "bfloat16": "flops"}
    side = smaller = effort.host_side
    if where.type != "cpu":
        kinds = {"bfloat16": "flops", "float32": "fp32_flops", "tf32": "tf32_flops", "float64": "fp64_flops"}
        side, smaller = effort.accelerator_side, effort.accelerator_side // 4  # a card may be a hundred times slower in fp64
    rates = {kind: _product_rate(where, effort, kind, side if kind == "bfloat16" else smaller) for kind in kinds}
    most = three_digits(rates["bfloat16"] / 6 / PARAMETERS)
    meaning = f"a 7B model (6 FLOP per weight and token) trains at {most} tokens/s at most"
    row = Measurement(f"product of {side} x {side}", "TFLOP/s", {k: v / 1e12 for k, v in rates.items()}, meaning)
    return {kinds[kind]: rate for kind, rate in rates.items()}, row


def _product_rate(where: torch.device, effort: Effort, kind: str, side: int) -> float:
    """Measures FLOP/s of a square product in a dtype, or in fp32 that runs in TF32."""
    dtype, repeat = getattr(torch, kind.replace("tf32", "float32")), 1 if where.type == "cpu" else 10
    a, b = (torch.randn(side, side, device=where).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def work() -> None:
        for _ in range(repeat):
            torch.mm(a, b, out=out)

    products, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    try:
        products.fp32_precision = "tf32" if kind == "tf32" else "ieee"
        return 2 * side**3 * repeat / median_s(work, effort.seconds, waiter(where))
    finally:
        products.fp32_precision = before


def tf32_in_use() -> tuple[bool, bool]:
    """Tells whether torch is set to run products, and convolutions, of fp32 in TF32 on an accelerator."""
    convolutions: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul.fp32_precision == "tf32", convolutions.conv.fp32_precision == "tf32"


def attention(where: torch.device, effort: Effort, rates: Mapping[str, float]) -> Measurement:
    """Measures causal attention, forward: half of all pairs count, with 4 FLOP per pair and element. ``rates``: those of
    ``matmul``."""
    host = where.type == "cpu"
    heads, tokens, width = (4, effort.host_side, 64) if host else (32, effort.accelerator_side // 2, 128)
    dtype = torch.float32 if host else torch.bfloat16
    q, k, v = (torch.randn(1, heads, tokens, width, device=where).to(dtype) for _ in range(3))
    with torch.no_grad():
        seconds = median_s(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), effort.seconds, waiter(where))
    rate = 2 * heads * tokens**2 * width / seconds
    share = rate / rates["fp32_flops" if host else "flops"]
    meaning = f"{share:.0%} of the product's rate: what long sequences run at, forward"
    what = f"causal attention, {tokens} tokens"
    return Measurement(what, "TFLOP/s", {str(dtype).removeprefix("torch."): rate / 1e12}, meaning)


def strided(where: torch.device, effort: Effort) -> tuple[float, Measurement]:
    """Measures a product of heads with a table of positions, as rotary embeddings have it: elementwise, on values of different
    strides. Returns billions of elements per second, and the row."""
    tokens, heads, width = max(1, effort.accelerator_side // 4), 32, 128
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    x = torch.randn(8, tokens, heads, width, device=where).to(dtype).transpose(1, 2)
    table = torch.randn(tokens, width, device=where).to(dtype)
    out = torch.empty_like(x)
    rate = x.numel() / median_s(lambda: torch.mul(x, table, out=out), effort.seconds, waiter(where)) / 1e9
    meaning = f"rotary embeddings of 1 million elements take {1e3 / rate:.3g} us, whatever their bytes"
    return rate, Measurement("elementwise product of values of different strides", "G elements/s", {"a * b": rate}, meaning)


def issue(where: torch.device, effort: Effort) -> tuple[float, Measurement]:
    """Measures operations on one element. Returns microseconds per operation, and the row."""
    one = torch.ones(1, device=where)
    out = torch.empty_like(one)

    def work() -> None:
        for _ in range(_ISSUED):
            torch.add(one, one, out=out)

    us = median_s(work, effort.seconds, waiter(where)) / _ISSUED * 1e6
    meaning = f"a step of 10,000 operations takes {us * 10:.0f} ms or more, however small they are"
    return us, Measurement("a tiny operation", "us", {"add": us}, meaning)
