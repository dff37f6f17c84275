"""Candidates that serve several budgets give each the plan of its own search."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch

from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets, held_nbytes, trained_nbytes
from mtcompile.passes.plan import Decision, Plan, Updates
from mtcompile.passes.planning import candidates as candidates_module
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.evaluate import evaluate, identity
from mtcompile.passes.planning.figures import evaluator as evaluator_module
from mtcompile.passes.planning.figures.evaluator import Evaluator
from mtcompile.passes.planning.limits import Limits
from mtcompile.passes.planning.linear.needs import home_costs, needs_of
from mtcompile.passes.planning.linear.relaxation import Bounds, Infeasible
from mtcompile.passes.planning.pace import impatient, paced
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.policies import POLICIES
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem
from mtcompile.passes.step_graph import param_homes_by_node
from tests.helpers.stacks import WIDTH, Residual
from tests.helpers.tracing import trace, traced_case
from tests.passes.planning.drawn_plans import (
    BOUNDED,
    MACHINES,
    SLOW,
    WAYS,
    are_hardly_slower,
    crossing,
    mixed,
    skips,
    straight,
    varied,
    with_homes_on_disk,
)


def test_progress_moves_while_a_search_goes_on() -> None:
    told: list[tuple[int, int]] = []
    problem = PlanningProblem(crossing(), MACHINES[1], Budgets(), effort="normal")
    candidates = Candidates(problem, lambda text, done, total: told.append((done, total)))
    memory, before = (candidates.floor + candidates.resident.plan.peak_bytes["device"]) // 2, candidates.evaluations
    told.clear()
    candidates.best(memory, None)
    assert len({done for done, _ in told}) > 2 and all(done <= total for done, total in told)
    assert len(told) <= 3 + (candidates.evaluations - before) // 16, "now and then, not for each plan"


@pytest.mark.parametrize("effort", ["quick", pytest.param("normal", marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", [crossing, skips])
def test_a_plan_does_not_depend_on_what_was_asked_before(step: Callable[[], Any], effort: str) -> None:
    """It is within its budgets, and not below its bound."""
    problem = PlanningProblem(step(), MACHINES[1], Budgets(updates=WAYS["behind the forward"]), effort=effort)
    first = Candidates(problem)
    low, high, host = first.floor, first.resident.plan.peak_bytes["device"], first.leanest().peak_bytes["host"]
    asked = [(int(low + share * (high - low)), most) for share in (0.05, 0.5) for most in (None, host)]
    found = [first.best(*budgets) for budgets in asked]
    other = Candidates(problem)
    again = [other.best(*budgets) for budgets in asked[::-1]]
    again.append(make_plan(problem.within(*asked[-1])))
    for one, same in zip([*found[::-1], found[-1]], again, strict=True):
        assert (one.plan, one.schedule) == (same.plan, same.schedule)
    for budgets, plan in zip(asked, (one.plan for one in found), strict=True):
        assert not Limits(*budgets).missing(plan)
        assert (plan.certificate is None) == (effort == "quick")
        assert plan.certificate is None or plan.total_us >= plan.certificate.bound_us * (1 - 1e-9)


@pytest.mark.slow
def test_more_effort_evaluates_more_plans_and_is_not_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least effort solves no linear program."""
    evaluations, times = list[int](), list[float]()
    for effort in ("quick", "normal", "thorough"):
        problem = PlanningProblem(skips(), SLOW, Budgets(updates=WAYS["as gradients arrive"]), effort=effort)
        candidates = Candidates(problem)
        with monkeypatch.context() as patch:
            if effort == "quick":
                patch.setattr(candidates_module, "Bounds", None)
            plan = candidates.best(int(candidates.floor * 1.3), None).plan
        evaluations.append(candidates.evaluations)
        times.append(plan.total_us)
    assert evaluations == sorted(set(evaluations)), evaluations
    assert times == sorted(times, reverse=True), times


