"""Step graphs from a GPU (``make gpu ARGS=fixtures``), whose kernels differ from a CPU's, are planned where there is none."""

from __future__ import annotations

import pytest

from benchmarks.gpu import FIXTURES
from mtcompile.machine.presets import PRESETS
from mtcompile.passes.analysis.cost import node_cost
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.graph_json import graph_from_json
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.step_graph import kernel_of, regions
from mtcompile.runtime.verify import verify


@pytest.mark.parametrize(
    ("name", "attention_flops", "gibs"),
    [  # batch x heads x length² x head size, by 2 for each of two products, halved as it is causal; 2.5 times as many backward
        ("qwen2.5-7b-2-layers-16x4096-cuda", 2 * 16 * 28 * 4096**2 * 128, (80, 24)),
        ("llama-8b-2-layers-1x32768-cuda", 2 * 32 * 32768**2 * 128, (80, 8)),
    ],
)
def test_step_graphs_of_a_gpu_are_planned(name: str, attention_flops: int, gibs: tuple[int, int]) -> None:
    step = graph_from_json((FIXTURES / f"{name}.json").read_text())
    operations = {node for region in regions(step) for node in kernel_of(step, region).graph.nodes}
    flops = {node_cost(node).flops for node in operations if "cudnn_attention" in str(node.target)}
    assert flops == {attention_flops, attention_flops * 5 // 2}
    times = []
    for gib in gibs:
        planned = make_plan(PlanningProblem(step, PRESETS["h100-sxm"], Budgets(device=gib * 2**30)))
        verify(planned.schedule)
        assert planned.plan.peak_bytes["device"] <= gib * 2**30
        times.append(planned.plan.step_time_us)
    assert times[0] < times[1]
