"""Drawings: every call and every byte of the step graph is in them, each kind in a shape of its own."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from torch import fx

from mtcompile.passes.lower import work_of
from mtcompile.passes.step_graph import calls, is_move, is_region, is_update, recomputes, results
from mtcompile.report.dot import LOOKS, dot, render
from mtcompile.report.stages import STAGES, print_readable, stages
from mtcompile.runtime.schedule import gib
from tests.helpers.stacks import BLOCKS, KINDS, by_policy, forecast, planned

NODE = re.compile(r'^ +"([^"]+)" \[shape=(\w+), fillcolor="(#\w+)", label="([^"]*)"\];$', re.M)
EDGE = re.compile(r'^  "([^"]+)" -> "([^"]+)" \[label="([^"]+)"\];$', re.M)
CLUSTER = re.compile(r"subgraph cluster_(forward|backward)_(\d+) \{")


def nodes(text: str) -> dict[str, str]:
    """Name -> shape, but for the legend's."""
    return {name: shape for name, shape, _, _ in NODE.findall(text) if not name.startswith("legend ")}


def flows(step: fx.GraphModule) -> dict[tuple[str, str], int]:
    """Bytes from call to call, by walking the graph from the values' side."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for call in calls(step):
        for item in results(call):
            for user in item.users:
                if user.op != "output":
                    found[call.name, user.name] += item.meta["nbytes"] * sum(a is item for a in user.args)
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_and_every_byte_is_drawn(kind: str) -> None:
    step = planned(kind).step
    text = dot(step)
    shapes = nodes(text)
    for call in calls(step):
        assert shapes.pop(call.name) == LOOKS[work_of(call)][0]
    assert set(shapes.values()) <= {LOOKS["home"][0], LOOKS["result"][0]}
    drawn = {(one, other): nbytes for one, other, nbytes in EDGE.findall(text)}
    for ends, total in flows(step).items():
        assert drawn[ends] == gib(total)
    places = {(call.meta["phase"], str(call.meta["block"])) for call in calls(step)}
    assert Counter(CLUSTER.findall(text)) == Counter(places)


@pytest.mark.slow
def test_kinds_are_those_of_the_step_graph() -> None:
    everywhere = [call for kind in KINDS for call in calls(planned(kind).step)]
    found = defaultdict(list)
    for call in everywhere:
        found[work_of(call)].append(call)
    assert all(is_region(call) and recomputes(call) for call in found["recompute"]) and found["recompute"]
    assert all(is_region(call) and not recomputes(call) for call in found["region"])
    assert all(is_move(call) for call in found["prefetch"] + found["offload"])
    assert all(is_update(call) for call in found["update"]) and found["update"]
    assert all(call.meta["phase"] == "backward" for call in found["recompute"])
    assert not any(work_of(call) == "recompute" for call in calls(by_policy("resident").step))
    looks = [(shape, colour) for shape, colour, _ in LOOKS.values()]
    assert len({shape for shape, _ in looks}) == len(looks)


def test_alike_blocks_are_folded() -> None:
    step = by_policy("megatrain").step
    whole, folded = dot(step), dot(step, fold=True)
    assert " ... x " not in whole
    counts = [int(n) for n in re.findall(r'label="[^"]*, forward \.\.\. x (\d+)"', folded)]
    assert counts and len(nodes(folded)) < len(nodes(whole))
    places = CLUSTER.findall(folded)
    forward = sum(phase == "forward" for phase, _ in places)
    assert forward - len(counts) + sum(counts) == sum(p == "forward" for p, _ in CLUSTER.findall(whole)) >= BLOCKS
    kept = nodes(folded)
    assert kept.items() <= nodes(whole).items()
    assert all(one in kept and other in kept for one, other, _ in EDGE.findall(folded))


def test_blocks_that_differ_are_not_folded() -> None:
    plan = forecast().planned
    assert plan is not None
    step = plan.step
    merged = re.findall(r'label="([^",]+), \w+ \.\.\. x (\d+)"', dot(step, fold=True))
    names = step.meta["blocks"]
    kernels = defaultdict(list)
    for call in calls(step):
        if is_region(call):
            kernels[names[call.meta["block"]]].append(str(call.target))
    for name, count in merged:
        start = names.index(name)
        assert all(kernels[other] == kernels[name] for other in names[start : start + int(count)])


@pytest.mark.parametrize("fold", [False, True])
def test_graphviz_draws_it(tmp_path: Path, fold: bool) -> None:
    step = planned("backward").step
    text = dot(step, fold)
    render(text, tmp_path / "step.dot")
    assert (tmp_path / "step.dot").read_text() == text and text.count("{") == text.count("}")
    if shutil.which("dot") is None:
        with pytest.raises(ValueError, match="graphviz"):
            render(text, tmp_path / "step.svg")
        return
    render(text, tmp_path / "step.svg")
    root = xml.etree.ElementTree.parse(tmp_path / "step.svg").getroot()
    drawn = [e for e in root.iter() if e.get("class") == "node"]
    assert len(drawn) == len(NODE.findall(text))
    with pytest.raises(ValueError, match="expected dot to draw"):
        render("digraph {", tmp_path / "broken.svg")


def test_graphviz_is_asked_for_where_it_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="graphviz"):
        render("digraph {}", tmp_path / "step.svg")
    with pytest.raises(ValueError, match=r"\.dot or \.svg"):
        render("digraph {}", tmp_path / "step.png")
    assert not list(tmp_path.iterdir())


def test_every_stage_as_text() -> None:
    found = forecast()
    assert found.planned is not None and found.joint is not None and found.problem is not None
    texts = stages(found)
    text = print_readable(found)
    assert tuple(texts) == STAGES and all(f"# {stage}\n" in text for stage in STAGES)
    for node in found.joint.graph.nodes:
        if node.op == "call_function":
            assert f" {node.name}: " in texts["joint graph"] or f" {node.name} = " in texts["joint graph"]
    assert "prefetch(" not in texts["step graph"] and "prefetch(" in texts["rewritten step graph"]
    assert texts["schedule"] == str(found.planned.schedule)
    assert "layers.2.up" in texts["joint graph"]
