"""The longest sequence that trains within a device budget, with tiles of tokens and without, on the emulated device.

    python -m benchmarks.long_sequences --json out.json     # a quarter of an hour

Both ways train the same decoder, of the proportions of a 7B model, with its loss head in chunks and the search's free choice of
what to recompute and to offload: without tiles it recomputes every block where that is what fits. For each way, the smallest
budget of two short sequences says where to look; then sequences of whole groups of ``GROUP`` tokens train for a step until one
trains and the next is refused. The emulated device enforces the budget, and the peak is that of the allocator's events.
``difference``: the largest difference of a gradient from that of plain PyTorch, as a part of the largest of its tensor.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import mtcompile
from benchmarks.cases import measure_cases
from mtcompile.models.decoders import Decoder
from mtcompile.models.shapes import Shape
from mtcompile.passes.analysis.cost import Machine

GROUP = 64  # tokens of a tile
SHAPE = Shape(128, 680, 3, 4, 1, 512, head_dim=32, dtype=torch.float32)
CASES = {"32 MiB": 32 << 20, "12 MiB": 12 << 20}
WAYS = ("whole", "tiles")
_SHORT = (1024, 2048)  # tokens
_CHUNKS = 128  # of the loss head, both ways


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Decoder(SHAPE)


def _batch(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(tokens).view(1, -1) * 7919 % SHAPE.vocabulary
    return {"tokens": ids, "targets": ids.roll(-1)}


def _compiled(way: str, tokens: int, memory: int) -> Any:
    torch.compiler.reset()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tiles = tokens // GROUP if way == "tiles" else 1
    return mtcompile.compile(model, memory=memory, optimizer=optimizer, device="cpu", tiles=tiles, loss_chunks=_CHUNKS)


def _smallest(way: str, tokens: int) -> int:
    """The smallest budget that works, as its refusal says it."""
    try:
        _compiled(way, tokens, 1)(**_batch(tokens))
    except mtcompile.BudgetError as refused:
        return refused.minimum_bytes
    raise AssertionError("a budget of one byte was accepted")


def _trained(way: str, tokens: int, memory: int) -> dict[str, Any] | str:
    """One step's peak and gradients, or why it is refused."""
    model = _compiled(way, tokens, memory)
    started = time.process_time()
    try:
        loss = model(**_batch(tokens))
    except mtcompile.BudgetError as refused:
        return str(refused).splitlines()[0]
    loss.backward()
    plain = _model()
    plain(**_batch(tokens)).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    differences = [float((one.grad - other.grad).abs().max() / other.grad.abs().max()) for one, other in pairs]
    report = model.memory_report()
    return {
        "tokens": tokens,
        "peak_bytes": report["peak_device_bytes"],
        "planned_peak_bytes": report["planned_peak_device_bytes"],
        "difference": max(differences),
        "cpu_s": time.process_time() - started,
    }


def _longest(way: str, memory: int) -> dict[str, Any]:
    short, longer = _SHORT
    first, second = _smallest(way, short), _smallest(way, longer)
    slope = (second - first) / (longer - short)
    tokens = int((memory - first) / slope + short) // GROUP * GROUP
    step = max(GROUP, tokens // 128 // GROUP * GROUP)
    best: dict[str, Any] = {}
    refused = dict[str, Any]()
    while not (best and refused):
        row = _trained(way, tokens, memory)
        if isinstance(row, str):
            refused = {"refused_tokens": tokens, "refused": row}
            tokens -= step
        else:
            best = row
            tokens += step
    return {**best, **refused}


def measure(name: str) -> dict[str, Any]:
    """One row: what each way trains within a budget, and how many times as long the sequences in tiles are."""
    rows = {way: _longest(way, CASES[name]) for way in WAYS}
    return {"case": name, "budget_bytes": CASES[name], **rows, "longer": rows["tiles"]["tokens"] / rows["whole"]["tokens"]}


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    ways = ", ".join(
        f"{way} {row[way]['tokens']:,} tokens (peak {row[way]['peak_bytes']:,}, refused at {row[way]['refused_tokens']:,})"
        for way in WAYS
    )
    return f"{row['case']}: {ways}: {row['longer']:.2f} times as long"


if __name__ == "__main__":
    measure_cases(__doc__, CASES, measure, line, Machine())
