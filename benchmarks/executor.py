"""What the executor itself costs: schedules on the emulated device, with kernels that do nothing and copies that move
nothing.

    python -m benchmarks.executor --layers 24     # a deep small model at three budgets: microseconds per instruction
    python -m benchmarks.executor --shape 7b      # a 7B-shaped step planned for a large GPU: issue time beside step time

A shape is traced without memory for its weights; workspaces and times are by formulas, as of a GPU nobody has here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import mtcompile
from benchmarks.models import Case, make
from mtcompile import capture
from mtcompile.passes.build import build
from mtcompile.passes.cost import Machine
from mtcompile.passes.loss_head import chunk_loss
from mtcompile.passes.normalize import normalize
from mtcompile.passes.planner import Budgets, Planned, make_plan
from mtcompile.runtime.arena import Layout, layout_of
from mtcompile.runtime.cpu import Arenas, CpuMemory
from mtcompile.runtime.executor import execute, prepare
from mtcompile.runtime.schedule import PHASES, Schedule

STEPS = 30


class Still(CpuMemory):
    """Moves no bytes. ``fresh``: a tensor per buffer."""

    fresh: dict[str, torch.Tensor]

    def alloc(self, name: str) -> None:
        if self.schedule.buffers[name].kind == "placed":
            self.tensors[name] = self.fresh[name]
        else:
            super().alloc(name)

    def copy(self, reads: Any, writes: Any) -> None:
        for write in writes:
            self.tensors[write]


def returning(results: tuple[torch.Tensor, ...]) -> Callable[..., tuple[torch.Tensor, ...]]:
    return lambda *args: results


def issue_us(schedule: Schedule, layouts: Mapping[str, Layout], device: str = "cpu", steps: int = STEPS) -> float:
    """Median microseconds that executing a step's instructions takes."""
    fresh = {n: torch.empty_strided(x.size, x.stride, dtype=x.dtype, device=device) for n, x in layouts.items()}
    kernels = {i.kernel: returning(tuple(fresh[w] for w in i.writes)) for i in schedule.instructions if i.op == "run"}
    none = torch.empty(0, dtype=torch.uint8)
    phases = [prepare(schedule, phase) for phase in PHASES]
    times = []
    for _ in range(steps):
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


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama and its batch. ``memory``: device bytes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    batch: int
    seq: int
    memory: int


SHAPES = {"7b": Shape(3584, 18944, 28, 28, 4, 152064, 158, 1024, 130 * 2**30)}
GPU = Machine("h200-sxm (formulas)", flops=6e14, memory_gbps=4300.0, h2d_gbps=50.0, d2h_gbps=50.0, issue_us=5.0)


def shaped(shape: Shape) -> tuple[Planned, dict[str, Layout]]:
    """A step of that shape in bf16, planned for ``GPU``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        use_cache=False,
        dtype="bfloat16",
    )
    found: list[fx.GraphModule] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = LlamaForCausalLM._from_config(config).train()
        tokens = torch.zeros((shape.batch, shape.seq), dtype=torch.int64)
        names: dict[int, tuple[str, str]] = {id(p): ("param", n) for n, p in model.named_parameters()}

        def backend(graph: Any, inputs: Any) -> Any:
            description = capture.describe(graph, inputs, lambda tensor: names.get(id(tensor)))
            scalars = tuple(d and s for _, d, s in description.computed)
            joint = normalize(capture.joint_graph(description, scalars))
            chunk_loss(joint, 64)
            found.append(build(joint))
            return graph.forward

        def call(tokens: torch.Tensor) -> Any:
            return model(input_ids=tokens, labels=tokens).loss

        capture.front_end(call, backend)(tokens)
    planned = make_plan(found[0], GPU, Budgets(device=shape.memory))
    nodes = {node.name: node for node in planned.step.graph.nodes}
    return planned, {name: layout_of(nodes[name].meta["val"]) for name in planned.schedule.buffers}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a step of this shape instead")
    args = parser.parse_args()
    if args.shape:
        planned, layouts = shaped(SHAPES[args.shape])
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
        program = compiled._mt_engine.last
        count = len(program.schedule)
        each = issue_us(program.schedule, program.layouts) / count
        budget = f"{share:.0%} of the training state" if share else "everything resident"
        print(f"{budget}: {count} instructions, {each:.1f} us each")


if __name__ == "__main__":
    main()
