"""Which forms of a step are searched, by their bounds. Forms here are their times: no step is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts import compare, fastest
from mtcompile.passes.cuts.compare import Comparison
from mtcompile.passes.cuts.form import Allowed, Form, first_chunks
from mtcompile.passes.cuts.fragments.cut import UNCUT
from mtcompile.passes.plan import Certificate, Plan
from mtcompile.passes.planning.problem import DoesNotFit, Planned

FASTEST_US = 50.0  # of any form, with everything on the device


@dataclass
class Made:
    """A form whose plans take at least ``bound_us`` within the limits, that of a search ``time_us`` and those of short climbs
    ``climbed_us``; ``above_us``: of plans that may need more; ``finer_us``: of plans of all finer forms, at least."""

    form: Form
    bound_us: float
    time_us: float
    climbed_us: float
    rows: tuple[str, ...] = ()  # the embeddings of which it takes few rows
    above_us: float = 120.0
    finer_us: float = 10.0
    candidates: Any = field(init=False)

    def __post_init__(self) -> None:
        resident = SimpleNamespace(plan=SimpleNamespace(total_us=FASTEST_US, peak_bytes={"device": 2, "host": 0}))
        meta = {"rows": dict.fromkeys(self.rows), "homes": {}}
        problem = SimpleNamespace(fixed_homes={}, budgets=None, step=SimpleNamespace(meta=meta))
        figures: dict[str, Any] = {
            "bound_us": lambda *limits, inside=True: self.bound_us if inside else self.finer_us,
            "climbed_us": lambda device: self.climbed_us,
            "above_us": lambda device: self.above_us,
        }
        self.candidates = SimpleNamespace(**figures, resident=resident, problem=problem, resident_may_be_slow=False)


def searched(
    monkeypatch: pytest.MonkeyPatch,
    first: Made,
    *finer: Made,
    in_fragments: bool = False,
    small: bool = False,
    host: int | None = None,
) -> list[int]:
    """Returns the numbers of chunks of the forms that a comparison searches."""
    order: list[int] = []

    def find(form: Made) -> Any:
        order.append(form.form.chunks)
        return planned_in(form.time_us)

    monkeypatch.setattr(Comparison, "is_near", False)
    run(monkeypatch, Budgets(1, host, 0), find, [(first, (first, *finer))], small, Allowed(in_fragments=in_fragments))
    return order


def run(
    monkeypatch: pytest.MonkeyPatch,
    limits: Budgets,
    find: Callable[[Made], Any],
    kinds: Sequence[tuple[Any, ...]],
    small: bool = False,
    allowed: Allowed | None = None,
) -> Comparison[Any]:
    """Compares forms, each of the coarsest with chains of finer ones."""
    monkeypatch.setattr(compare, "is_small", lambda *about: small)
    monkeypatch.setattr(compare, "held_nbytes", lambda step, budgets: {})
    monkeypatch.setattr(Comparison, "_may_be_in_rows", frozenset())
    forms: Any = SimpleNamespace(find=find, allows=lambda cut: True, limits=limits)
    comparison: Comparison[Any] = Comparison(forms, allowed or Allowed())
    comparison.compare([(coarsest, [*map(iter, finer)]) for coarsest, *finer in kinds])
    comparison.plan_waiting()
    return comparison


def planned_in(us: float) -> Any:
    return SimpleNamespace(plan=SimpleNamespace(total_us=us, all_resident=False))


def chunks(count: int, bound_us: float, time_us: float = 120.0, climbed_us: float = 120.0, finer_us: float = 10.0) -> Made:
    return Made(Form(chunks=count), bound_us, time_us, climbed_us, finer_us=finer_us)


def test_of_forms_that_promise_more_only_the_one_that_is_likely_fastest_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = chunks(1, 100, 130, 125), chunks(4, 95, 120, 115), chunks(16, 90, 94, 120)
    assert searched(monkeypatch, *forms) == [4]
    assert searched(monkeypatch, *forms, host=1) == [1, 4, 16]  # plans of short climbs may not fit there


def test_of_forms_that_are_likely_as_fast_the_one_with_the_lowest_bound_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(monkeypatch, chunks(1, 100), chunks(4, 98), chunks(16, 90)) == [16]
    assert searched(monkeypatch, chunks(1, 100), chunks(4, 95, climbed_us=122.5)) == [4]  # a third of the way to it
    assert searched(monkeypatch, chunks(1, 100), chunks(4, 95, climbed_us=124.5)) == [1]
    assert searched(monkeypatch, chunks(1, 100), chunks(4, 95, climbed_us=123.3)) == [1, 4]  # a tie, nearly


def test_a_form_whose_bound_is_hardly_lower_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(monkeypatch, chunks(1, 100, 109, 109), chunks(4, 99.9, 101, 101)) == [1]
    forms = chunks(1, 100, 109, 109), chunks(4, 99.9, 101, 101), chunks(16, 90)
    assert searched(monkeypatch, *forms, host=1) == [1, 16]


def test_finer_forms_are_left_out_once_the_bound_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    for us, order in ((98, [4]), (102, [64])):  # far above the bound, that tells nothing
        forms = chunks(1, 100), chunks(4, 90, us, us), chunks(16, 95, 101, 95), chunks(64, 80, 85, 85)
        assert searched(monkeypatch, *forms) == order


def test_finer_forms_are_left_out_once_the_bound_and_short_climbs_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles or fragments, also where both are above the fastest form's so far."""
    forms = chunks(1, 100), chunks(4, 90, 102, 102), chunks(16, 95, 103, 103), chunks(64, 80, 85, 85)
    assert searched(monkeypatch, *forms) == [4]
    in_chunks = chunks(1, 100), chunks(4, 90, 102, 102)
    for climbed_us, fastest_us in ((112, 102), (106, 85)):
        tiled = [Made(Form(tiles=tiles), bound, us, us) for tiles, bound, us in ((2, 95, climbed_us), (4, 80, 85))]
        kinds = [(in_chunks[0], in_chunks[1:], tiled)]
        best = run(monkeypatch, Budgets(1, None, 0), lambda form: planned_in(form.time_us), kinds).best
        assert best is not None and best[1].plan.total_us == fastest_us


