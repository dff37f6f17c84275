"""A rewritten draft is the rewritten step graph: the same calls by the same names, the same schedule, byte for byte.

Bundled, it has the same peaks and times."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from torch import fx

from mtcompile.passes import rewrite, rewritten_draft
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.kernels import copy_meta
from mtcompile.passes.draft import DraftGraph, bundle, draft_of
from mtcompile.passes.lower import lower_without_deps
from mtcompile.passes.plan import Updates
from mtcompile.passes.step_graph import calls, copy_step, listing, results
from mtcompile.runtime.deps import waits
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.sim import clock
from tests.helpers.tracing import random_plan, traced_case

pytestmark = pytest.mark.slow  # it traces models

UPDATES = (None, Updates(), Updates(held=True), Updates(run_ahead=True), Updates(run_ahead=True, patient=True))


@pytest.mark.parametrize("name", ["cnn", "tied", "llama", "constants"])
def test_a_draft_is_rewritten_as_the_step_graph_is(name: str) -> None:
    step = traced_case(name).step
    draft, before = draft_of(step), listing(step)
    assert listing(draft) == before
    draw = random.Random(name)
    for number in range(12):
        plan = replace(random_plan(step, draw.choice), updates=UPDATES[number % len(UPDATES)])
        drafted, rewritten = rewritten_draft(draft, plan), rewrite(step, plan)
        assert listing(drafted) == listing(rewritten)
        for one, other in zip(calls(drafted), calls(rewritten), strict=True):
            assert (one.name, one.meta["phase"], one.meta["block"]) == (other.name, other.meta["phase"], other.meta["block"])
            assert [copy_meta(v, ("nbytes", "role", "tier", "origin")) for v in results(one)] == [
                copy_meta(v, ("nbytes", "role", "tier", "origin")) for v in results(other)
            ]
        schedule = lower_without_deps(rewritten, plan, Machine(), {"device": number})
        assert lower_without_deps(drafted, plan, Machine(), {"device": number}) == schedule
        bundled = lower_without_deps(bundle(drafted), plan, Machine(), {"device": number})
        assert len(bundled) < len(schedule)
        assert (bundled.peak_nbytes, bundled.arena_nbytes) == (schedule.peak_nbytes, schedule.arena_nbytes)
        assert _worked(bundled) == _worked(schedule)
    assert listing(draft) == listing(step) == before


def _worked(schedule: Schedule) -> list[tuple[str, float, float]]:
    """When each copy and run of a schedule starts and ends."""
    times = zip(schedule.instructions, *clock(schedule, waits=waits(schedule)), strict=True)
    return [(instruction.label, start, end) for instruction, start, end in times if instruction.label]


def test_names_are_those_of_fx() -> None:
    """Names that are taken, numbered already, or not identifiers."""
    step = copy_step(traced_case("chain").step)
    draft = draft_of(step)
    taken = [node.name for node in step.graph.nodes if node.op != "output"]
    candidates = ["new", "new", "new_3", "new", "new_3", "a.b", "a.b", "x[0]", *taken[:5], *(f"{n}_7" for n in taken[:3])]
    for candidate in candidates:
        made = [
            graph.create_node("call_function", len, (), name=candidate).name
            for graph in (draft.graph, step.graph)
            if graph.inserting_before(graph.output_node())
        ]
        assert made[0] == made[1], candidate


def test_operands_are_replaced_as_in_fx() -> None:
    """One by one, there and back, in tuples too, read in between or not."""
    draw = random.Random(0)
    for number in range(50):
        listings = []
        order = [draw.sample(range(6), 2) for _ in range(12)]
        reads = [draw.random() < 0.2 for _ in order]
        for graph in (DraftGraph(), fx.Graph()):
            values = [graph.create_node("placeholder", f"v{i}", (), name=f"v{i}") for i in range(6)]
            reader = graph.create_node("call_function", len, (*values[:3], 1, (values[3], (values[0],))), name="reader")
            for (old, new), read in zip(order, reads, strict=True):
                reader.replace_input_with(values[old], values[new])
                if read:
                    assert len(reader.args) == 5
            operands = reader.all_input_nodes
            assert set(operands) == {value for value in values if reader in value.users}
            listings.append((str(reader.args), [node.name for node in operands]))
            reader.args = ()
            assert not any(value.users for value in values)
        assert listings[0] == listings[1], number


def test_a_value_that_is_read_is_not_erased() -> None:
    draft = draft_of(traced_case("chain").step)
    with pytest.raises(AssertionError, match="still read by"):
        draft.graph.erase_node(calls(draft)[0])
