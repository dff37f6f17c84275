"""Which forms of a step are made and planned, by their bounds. Forms here are their figures: no step is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts import fastest
from mtcompile.passes.cuts.fastest import Comparison, fastest_form
from mtcompile.passes.cuts.form import Allowed, Form, chains_of_forms, first_form
from mtcompile.passes.cuts.fragments.cut import Cut
from mtcompile.passes.plan import Certificate, Plan
from mtcompile.passes.planning.problem import DoesNotFit, Planned
from mtcompile.passes.planning.search import EFFORTS

RESIDENT_US = 50.0  # of any form, with everything on the device
IN_CHUNKS = Allowed(tiles=1)
WITHIN = Budgets(1, None, 0)


@dataclass(frozen=True)
class Problem:
    budgets: Budgets = WITHIN
    fixed_homes: tuple[str, ...] = ()


@dataclass
class Made:
    """A form. ``bound_us``, ``finer_us``: the least that its plans and those of finer forms take; ``found``: what its plan
    takes, (tier, bytes) that it needs if none fits, or None if it cannot be run; ``least_nbytes``: of the device."""

    form: Form
    bound_us: float
    found: float | tuple[str, int] | None = 120.0
    finer_us: float = 55.0
    least_nbytes: int = 2
    rows: bool = False
    device_us: float | None = None  # where the host has no limit
    candidates: Any = field(init=False)

    def __post_init__(self) -> None:
        self.candidates = SimpleNamespace(
            bound_us=self._bound_us,
            least_nbytes=self.least_nbytes,
            resident=SimpleNamespace(
                plan=SimpleNamespace(total_us=RESIDENT_US, peak_bytes={"device": 2, "host": 0, "disk": 0})
            ),
            resident_may_be_slow=False,
            problem=Problem(),
            effort=EFFORTS["normal"],
        )

    def _bound_us(self, device: int | None, host: int | None, inside: bool = True, all_plans: bool = False) -> float:
        if host is None and self.device_us is not None:
            return self.device_us
        return self.bound_us if inside else self.finer_us


@dataclass
class Step:
    """The forms of a step. ``made``, ``planned``: the chunks of those that were, in order; less than 0 with few rows."""

    forms: list[Made]
    limits: Budgets = WITHIN
    captured: fx.GraphModule = field(default_factory=lambda: fx.GraphModule({}, fx.Graph()))
    all_rows: bool = True
    made: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    allows: Callable[[Cut], bool] = lambda cut: True

    @property
    def first(self) -> Made:
        return self.forms[0]

    def cut(self, form: Form) -> Made | None:
        self.made.append(form.chunks)
        return next((each for each in self.forms if each.form == form and not each.rows), None)

    def in_rows(self, step: Made, embeddings: str) -> Made | None:
        return next((each for each in self.forms if each.form == step.form and each.rows and embeddings == "used"), None)

    def may_take_all_rows(self, step: Made, rows: Made) -> bool:
        return self.all_rows

    def find(self, step: Made) -> Planned | None:
        self.planned.append(-step.form.chunks if step.rows else step.form.chunks)
        if isinstance(step.found, tuple):
            raise DoesNotFit(*step.found, ())
        if step.found is None:
            return None
        plan = Plan(step_time_us=step.found, certificate=Certificate(step.bound_us, {"link": 7.0}))
        return Planned(plan, self.captured, None)  # type: ignore[arg-type]

    def without_disk(self) -> Step:
        return replace(self, limits=replace(self.limits, disk=None))


@pytest.fixture(autouse=True)
def quickly_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets it take no time to compare forms of a step with no embeddings."""
    monkeypatch.setattr(fastest, "operations", lambda candidates: 0)
    monkeypatch.setattr(fastest, "fetched_by_rows", lambda graph, embeddings: {})


def chunks(count: int, bound_us: float, *about: Any, **others: Any) -> Made:
    return Made(Form(count), bound_us, *about, **others)


def compared(step: Any, allowed: Allowed = IN_CHUNKS, effort: str = "normal") -> Comparison[Any]:
    step.first.candidates.effort = EFFORTS[effort]
    return fastest_form(step, allowed)


