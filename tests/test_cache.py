"""Plans remembered between runs: the search is left out, the proof is not, and what no longer fits is planned anew."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mtcompile
from mtcompile import engine
from mtcompile.passes import planner
from tests.test_backend import Gpt, tokens
from tests.training import adamw, minimum_bytes, same, train


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """One entry per search; plans are remembered in ``tmp_path``."""
    monkeypatch.setenv("MT_CACHE", str(tmp_path))
    made: list[int] = []
    search = planner._frontier
    monkeypatch.setattr(planner, "_frontier", lambda *args: (made.append(1), search(*args))[1])
    return made


def run(model: torch.nn.Module, memory: int) -> tuple[Any, Any]:
    torch.compiler.reset()
    copied = copy.deepcopy(model)
    optimizer = adamw(copied.parameters())
    compiled = mtcompile.compile(copied, memory=memory, optimizer=optimizer)
    return train(compiled, optimizer, {"tokens": tokens(4)}, steps=2), compiled


def rows(compiled: Any) -> list[str]:
    """The schedule, kernels by the hash of what they compute: their numbers count what the search has looked at."""
    return re.sub(r"k\d+_", "k_", str(compiled.schedule)).splitlines()


def test_the_second_run_does_not_search(searches: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Gpt(layers=3)
    monkeypatch.setenv("MT_CACHE", "0")
    memory = int(minimum_bytes(model, {"tokens": tokens(4)}) * 1.2)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("MT_CACHE", str(tmp_path))
    searches.clear()
    proofs = []
    prove = engine.verify
    monkeypatch.setattr(engine, "verify", lambda schedule: (proofs.append(1), prove(schedule))[1])
    expected, first = run(model, memory)
    found, second = run(model, memory)
    assert len(searches) == 1 and len(proofs) == 2
    assert same(expected, found) and second.plan == first.plan and rows(second) == rows(first)
    other, _ = run(model, memory + 4096)  # another budget is another question
    assert len(searches) == 2 and same(expected, other)

    _, resident = run(model, 2**30)
    for file in tmp_path.glob("plans/*.json"):  # a plan that does not fit here
        file.write_text(resident.plan.to_json())
    again, fourth = run(model, memory)
    assert len(searches) == 3 and same(expected, again) and rows(fourth) == rows(first)
    for file in tmp_path.glob("plans/*.json"):
        file.write_text("{")
    assert same(expected, run(model, memory)[0]) and len(searches) == 4
