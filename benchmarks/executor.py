"""What the executor itself costs: schedules on the emulated device, with kernels that do nothing and copies that move
nothing.

    python -m benchmarks.executor --layers 24     # a deep small model at three budgets: microseconds per instruction
    python -m benchmarks.executor --shape qwen2.5-7b   # a step of this shape planned for a large GPU: issue beside step time

A shape is traced without memory for its weights; workspaces and times are by formulas, as of a GPU nobody has here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mtcompile
from benchmarks.models import Case, make
from mtcompile.capture.tracing import trace
from mtcompile.machine.presets import PRESETS
from mtcompile.models.decoders import fake
from mtcompile.models.shapes import SHAPES
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.problem import Planned, PlanningProblem
from mtcompile.runtime.devices.arena import Layout, layout_of
from mtcompile.runtime.devices.cpu import Arenas, CpuMemory
from mtcompile.runtime.executor import execute, prepare
from mtcompile.runtime.schedule import PHASES, Schedule

STEPS = 30


class Still(CpuMemory):
    """Moves no bytes. ``fresh``: a tensor per buffer."""

    fresh: dict[str, torch.Tensor]

    def alloc(self, name: str, filled: bool = False) -> None:
        if filled or self.schedule.buffers[name].kind == "placed":
            self.tensors[name] = self.fresh[name]
        else:
            super().alloc(name, filled)

    def copy(self, reads: Any, writes: Any) -> None:
        for write in writes:
            self.tensors[write]


def returning(results: tuple[torch.Tensor, ...]) -> Callable[..., tuple[torch.Tensor, ...]]:
    return lambda *args: results


def issue_us(schedule: Schedule, layouts: Mapping[str, Layout], device: str = "cpu") -> float:
    """Median microseconds that executing a step's instructions takes."""
    fresh = {n: torch.empty_strided(x.size, x.stride, dtype=x.dtype, device=device) for n, x in layouts.items()}
    kernels = {i.kernel: returning(tuple(fresh[w] for w in i.writes)) for i in schedule.instructions if i.op == "run"}
    none = torch.empty(0, dtype=torch.uint8)
    phases = [prepare(schedule, phase) for phase in PHASES]
    times = []
    for _ in range(STEPS):
        memory = Still(schedule, layouts, Arenas(none, none), trusted=True)
        memory.fresh = fresh
        for name, buffer in schedule.buffers.items():
            if buffer.kind == "home":
                memory.bind(name, fresh[name])
        started = time.perf_counter()
        for phase in phases:
            execute(phase, memory, kernels)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


GPU = PRESETS["h200-sxm"]
MEMORY = 130 * 2**30


def shaped(name: str, batch: int, seq: int) -> tuple[Planned, dict[str, Layout]]:
    """A step of that shape, planned for ``GPU`` with ``MEMORY``."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake(SHAPES[name])
        tokens = torch.zeros((batch, seq), dtype=torch.int64)
        traced = trace(model, {"tokens": tokens, "targets": tokens}, loss_chunks=64)
    planned = make_plan(PlanningProblem(traced.step, GPU, Budgets(device=MEMORY)))
    nodes = {node.name: node for node in planned.step.graph.nodes}
    return planned, {name: layout_of(nodes[name].meta["val"]) for name in planned.schedule.buffers}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a step of this shape instead")
    parser.add_argument("--batch", type=int, default=158)
    parser.add_argument("--seq", type=int, default=1024)
    args = parser.parse_args()
    if args.shape:
        planned, layouts = shaped(args.shape, args.batch, args.seq)
        print(planned.plan)
        step_us = planned.plan.step_time_us
        us = issue_us(planned.schedule, layouts, "meta")
        print(f"{len(planned.schedule)} instructions issued in {us / 1e3:.2f} ms")
        print(f"{us / step_us:.4%} of the predicted step of {step_us / 1e6:.2f} s")
        return
    for share in (None, 0.5, 0.15):
        model, tokens, targets = make(Case("executor", args.layers, 64, 4, 2, 32))
        state = 4 * sum(p.nbytes for p in model.parameters())
        compiled: Any = mtcompile.compile(model, memory=int(state * share) if share else "1GiB")
        compiled(tokens, targets).backward()
        program = compiled._mt_model.session.last
        count = len(program.schedule)
        each = issue_us(program.schedule, program.layouts) / count
        budget = f"{share:.0%} of the training state" if share else "everything resident"
        print(f"{budget}: {count} instructions, {each:.1f} us each")


if __name__ == "__main__":
    main()
