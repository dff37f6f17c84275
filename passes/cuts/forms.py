"""A step in its forms, as a comparison of them asks for it."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import fx

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts.form import Form
from mtcompile.passes.cuts.fragments.cut import Cut
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.problem import Planned


class FormOfStep(Protocol):
    """A step in one form."""

    @property
    def form(self) -> Form: ...

    @property
    def candidates(self) -> Candidates: ...


S = TypeVar("S", bound=FormOfStep)


class Forms(Protocol[S]):
    """The forms of one step, each made once, within limits."""

    @property
    def captured(self) -> fx.GraphModule:
        """The joint graph before any rewrite."""
        ...

    @property
    def limits(self) -> Budgets:
        """The limits on plans."""
        ...

    @property
    def first(self) -> S:
        """The form to plan first, with all rows of embeddings."""
        ...

    def cut(self, form: Form) -> S | None:
        """Returns the step in a form, with all rows of embeddings; None if it cannot be cut so."""
        ...

    def in_rows(self, step: S, embeddings: str) -> S | None:
        """Returns a step in that form which takes few rows of ``embeddings``; None if it takes all."""
        ...

    def may_take_all_rows(self, step: S, rows: S) -> bool:
        """Tells whether to plan a step that takes all rows too, beside that which takes few ``rows``."""
        ...

    def allows(self, cut: Cut) -> bool:
        """Tells whether weights may be cut so."""
        ...

    def find(self, step: S) -> Planned | None:
        """Returns the fastest plan of a form; None if it cannot be run. Raises DoesNotFit."""
        ...

    def without_disk(self) -> Forms[S]:
        """Returns the forms of the same step as if there were no disk."""
        ...