def test_the_form_with_the_lowest_bound_is_planned_first_and_none_whose_bound_is_not_below_the_best_plan() -> None:
    step = Step([chunks(1, 180), chunks(4, 160), chunks(16, 90, 150)])
    best = compared(step).best
    assert best is not None and best[0] is step.forms[2] and step.planned == [16]
    step = Step([chunks(1, 100), chunks(4, 95, 110), chunks(16, 90, 130)])
    assert compared(step).best_us == 110 and step.planned == [16, 4]


def test_other_plans_are_expected_as_far_above_their_bounds_as_one_that_is_near_its_own() -> None:
    """Here 11 %: the others would take 110 and 101."""
    step = Step([chunks(1, 99), chunks(4, 91), chunks(16, 90, 100)])
    assert compared(step).best_us == 100 and step.planned == [16]
    step = Step([chunks(1, 100, 125), chunks(4, 95, 130), chunks(16, 90, 130)])  # far above: others may not be
    assert compared(step).best_us == 125 and step.planned == [16, 4, 1]


def test_finer_fragments_are_expected_to_come_nearer_to_their_bounds() -> None:
    def fragments(nbytes: int, bound_us: float, found: float) -> Made:
        return Made(Form(cut=Cut(nbytes)), bound_us, found)

    step = Step([chunks(1, 200, 300)])
    comparison = Comparison(step, IN_CHUNKS, EFFORTS["normal"], [(best := fragments(8, 90, 100), step.find(best))])
    assert comparison._expected_us(fragments(16, 90, 0)) == pytest.approx(100)
    assert comparison._expected_us(fragments(4, 90, 0)) == comparison._expected_us(best) == 90


def test_a_chain_ends_where_the_bound_does_not_fall() -> None:
    step = Step([chunks(1, 100), chunks(4, 90), chunks(16, 95), chunks(64, 60)])
    compared(step)
    assert step.made == [4, 16]


def test_no_finer_form_is_made_that_could_not_be_faster() -> None:
    step = Step([chunks(1, 98, 99, finer_us=99), chunks(4, 60)])
    compared(step)
    assert not step.made and step.planned == [1]


