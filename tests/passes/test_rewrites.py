"""Every pass keeps the bits, every plan keeps the computation, and corrupted schedules of real models are rejected."""

from __future__ import annotations

import operator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import fx, nn

from mtcompile.kernels.zeros.run import example
from mtcompile.passes import PIPELINE, rewrite
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.kernels import kernel_key
from mtcompile.passes.analysis.memory import body_peak
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Decision, Plan, plan_from_json
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.proof.same_computation import SameComputationError, same_computation
from mtcompile.passes.proof.schedule import Given, check_schedule
from mtcompile.passes.step_graph import is_seed, kernel_of, listing, placeholders, regions
from mtcompile.runtime.schedule import from_json
from mtcompile.runtime.verify import ScheduleError, verify
from tests.helpers.models import CASES
from tests.helpers.proof.corrupt import mutants
from tests.helpers.proof.oracle import why_unsafe
from tests.helpers.tracing import equal, interpret, lowered, random_plan, trace, traced_case

pytestmark = pytest.mark.slow  # it compiles many models


@pytest.mark.parametrize("drawn", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in ("gpt2", "t5"))) for n in CASES])
def test_bits_after_every_pass(name: str, drawn: int) -> None:
    traced = traced_case(name)
    expected = interpret(traced.step, traced.inputs)
    same_computation(traced.joint, traced.step)
    rng = Random(name)
    for plan in (Plan(), Plan(lookahead=1), *(random_plan(traced.step, rng.choice) for _ in range(drawn))):
        seen = []

        def after(pass_name: str, step: fx.GraphModule, seen: list[str] = seen) -> None:
            seen.append(pass_name)
            assert equal(interpret(step, traced.inputs), expected), pass_name
            same_computation(traced.joint, step)

        step = rewrite(traced.step, plan, after)
        assert seen == [transform.__name__ for transform in PIPELINE]
        schedule = lowered(step, plan)
        verify(schedule)
        assert from_json(schedule.to_json()) == schedule
    assert equal(interpret(traced.step, traced.inputs), expected)  # rewriting left the original alone


@pytest.mark.parametrize(
    ("names", "fewest"),
    [(("cnn", "tied"), 80), pytest.param(("llama", "gpt2", "cnn", "tied", "chain"), 200, marks=pytest.mark.long)],
)
def test_corrupted_schedules_of_real_models(names: tuple[str, ...], fewest: int) -> None:
    """Many mutants; what random executions show unsafe is rejected, naming an invariant."""
    unsafe = total = 0
    for seed, name in enumerate(names):
        traced = traced_case(name)
        plan = Plan(lookahead=seed % 2)
        schedule = lowered(rewrite(traced.step, plan), plan)
        assert why_unsafe(schedule, walks=2, seed=seed) is None
        for what, mutant in mutants(schedule, seed, per_kind=2):
            total += 1
            reason = why_unsafe(mutant, walks=3, seed=seed)
            if reason is None:
                continue
            unsafe += 1
            with pytest.raises(ScheduleError) as caught:
                verify(mutant)
            assert caught.value.invariant, what
    assert unsafe >= fewest, (unsafe, total)


def test_identical_layers_share_a_kernel_and_others_do_not() -> None:
    step = trace(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), {"input": torch.randn(3, 8)}).step
    assert len(step.meta["kernels"]) < len(regions(step))
    constants = traced_case("constants").step
    text = "\n".join(str(kernel_of(constants, r).graph) for r in regions(constants))
    assert "tanh" in text and text.count("gelu") >= 4


def _body(target: Any, *rest: Any, shape: tuple[int, ...] = (2, 3), **kwargs: Any) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(shape, device="meta")
    y = graph.call_function(target, (x, *rest), kwargs)
    y.meta["val"] = torch.empty(shape, device="meta")
    graph.output((y,))
    return graph


def test_kernel_keys_tell_everything_that_matters_apart() -> None:
    aten = torch.ops.aten
    bodies = [
        _body(aten.gelu.default),
        _body(aten.gelu.default, approximate="tanh"),
        _body(aten.gelu.default, approximate="none"),
        _body(aten.gelu.default, shape=(3, 2)),
        _body(aten.add.Tensor, 1),
        _body(aten.add.Tensor, 1.0),
        _body(aten.add.Tensor, True),
        _body(aten.add.Tensor, 0.0),
        _body(aten.add.Tensor, -0.0),
        _body(aten.add.Scalar, 1),
    ]
    keys = [kernel_key(body) for body in bodies]
    assert len(set(keys)) == len(keys)
    assert kernel_key(_body(aten.gelu.default)) == keys[0]


