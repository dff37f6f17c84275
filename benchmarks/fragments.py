"""Weights in fragments against whole-layer streaming: steps with small batches over a slow link, on the emulated device.

    python -m benchmarks.fragments --json out.json     # two minutes

Kernels, copies and updates keep to the speeds of a slow machine, several times slower than this one, and plans are for that
machine. Both ways train the same model with ``update="backward"`` within the same budget, in alternation; medians of ``STEPS``
steps after ``WARMUPS``: forward, backward and updates. The first layer's wait is predicted from the schedule, and measured in
the trace of the last step; the peak is that of the ledger. ``equal``: loss and weights have the bits of the whole layers'.

``one layer``: a linear layer, whose loss is the mean square of its output. ``layer larger than the device``: the same with a
budget below the weight, where whole layers are refused. ``head``: a small layer and a vocabulary, with ``fragments="split"``,
and with ``"exact"``.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mtcompile
from benchmarks.cases import measure_cases
from mtcompile.execution.memory.fragment_figures import streaming
from mtcompile.passes.analysis.cost import Machine

WARMUPS, STEPS = 1, 7
SLOW = Machine("slow link", flops=1e10, memory_gbps=2.0, h2d_gbps=0.025, d2h_gbps=0.025, host_gbps=0.2, issue_us=20.0)
WIDTH, ROWS, VOCABULARY, BATCH = 256, 8192, 8192, 4


class Layer(nn.Module):
    """A first layer whose input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


class Head(nn.Module):
    """A layer, and a head whose input needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(torch.relu(self.layer(x)))
        return F.cross_entropy(logits, torch.arange(len(x)) * 7)


# By name: the model, what may be cut, and the budget as a part of the weights' bytes.
CASES: dict[str, tuple[type[nn.Module], str, float]] = {
    "one layer": (Layer, "exact", 2.5),
    "layer larger than the device": (Layer, "exact", 0.5),
    "head": (Head, "split", 3.0),
    "head, exact": (Head, "exact", 3.0),
}


class Training:
    """One way to train a model: ``fragments`` as for ``compile``. ``refused``: why it cannot, if so."""

    def __init__(self, model: nn.Module, memory: int, fragments: str | None) -> None:
        own = copy.deepcopy(model)
        self.optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)
        self.model: Any = mtcompile.compile(
            own, memory=memory, optimizer=self.optimizer, device="cpu", throttle=SLOW, update="backward", fragments=fragments
        )
        self.refused, self.times, self.losses = "", list[float](), list[Tensor]()

    def step(self, x: Tensor, counts: bool) -> None:
        started = time.perf_counter()
        loss = self.model(x)
        loss.backward()
        self.optimizer.step()
        if counts:
            self.times.append((time.perf_counter() - started) * 1e3)
        self.losses.append(loss.detach())

    def try_step(self, x: Tensor) -> None:
        try:
            self.step(x, False)
        except mtcompile.BudgetError as error:
            self.refused = str(error).splitlines()[0]

    def row(self) -> dict[str, Any]:
        if self.refused:
            return {"refused": self.refused}
        schedule, report = self.model.schedule, self.model.memory_report()
        starts = {record.index: record.start_us for record in self.model.last_trace.records}
        predicted, measured = streaming(schedule), streaming(schedule, starts)
        return {
            "measured_ms": statistics.median(self.times),
            "predicted_ms": self.model.plan.total_us / 1e3,
            "steps_ms": self.times,
            "first_wait_predicted_ms": predicted.wait_us / 1e3,
            "first_wait_measured_ms": measured.wait_us / 1e3,
            "staging_bytes": predicted.staging_nbytes,
            "peak_bytes": report["peak_device_bytes"],
            "planned_peak_bytes": report["planned_peak_device_bytes"],
            "notes": self.model.plan.notes,
        }


def measure(name: str, steps: int = STEPS) -> dict[str, Any]:
    """One row: both ways' times in ms, waits and bytes."""
    torch.compiler.reset()
    torch.manual_seed(0)
    kind, fragments, share = CASES[name]
    model, x = kind(), torch.randn(BATCH, WIDTH)
    memory = int(share * sum(p.nbytes for p in model.parameters()))
    ways = {"whole": Training(model, memory, None), "fragments": Training(model, memory, fragments)}
    for way in ways.values():
        way.try_step(x)
    for turn in range(WARMUPS + steps):
        for way in ways.values():
            if not way.refused:
                way.step(x, turn >= WARMUPS)
    row: dict[str, Any] = {"case": name, "memory_bytes": memory, **{each: way.row() for each, way in ways.items()}}
    if not ways["whole"].refused:
        row["ratio"] = row["whole"]["measured_ms"] / row["fragments"]["measured_ms"]
        row["predicted_ratio"] = row["whole"]["predicted_ms"] / row["fragments"]["predicted_ms"]
        weights = zip(ways["whole"].model.parameters(), ways["fragments"].model.parameters(), strict=True)
        losses = zip(ways["whole"].losses, ways["fragments"].losses, strict=True)
        row["equal"] = all(torch.equal(one, other) for one, other in (*losses, *weights))
    return row


def line(row: dict[str, Any]) -> str:
    """Formats a row for people."""
    ways = []
    for way in ("whole", "fragments"):
        if "refused" in row[way]:
            ways.append(f"{way}: {row[way]['refused']}")
            continue
        each = row[way]
        ways.append(
            f"{way}: {each['measured_ms']:.1f} ms (predicted {each['predicted_ms']:.1f}), first wait "
            f"{each['first_wait_measured_ms']:.2f} ms ({each['first_wait_predicted_ms']:.2f}), staging "
            f"{each['staging_bytes'] / 2**20:.2f} MiB, peak {each['peak_bytes'] / 2**20:.2f} of "
            f"{row['memory_bytes'] / 2**20:.2f} MiB"
        )
    faster = f"x {row['ratio']:.2f} (predicted {row['predicted_ratio']:.2f}), equal {row['equal']}" if "ratio" in row else ""
    return "\n  ".join([f"{row['case']}: {faster}", *ways])


def main() -> None:
    measure_cases(__doc__, CASES, measure, line, SLOW)


if __name__ == "__main__":
    main()