@pytest.mark.parametrize(("effort", "planned"), [("quick", [1]), ("normal", [4]), ("thorough", [16, 4])])
def test_a_form_is_worth_the_time_that_some_steps_gain(
    effort: str, planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here 20 ms, 200 µs of each of a hundred steps, 20 of a thousand, or 2 of ten thousand: to make one and, beside the best
    plan, to search for another."""
    monkeypatch.setattr(fastest, "operations", lambda candidates: 100)
    step = Step([chunks(1, 300, 310, finer_us=275), chunks(4, 290, 300, finer_us=280), chunks(16, 281, 400)])
    compared(step, effort=effort)
    assert step.planned == planned


def test_where_a_form_does_not_fit_those_that_need_less_come_next() -> None:
    forms = [chunks(1, 90, 120, least_nbytes=3), chunks(4, 80, 130, least_nbytes=5), chunks(16, 70, ("device", 9))]
    step = Step(forms)
    assert compared(step).best_us == 120 and step.planned == [16, 1, 4]


def test_a_refusal_is_of_the_form_with_the_smallest_way_to_go() -> None:
    """None is planned that needs more by its linear program than another one did."""
    needs = (1, 12, 13), (4, 11, 12), (16, 9, 10), (64, 10, 10)
    step = Step([chunks(count, inf, ("device", most), least_nbytes=least) for count, least, most in needs])
    form, error = compared(step).refusal
    assert form is step.forms[2] and error.minimum == 10 and step.planned == [16]


def test_a_refusal_by_the_host_that_is_no_nearer_is_the_last() -> None:
    needs = (1, 5, 9), (4, 4, 9), (16, 3, 8)
    forms = [chunks(n, inf, ("host", host), finer_us=inf, least_nbytes=least, device_us=90.0) for n, least, host in needs]
    step = Step(forms, Budgets(1, 1, 0, disk_updates=True))
    assert compared(step).refusal[1].minimum == 8 and step.planned == [16, 4]


def test_forms_that_cannot_be_run_or_change_bits_are_passed_over() -> None:
    step = Step([chunks(1, 100), chunks(4, 90, None)])
    assert compared(step).best_us == 120 and step.planned == [4, 1]
    step = Step([chunks(1, 100)], allows=lambda cut: False)
    assert compared(step).best is None and not step.planned


def test_finer_forms_are_made_of_the_rows_that_promise_more() -> None:
    used = replace(IN_CHUNKS, embeddings="used")
    few = [chunks(1, 90, 95, rows=True), chunks(4, 80, 85, rows=True)]
    step = Step([chunks(1, 100), *few, chunks(4, 60)])
    assert compared(step, used).best_us == 85 and step.planned == [-4]
    step = Step([chunks(1, 85), *few, chunks(4, 60, 65)])
    assert compared(step, used).best_us == 65 and step.planned == [4]
    assert len(compared(Step([chunks(1, 85), few[0]], all_rows=False), used).made) == 1


def test_what_is_kept_for_last_is_compared_where_it_may_be_faster_or_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "fetched_by_rows", lambda graph, embeddings: {embeddings: None})
    last = Allowed(1, 1, last_embeddings="used")
    few = chunks(1, 90, 95, rows=True)
    for compares, planned in ((True, [1, -1]), (False, [1])):
        step = Step([chunks(1, 100), few])
        compared(step, replace(last, compares_last=compares))
        assert step.planned == planned
    step = Step([chunks(1, 100, ("device", 9)), few])
    assert compared(step, replace(last, compares_last=False)).best_us == 95
    step = Step([chunks(1, 100, RESIDENT_US), few])
    assert compared(step, last).best_us == RESIDENT_US and len(compared(step, last).made) == 1


def test_with_a_disk_others_are_compared_only_where_the_first_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "may_fit_without", lambda *about, inside: False)
    for found, planned in ((120.0, [1]), (("host", 9), [1, 4])):
        step = Step([chunks(1, 100, found), chunks(4, 90)], Budgets(1, None, 0, disk=1))
        compared(step)
        assert step.planned == planned


def test_forms_without_room_for_their_logits_are_not_made() -> None:
    """Not even in chunks, unless a form that does not fit needs as much, or kernels may do without them."""
    graph = fx.Graph()
    logits = graph.call_function(torch.ops.aten._log_softmax.default, (graph.placeholder("x"), 1, False))
    logits.meta["val"] = torch.empty(5, 4)  # 80 bytes
    captured = fx.GraphModule({}, graph)
    assert [first_form(captured, device).chunks for device in (None, 80, 79, 5, 1)] == [1, 1, 4, 16, 64]
    for first, fuses, made in ((100.0, False, [16]), (100.0, True, [4]), (inf, False, [4])):
        step = Step([chunks(1, first, ("device", 90), least_nbytes=80 if first == inf else 2)], Budgets(10, None, 0), captured)
        compared(step, replace(IN_CHUNKS, fuses=fuses))
        assert {*step.made} == {*made}


@pytest.mark.parametrize(
    ("finer", "others"),
    [([chunks(4, 98), chunks(16, 99)], (2, 98.0)), ([chunks(4, inf)], (0, 0.0)), ([], (0, 0.0))],
    ids=["some", "none that fits", "none"],
)
def test_a_certificate_tells_of_the_other_forms_that_were_made(finer: list[Made], others: tuple[int, float]) -> None:
    told = compared(Step([chunks(1, 100, 101.0), *finer])).told()
    assert told is not None
    assert told[1].plan.certificate == Certificate(100.0, {"link": 7.0}, *others)
    assert ("nor, in any of the 2 other cuts compared, than 0.098 ms" in str(told[1].plan.certificate)) == (others[0] > 0)


def test_chains_have_the_head_whole_or_in_many_chunks_and_the_numbers_that_are_not_to_be_chosen() -> None:
    cuts = [Cut(2), Cut(1), Cut(2, gathers=True)]
    chains = [*chains_of_forms(Allowed(), Form(4), cuts)]
    assert chains[0] == [Form(16), Form(64)]
    for count, others in ((1, chains[1:4]), (64, chains[4:])):
        assert others == [
            [Form(count, 1, cuts[0]), Form(count, 1, cuts[1])],
            [Form(count, 1, cuts[2])],
            [Form(count, tiles) for tiles in (4, 16, 64)],
        ]
    assert [*chains_of_forms(Allowed(4, 2), Form(4, 2), cuts[:1])] == [[], [Form(4, 2, cuts[0])]]
