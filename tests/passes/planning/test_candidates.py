"""Candidates that serve several budgets give each the plan of its own search."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
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
from mtcompile.passes.planning.climbs import climb as climb_module
from mtcompile.passes.planning.climbs.kicks import differ
from mtcompile.passes.planning.climbs.limits import Limits
from mtcompile.passes.planning.evaluate import evaluate, identity
from mtcompile.passes.planning.figures import evaluator as evaluator_module
from mtcompile.passes.planning.figures.evaluator import Evaluator
from mtcompile.passes.planning.figures.stored import SearchedText, searched_from_json
from mtcompile.passes.planning.ladders import waiting_less
from mtcompile.passes.planning.linear import relaxation as relaxation_module
from mtcompile.passes.planning.linear.homes import home_costs
from mtcompile.passes.planning.linear.program import Infeasible
from mtcompile.passes.planning.linear.relaxation import Relaxation
from mtcompile.passes.planning.pace import impatient, paced
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.policies import POLICIES
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem
from tests.helpers.models import make
from tests.helpers.stacks import WIDTH, Residual, stack
from tests.helpers.tracing import trace, traced_case
from tests.passes.planning.drawn_plans import BOUNDED, MACHINES, SLOW, WAYS, crossing, mixed, skips, varied, with_homes_on_disk


@pytest.mark.long
def test_candidates_give_every_budget_what_a_search_of_its_own_would() -> None:
    traced = trace(*make("gpt2"))
    most = make_plan(PlanningProblem(traced.step, Machine(), Budgets())).plan.peak_bytes["device"]
    candidates = Candidates(PlanningProblem(traced.step, Machine(), Budgets()))
    with pytest.raises(DoesNotFit) as caught:
        candidates.best(1, None)
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = int(caught.value.minimum + share * (most - caught.value.minimum))
        one, other = candidates.best(budget, None), make_plan(PlanningProblem(traced.step, Machine(), Budgets(budget)))
        assert one.plan.decisions == other.plan.decisions and one.schedule == other.schedule


@pytest.mark.slow
@pytest.mark.parametrize("disk", [None, 1 << 40])
def test_what_is_known_of_a_step_serves_it_with_other_homes_and_limits(
    disk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, few in {"MOST_SEARCHED": 9, "MOST_POINTS": 3, "_FEWEST_POINTS": 3, "_REFINED": 9}.items():
        monkeypatch.setattr(candidates_module, limit, few)
    problem = PlanningProblem(BOUNDED["crossing"](), Machine(), Budgets(disk=disk))
    known = Candidates(problem)
    homes = list(known.open_params)
    known.best(None, None)
    assert known.evaluations
    for tier in ("device", *(["disk"] if disk else [])):
        fixed = replace(problem, fixed_homes={homes[-1]: tier})
        like, alone = Candidates.like(known, fixed), Candidates(fixed)
        for device in (None, alone.floor):
            one, other = like.best(device, None), alone.best(device, None)
            assert one.plan == other.plan and one.schedule == other.schedule
        again = Candidates.like(known, replace(fixed))
        again.best(None, None)
        assert again.evaluations == 0 < like.evaluations
    assert Candidates.like(known, replace(problem, budgets=replace(problem.budgets, device=1)))._points is known._points
    slower = Candidates.like(known, replace(problem, machine=SLOW))
    assert not slower._figures and slower._akin is None


class Forgetting(dict[Any, Any]):
    """Remembers nothing."""

    def __contains__(self, key: object) -> bool:
        return False

    def get(self, key: object, default: Any = None) -> Any:
        return default


@pytest.mark.slow
@pytest.mark.parametrize("case", ["crossing", pytest.param("mixed", marks=pytest.mark.long)])
def test_no_plan_is_evaluated_twice_in_a_search(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan and its schedule are those that a search without memory finds."""
    problem = PlanningProblem(BOUNDED[case](), CASTING["the host is the wall"], Budgets(updates=Updates(run_ahead=True)))
    counted, keys = Evaluator.figures, []

    def counting(evaluator: Evaluator, plan: Plan) -> Any:
        keys.append(identity(plan))
        return counted(evaluator, plan)

    monkeypatch.setattr(Evaluator, "figures", counting)
    monkeypatch.setattr(candidates_module, "MOST_SEARCHED", 16)
    remembering, forgetting = Candidates(problem), Candidates(problem)
    forgetting._figures, forgetting._paces = Forgetting(), Forgetting()
    least = remembering.least()
    assert remembering.evaluations == len(set(keys)) == len(keys)
    evaluated, other = len(keys), forgetting.least()
    assert (other.plan, other.schedule) == (least.plan, least.schedule)
    assert len(keys) - evaluated > 1.1 * evaluated
    again = remembering.evaluate(least.plan)
    assert again.schedule == evaluate(problem, least.plan).schedule


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
            certificate = candidates.certificate(plan.peak_bytes["device"], plan.peak_bytes["host"], inf)
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
        certificate = candidates.certificate(plan.peak_bytes["device"], plan.peak_bytes["host"], inf)
        assert certificate is not None and certificate.bound_us <= plan.total_us * (1 + 1e-9), machine.name


