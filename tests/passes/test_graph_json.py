"""Graphs as text: what is read back plans, runs and prints as what was written."""

from __future__ import annotations

import json

import pytest
import torch
from torch import fx

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.graph_json import GraphFormatError, graph_from_json, graph_to_json
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.step_graph import listing
from tests.helpers.models import CASES, make
from tests.helpers.tracing import interpret, trace

pytestmark = pytest.mark.slow  # it compiles many models


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n in ("gpt2", "llama"))) for n in CASES]
)  # t5 has all they have
def test_round_trip(name: str) -> None:
    traced = trace(*make(name))
    text = graph_to_json(traced.step)
    again = graph_from_json(text)
    assert graph_to_json(again) == text and listing(again) == listing(traced.step)
    assert again.meta["kernels"].keys() == traced.step.meta["kernels"].keys()
    one, other = (make_plan(PlanningProblem(step, Machine(), Budgets())) for step in (again, traced.step))
    assert one.schedule == other.schedule
    again.meta["constants"] = traced.step.meta["constants"]
    for one, other in zip(interpret(again, traced.inputs), interpret(traced.step, traced.inputs), strict=True):
        assert torch.equal(one, other)


def test_what_the_format_cannot_say() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(len, (graph.placeholder("x"),)),))
    with pytest.raises(GraphFormatError, match="built-in function len"):
        graph_to_json(fx.GraphModule(torch.nn.Module(), graph))


def test_text_that_is_no_graph() -> None:
    text = graph_to_json(trace(*make("cnn")).step)
    for wrong in ("", "{}", "[]", text.replace("mtcompile-graph-1", "other"), text.replace('"target"', '"aim"')):
        with pytest.raises(GraphFormatError):
            graph_from_json(wrong)
    data = json.loads(text)
    data["nodes"][-1]["args"] = {"node": "nobody"}
    with pytest.raises(GraphFormatError, match="nobody"):
        graph_from_json(json.dumps(data))
