"""The budget that the other tests here compile with leaves no room for a resident plan."""

from __future__ import annotations

import pytest

import mtcompile
from tests.conformance.loops import INPUTS, build, smallest_budget

pytestmark = pytest.mark.slow  # it compiles many models


def test_the_budget_of_these_tests_is_well_under_the_resident_plan() -> None:
    for kind in INPUTS:
        resident = mtcompile.compile(build(kind), device="cpu")
        resident(**INPUTS[kind])
        assert smallest_budget(kind) < 0.8 * resident.memory_report()["planned_peak_device_bytes"]
