"""Times each operation of a decoder's step alone, beside the time that a plan counts on: where predictions are off, and why.

    python -m benchmarks.operations qwen2.5-7b --batch 8 --seq 2048 --json out.json

One block, the stem, the head and its loss, forward and backward, are traced for this device. Each distinct operation runs on
random tensors of its shapes, one after the other on one stream; a time is the median of several runs, by the device's clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from benchmarks.run import about
from mtcompile.capture.tracing import trace
from mtcompile.kernels.zeros.run import zeros_of
from mtcompile.machine.device import choose
from mtcompile.machine.presets import machine_of
from mtcompile.machine.timing import waiter
from mtcompile.models.decoders import fake
from mtcompile.models.shapes import SHAPES
from mtcompile.passes.analysis.cost import Machine, node_cost
from mtcompile.passes.step_graph import is_view, kernel_of, regions
from mtcompile.torch_private import without_memory

_RUNS = 5
_SMALL = 200  # below so many microseconds a run repeats the operation, since its launch takes as long


def operations(shape: str, batch: int, seq: int, where: torch.device, chunks: int) -> Iterator[tuple[int, fx.Node]]:
    """How often each kernel's operations run in a step, and the operations."""
    layers = SHAPES[shape].layers
    with without_memory():
        tokens = torch.zeros((batch, seq), dtype=torch.int64, device=where)
        step = trace(fake(SHAPES[shape].shortened(2)), {"tokens": tokens, "targets": tokens}, where, loss_chunks=chunks).step
    times: dict[str, int] = {}
    bodies: dict[str, fx.Graph] = {}
    for region in regions(step):
        kernel = kernel_of(step, region)
        times[kernel.meta["key"]] = times.get(kernel.meta["key"], 0) + 1
        bodies[kernel.meta["key"]] = kernel.graph
    for key, body in bodies.items():
        count = layers if times[key] == 2 else times[key]
        for node in body.nodes:
            if node.op == "call_function" and not is_view(node) and node_cost(node).nbytes:
                yield count, node


def measure(node: fx.Node, where: torch.device) -> float:
    """Microseconds of one run of an operation."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: _like(operand.meta["val"], where))

    wait = waiter(where)

    def run(repeats: int) -> float:
        wait()
        if where.type != "cuda":
            started = time.perf_counter()
            for _ in range(repeats):
                node.target(*args, **kwargs)  # type: ignore[operator]
            return (time.perf_counter() - started) * 1e6 / repeats
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(repeats):
            node.target(*args, **kwargs)  # type: ignore[operator]
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / repeats

    run(1)
    repeats = 20 if run(1) < _SMALL else 1
    return statistics.median(run(repeats) for _ in range(_RUNS))


def _like(value: Any, where: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    host_or_device = value.device if value.device.type == "cpu" else where
    zeros = zeros_of(value, host_or_device)
    return zeros.normal_() if value.dtype.is_floating_point else zeros


def rows(shape: str, batch: int, seq: int, where: torch.device, machine: Machine, chunks: int) -> list[dict[str, Any]]:
    """One row per distinct operation: how often it runs in a step, its shapes, and the microseconds of one run."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for count, node in operations(shape, batch, seq, where, chunks):
        said = ", ".join(_shown(operand.meta["val"]) for operand in node.all_input_nodes)
        key = str(node.target), said + str([a for a in node.args if isinstance(a, int | float | bool)])
        if key in merged:
            merged[key]["count"] += count
            continue
        cost = node_cost(node)
        row = {"operation": str(node.target), "operands": said, "count": count, "flops": cost.flops, "nbytes": cost.nbytes}
        merged[key] = row | {"planned_us": cost.time_us(machine)}
        try:
            merged[key]["measured_us"] = measure(node, where)
        except Exception as error:  # an operation that refuses such values
            merged[key]["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if where.type == "cuda":
            torch.cuda.empty_cache()
    return list(merged.values())


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}/{list(value.stride())}"
    return str(value)[:20]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=1, help="of the loss")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    args = parser.parse_args()
    device = choose(None)
    machine = machine_of(device.where, fuses=False, staged=False)
    table = rows(args.shape, args.batch, args.seq, device.where, machine, args.chunks)
    if args.json:
        step = {"shape": args.shape, "batch": args.batch, "seq": args.seq, "chunks": args.chunks, "planned_with": machine.name}
        args.json.write_text(json.dumps({**about(), **step, "rows": table}, indent=1) + "\n")
    measured = [row for row in table if "measured_us" in row]
    for row in sorted(measured, key=lambda row: -row["count"] * row["measured_us"])[:40]:
        whole, ratio = row["count"] * row["measured_us"] / 1e3, row["planned_us"] / row["measured_us"]
        print(f"{whole:9.2f} ms  {row['count']:3} x  planned/measured {ratio:5.2f}  {row['operation']} {row['operands'][:110]}")
    totals = [sum(row["count"] * row[key] for row in measured) / 1e3 for key in ("planned_us", "measured_us")]
    print(f"planned {totals[0]:.1f} ms, measured {totals[1]:.1f} ms, not run {len(table) - len(measured)}")


if __name__ == "__main__":
    main()
