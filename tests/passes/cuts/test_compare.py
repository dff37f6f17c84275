"""Which forms of a step are searched, by their bounds. Forms here are their times: no step is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts import compare
from mtcompile.passes.cuts.compare import Comparison
from mtcompile.passes.cuts.form import Allowed, Form
from mtcompile.passes.planning.problem import DoesNotFit

FASTEST_US = 50.0  # of any form, with everything on the device


@dataclass
class Made:
    """A form whose plans take at least ``bound_us`` within the limits, that of a search ``time_us`` and a few ``quick_us``;
    ``above_us``: of these, whether they fit or not."""

    form: Form
    bound_us: float
    time_us: float
    quick_us: float
    rows: tuple[str, ...] = ()  # the embeddings of which it takes few rows
    above_us: float = 120.0
    candidates: Any = field(init=False)

    def __post_init__(self) -> None:
        resident = SimpleNamespace(plan=SimpleNamespace(total_us=FASTEST_US, peak_bytes={"device": 2, "host": 0}))
        problem = SimpleNamespace(fixed_homes={}, step=SimpleNamespace(meta={"rows": dict.fromkeys(self.rows)}))
        figures: dict[str, Any] = {
            "bound_us": lambda *limits: self.bound_us,
            "quick_us": lambda device, above=False: self.above_us if above else self.quick_us,
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
        return SimpleNamespace(plan=SimpleNamespace(total_us=form.time_us, all_resident=False))

    monkeypatch.setattr(Comparison, "is_near", False)
    monkeypatch.setattr(compare, "is_small", lambda *about: small)
    forms: Any = SimpleNamespace(find=find, allows=lambda cut: True, limits=Budgets(1, host, 0))
    Comparison(forms, Allowed(in_fragments=in_fragments)).run([(first, [iter((first, *finer))])])
    return order


def chunks(count: int, bound_us: float, time_us: float = 120.0, quick_us: float = 120.0) -> Made:
    return Made(Form(chunks=count), bound_us, time_us, quick_us)


def test_a_form_that_promises_more_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(monkeypatch, chunks(1, 100), chunks(4, 98), chunks(16, 90)) == [1, 4, 16]


def test_a_form_whose_bound_is_hardly_lower_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(monkeypatch, chunks(1, 100), chunks(4, 99.9), chunks(16, 90)) == [1, 16]


def test_finer_forms_are_left_out_once_the_bound_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = chunks(1, 100), chunks(4, 90), chunks(16, 95), chunks(64, 80)
    assert searched(monkeypatch, *forms) == [1, 4]


def test_no_form_has_more_chunks_once_the_bound_rises_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Comparison, "is_near", False)
    monkeypatch.setattr(compare, "is_small", lambda *about: False)
    planned = SimpleNamespace(plan=SimpleNamespace(total_us=120.0, all_resident=False))
    forms: Any = SimpleNamespace(find=lambda form: planned, allows=lambda cut: True, limits=Budgets(1, None, 0))
    comparison: Comparison[Any] = Comparison(forms, Allowed())
    comparison.run([(chunks(1, 100), [iter((chunks(1, 100), chunks(4, 90), chunks(16, 95)))])])
    assert [comparison.is_too_fine(Form(count, tiles=4)) for count in (1, 4, 16, 64)] == [False, False, True, True]


def test_fragments_that_were_asked_for_are_compared_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = chunks(1, 100), chunks(4, 99.9), chunks(16, 110), chunks(64, 80)
    assert searched(monkeypatch, *forms, in_fragments=True) == [1, 4, 16, 64]


def test_a_form_whose_quick_plans_are_much_slower_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(monkeypatch, chunks(1, 100), chunks(4, 90, quick_us=145), chunks(16, 80, quick_us=143)) == [1, 16]


def test_the_form_with_the_fastest_quick_plan_is_searched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first, slow, fast = chunks(1, 100, 130), chunks(4, 95, 120, 120), chunks(16, 90, 94, 110)
    assert searched(monkeypatch, first, slow, fast) == [1, 16]
    assert searched(monkeypatch, first, slow, fast, host=1) == [1, 4, 16]  # quick plans may not fit there


def test_a_form_is_searched_if_no_quick_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(monkeypatch, chunks(1, 100), chunks(4, 90, quick_us=inf)) == [1, 4]


def test_a_form_is_not_searched_if_quick_plans_are_far_slower_even_with_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [Made(Form(chunks=count), 90, 120, inf, above_us=us) for count, us in ((4, 145.0), (16, 143.0), (64, inf))]
    assert searched(monkeypatch, chunks(1, 100), *forms) == [1, 16, 64]  # of the last, they say nothing


def test_forms_of_a_small_step_are_compared_whatever_they_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = chunks(1, 100), chunks(4, 100), chunks(16, 110), chunks(64, 80, quick_us=999)
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
        return SimpleNamespace(plan=SimpleNamespace(total_us=form.time_us, all_resident=False))

    monkeypatch.setattr(Comparison, "is_near", False)
    monkeypatch.setattr(compare, "is_small", lambda *about: False)
    forms: Any = SimpleNamespace(find=find, allows=lambda cut: True, limits=limits or Budgets(1, None, 0))
    Comparison(forms, Allowed()).run([(kind, [iter(finer if kind is kinds[-1] else ())]) for kind in kinds])
    return order


def few(bound_us: float, time_us: float, quick_us: float, count: int = 1) -> Made:
    return Made(Form(chunks=count), bound_us, time_us, quick_us, ("embed",))


def test_the_kind_with_the_fastest_quick_plan_is_searched_first_whatever_bounds_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched_kinds(monkeypatch, few(80, 130, 150), chunks(1, 100, 120, 140)) == ["all"]
    assert searched_kinds(monkeypatch, few(80, 130, 145), chunks(1, 100, 120, 140)) == ["all", "few"]
    assert searched_kinds(monkeypatch, few(80, 110, 120), chunks(1, 100, 120, 140)) == ["few"]


def test_a_kind_that_could_hardly_be_faster_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched_kinds(monkeypatch, few(80, 110, 120), chunks(1, 105, 120, 121)) == ["few"]
    assert searched_kinds(monkeypatch, few(80, 110, 120), chunks(1, 104, 120, 121)) == ["few", "all"]


def test_no_finer_forms_are_made_of_a_kind_that_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    finer = chunks(4, 70, 90, 100)
    assert searched_kinds(monkeypatch, few(80, 110, 120), chunks(1, 108, 120, 140), finer=[finer]) == ["few"]
    assert searched_kinds(monkeypatch, few(80, 110, 120), chunks(1, 100, 120, 121), finer=[finer]) == ["few", "all", "all*"]


def test_finer_forms_are_compared_with_the_bound_of_their_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    finer = chunks(4, 90, 105, 110)  # promises more than all rows at once do, not more than few
    assert searched_kinds(monkeypatch, few(80, 110, 120), chunks(1, 100, 120, 121), finer=[finer]) == ["few", "all", "all*"]


def test_with_a_disk_only_the_likely_kind_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = few(80, 130, 130), chunks(1, 90, 120, 130)
    assert searched_kinds(monkeypatch, *kinds, limits=Budgets(1, None, 0)) == ["few", "all"]
    assert searched_kinds(monkeypatch, *kinds, limits=Budgets(1, 1, 0, disk=1)) == ["few"]
