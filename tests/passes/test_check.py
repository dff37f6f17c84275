"""The proof takes no figure and no name on trust: whatever one lie in a step graph or in a schedule's tables changes for the
worse is refused. What is worse is decided by running the step (tests/helpers/proof/replay.py)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from torch import fx

from mtcompile.passes.proof.same_computation import SameComputationError, same_computation
from mtcompile.passes.proof.schedule import check_schedule
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.verify import ScheduleError, verify
from tests.helpers.proof import steps, tables
from tests.helpers.proof.replay import why_unsafe
from tests.helpers.proof.subjects import Subject, few_subjects, lowered_again, subjects

pytestmark = pytest.mark.slow  # it compiles many models

KINDS = {*(f"table: {kind}" for kind in tables.KINDS), *(f"step: {kind}" for kind in steps.KINDS)}


def refusal(subject: Subject, step: fx.GraphModule, schedule: Schedule) -> str | None:
    """Why the proof refuses it; None where it does not."""
    try:
        same_computation(subject.joint, step)
        check_schedule(step, schedule, subject.given)
        verify(schedule)
    except (SameComputationError, ScheduleError) as error:
        return str(error)
    return None


def mutants(subject: Subject, seed: int, per_kind: int) -> Iterator[tuple[str, fx.GraphModule, Schedule]]:
    for kind, schedule in tables.mutants(subject.schedule, seed, per_kind):
        yield f"table: {kind}", subject.step, schedule
    for kind, step in steps.mutants(subject.step, seed, per_kind):
        try:
            yield f"step: {kind}", step, lowered_again(subject, step)
        except KeyError as error:  # a tier that lowering has no arena for
            assert error.args == ("disk",)


def test_what_is_really_unsafe_is_refused() -> None:
    """Two hundred mutants of four steps, of every kind."""
    refused: Counter[str] = Counter()
    unsafe: set[str] = set()
    for seed, subject in enumerate(few_subjects()):
        assert refusal(subject, subject.step, subject.schedule) is None
        assert why_unsafe(subject, subject.step, subject.schedule) is None
        for kind, step, schedule in mutants(subject, seed, 1):
            why = refusal(subject, step, schedule)
            refused[kind] += why is not None
            if why is None or kind not in unsafe:
                wrong = why_unsafe(subject, step, schedule)
                assert why is not None or wrong is None, f"{subject.name}, {kind}: accepted, although {wrong}"
                unsafe |= {kind} if wrong is not None else set()
    assert set(+refused) == KINDS, sorted(KINDS ^ set(+refused))
    assert len(unsafe) >= 30, sorted(KINDS - unsafe)


@pytest.mark.long
def test_five_thousand_mutants_of_real_steps() -> None:
    total = refused = 0
    for seed in itertools.count():
        for subject in subjects(plans=2):
            for kind, step, schedule in mutants(subject, seed, 2):
                total += 1
                if refusal(subject, step, schedule) is not None:
                    refused += 1
                elif (wrong := why_unsafe(subject, step, schedule)) is not None:
                    pytest.fail(f"{subject.name}, {kind}: accepted, although {wrong}")
        if total >= 5000:
            break
    assert refused > 0.9 * total
