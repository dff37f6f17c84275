"""Graphs as text: what is read back plans, runs and prints as what was written."""

from __future__ import annotations

import json
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in ("gpt2", "llama", "t5"))) for n in CASES])
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


def test_what_the_contract_says_of_a_graph_is_read_back() -> None:
    step = trace(*make("cnn")).step
    said = {"told": ("a branch",), "unordered": ("a base",), "is_part": True}
    step.meta.update(said)
    assert said.items() <= graph_from_json(graph_to_json(step)).meta.items()


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


HOSTILE = "__import__('pathlib').Path('executed').touch()"


def small(**changes: object) -> str:
    """A graph of one relu as text. ``changes``: fields of its call."""
    value = {"val": ["float32", [1], [1], 0, 4]}
    x = {"op": "placeholder", "name": "x", "target": "x", "args": {"tuple": []}, "kwargs": {}, "meta": value}
    operand = {"tuple": [{"node": "x"}]}
    call = {"op": "call_function", "name": "y", "target": "aten.relu.default", "args": operand, "kwargs": {}, "meta": value}
    end = {"op": "output", "name": "output", "target": "output", "args": {"tuple": [operand]}, "kwargs": {}, "meta": {}}
    step = {"inputs": [], "outputs": [], "blocks": [], "device": "", "homes": {}}
    nodes = [x, {**call, **changes}, end]
    return json.dumps({"format": "mtcompile-graph-1", "name": "", "nodes": nodes, "kernels": {}, "step": step})


def test_what_is_read_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and targets of a graph become Python source, which is run."""
    monkeypatch.chdir(tmp_path)
    assert torch.equal(graph_from_json(small())(torch.tensor([-1.0]))[0], torch.tensor([-1.0]))
    code = f"x={HOSTILE}"
    changes: list[dict[str, object]] = [
        {"op": "placeholder", "target": code, "args": {"tuple": []}},
        {"op": "placeholder", "target": f"x):\n  pass\n{HOSTILE}\ndef f(self", "args": {"tuple": []}},
        {"name": code},
        {"name": "lambda"},
        {"kwargs": {f"self={HOSTILE}, b": 1}},
        {"op": "get_attr", "target": f'a", {HOSTILE}) + getattr(self, "b', "args": {"tuple": []}},
        {"op": "call_module", "target": f'a", {HOSTILE}) + getattr(self, "b'},
        {"op": "call_method", "target": "numpy"},
        {"target": "aten.from_file.default", "args": {"tuple": ["grown", True, 8]}},
        {"target": "profiler._record_function_enter_new.default"},
        {"target": "aten.__class__.__init__"},
        {"args": {"dtype": "ops"}},
        {"kwargs": {"a": {"device": code}}},
    ]
    for change in changes:
        with pytest.raises(GraphFormatError):
            graph_from_json(small(**change))
    graph_from_json(small(meta={"stack_trace": f"a\n{HOSTILE}", "val": ["float32", [1], [1], 0, 4]}))(torch.ones(1))
    named = {**json.loads(small()), "name": f"X({HOSTILE})"}
    with pytest.raises(GraphFormatError, match="identifier"):
        graph_from_json(json.dumps(named))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [[-1], [1 << 80], ["1"], 1, [[1]]])
def test_values_that_are_no_tensors(size: object) -> None:
    with pytest.raises(GraphFormatError):
        graph_from_json(small(meta={"val": ["float32", size, [1], 0, 4]}))


def test_text_that_is_too_deep() -> None:
    with pytest.raises(GraphFormatError):
        graph_from_json('{"format": "mtcompile-graph-1", "nodes": ' + "[" * 100_000 + "]" * 100_000 + "}")


def test_a_complex_number_is_written_and_read() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (x, 2 - 1j)))
    read = graph_from_json(graph_to_json(fx.GraphModule(torch.nn.Module(), graph)))
    assert next(node.args[1] for node in read.graph.nodes if node.op == "call_function") == 2 - 1j