def test_no_form_has_more_chunks_once_the_bound_rises_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Comparison, "is_near", False)
    first, finer = chunks(1, 100), (chunks(1, 100), chunks(4, 90, 98, 98), chunks(16, 95))
    comparison = run(monkeypatch, Budgets(1, None, 0), lambda form: planned_in(form.time_us), [(first, finer)])
    assert [comparison.is_to_skip(Form(count, tiles=4)) for count in (1, 4, 16, 64)] == [False, False, True, True]


def test_a_form_is_searched_at_once_if_finer_ones_could_hardly_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    faster = chunks(4, 97, 110, 115)
    assert searched(monkeypatch, chunks(1, 100, 112, 125, finer_us=96), faster) == [1, 4]
    assert searched(monkeypatch, chunks(1, 100, 112, 125, finer_us=94), faster) == [4]


@pytest.mark.parametrize(("climbed_us", "order"), [(104, [1]), (105, [4])])
def test_no_other_form_is_made_where_short_climbs_are_near_what_any_could_give(
    climbed_us: float, order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, finer, found = chunks(1, 100, 103, climbed_us, finer_us=95), iter([chunks(4, 96, 98, 99)]), list[int]()

    def find(form: Made) -> Any:
        found.append(form.form.chunks)
        return planned_in(form.time_us)

    run(monkeypatch, Budgets(1, None, 0), find, [(first, finer)])
    assert found == order and len([*finer]) == (order == [1])


@pytest.mark.parametrize(("bound_us", "seen"), [(94, 0), (104, 3)])
def test_no_tiles_are_made_where_the_best_bound_is_near_what_they_could_give(
    bound_us: float, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take long to make. All of a small step are."""
    monkeypatch.setattr(Comparison, "is_near", False)
    first = chunks(1, bound_us, 101, 101, finer_us=90)
    tiles = [Made(Form(tiles=count), 90 - count, 120, 120) for count in (4, 16, 64)]
    for small in (False, True):
        left = iter(tiles)
        run(monkeypatch, Budgets(1, None, 0), lambda form: planned_in(form.time_us), [(first, (first,), left)], small)
        assert 3 - len([*left]) == (3 if small else seen)


def test_fragments_that_were_asked_for_are_compared_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = chunks(1, 100), chunks(4, 99.9), chunks(16, 110), chunks(64, 80)
    assert searched(monkeypatch, *forms, in_fragments=True) == [1, 4, 16, 64]


def test_within_a_host_a_form_whose_short_climbs_are_much_slower_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = chunks(1, 100), chunks(4, 90, climbed_us=145), chunks(16, 80, climbed_us=143)
    assert searched(monkeypatch, *forms, host=1) == [1, 16]


def test_a_form_is_searched_if_its_short_climbs_find_nothing_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(monkeypatch, chunks(1, 100), chunks(4, 90, climbed_us=inf)) == [1, 4]


def test_a_form_is_not_searched_if_plans_that_need_more_memory_are_far_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [Made(Form(chunks=count), 90, 120, inf, above_us=us) for count, us in ((4, 145.0), (16, 143.0), (64, inf))]
    assert searched(monkeypatch, chunks(1, 100), *forms) == [1, 16, 64]  # of the last, they say nothing


def test_forms_of_a_small_step_are_compared_whatever_they_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = chunks(1, 100), chunks(4, 100), chunks(16, 110), chunks(64, 80, climbed_us=999)
    assert searched(monkeypatch, *forms, small=True) == [1, 4, 16, 64]


def test_a_form_that_cannot_be_faster_is_never_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(monkeypatch, chunks(1, 100), chunks(4, 121), in_fragments=True) == [1]


@pytest.mark.parametrize(
    ("fuses", "minimum", "has_room"), [(False, 0, [False, True]), (True, 0, [True, True]), (False, 90, [True, True])]
)
def test_forms_without_room_for_their_logits_are_not_made(fuses: bool, minimum: int, has_room: list[bool]) -> None:
    """Not even in chunks, unless a form that does not fit needs as much, or kernels may do without them."""
    graph = fx.Graph()
    logits = graph.call_function(torch.ops.aten._log_softmax.default, (graph.placeholder("x"), 1, False))
    logits.meta["val"] = torch.empty(5, 4)  # 80 bytes
    forms: Any = SimpleNamespace(captured=fx.GraphModule({}, graph), limits=Budgets(25, None, 0))
    comparison: Comparison[Any] = Comparison(forms, Allowed(fuses=fuses))
    if minimum:
        comparison.refused.append((None, DoesNotFit("device", minimum, ())))
    assert [comparison.has_room_for(Form(chunks=count)) for count in (1, 4)] == has_room


# ------------------------------------------------------------------------------------ all rows of embeddings, or few


def searched_kinds(
    monkeypatch: pytest.MonkeyPatch, *kinds: Made, finer: Sequence[Made] = (), limits: Budgets | None = None
) -> list[str]:
    """Returns the forms that a comparison searches: of these kinds, and finer ones of the last kind."""
    order: list[str] = []

    def find(form: Made) -> Any:
        order.append(("few" if form.rows else "all") + "*" * (form.form.chunks > 1))
        return planned_in(form.time_us)

    monkeypatch.setattr(Comparison, "is_near", False)
    chains = [(kind, finer if kind is kinds[-1] else ()) for kind in kinds]
    run(monkeypatch, limits or Budgets(1, None, 0), find, chains)
    return order


def few(bound_us: float, time_us: float, climbed_us: float, count: int = 1) -> Made:
    return Made(Form(chunks=count), bound_us, time_us, climbed_us, ("embed",))


def test_the_kind_that_is_likely_fastest_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched_kinds(monkeypatch, few(80, 130, 160), chunks(1, 100, 120, 140)) == ["all"]
    assert searched_kinds(monkeypatch, few(80, 130, 150), chunks(1, 100, 120, 140)) == ["few"]
    assert searched_kinds(monkeypatch, few(80, 110, 120), chunks(1, 100, 120, 140)) == ["few"]


def test_where_a_search_finds_less_than_short_climbs_of_the_other_kind_that_is_searched_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert searched_kinds(monkeypatch, few(80, 134, 150), chunks(1, 100, 120, 135)) == ["few"]
    assert searched_kinds(monkeypatch, few(80, 136, 150), chunks(1, 100, 120, 135)) == ["few", "all"]


def test_few_rows_that_promise_no_more_than_all_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched_kinds(monkeypatch, few(99.9, 110, 120), chunks(1, 100, 120, 140)) == ["all"]
    assert searched_kinds(monkeypatch, few(99.0, 110, 120), chunks(1, 100, 120, 140)) == ["few"]


def test_within_a_host_a_kind_that_could_hardly_be_faster_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Budgets(1, 1, 0)
    assert searched_kinds(monkeypatch, few(80, 110, 120), chunks(1, 105, 120, 121), limits=limits) == ["few"]
    assert searched_kinds(monkeypatch, few(80, 110, 120), chunks(1, 104, 120, 121), limits=limits) == ["few", "all"]


def test_no_finer_forms_are_made_of_a_kind_that_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    finer = chunks(4, 70, 90, 100)
    assert searched_kinds(monkeypatch, few(80, 110, 120), chunks(1, 100, 120, 140), finer=[finer]) == ["few"]
    assert searched_kinds(monkeypatch, few(80, 110, 120), chunks(1, 100, 120, 112), finer=[finer]) == ["all*"]


def test_finer_forms_are_compared_with_the_bound_of_their_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    finer = chunks(4, 90, 105, 110)  # promises more than all rows at once do, not more than few
    assert searched_kinds(monkeypatch, few(80, 110, 120), chunks(1, 100, 120, 112), finer=[finer]) == ["all*"]


def test_with_a_disk_only_the_likely_kind_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = few(80, 130, 130), chunks(1, 90, 120, 120)
    assert searched_kinds(monkeypatch, *kinds, limits=Budgets(1, None, 0)) == ["all"]
    assert searched_kinds(monkeypatch, *kinds, limits=Budgets(1, 1, 0, disk=1)) == ["few"]


# ------------------------------------------------------------------------------------------------------- what is told of all


@pytest.mark.parametrize(
    ("finer", "others"),
    [([chunks(4, 90), chunks(16, 95)], (2, 90.0)), ([chunks(4, inf)], (0, 0.0)), ([], (0, 0.0))],
    ids=["some", "none that fits", "none"],
)
def test_a_certificate_tells_of_the_other_forms_that_were_made(
    finer: Sequence[Made], others: tuple[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "is_near", False)
    plan = Plan(step_time_us=120.0, certificate=Certificate(100.0, {"link": 7.0}))
    find: Any = lambda form: Planned(plan, None, None) if form.form.chunks == 1 else planned_in(130.0)  # noqa: E731
    first = chunks(1, 100, climbed_us=110)
    told = run(monkeypatch, Budgets(1, None, 0), find, [(first, (first, *finer))]).told()
    assert told is not None and told[0] is first
    assert told[1].plan == replace(plan, certificate=Certificate(100.0, {"link": 7.0}, *others))
    assert ("nor, in any of the 2 other cuts compared, than 0.09 ms" in str(told[1].plan.certificate)) == (others[0] > 0)


def test_far_above_its_bound_a_plan_says_little_of_forms_with_higher_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for us, likely in ((110.0, [1]), (200.0, [4])):
        order: list[int] = []

        def find(form: Made, order: list[int] = order) -> Any:
            order.append(form.form.tiles)
            return planned_in(form.time_us)

        monkeypatch.setattr(Comparison, "is_near", False)
        first, tiled = chunks(1, 100, us, us), Made(Form(tiles=4), 101, 105, 105)
        run(monkeypatch, Budgets(1, None, 0), find, [(first, (first,), (tiled,))])
        assert order == likely


@pytest.mark.parametrize(("bound_us", "small", "enough"), [(95.0, False, False), (85.0, False, True), (95.0, True, True)])
def test_finer_forms_have_chunks_if_these_promise_more(
    bound_us: float, small: bool, enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "is_near", False)
    first, in_chunks, whole = chunks(1, 100), Made(Form(64, 4), 90, 120, 120), Made(Form(1, 4), bound_us, 120, 120)
    chains = (first,), (in_chunks,), (whole,)
    comparison = run(monkeypatch, Budgets(1, None, 0), lambda form: planned_in(form.time_us), [(first, *chains)], small)
    assert comparison.is_to_skip(Form(1, tiles=16)) is not enough
    assert not comparison.is_to_skip(Form(64, tiles=16)) and not comparison.is_to_skip(Form(1))


def test_forms_that_are_cut_most_come_first_after_those_with_other_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "possible_cuts", lambda *about: [UNCUT])
    comparison: Any = SimpleNamespace(forms=SimpleNamespace(captured=None, first=chunks(16, 100)), allowed=Allowed())
    in_chunks = [Form(count) for count in (1, 4, 16, 64)]
    tiled = [[Form(64, count) for count in (4, 16, 64)], [Form(1, count) for count in (4, 16, 64)]]
    chains = [*fastest._finer_forms(comparison, None, 0, compared=False)]
    assert chains[0] == in_chunks and [chain[-3:] for chain in chains[1:]] == tiled
    compared = [*fastest._finer_forms(comparison, None, 0, compared=True)]
    assert compared[-1] == in_chunks and [chain[-3:] for chain in compared[:-1]] == tiled


@pytest.mark.parametrize(
    ("rows", "device", "count"),
    [
        *(
            (4096, device, count)
            for device, count in [(None, 1), (6000, 1), (4000, 4), (1200, 16), (300, 16), (63, 16), (62, 64), (10, 64)]
        ),
        *((4095, device, count) for device, count in [(1200, 4), (300, 4), (250, 4), (249, 16), (10, 64)]),
        *((100, device, count) for device, count in [(4000, 1), (1000, 1), (999, 16)]),
    ],
)
def test_a_loss_head_begins_in_few_chunks_where_these_are_small(
    rows: int, device: int | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 bytes of logits; and where more chunks would have fewer than 256 rows."""
    monkeypatch.setattr("mtcompile.passes.cuts.form.largest_logits", lambda joint: SimpleNamespace(shape=(rows, 1)))
    monkeypatch.setattr("mtcompile.passes.cuts.form.storage_nbytes", lambda logits: 100)
    joint: Any = None
    assert first_chunks(joint, device) == count
