"""What the executor itself costs per instruction: a deep model's schedules on the emulated device, with kernels that do
nothing and copies that move nothing.

    python -m benchmarks.executor --layers 24
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import mtcompile
from benchmarks.models import Case, make
from mtcompile.runtime.arena import arena
from mtcompile.runtime.cpu import Arenas, CpuMemory
from mtcompile.runtime.executor import execute
from mtcompile.runtime.schedule import PHASES

STEPS = 30


class Still(CpuMemory):
    """Moves no bytes."""

    def copy(self, reads: Any, writes: Any) -> None:
        for write in writes:
            self.tensors[write]


def returning(results: tuple[torch.Tensor, ...]) -> Callable[..., tuple[torch.Tensor, ...]]:
    return lambda *args: results


def per_instruction_us(compiled: Any) -> tuple[int, float]:
    """(instructions of a step, median microseconds each) of the last program that ran."""
    program = compiled._mt_engine.last
    schedule, layouts = program.schedule, program.layouts
    fresh = {n: torch.empty_strided(x.size, x.stride, dtype=x.dtype) for n, x in layouts.items()}
    kernels = {i.kernel: returning(tuple(fresh[w] for w in i.writes)) for i in schedule.instructions if i.op == "run"}
    arenas = Arenas(arena(schedule.arena_nbytes["device"]), arena(schedule.arena_nbytes["host"]))
    homes = [name for name, buffer in schedule.buffers.items() if buffer.kind == "home"]
    views: dict[str, torch.Tensor] = {}
    times = []
    for _ in range(STEPS):
        memory = Still(schedule, layouts, arenas, trusted=True, views=views)
        for name in homes:
            memory.bind(name, fresh[name])
        started = time.perf_counter()
        for phase in PHASES:
            execute(program.phases[phase], memory, kernels)
        times.append(time.perf_counter() - started)
    count = len(schedule.instructions)
    return count, statistics.median(times) * 1e6 / count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    args = parser.parse_args()
    for share in (None, 0.5, 0.15):
        model, tokens, targets = make(Case("executor", args.layers, 64, 4, 2, 32))
        state = 4 * sum(p.nbytes for p in model.parameters())
        compiled = mtcompile.compile(model, memory=int(state * share) if share else "1GiB")
        compiled(tokens, targets).backward()
        count, each = per_instruction_us(compiled)
        budget = f"{share:.0%} of the training state" if share else "everything resident"
        print(f"{budget}: {count} instructions, {each:.1f} us each")


if __name__ == "__main__":
    main()
