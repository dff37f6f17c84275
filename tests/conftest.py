"""Settings of all tests."""

from __future__ import annotations

import gc
import linecache
import logging

import pytest
import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo import guards

# These look at how good plans are, or at their bounds. What all other tests show does not depend on it.
_SEARCHED = (
    "tests/passes/",
    "tests/forecast/",
    "tests/execution/elastic/",
    "tests/execution/memory/test_faster_fragments.py",
    "tests/viz/test_data.py",
)


@pytest.fixture(scope="module", autouse=True)
def rare_collections() -> None:
    """Lets the garbage collector look rarely, and never at what was there before a file's tests: imports and caches, which
    grow. Compiled models collect by themselves, before they refuse a forward, and took a fifth of all tests' time for it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, 20, 20)


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets nothing be told of what takes long: tests read what commands print."""
    monkeypatch.setenv("MT_PROGRESS", "0")


@pytest.fixture(autouse=True)
def short_searches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets searches be short, which are most of the time that a small model takes to compile."""
    if not request.node.nodeid.startswith(_SEARCHED):
        monkeypatch.setenv("MT_EFFORT", "quick")


@pytest.fixture(scope="session", autouse=True)
def forks_run_backwards() -> None:
    """Starts autograd's engine while there is no GPU. Later, builds of torch for CUDA take a fake tensor's for one: the engine
    would start a thread for it, and after that no fork may run a backward, as the ranks of tests/ranks do."""
    if not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()


@pytest.fixture(scope="session", autouse=True)
def quick_captures() -> None:
    """Lets Dynamo neither time its guards, for which it empties the processor's caches, nor look whether sources changed, nor
    collect garbage each time, nor write down graphs and guards for a log, which it does while that has handlers."""
    guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
    linecache.checkcache = lambda filename=None: None
    dynamo_config.run_gc_after_compile = False
    trace_log = logging.getLogger("torch.__trace")
    trace_log.handlers.clear()
    trace_log.propagate = True  # pytest gives handlers of its own to each logger that does not