@pytest.mark.slow
@pytest.mark.parametrize("disk", [None, 1 << 40])
def test_what_is_known_of_a_step_serves_it_with_other_homes_and_limits(disk: int | None) -> None:
    problem = PlanningProblem(crossing(), Machine(), Budgets(disk=disk), effort="quick")
    known = Candidates(problem)
    homes = list(known.open_params)
    known.best(known.floor, None)
    assert known.evaluations
    for tier in ("device", *(["disk"] if disk else [])):
        fixed = replace(problem, fixed_homes={homes[-1]: tier})
        like, alone = Candidates.like(known, fixed), Candidates(fixed)
        for device in (None, alone.floor):
            one, other = like.best(device, None), alone.best(device, None)
            assert one.plan == other.plan and one.schedule == other.schedule
        again = Candidates.like(known, replace(fixed))
        again.best(alone.floor, None)
        assert again.evaluations == 0 < like.evaluations <= alone.evaluations
    other_limits = Candidates.like(known, replace(problem, budgets=replace(problem.budgets, device=1)))
    other_limits.best(known.floor, None)
    assert other_limits.evaluations == known.evaluations
    slower = Candidates.like(known, replace(problem, machine=SLOW))
    assert slower.best(known.floor, None).plan == Candidates(slower.problem).best(known.floor, None).plan


@pytest.mark.parametrize("effort", ["quick", pytest.param("normal", marks=pytest.mark.slow)])
def test_no_plan_is_evaluated_twice(effort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = Budgets(updates=Updates(run_ahead=True))
    problem = PlanningProblem(mixed(), CASTING["the host is the wall"], budgets, effort=effort)
    counted, keys = Evaluator.figures, []

    def counting(evaluator: Evaluator, plan: Plan) -> Any:
        keys.append(identity(plan))
        return counted(evaluator, plan)

    monkeypatch.setattr(Evaluator, "figures", counting)
    candidates = Candidates(problem)
    plan = candidates.best(candidates.floor, None).plan
    candidates.best(candidates.floor * 5 // 4, plan.peak_bytes["host"])
    least = candidates.least()
    assert candidates.evaluations == len(set(keys)) == len(keys)
    again = candidates.evaluate(least.plan)
    assert again.schedule == evaluate(problem, least.plan).schedule and candidates.evaluations == len(keys)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", BOUNDED)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_bound_is_never_above_a_plan(case: str, way: str, every: bool) -> None:
    rnd = random.Random(case + way)
    which = list(BOUNDED).index(case) + list(WAYS).index(way)  # of the machines, another for each case and way
    for machine in MACHINES if every else MACHINES[which % len(MACHINES) :][:1]:
        candidates = Candidates(PlanningProblem(BOUNDED[case](), machine, Budgets(updates=WAYS[way])))
        for _ in range(8):
            plan = varied(candidates, rnd)
            patient = paced(plan, candidates.evaluate, candidates._evaluator.due_first)
            plan = rnd.choice([patient, candidates.evaluate(impatient(plan) or plan)]).plan
            certificate = candidates.certificate(plan.peak_bytes["device"], plan.peak_bytes["host"])
            assert certificate is not None and certificate.bound_us <= plan.total_us * (1 + 1e-9), machine.name


@pytest.mark.parametrize("way", [way for way in WAYS if way != "after the backward"])
@pytest.mark.parametrize("case", sorted(BOUNDED.keys() - {"mixed"}))
@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.long)])
def test_the_bound_is_never_above_a_plan_with_homes_on_disk(case: str, way: str, count: int) -> None:
    """Whichever homes are on disk, the bound for these budgets holds."""
    rnd = random.Random(case + way)
    for number in range(count):
        machine = replace(MACHINES[number % len(MACHINES)], disk_read_gbps=rnd.choice([0.01, 2.0]), disk_write_gbps=1.0)
        budgets = Budgets(updates=WAYS[way], disk=1 << 40, disk_staging=1 << 16, disk_updates=True)
        candidates = Candidates(PlanningProblem(BOUNDED[case](), machine, budgets))
        plan = with_homes_on_disk(varied(candidates, rnd), rnd)
        patient = paced(plan, candidates.evaluate, candidates._evaluator.due_first)
        plan = rnd.choice([patient, candidates.evaluate(impatient(plan) or plan)]).plan
        certificate = candidates.certificate(plan.peak_bytes["device"], plan.peak_bytes["host"])
        assert certificate is not None and certificate.bound_us <= plan.total_us * (1 + 1e-9), machine.name


