"""Moves of climbs: what they change, in which order they are made, and which are not made again."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Choice, Decision, Decisions, Plan
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.climbs.kicks import FIRST, LAST, THEN, Move, Moved
from mtcompile.passes.planning.climbs.limits import Limits
from mtcompile.passes.planning.climbs.moves import moves
from mtcompile.passes.planning.climbs.single import Climb, Ways, repeated
from mtcompile.passes.planning.ladders import blocks_alike, kept_positions
from mtcompile.passes.planning.problem import PlanningProblem
from tests.helpers.tracing import traced_case
from tests.passes.planning.drawn_plans import MACHINES, WAYS

_PEAKS = {"device": 0, "host": 0}
_TIERS: tuple[Choice, Choice] = "device", "host"


def test_blocks_keep_more_or_less_one_after_the_other() -> None:
    problem = PlanningProblem(traced_case("llama").step, MACHINES[1], Budgets(updates=WAYS["behind the forward"]))
    candidates = Candidates(problem)
    alike = max(blocks_alike(candidates.blocks), key=len)
    variants, plan = alike[0].variants, candidates._by_density[0][0]
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

    def evaluate(plan: Plan) -> Plan:
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

    def evaluate(plan: Plan) -> Plan:
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
    for kind in moves(candidates.blocks, candidates.open_params, True):
        for plan in (candidates._by_density[0][0], candidates.resident.plan):
            assert max(Counter(moved.name for moved in kind(plan)).values(), default=1) == 1
    equal, exchanges = ["a", "b", "c"], 0
    kind = moves([], dict.fromkeys(equal, 8), False)[0]
    for tiers in itertools.product(_TIERS, repeat=len(equal)):
        plan = Plan(Decisions(Decision("params", home, tier, 8, "") for home, tier in zip(equal, tiers, strict=True)))
        names = Counter(moved.name for moved in kind(plan))
        exchanges += names["last for first"] + names["first for last"]
        assert max(names.values()) == 1
    assert exchanges == 2 * 6  # of all plans, six have homes on both tiers


def test_plans_that_no_move_led_to_try_all_that_makes_room() -> None:
    made: list[int] = []

    def room(plan: Plan, before: Plan, missing: int) -> Plan:
        made.append(plan.span)
        return plan.changed(lookahead=1)  # which is much slower

    def evaluate(plan: Plan) -> Plan:
        nbytes = 0 if plan.lookahead or not plan.span else 8
        return plan.changed(step_time_us=100.0 - plan.span + 50.0 * plan.lookahead, peak_bytes={"device": nbytes, "host": 0})

    climb = Climb(Limits(1), Ways([], {"device": [room, room]}, lambda plan, unused: iter(())), evaluate, evaluate(Plan()), 60)
    for span in (1, 2, 3):
        assert not climb.is_better(Plan(span=span))
    assert made == [1, 1, 2, 2, 3, 3]