def test_a_changed_computation_is_noticed() -> None:
    traced = traced_case("gpt2")
    step = rewrite(traced.step, Plan())
    for region in regions(step):
        for node in kernel_of(step, region).graph.nodes:
            if node.target is torch.ops.aten.add.Tensor:
                original, node.target = node.target, torch.ops.aten.sub.Tensor
                with pytest.raises(SameComputationError, match="I5"):
                    same_computation(traced.joint, step)
                node.target = original
                break
    same_computation(traced.joint, step)
    plan = Plan()
    schedule = lowered(step, plan)
    other = rewrite(traced.step, Plan(lookahead=1))
    with pytest.raises(SameComputationError, match="I5"):
        check_schedule(other, schedule, Given(plan))
    rows = schedule.instructions
    for index, changes in ((0, {"block": "head"}), (-1, {"work": "update"})):
        where = [i for i, row in enumerate(rows) if row.op != "alloc" and row.op != "free"][index]
        wrong = replace(schedule, instructions=(*rows[:where], replace(rows[where], **changes), *rows[where + 1 :]))
        with pytest.raises(SameComputationError, match=f"found .*{next(iter(changes.values()))}"):
            check_schedule(step, wrong, Given(plan))


@pytest.mark.parametrize("name", ["tied", pytest.param("llama", marks=pytest.mark.long)])
def test_plans_are_deterministic_round_trip_and_explain_themselves(name: str) -> None:
    traced = traced_case(name)
    free = make_plan(PlanningProblem(traced.step, Machine(), Budgets()))
    floor = free.plan.minimum_device_bytes
    for budget in (floor, (floor + free.plan.peak_bytes["device"]) // 2, None):
        one, other = (make_plan(PlanningProblem(traced.step, Machine(), Budgets(budget))).plan for _ in range(2))
        assert one == other and plan_from_json(one.to_json()) == one
        assert budget is None or one.peak_bytes["device"] <= budget
        assert all(decision.reason for decision in one.decisions)
        text = str(one)
        assert "peak" in text and "numerics" in text and "smallest device budget" in text


def test_weights_that_stay_are_fetched_once() -> None:
    """What stays is in memory from the forward to the backward, beside what regions make; all else is fetched in both."""
    traced = traced_case("gpt2")
    homes = list(dict.fromkeys(traced.step.meta["homes"].values()))
    stays = Plan(lookahead=1).with_decision(Decision("fetch", homes[-1], "keep", 0, "stays"))
    for plan in (stays, replace(stays, pooled=True)):
        step = rewrite(traced.step, plan)
        schedule = lowered(step, plan)
        fetches = [i for i in schedule.instructions if i.queue == "h2d"]
        for home in homes:
            names = {node.name for node in placeholders(step.graph) if step.meta["homes"].get(node.meta["name"]) == home}
            read = [i.phase for i in fetches if names & {*i.reads}]
            assert ("backward" in read) == (home != homes[-1]), home
            kinds = {schedule.buffers[w].kind for i in fetches if names & {*i.reads} for w in i.writes}
            assert kinds == {"pooled" if plan.pooled or home == homes[-1] else "placed"}
        assert bool(schedule.arena_nbytes["device"]) != plan.pooled


def test_weights_return_late_and_gradients_are_freed_early_where_the_plan_says_so() -> None:
    """In the backward only: a home that returns late is fetched behind all earlier regions, and gradients that are freed early
    are gone before the next region; both of other homes are as without."""
    traced = traced_case("gpt2")
    homes = list(dict.fromkeys(traced.step.meta["homes"].values()))
    ahead = Plan(lookahead=1, pooled=True)
    waits = [Decision(kind, homes[1], choice, 0, "") for kind, choice in (("return", "late"), ("gradients", "early"))]
    places = []
    for plan in (ahead, ahead.with_decisions(waits)):
        step = rewrite(traced.step, plan)
        names = {node.name for node in placeholders(step.graph) if step.meta["homes"].get(node.meta["name"]) == homes[1]}
        schedule = lowered(step, plan)
        regions_before, early, issued = 0, dict[str, bool](), dict[str, tuple[int, bool, str]]()
        last_copied = dict[str, tuple[str, int]]()  # gradient -> its copy home, and the regions before that
        for i in schedule.instructions:
            if i.op == "run" and i.queue == "compute":
                regions_before += 1
            elif i.queue == "h2d" and i.op == "copy":
                issued[i.label] = regions_before, not names.isdisjoint(i.reads), i.phase
            elif i.queue == "d2h" and i.op == "copy":
                last_copied |= dict.fromkeys(i.reads, (i.label, regions_before))
            elif i.op == "free" and i.writes[0] in last_copied:
                label, before = last_copied[i.writes[0]]
                early[label] = regions_before == before
        places.append((issued, early))
    (issued, early), (issued_late, early_now) = places
    moved = {label for label in issued if issued[label] != issued_late[label]}
    assert [issued_late[label] for label in moved] == [(issued[label][0] + 1, True, "backward") for label in moved] != []
    changed = {label for label in early if early[label] != early_now[label]}
    assert changed and all(early_now[label] for label in changed)
    assert len(changed) < sum(not at_once for at_once in early.values())  # those of other homes are freed later still


def test_values_load_late_where_the_plan_says_so_before_what_comes_ahead() -> None:
    """Such a value comes back behind the region before the one that reads it, and before what is fetched for later ones."""
    traced = traced_case("gpt2")
    ahead = Plan(decisions=(Decision("activation", "*", "host", 0, ""),), lookahead=1, pooled=True)
    for region in regions(traced.step):
        if region.meta["phase"] == "forward":
            ahead = ahead.with_decision(Decision("variant", traced.step.meta["blocks"][region.meta["block"]], "save", 0, ""))

    def loads(plan: Plan) -> dict[str, tuple[int, int]]:
        """Returns the regions before each copy to the device in the backward, and the copies since the last of these."""
        issued, regions_before, copies = dict[str, tuple[int, int]](), 0, 0
        for i in lowered(rewrite(traced.step, plan), plan).instructions:
            if i.op == "run" and i.queue == "compute":
                regions_before, copies = regions_before + 1, 0
            elif i.op == "copy" and i.queue == "h2d" and i.phase == "backward":
                issued[i.label], copies = (regions_before, copies), copies + 1
        return issued

    before = loads(ahead)
    late = next(label for label, (_, copies) in before.items() if label.startswith("load_") and copies)
    now = loads(ahead.with_decision(Decision("load", late.removeprefix("load_"), "late", 0, "")))
    assert now[late] == (before[late][0] + 1, 0)
    assert {label: at for label, (at, _) in now.items() if label != late} == {
        label: at for label, (at, _) in before.items() if label != late
    }


def test_listings_read_well() -> None:
    traced = traced_case("tied")
    text = listing(rewrite(traced.step, Plan()))
    assert "prefetch" in text and "offload" in text and "return grad embed.weight" in text


def test_views_never_cross_a_cut() -> None:
    for name in CASES:
        step = traced_case(name).step
        for region in regions(step):
            for operand in region.args:
                assert operand.op == "placeholder" or operand.meta["val"].untyped_storage().nbytes() <= operand.meta["nbytes"]


def test_body_peak_counts_a_storage_once_and_to_its_last_view() -> None:
    aten = torch.ops.aten
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(16, 16, device="meta")  # 1 KiB

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        vals = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        node.meta["val"] = target(*vals)
        return node

    a = call(aten.relu.default, x)
    v = call(aten.t.default, a)
    b = call(aten.relu.default, x)
    c = call(aten.mm.default, v, b)
    d = call(aten.relu.default, c)
    graph.output((d,))
    assert body_peak(graph) == 3 * 1024  # a (kept by its view), b and c; then c and d


class Functional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum()


def test_without_parameters() -> None:
    x = torch.randn(4, requires_grad=True)
    traced = trace(Functional(), {"x": x})
    assert torch.equal(interpret(traced.step, traced.inputs)[1], x.cos())


def test_what_attention_says_of_its_random_numbers_is_passed_on() -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    for packet in (torch.ops.aten._scaled_dot_product_efficient_attention, torch.ops.aten._scaled_dot_product_flash_attention):
        call = graph.call_function(packet.default, (q, q, q))
        names = [result.name for result in packet.default._schema.returns]
        found = [names[i] for i in range(len(names)) if is_seed(graph.call_function(operator.getitem, (call, i)))]
        assert found in (["philox_seed", "philox_offset"], ["rng_state", "unused"])
    assert not is_seed(q) and not is_seed(graph.call_function(torch.ops.aten.sin.default, (q,)))


def test_seeds_of_attention_are_examples_in_host_memory() -> None:
    graph = fx.Graph()
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    names = [argument.name for argument in backward._schema.arguments]
    given = [graph.placeholder(name) for name in names[:9]]
    for node in given:
        node.meta["val"] = torch.empty(2, device="meta")
    graph.output(graph.call_function(backward, tuple(given)))
    on_host = [node.name for node in given if example(node, torch.device("meta")).device.type == "cpu"]
    assert on_host == ["philox_seed", "philox_offset"]
