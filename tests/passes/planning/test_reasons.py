"""Reasons: the figures of a decision are those of the schedule and of kernels, and values have the names of their modules."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.passes import rewrite
from mtcompile.passes.analysis.cost import Machine, kernel_us
from mtcompile.passes.analysis.names import value_names
from mtcompile.passes.analysis.saved import saved_values
from mtcompile.passes.analysis.state import Budgets, held_nbytes
from mtcompile.passes.plan import Decision, Plan, alike, plan_from_json
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.planner import plan_among
from mtcompile.passes.planning.problem import Planned, PlanningProblem
from mtcompile.passes.step_graph import calls, inputs_of, is_region, kernel_of, regions, results
from mtcompile.runtime.schedule import gib
from tests.helpers.models import make
from tests.helpers.tracing import trace

FIGURE = re.compile(r"\d (s|ms|µs|B|KiB|MiB|GiB)\b")
_US = {"s": 1e6, "ms": 1e3, "µs": 1.0}


def us(text: str) -> float:
    """The first time in a text, in µs."""
    found = re.search(r"([\d.]+(?:e-\d+)?) (s|ms|µs)\b", text)
    assert found is not None, text
    return float(found[1]) * _US[found[2]]


@cache
def tight() -> Any:
    return mtcompile.plan(lambda: make("llama"), batch=4, seq=64, memory="256KiB", machine="rtx4090")


def changed(plan: Plan, *decisions: Decision) -> tuple[PlanningProblem, Planned]:
    """The tight plan with other decisions, planned without limits, which make no difference to its copies and kernels."""
    problem: PlanningProblem = tight().problem
    unlimited = replace(problem, budgets=replace(problem.budgets, device=None))
    return unlimited, Candidates(unlimited).planned(plan.with_decisions(decisions))


def test_every_reason_has_a_figure_and_every_name_a_module() -> None:
    plan, step = tight().planned.plan, tight().problem.step
    assert {"params", "fetch", "variant", "activation"} <= {d.kind for d in plan.decisions}
    assert all(FIGURE.search(d.reason) for d in plan.decisions)
    text = str(plan)
    for words in ("found by", "linear program", "makes room", "by climbing"):
        assert words not in text
    values = {value.name: value for region in regions(step) for value in results(region)}
    names = value_names(step)
    assert len({names[value] for value in values}) == len(values)
    for value, node in values.items():
        if node.meta["role"] == "activation" and node.meta["module_path"]:
            assert names[value].startswith(f"{node.meta['module_path']}/")
    about = {d.subject for d in plan.decisions if d.kind == "activation"} - {"*"}
    assert about and all(plan.names[value] == names[value] for value in about)
    listing = "\n".join(line for line in text.splitlines() if line.lstrip().startswith(("variant", "activation")))
    assert re.search(r"model\.layers\.\d\.\w+/\w+", listing) and not re.search(r"\b(rsqrt|getitem|mm|add|mul)_\d", listing)
    assert plan_from_json(plan.to_json()) == plan


def test_equal_decisions_are_one_line_with_the_range_of_their_figures() -> None:
    plan = tight().planned.plan
    lines = alike(plan.decisions, plan.names)
    on_host = [each for each in lines if (each.decisions[0].kind, each.decisions[0].choice) == ("params", "host")]
    host = max(on_host, key=lambda line: len(line.decisions))
    times = [us(d.reason) for d in host.decisions]
    assert min(times) < max(times) and host.reason.startswith(f"fetching it costs {min(times):g} to {max(times):g} µs a step")
    assert len(host.decisions) == len(host.subjects) > 2


def test_what_is_at_home_costs_what_its_copies_take() -> None:
    found = tight()
    plan, step, schedule = found.planned.plan, found.problem.step, found.planned.schedule
    homes = {node.name: step.meta["homes"].get(spec.name) for spec, node in inputs_of(step) if spec.role == "param"}
    for d in plan.decisions:
        if d.kind == "params" and d.choice == "host":
            brought = [i for i in schedule.instructions if i.work == "prefetch" and homes.get(i.reads[0]) == d.subject]
            assert us(d.reason) == pytest.approx(sum(i.time_us for i in brought), rel=0.06)
            held = gib(held_nbytes(step, found.problem.budgets, "device")[d.subject])
            assert f"on the device it would take {held} (the device has" in d.reason
        if d.kind == "activation" and d.choice == "host" and "copying it there and back" in d.reason:
            copies = [i for i in schedule.instructions if i.op == "copy" and schedule.buffers[i.writes[0]].value == d.subject]
            assert us(d.reason) == pytest.approx(sum(i.time_us for i in copies), rel=0.06)


def test_what_is_on_the_device_would_cost_what_it_costs_at_home() -> None:
    """The price of the other choice is what the reason says once that is chosen."""
    plan = tight().planned.plan
    here = next(d for d in plan.decisions if d.kind == "params" and d.choice == "device")
    value = next(d for d in plan.decisions if d.kind == "activation" and d.choice == "device" and "recomputing" in d.reason)
    moved = replace(here, choice="host"), replace(value, choice="host")
    _, planned = changed(plan, *moved, Decision("fetch", here.subject, "again", here.nbytes))
    for before in (here, value):
        after = planned.plan.find(before.kind, before.subject)
        assert after is not None and "costs" in after.reason and us(after.reason) == pytest.approx(us(before.reason), rel=0.06)


def test_recomputing_costs_what_the_backward_takes_longer() -> None:
    plan, step = tight().planned.plan, tight().problem.step
    block = next(d.subject for d in plan.decisions if d.kind == "variant" and d.choice == "save" and "layers.1" in d.subject)
    whole = plan.find("variant", block)
    assert whole is not None
    problem, planned = changed(plan, Decision("variant", block, "recompute", 0))
    again = planned.plan.find("variant", block)
    assert again is not None and us(again.reason) == us(whole.reason)

    def backward_us(graph: Any) -> float:
        index = step.meta["blocks"].index(block)
        backwards = [c for c in calls(graph) if is_region(c) and c.meta["phase"] == "backward" and c.meta["block"] == index]
        return sum(kernel_us(kernel_of(graph, call), problem.machine) for call in backwards)

    longer = backward_us(planned.step) - backward_us(rewrite(step, plan))
    assert us(again.reason) == pytest.approx(longer, rel=0.06)
    (region,) = [r for r in regions(step) if r.meta["phase"] == "forward" and step.meta["blocks"][r.meta["block"]] == block]
    assert gib(sum(value.meta["nbytes"] for value in saved_values(region))) in again.reason


def test_reasons_change_no_figure_and_no_identity() -> None:
    plan = tight().planned.plan
    bare = replace(plan, decisions=tuple(replace(d, reason="") for d in plan.decisions), names={})
    assert bare.decisions.identity == plan.decisions.identity
    _, one = changed(plan)
    _, other = changed(bare)
    assert one.plan == other.plan and one.schedule == other.schedule


def test_a_plan_says_who_decided_if_no_search_did() -> None:
    problem: PlanningProblem = tight().problem
    planned = plan_among(Candidates(problem), replace(problem.budgets, device=None), "megatrain")
    assert all(d.reason.startswith("policy megatrain: ") for d in planned.plan.decisions)
    home = next(iter(problem.step.meta["homes"].values()))
    fixed = Candidates(replace(problem, fixed_homes={home: "host"}))
    decided = fixed.planned(fixed.base).plan.find("params", home)
    assert decided is not None and decided.reason.startswith("decided before this plan: fetching it costs ")
    roomy = Candidates(replace(problem, budgets=replace(problem.budgets, device=None))).best(None, None).plan
    assert roomy.all_resident and {d.reason for d in roomy.decisions} == {f"everything fits: {gib(roomy.peak_bytes['device'])}"}


def test_equal_kernels_of_which_other_results_are_saved_have_reasons_of_their_own() -> None:
    """The first layer's norm is read outside the kernel that makes it, so that block saves one value less."""

    class Layer(nn.Module):
        def __init__(self, gated: bool) -> None:
            super().__init__()
            self.norm, self.up, self.down, self.gated = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64), gated
            self.gate = nn.Linear(64, 256) if gated else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            hidden = nn.functional.gelu(self.up(y))
            return torch.tanh(self.down(hidden if self.gate is None else hidden * self.gate(y)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(Layer(True), Layer(False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    step = trace(Net(), {"x": torch.randn(1024, 64)}).step
    alike = [r for r in regions(step) if str(r.target) == str(regions(step)[0].target)]
    assert len({len(saved_values(region)) for region in alike}) == 2
    candidates = Candidates(PlanningProblem(step, Machine(), Budgets()))
    leanest = candidates.least().plan
    keeping = [replace(d, choice="save") for d in leanest.decisions if d.kind == "variant"]
    planned = candidates.planned(leanest.with_decisions(keeping))
    assert keeping and all(FIGURE.search(d.reason) for d in planned.plan.decisions)