def test_near_the_floor_the_bound_counts_copies_that_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = replace(SLOW, h2d_gbps=SLOW.h2d_gbps / 4, d2h_gbps=SLOW.d2h_gbps / 4, host_gbps=1000.0)
    problem = PlanningProblem(mixed(), slower, Budgets(updates=Updates(run_ahead=True)))
    candidates = Candidates(problem)
    lean = (candidates.evaluate(ladder[0]).plan for ladder in candidates._by_density)
    least = min(lean, key=lambda plan: (plan.peak_bytes["device"], plan.total_us))
    bound_us = candidates.bound_us(least.peak_bytes["device"], None)
    monkeypatch.setattr("mtcompile.passes.planning.linear.relaxation.gaps_between", lambda *about: [])
    assert Candidates(problem).bound_us(least.peak_bytes["device"], None) < 0.995 * bound_us < least.total_us


def test_gradients_of_homes_on_the_device_wait_there_for_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PlanningProblem(crossing(), SLOW, Budgets())
    held, gradients = held_nbytes(problem.step, problem.budgets), trained_nbytes(problem.step)
    limits, resident = {"device": sum(held.values()) + sum(gradients.values()) - 1}, dict.fromkeys(held, True)
    with pytest.raises(Infeasible):
        Candidates(problem)._bounds.solve(limits, resident)
    monkeypatch.setattr("mtcompile.passes.planning.linear.memory.gradients_at", lambda *about: {})
    Candidates(problem)._bounds.solve(limits, resident)


def test_all_blocks_keep_more_at_home_together() -> None:
    """Each alone would need the room that all of them need."""
    candidates = Candidates(PlanningProblem(crossing(), SLOW, Budgets(updates=Updates(run_ahead=True))))
    kept = {block.name: tuple(block.saved[i].name for i in block.variants[-1].positions) for block in candidates.blocks}

    def keeps_all_at_home(plan: Plan) -> bool:
        return all(
            plan.keeps(block, value) and plan.activation(value) == "host" for block, values in kept.items() for value in values
        )

    whole = [ladder[-1] for ladder in candidates.ladders if keeps_all_at_home(ladder[-1])]
    assert {plan.lookahead for plan in whole} >= {1, 2}
    assert any(plan.lookahead == 1 and all(map(plan.returns_late, candidates.open_params)) for plan in whole)


def test_near_the_floor_only_the_backward_waits() -> None:
    """Between nothing fetched ahead and all of it are plans whose homes wait in the backward only: the leanest of these needs
    hardly more than the floor, and is faster than what is there without."""
    candidates = Candidates(PlanningProblem(crossing(), SLOW, Budgets(updates=Updates(run_ahead=True))))
    ahead = replace(candidates.base, lookahead=1, pooled=True)
    without, whole = (candidates.evaluate(replace(ahead, lookahead=n)).plan for n in (0, 1))
    ladder = waiting_less(ahead, candidates.open_params)
    plans = [candidates.evaluate(plan).plan for plan in ladder]
    peaks = [plan.peak_bytes["device"] for plan in plans]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1] == whole.peak_bytes["device"]
    assert plans[0].total_us < without.total_us and plans[-1].total_us == whole.total_us
    assert any(ladder[0].decisions == each[0].decisions for each in candidates.ladders)


