"""Moves of climbs: what they change, in which order they are made, and which are not made again."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial
from math import inf

import pytest

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Choice, Decision, Decisions, Plan
from mtcompile.passes.planning.blocks import blocks_alike, kept_positions
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.climbs.casts import casts
from mtcompile.passes.planning.climbs.climb import Climb, Ways, repeated
from mtcompile.passes.planning.climbs.move import FIRST, LAST, THEN, Move, Moved
from mtcompile.passes.planning.climbs.moves import moves
from mtcompile.passes.planning.climbs.singles import singles
from mtcompile.passes.planning.limits import Limits
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.planning.starts import least_plan
from tests.helpers.tracing import traced_case
from tests.passes.planning.drawn_plans import MACHINES, WAYS, crossing

_PEAKS = {"device": 0, "host": 0}
_TIERS: tuple[Choice, Choice] = "device", "host"


def test_blocks_keep_more_or_less_one_after_the_other() -> None:
    problem = PlanningProblem(traced_case("llama").step, MACHINES[1], Budgets(updates=WAYS["behind the forward"]))
    candidates = Candidates(problem)
    alike = max(blocks_alike(candidates.blocks), key=len)
    variants, plan = alike[0].variants, least_plan(candidates.base, candidates.blocks)
    assert len(alike) > 1 and len(variants) > 1
    for number, more in ((len(variants) - 1, True), (0, False)):
        first = alike[-1] if more else alike[0]  # what the last blocks keep waits shortest

        def follows(kind: Move, count: int, plan: Plan = plan, name: object = (number, more)) -> Plan | None:
            return repeated(kind, name, plan, count)

        def keeps(plan: Plan | None, number: int = number) -> list[bool]:
            return [plan is not None and kept_positions(plan, block) == variants[number].positions for block in alike]

        kinds = moves(candidates.blocks, candidates.open_params, True)
        kind = next(kind for kind in kinds if keeps(follows(kind, 1))[alike.index(first)])
        assert [sum(keeps(follows(kind, count))) for count in range(1 + len(alike))] == list(range(1 + len(alike)))
        assert follows(kind, 1 + len(alike)) is None
        plan = follows(kind, len(alike)) or plan


def test_a_move_that_did_harm_is_made_again_where_nothing_else_helps() -> None:
    tried: list[tuple[int, str]] = []  # from which plan, and which move

    def named(plan: Plan, name: str, **changes: int) -> Plan:
        tried.append((plan.span, name))
        return plan.changed(**changes)

    def kind(plan: Plan) -> Iterator[Moved]:
        yield Moved("seldom", LAST, partial(named, plan, "seldom", disk_lookahead=1))
        yield Moved("harms", FIRST, partial(named, plan, "harms", lookahead=1))
        yield Moved("does little", FIRST, partial(named, plan, "does little", pooled=True))
        yield Moved("helps", THEN, partial(named, plan, "helps", span=plan.span + 1))

    def evaluate(plan: Plan, us: float = inf) -> Plan:
        us = 100.0 - min(plan.span, 8) + 5.0 * plan.lookahead + 5.0 * plan.disk_lookahead + 1e-3 * plan.pooled
        return plan.changed(step_time_us=us, peak_bytes=_PEAKS)

    climb = Climb(Limits(1), Ways([kind], {}, lambda plan, unused: iter(())), evaluate, evaluate(Plan()))
    climb.go_on(60)
    last = climb.best.span
    assert last == 8 and climb.remaining > 0
    times = Counter(tried)
    assert [span for span, name in tried if name == "harms"] == [0, last]
    assert [span for span, name in tried if name == "seldom"] == [last]
    assert times[0, "does little"] == times[last, "does little"] == 1


@pytest.mark.parametrize("room_helps", [False, True])
def test_what_made_no_room_for_a_move_does_so_again_last(room_helps: bool) -> None:
    made: list[int] = []  # by how many moves before

    def kind(plan: Plan) -> Iterator[Moved]:
        yield Moved("too large", FIRST, partial(plan.changed, pooled=True))
        yield Moved("helps", THEN, partial(plan.changed, span=plan.span + 1))

    def room(plan: Plan, before: Plan, missing: int) -> Plan:
        assert plan.pooled and missing == 7
        made.append(before.span)
        return plan.changed(lookahead=1)

    def evaluate(plan: Plan, us: float = inf) -> Plan:
        us = 100.0 - min(plan.span, 4) - 5.0 * plan.pooled + (3.0 if room_helps else 8.0) * plan.lookahead
        nbytes = 8 if plan.pooled and not plan.lookahead else 0
        return plan.changed(step_time_us=us, peak_bytes={"device": nbytes, "host": 0})

    climb = Climb(Limits(1), Ways([kind], {"device": [room]}, lambda plan, unused: iter(())), evaluate, evaluate(Plan()))
    climb.go_on(60)
    assert climb.best.span == 4 and climb.best.pooled == room_helps and not climb.limits.missing(climb.best)
    assert made == ([0] if room_helps else [0, 4])


def test_moves_of_a_kind_have_names_of_their_own() -> None:
    problem = PlanningProblem(traced_case("llama").step, MACHINES[1], Budgets(updates=WAYS["behind the forward"]))
    candidates = Candidates(problem)
    of_one = singles(candidates.blocks, candidates.open_params, True, 10**6)
    assert of_one
    for kind in moves(candidates.blocks, candidates.open_params, True) + of_one:
        for plan in (least_plan(candidates.base, candidates.blocks), candidates.resident.plan):
            assert max(Counter(moved.name for moved in kind(plan)).values(), default=1) == 1
    equal, exchanges = ["a", "b", "c"], 0
    kind = moves([], dict.fromkeys(equal, 8), False)[0]
    for tiers in itertools.product(_TIERS, repeat=len(equal)):
        plan = Plan(Decisions(Decision("params", home, tier, 8, "") for home, tier in zip(equal, tiers, strict=True)))
        names = Counter(moved.name for moved in kind(plan))
        exchanges += names["last for first"] + names["first for last"]
        assert max(names.values()) == 1
    assert exchanges == 2 * 6  # of all plans, six have homes on both tiers


def test_room_is_made_in_the_first_way_that_makes_enough() -> None:
    made: list[str] = []

    def room(name: str, nbytes: int, plan: Plan, before: Plan, missing: int) -> Plan:
        assert plan is before and missing == 7
        made.append(name)
        return plan.changed(lookahead=nbytes)

    def evaluate(plan: Plan, us: float = inf) -> Plan:
        return plan.changed(step_time_us=100.0, peak_bytes={"device": 8 - plan.lookahead, "host": 0})

    rooms = [partial(room, "little", 3), partial(room, "enough", 7), partial(room, "more", 8)]
    climb = Climb(Limits(1), Ways([], {"device": rooms}, lambda plan, unused: iter(())), evaluate, evaluate(Plan()))
    climb.make_room()
    assert made == ["little", "enough"] and climb.best.lookahead == 7


@pytest.mark.parametrize("host", [False, True])
def test_a_move_of_one_decision_changes_that_alone_and_together_they_reach_all(host: bool) -> None:
    problem = PlanningProblem(crossing(), MACHINES[1], Budgets(updates=WAYS["behind the forward"]))
    candidates = Candidates(problem)
    plan, homes, block = candidates.resident.plan, list(candidates.open_params), candidates.blocks[1]
    kinds = singles(candidates.blocks, candidates.open_params, host, 1000)
    reached = [moved.make() for kind in kinds for moved in kind(plan)]
    assert [each.tiers(homes).count("host") for each in reached[: len(homes)]] == [1] * len(homes)
    kept = {kept_positions(each, block) for each in reached}
    assert len(block.saved) <= 4 and len(kept) == 2 ** len(block.saved)  # few values: any of them
    for each in reached:
        others = [kept_positions(each, other) != kept_positions(plan, other) for other in candidates.blocks]
        assert sum(others) + sum(one != other for one, other in zip(each.tiers(homes), plan.tiers(homes), strict=True)) <= 1
    crossing_now = [[each.activation(value.name) for value in block.crossing] for each in reached]
    tiers = {"device", "recompute", *(["host"] if host else [])}
    assert {tier for tier, *_ in crossing_now} == tiers
    assert host or not any(each.activation(v.name) == "host" for each in reached for b in candidates.blocks for v in b.saved)
    assert not singles(candidates.blocks, candidates.open_params, host, 20)  # too many for so short a search


def test_homes_on_both_tiers_are_exchanged_and_stay_or_do_not() -> None:
    sizes = {"a": 8, "b": 16, "c": 24}
    kind, rest = singles([], sizes, True, 100)
    plan = Plan(Decisions([Decision("params", "a", "device", 8), *(Decision("params", home, "host", 8) for home in "bc")]))
    reached = {moved.name: moved.make() for moved in kind(plan)}
    assert reached.keys() == {"a", "b", "c", ("b", "stays"), ("c", "stays"), ("a", "b"), ("a", "c")}
    assert reached["a", "c"].tiers(sizes) == ["host", "host", "device"]
    assert reached["b", "stays"].stays("b") and not plan.stays("b")
    (moved,) = rest(plan)
    assert (plan.activation("x"), moved.make().activation("x")) == ("host", "device")


def test_the_host_casts_all_or_none_or_shares_of_the_weights_it_may() -> None:
    kind = casts(homes := [f"home {number}" for number in range(16)])
    whole, *others = (moved.make() for moved in kind(Plan(narrow=False)))
    assert whole.narrow and not whole.wide and [len(plan.wide) for plan in others] == [4, 8, 12]
    reached = {moved.name: moved.make() for moved in kind(whole)}
    assert reached.keys() == {"none", 1, 3} and not reached["none"].narrow
    assert [len(reached[part].wide) for part in (1, 3)] == [2, 6]
    most = whole.changed(wide=tuple(homes[:14]))
    assert {moved.name for moved in kind(most)} == {"none", 6}