def test_near_the_floor_the_bound_counts_copies_that_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = replace(SLOW, h2d_gbps=SLOW.h2d_gbps / 4, d2h_gbps=SLOW.d2h_gbps / 4, host_gbps=1000.0)
    problem = PlanningProblem(mixed(), slower, Budgets(updates=Updates(run_ahead=True)), effort="quick")
    candidates = Candidates(problem)
    least = candidates.best(candidates.floor, None).plan
    bound_us = candidates.bound_us(least.peak_bytes["device"], None)
    monkeypatch.setattr("mtcompile.passes.planning.linear.relaxation.gaps_between", lambda *about: [])
    assert Candidates(problem).bound_us(least.peak_bytes["device"], None) < 0.995 * bound_us < least.total_us


def test_gradients_of_homes_on_the_device_wait_there_for_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PlanningProblem(crossing(), SLOW, Budgets())
    held, gradients = held_nbytes(problem.step, problem.budgets, "device"), trained_nbytes(problem.step)
    limits, resident = {"device": sum(held.values()) + sum(gradients.values()) - 1}, dict.fromkeys(held, True)
    with pytest.raises(Infeasible):
        Candidates(problem)._bounds.solve(limits, resident)
    monkeypatch.setattr("mtcompile.passes.planning.linear.relaxation.gradients_at", lambda *about: {})
    Candidates(problem)._bounds.solve(limits, resident)


