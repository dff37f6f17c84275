"""Peaks of a plan are expressions of batch and sequence."""

from __future__ import annotations

import pytest

from mtcompile.forecast.symbolic import MONOMIALS, NotPolynomial, evaluated, peak_expressions
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.joint.build import build
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.problem import PlanningProblem
from tests.helpers.models import make, tower
from tests.helpers.tracing import trace

pytestmark = pytest.mark.slow  # it compiles many models


def test_peaks_are_expressions_of_batch_and_sequence() -> None:
    """Expressions fitted to one plan at six sizes give, at a seventh, the peak of lowering it there, or a little more."""
    points = [(2, 128), (3, 128), (2, 256), (3, 256), (2, 384), (3, 384), (5, 512)]
    joints = [trace(*tower(*point)).joint for point in points]
    steps = [Candidates(PlanningProblem(build(joint, like=joints[-1]), Machine(), Budgets())) for joint in joints]
    for plan in (steps[0].least().plan, steps[0].best(None, None).plan):
        planned = [step.planned(plan) for step in steps]
        expressions = peak_expressions(planned[:-1], points[:-1], MONOMIALS["both"])
        for tier, expression in expressions.items():
            for point, planned_at in zip(points, planned, strict=True):
                nbytes = planned_at.schedule.peak_nbytes[tier]
                assert nbytes <= evaluated(expression, *point) <= nbytes * 1.2
    assert "seq**2" in str(expressions["device"])
    tied = trace(*make("tied"))
    with pytest.raises(ValueError, match="same operations"):
        build(tied.joint, like=joints[0])
    other = Candidates(PlanningProblem(tied.step, Machine(), Budgets())).best(None, None)
    with pytest.raises(NotPolynomial):
        peak_expressions([planned[0], other], points[:2], MONOMIALS["batch"])
