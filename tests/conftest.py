"""Settings of all tests."""

from __future__ import annotations

import gc

import pytest

from mtcompile.passes.planning import candidates, frontier

# These look at how good plans are. What all other tests show does not depend on it.
_SEARCHED_WHOLE = ("tests/passes/planning/", "tests/forecast/test_golden.py")
_FEW = 2  # plans of a local search, and of each ladder of candidates


@pytest.fixture(scope="session", autouse=True)
def rare_collections() -> None:
    """Lets the garbage collector look rarely, and never at what was imported, which is most of what there is."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets nothing be told of what takes long: tests read what commands print."""
    monkeypatch.setenv("MT_PROGRESS", "0")


@pytest.fixture(autouse=True)
def short_searches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets searches stop early, which are most of the time that a small model takes to compile."""
    if not request.node.nodeid.startswith(_SEARCHED_WHOLE):
        monkeypatch.setattr(candidates, "MOST_SEARCHED", _FEW)
        monkeypatch.setattr(candidates, "MOST_POINTS", _FEW)
        monkeypatch.setattr(candidates, "_AHEAD", (1,))
        monkeypatch.setattr(frontier, "ROUNDS", 1)