@pytest.mark.slow
def test_one_program_serves_all_budgets() -> None:
    """What was solved before makes no difference."""
    candidates = Candidates(PlanningProblem(crossing(), SLOW, Budgets(updates=Updates(run_ahead=True)), effort="quick"))
    least, most = candidates.least().plan.peak_bytes["device"], candidates.resident.plan.peak_bytes["device"]
    limits = [{"device": least + (most - least) * i // 3, "host": host} for i in (1, 2, 3) for host in (None, 1 << 30)]
    home = next(iter(candidates.sizes))
    asked = [(limit, decided, ahead) for limit in limits for decided in ({}, {home: True}) for ahead in (0, 1)]
    first = [candidates._bounds.solve(*each).bound_us for each in asked]
    assert [candidates._bounds.solve(*each).bound_us for each in reversed(asked)] == first[::-1]
    for each, bound_us in zip(asked, first, strict=True):
        problem = replace(candidates.problem, step=crossing())
        fresh = Bounds(problem, candidates.blocks).solve(*each).bound_us
        assert fresh == bound_us


@pytest.mark.parametrize("fixed", [None, "host", "device"])
@pytest.mark.parametrize("step", [mixed, straight, crossing])
@pytest.mark.parametrize("kind", [kind for kind, updates in WAYS.items() if updates is not None])
def test_updates_cost_what_they_take_in_schedules(step: Callable[[], Any], kind: str, fixed: str | None) -> None:
    """On the host in one with every home there, and on the device in one with all there."""
    home = next(iter(Candidates(PlanningProblem(step(), SLOW, Budgets())).sizes))
    problem = PlanningProblem(step(), SLOW, Budgets(updates=WAYS[kind]), fixed_homes={home: fixed} if fixed else {})
    candidates, costs, homes = (
        Candidates(problem),
        home_costs(problem, needs_of(problem.step)),
        param_homes_by_node(problem.step),
    )
    streamed = POLICIES["megatrain"](problem.step, candidates.base, candidates.open_params)
    for plan, queue, cost in ((streamed, "host", "update_us"), (candidates.resident.plan, "compute", "device_update_us")):
        schedule = evaluate(problem, plan).schedule
        updates = [i for i in schedule.instructions if i.work == "update" and i.queue == queue]
        taken = [i for i in updates if any(schedule.buffers[name].version_of in homes for name in i.writes)]
        assert sum(i.time_us for i in taken) == pytest.approx(sum(getattr(each, cost) for each in costs.values()))


@pytest.mark.slow
def test_one_program_tells_the_bytes_below_which_nothing_fits() -> None:
    candidates = Candidates(PlanningProblem(crossing(), SLOW, Budgets(updates=Updates(run_ahead=True))))
    least, far = candidates.least_nbytes, 1 << 10  # what a solver may leave out of rows in GiB
    assert candidates.bound_us(least - far, None) == inf > candidates.bound_us(least + far, None) > 0
    assert 0 < least <= candidates.least().plan.peak_bytes["device"]


@pytest.mark.slow
def test_a_slow_host_updates_first_what_is_due_first() -> None:
    machine = replace(SLOW, host_gbps=0.05)
    candidates = Candidates(PlanningProblem(traced_case("chain").step, machine, Budgets(updates=Updates(run_ahead=True))))
    plan = candidates.least().plan
    assert plan.updates is not None
    patient = replace(plan, updates=replace(plan.updates, patient=True, order=()))
    ordered, taking_turns = paced(patient, candidates.evaluate, candidates._evaluator.due_first).plan, impatient(patient)
    assert taking_turns is not None and ordered.updates is not None and ordered.updates.order
    assert ordered.total_us <= min(candidates.evaluate(other).plan.total_us for other in (patient, taking_turns))
    updated = [i for i in candidates.evaluate(ordered).schedule.instructions if i.work == "update"]
    first = [candidates.evaluate(ordered).schedule.buffers[i.writes[0]].version_of for i in updated if i.queue == "host"]
    assert tuple(first) == ordered.updates.order


# Where the host casts, patient updates wait for the last cast, and impatient ones do not.
CASTING = {
    "the host is the wall": Machine("casting", 1e12, 100.0, 1.0, 1.0, issue_us=0.2, host_gbps=2.0),
    "the link is the wall": Machine("casting", 1e11, 100.0, 0.3, 0.3, issue_us=0.2, host_gbps=5.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wall", "way"),
    [
        ("the host is the wall", "as gradients arrive"),
        pytest.param("the link is the wall", "behind the forward", marks=pytest.mark.long),
        pytest.param("the host is the wall", "behind the forward", marks=pytest.mark.long),
        pytest.param("the link is the wall", "as gradients arrive", marks=pytest.mark.long),
    ],
)
def test_more_memory_is_hardly_slower_where_the_host_casts(wall: str, way: str) -> None:
    candidates = Candidates(PlanningProblem(mixed(), CASTING[wall], Budgets(updates=WAYS[way])))
    full, least = candidates.best(None, None).plan.peak_bytes["device"], candidates.leanest().peak_bytes["device"]
    plans = [candidates.best(least + (full - least) * i // 4, None).plan for i in range(5)]
    assert are_hardly_slower([plan.total_us for plan in plans])
    plan = plans[1]
    times = [plan.total_us]
    for share in (1.1, 1.0, 0.9, 0.8):
        with contextlib.suppress(DoesNotFit):
            within = candidates.best(plan.peak_bytes["device"], int(plan.peak_bytes["host"] * share)).plan
            times.append(within.total_us)
    assert len(times) >= 2 and are_hardly_slower(times[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("wall", CASTING)
def test_where_the_host_may_cast_few_schedules_are_made_and_casts_are_tried(wall: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled = list[Plan]()

    def counting(problem: PlanningProblem, plan: Plan) -> Any:
        scheduled.append(plan)
        return evaluate(problem, plan)

    monkeypatch.setattr(evaluator_module, "evaluate", counting)
    candidates = Candidates(PlanningProblem(mixed(), CASTING[wall], Budgets(), effort="quick"))
    plan = candidates.best(candidates.floor * 3 // 2, None).plan
    assert candidates.evaluations > 20 > len(scheduled)
    other = candidates.evaluate(replace(plan, narrow=not plan.narrow)).plan
    assert plan.total_us <= other.total_us and (plan.narrow or wall != "the link is the wall")


@pytest.mark.slow
def test_updates_that_need_not_wait_for_the_last_cast_are_seen() -> None:
    """They are faster and need less of the host, for fixed policies too."""
    machine = CASTING["the link is the wall"]
    candidates = Candidates(PlanningProblem(mixed(), machine, Budgets(updates=Updates())))
    patient = candidates.evaluate(POLICIES["megatrain"](mixed(), candidates.base, candidates.open_params)).plan
    least = candidates.by_policy("megatrain", Budgets(updates=Updates())).plan
    assert least.total_us < patient.total_us and least.peak_bytes["host"] < patient.peak_bytes["host"]
    host = least.peak_bytes["host"]
    assert candidates.by_policy("megatrain", Budgets(host=host, updates=Updates())).plan == replace(
        least, budget_bytes={"device": None, "host": host}, certificate=candidates.certificate(None, host)
    )
    assert candidates.best(least.peak_bytes["device"], host).plan.total_us <= least.total_us


@pytest.mark.parametrize("way", ["as gradients arrive", pytest.param("behind the forward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("effort", ["quick", pytest.param("normal", marks=pytest.mark.slow)])
def test_the_smallest_host_that_is_named_works_and_nothing_drawn_needs_less(way: str, effort: str) -> None:
    problem = PlanningProblem(traced_case("tied").step, MACHINES[1], Budgets(updates=WAYS[way]), effort=effort)
    candidates, rnd = Candidates(problem), random.Random(1)
    least, most = candidates.leanest().peak_bytes["device"], candidates.resident.plan.peak_bytes["device"]
    drawn = [varied(candidates, rnd) for _ in range(100)]
    peaks = [candidates.evaluate(one).plan.peak_bytes for plan in drawn for one in (plan, impatient(plan) or plan)]
    for device in (least + (most - least) * i // 10 for i in (3, 9)):
        refused = refusal(candidates, device, 0)
        smallest = refused.minimum
        assert refused.tier == "host" and refusal(candidates, device, smallest // 3).minimum == smallest
        assert not Limits(device, smallest).missing(candidates.best(device, smallest).plan)
        assert smallest <= min((peak["host"] for peak in peaks if peak["device"] <= device), default=smallest)


@pytest.mark.parametrize(
    ("step", "way", "homes"),
    [
        (straight, "as gradients arrive", "host"),
        (skips, "in turns of four", ""),
        pytest.param(mixed, "behind the forward", "", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("effort", ["quick", pytest.param("normal", marks=pytest.mark.slow)])
def test_the_smallest_budgets_that_are_named_work(step: Callable[[], Any], way: str, homes: str, effort: str) -> None:
    """Whatever smaller budget was refused: each names the same."""
    graph = step()
    fixed = dict.fromkeys(graph.meta["homes"].values(), homes) if homes else {}
    candidates = Candidates(PlanningProblem(graph, MACHINES[3], Budgets(updates=WAYS[way]), fixed_homes=fixed, effort=effort))
    device = refusal(candidates, 1, 1).minimum
    assert refusal(candidates, device // 2, None).minimum == device == candidates.leanest().peak_bytes["device"]
    assert not Limits(device).missing(candidates.best(device, None).plan)
    host = refusal(candidates, device, 1).minimum
    assert refusal(candidates, device, host // 2).minimum == host
    assert not Limits(device, host).missing(candidates.best(device, host).plan)


def test_a_refusal_is_of_the_tier_that_lacks_bytes() -> None:
    budgets = Budgets(updates=Updates(), disk=1, disk_staging=1 << 16, disk_updates=True)
    homes = dict.fromkeys(list(crossing().meta["homes"].values())[:1], "disk")
    problem = PlanningProblem(crossing(), Machine(), budgets, fixed_homes=homes, effort="quick")
    for host in (None, 1 << 30):
        refused = refusal(Candidates(problem), 1 << 30, host)
        enough = replace(problem, budgets=replace(budgets, disk=refused.minimum))
        assert refused.tier == "disk" and Candidates(enough).best(1 << 30, host).plan.peak_bytes["disk"] == refused.minimum


def refusal(candidates: Candidates, device: int | None, host: int | None) -> DoesNotFit:
    with pytest.raises(DoesNotFit) as refused:
        candidates.best(device, host)
    return refused.value


def test_of_plans_within_the_device_the_leanest_on_the_host_is_found() -> None:
    """One above the device's bytes that needs less of the host is none."""
    candidates = Candidates(PlanningProblem(straight(), MACHINES[3], Budgets(updates=Updates()), effort="quick"))
    device = candidates.leanest().peak_bytes["device"]
    hosts = list[int]()
    for more in (1.0, 1.2, 2.0):
        plan = candidates.leanest("host", within := Limits(int(device * more)))
        assert not within.missing(plan)
        hosts.append(plan.peak_bytes["host"])
    assert hosts == sorted(hosts, reverse=True) and hosts[-1] < candidates.leanest().peak_bytes["host"]


@pytest.mark.parametrize("step", [crossing, skips])
def test_more_memory_is_hardly_slower_where_homes_are_fixed_on_the_host(step: Callable[[], Any]) -> None:
    """All else fits: the plan that keeps it on the device fetches these homes one region ahead; another fetches them better."""
    graph = step()
    fixed = dict.fromkeys(graph.meta["homes"].values(), "host")
    candidates = Candidates(
        PlanningProblem(graph, MACHINES[1], Budgets(updates=WAYS["as gradients arrive"]), fixed_homes=fixed)
    )
    resident, low = candidates.resident.plan, candidates.floor
    budgets = [int(low + share * (resident.peak_bytes["device"] - low)) for share in (0.3, 0.6, 0.9, 1, 2)]
    times = [candidates.best(budget, None).plan.total_us for budget in budgets]
    assert are_hardly_slower(times) and times[-1] < 0.9 * resident.total_us, times


def test_gradients_do_not_wait_for_an_update_on_disk_where_there_are_slots_for_the_next_few() -> None:
    """One block of eight is on a slow disk: its update takes as long as the backwards of three others."""
    step = trace(Residual(layers=8), {"x": torch.ones(16, WIDTH)}).step
    machine = replace(SLOW, flops=1e11, host_gbps=20.0, disk_read_gbps=0.5, disk_write_gbps=0.5)
    candidates = Candidates(PlanningProblem(step, machine, Budgets(updates=Updates(), disk=1 << 40, disk_updates=True)))
    home = list(candidates.sizes)[5]
    plan = candidates.base.with_decision(Decision("params", home, "disk", candidates.sizes[home], ""))
    plans = [candidates.planned(replace(plan, updates=Updates(sets=sets))).plan for sets in (2, 3, 4)]
    times, hosts = ([value(one) for one in plans] for value in (lambda p: p.total_us, lambda p: p.peak_bytes["host"]))
    assert times[0] > 1.02 * times[1] > 1.04 * times[2], times
    assert hosts[0] < hosts[1] < hosts[2], hosts


@pytest.mark.slow
def test_candidates_of_another_budget_start_with_all_that_is_known() -> None:
    step = trace(Residual(layers=2), {"x": torch.randn(64, WIDTH)}).step
    problem = PlanningProblem(step, Machine(), Budgets(), effort="quick")
    known = Candidates(problem)
    plan = known.least().plan
    smaller = replace(problem, budgets=Budgets(device=plan.peak_bytes["device"]))
    like = Candidates.like(known, smaller)
    assert like.evaluate(plan).plan.total_us == plan.total_us and like.evaluations == known.evaluations
    assert like.problem is smaller and known.problem is problem
    slower = Candidates.like(known, replace(smaller, machine=replace(Machine(), h2d_gbps=1.0)))
    assert slower.evaluate(plan).plan.total_us > plan.total_us and slower.evaluations == 1


def test_a_plan_is_all_resident_only_if_nothing_is_computed_again_or_moves() -> None:
    traced = trace(Residual(layers=2), {"x": torch.randn(64, WIDTH)})
    candidates = Candidates(PlanningProblem(traced.step, Machine(), Budgets()))
    resident = candidates.best(None, None).plan
    assert resident.all_resident and not Plan().all_resident
    variants = [each for each in resident.decisions if each.kind == "variant"]
    activations = [each for each in resident.decisions if each.kind == "activation"]
    for without in (variants, activations):
        rest = replace(resident, decisions=tuple(each for each in resident.decisions if each not in without))
        changed = candidates.planned(rest).plan
        assert without and not changed.fetched and changed.total_us > resident.total_us and not changed.all_resident