def test_values_that_come_back_late_leave_room_to_fetch_ahead_in_the_forward() -> None:
    """They need less than plans in which only homes wait, and are faster than those that fetch nothing ahead."""
    candidates = Candidates(PlanningProblem(skips(), SLOW, Budgets(updates=Updates(run_ahead=True))))
    leaving = [value.name for block in candidates.blocks for value in block.crossing]
    late = next(ladder for ladder in candidates._by_density if all(map(ladder[0].loads_late, leaving)))
    plans = [candidates.evaluate(plan).plan for plan in late]
    none_ahead = candidates.evaluate(replace(late[0], lookahead=0)).plan
    assert plans[0].peak_bytes["device"] < plans[-1].peak_bytes["device"]
    assert plans[0].lookahead == 1 and plans[0].total_us < none_ahead.total_us


@pytest.mark.slow
def test_one_program_serves_all_budgets() -> None:
    """What was solved before makes no difference."""
    candidates = Candidates(PlanningProblem(crossing(), SLOW, Budgets(updates=Updates(run_ahead=True))))
    least, most = candidates.least().plan.peak_bytes["device"], candidates.resident.plan.peak_bytes["device"]
    limits = [{"device": least + (most - least) * i // 3, "host": host} for i in (1, 2, 3) for host in (None, 1 << 30)]
    home = next(iter(candidates.sizes))
    asked = [(limit, decided, ahead) for limit in limits for decided in ({}, {home: True}) for ahead in (0, 1)]
    costs = home_costs(candidates.problem, candidates._streamed, candidates.resident.schedule)
    first = [candidates._bounds.solve(*each).bound_us for each in asked]
    assert [candidates._bounds.solve(*each).bound_us for each in reversed(asked)] == first[::-1]
    for each, bound_us in zip(asked, first, strict=True):
        problem = replace(candidates.problem, step=crossing())
        fresh = Relaxation(problem, candidates.blocks, costs)(*each).bound_us
        assert fresh == bound_us


@pytest.mark.slow
def test_one_program_tells_the_bytes_below_which_nothing_fits() -> None:
    candidates = Candidates(PlanningProblem(crossing(), SLOW, Budgets(updates=Updates(run_ahead=True))))
    least, far = candidates.least_nbytes, 1 << 10  # what a solver may leave out of rows in GiB
    assert candidates.bound_us(least - far, None) == inf > candidates.bound_us(least + far, None) > 0
    assert 0 < least <= candidates.least().plan.peak_bytes["device"]


@pytest.mark.slow
def test_equal_blocks_that_decide_alike_have_nearly_the_optimum_of_blocks_that_decide_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = PlanningProblem(trace(*stack(4096)).step, SLOW, Budgets(updates=Updates(run_ahead=True)))
    candidates = Candidates(problem)
    least, most = candidates.least().plan.peak_bytes["device"], candidates.resident.plan.peak_bytes["device"]
    costs = home_costs(problem, candidates._streamed, candidates.resident.schedule)
    limits = [{"device": least + (most - least) * i // 5, "host": None} for i in range(1, 5)]
    asked = [(limit, decided, ahead) for limit in limits for decided in ({}, {"layers.2": True}) for ahead in (0, 1)]
    optima = {}
    for groups in (99, 2):
        monkeypatch.setattr(relaxation_module, "_GROUPS", 2)
        monkeypatch.setattr(relaxation_module, "_MANY", 2 * groups)
        solve = Relaxation(problem, candidates.blocks, costs)
        optima[groups] = [solve(*each) for each in asked]
    for (_, decided, ahead), alone, alike in zip(asked, optima[99], optima[2], strict=True):
        if ahead:
            assert alone.bound_us < alike.bound_us < 1.01 * alone.bound_us
            assert {home: alone.resident[home] for home in decided} == decided
            assert alike.resident["layers.2"] == alike.resident["layers.3"] >= len(decided) / 3
        else:
            assert alike.bound_us == alone.bound_us  # a bound is that of all plans


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
def test_more_memory_is_never_slower_where_the_host_casts(wall: str, way: str) -> None:
    candidates = Candidates(PlanningProblem(mixed(), CASTING[wall], Budgets(updates=WAYS[way])))
    full, least = candidates.best(None, None).plan.peak_bytes["device"], candidates.least().plan.peak_bytes["device"]
    plans = [candidates.best(least + (full - least) * i // 7, None).plan for i in range(8)]
    assert [plan.total_us for plan in plans] == sorted((plan.total_us for plan in plans), reverse=True)
    plan = plans[2]
    times = [plan.total_us]
    for share in (1.1, 1.0, 0.9, 0.8):
        with contextlib.suppress(DoesNotFit):
            within = candidates.best(plan.peak_bytes["device"], int(plan.peak_bytes["host"] * share)).plan
            times.append(within.total_us)
    assert len(times) >= 2 and times == sorted(times)


@pytest.mark.slow
@pytest.mark.parametrize("wall", CASTING)
def test_where_the_host_may_cast_few_schedules_are_made_and_climbs_and_casts_are_tried(
    wall: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled = list[Plan]()

    def counting(problem: PlanningProblem, plan: Plan) -> Any:
        scheduled.append(plan)
        return evaluate(problem, plan)

    monkeypatch.setattr(evaluator_module, "evaluate", counting)
    candidates = Candidates(PlanningProblem(mixed(), CASTING[wall], Budgets()))
    plan = candidates.best(candidates.floor * 3 // 2, None).plan
    assert candidates.evaluations > 20 > len(scheduled)
    improved = candidates._climbs()
    assert improved is not None and improved.plans
    other = candidates.evaluate(replace(plan, narrow=not plan.narrow)).plan
    assert plan.total_us <= other.total_us and plan.narrow == (wall == "the link is the wall")


@pytest.mark.slow
def test_updates_that_need_not_wait_for_the_last_cast_are_seen() -> None:
    """They are faster and need less of the host, for fixed policies too; a search keeps them, also when it is stored."""
    machine = CASTING["the link is the wall"]
    candidates = Candidates(PlanningProblem(mixed(), machine, Budgets(updates=Updates())))
    patient = candidates.evaluate(POLICIES["megatrain"](mixed(), candidates.base, candidates.open_params)).plan
    least = candidates.by_policy("megatrain", Budgets(updates=Updates())).plan
    assert least.total_us < patient.total_us and least.peak_bytes["host"] < patient.peak_bytes["host"]
    host = least.peak_bytes["host"]
    assert candidates.by_policy("megatrain", Budgets(host=host, updates=Updates())).plan == replace(
        least, budget_bytes={"device": None, "host": host}, certificate=candidates.certificate(None, host, least.total_us)
    )
    assert candidates.best(least.peak_bytes["device"], host).plan.total_us <= least.total_us
    points = candidates._points
    hurried = impatient(points[-1].plan)
    assert hurried is not None
    climbs = {Limits(7): points[-1].plan, Limits(7, 8): candidates.evaluate(replace(hurried, narrow=True)).plan}
    text, some = SearchedText(), dict([*climbs.items()][:1])
    for written in (some, climbs):  # whatever was written before
        again = searched_from_json(text(points, written, candidates.ladders), candidates.base, candidates.ladders)
        assert [point.plan for point in again[0]] == [point.plan for point in points] and again[1] == written


@pytest.mark.slow
@pytest.mark.parametrize("way", ["as gradients arrive", pytest.param("behind the forward", marks=pytest.mark.long)])
def test_the_smallest_host_that_is_named_works_and_nothing_drawn_needs_less(way: str) -> None:
    """Budgets from nothing up to it are refused with the same bytes, and larger ones are not slower."""
    problem = PlanningProblem(traced_case("tied").step, MACHINES[1], Budgets(updates=WAYS[way]))
    candidates, rnd = Candidates(problem), random.Random(1)
    least, most = candidates.least().plan.peak_bytes["device"], candidates.best(None, None).plan.peak_bytes["device"]
    drawn = [varied(candidates, rnd) for _ in range(100)]
    peaks = [candidates.evaluate(one).plan.peak_bytes for plan in drawn for one in (plan, impatient(plan) or plan)]
    for device in (least + (most - least) * i // 10 for i in (3, 9)):
        with pytest.raises(DoesNotFit) as refused:
            candidates.best(device, 0)
        smallest = refused.value.minimum
        assert refused.value.tier == "host"
        for host in (smallest // 3, smallest * 2 // 3, smallest - 1):
            with pytest.raises(DoesNotFit) as again:
                candidates.best(device, host)
            assert again.value.minimum == smallest
        budgets = [*(smallest + smallest * i // 8 for i in range(4)), None]
        times = [candidates.best(device, host).plan.total_us for host in budgets]
        assert times == sorted(times, reverse=True)
        assert smallest <= min((peak["host"] for peak in peaks if peak["device"] <= device), default=smallest)


@pytest.mark.long
@pytest.mark.parametrize("step", [crossing, skips])
def test_climbs_make_no_budget_slower_and_do_not_depend_on_what_was_asked_before(
    step: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans that climbs improve are within the budget, not above those without climbs, not below the bound, and monotone."""
    for limit, fewer in {"MOST_SEARCHED": 2, "MOST_POINTS": 2, "_FEWEST_POINTS": 2, "_REFINED": 5}.items():
        monkeypatch.setattr(candidates_module, limit, fewer)
    problem = PlanningProblem(step(), MACHINES[1], Budgets(updates=WAYS["behind the forward"]))
    assert differ(Candidates(problem).blocks)  # such steps are climbed on from kicks

    def times_us(shares: Sequence[float]) -> list[float]:
        candidates = Candidates(problem)
        low, high = candidates.floor, candidates.resident.plan.peak_bytes["device"]
        found = []
        for share in shares:
            budget = int(low + share * (high - low - 1))
            plan = candidates.best(budget, None).plan
            assert plan.peak_bytes["device"] <= budget
            assert plan.certificate is None or plan.total_us >= plan.certificate.bound_us * (1 - 1e-9)
            found.append(plan.total_us)
        return found

    rising = [0.05, 0.2, 0.4, 0.6, 0.8, 0.97]
    climbed = times_us(rising)
    assert climbed == sorted(climbed, reverse=True)
    assert times_us(rising[::-1]) == climbed[::-1]
    monkeypatch.setattr(Candidates, "_climbs", lambda candidates: None)
    without = times_us(rising)
    assert all(after <= before for after, before in zip(climbed, without, strict=True)) and climbed != without


@pytest.mark.parametrize("step", [crossing, skips])
def test_climbs_far_from_the_bound_go_on(step: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, fewer in {
        "MOST_SEARCHED": 2,
        "MOST_POINTS": 2,
        "_FEWEST_POINTS": 2,
        "_REFINED": 5,
        "_FEW_SEARCHED": 1000,
    }.items():
        monkeypatch.setattr(candidates_module, limit, fewer)
    for limit, fewer in {"_MOVES": (2, 2, 2), "_PATIENCE": 1}.items():
        monkeypatch.setattr(climb_module, limit, fewer)
    problem, times = PlanningProblem(step(), MACHINES[1], Budgets(updates=WAYS["behind the forward"])), []
    for many in (0, 30):
        monkeypatch.setattr(climb_module, "_MANY_FAR", many)
        candidates = Candidates(problem)
        times.append([candidates.best(int(candidates.floor * share), None).plan.total_us for share in (1, 1.1, 1.2, 1.4)])
    assert all(after <= before for before, after in zip(*times, strict=True)) and times[0] != times[1]


@pytest.mark.parametrize("step", [crossing, skips])
def test_more_memory_is_never_slower_where_homes_are_fixed_on_the_host(step: Callable[[], Any]) -> None:
    """All else fits: the plan that keeps it on the device fetches these homes one region ahead; another fetches them better."""
    graph = step()
    fixed = dict.fromkeys(graph.meta["homes"].values(), "host")
    candidates = Candidates(
        PlanningProblem(graph, MACHINES[1], Budgets(updates=WAYS["as gradients arrive"]), fixed_homes=fixed)
    )
    resident, low = candidates.resident.plan, candidates.floor
    budgets = [int(low + share * (resident.peak_bytes["device"] - low)) for share in (0.3, 0.6, 0.9, 1, 2)]
    times = [candidates.best(budget, None).plan.total_us for budget in budgets]
    assert times == sorted(times, reverse=True) and times[-1] < 0.9 * resident.total_us, times


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
    problem = PlanningProblem(trace(Residual(layers=2), {"x": torch.randn(64, WIDTH)}).step, Machine(), Budgets())
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
