"""Settings of all tests."""

from __future__ import annotations

import gc
import linecache
import logging
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo import guards

from mtcompile import compiler
from mtcompile.capture.joint import joint_key
from mtcompile.kernels.eager import Built, EagerKernels
from mtcompile.kernels.measure import Alone
from mtcompile.passes.step_graph import copy_step

# These look at how good plans are, or at their bounds. What all other tests show does not depend on it.
_SEARCHED = (
    "tests/passes/",
    "tests/forecast/",
    "tests/execution/elastic/",
    "tests/execution/memory/test_faster_fragments.py",
    "tests/viz/test_data.py",
)
# These look at what is traced and measured.
_TRACED_EACH = ("tests/capture/", "tests/kernels/", "tests/torch_private/")


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


@pytest.fixture(scope="module")
def traced_graphs() -> dict[Any, fx.GraphModule]:
    """The joint graphs that the tests of a file have traced."""
    return {}


@pytest.fixture(scope="module")
def measured_kernels() -> defaultdict[str, dict[tuple[str, int], Built]]:
    """The eager kernels that the tests of a file have measured, by device."""
    return defaultdict(dict)


@pytest.fixture(scope="module")
def measured_operations() -> defaultdict[str, defaultdict[int, dict[str, Alone]]]:
    """The operations that the tests of a file have measured, by device and thread count."""
    return defaultdict(lambda: defaultdict(dict))


@pytest.fixture(autouse=True)
def equal_graphs_are_traced_and_measured_once(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    traced_graphs: dict[Any, fx.GraphModule],
    measured_kernels: defaultdict[str, dict[tuple[str, int], Built]],
    measured_operations: defaultdict[str, defaultdict[int, dict[str, Alone]]],
) -> None:
    """Lets the tests of a file share joint graphs, by the key under which these are cached between runs, and the bytes that
    eager kernels need: most compile a model at several budgets. Tests that are long trace and measure for themselves."""
    if request.node.nodeid.startswith(_TRACED_EACH) or request.node.get_closest_marker("long"):
        return
    trace, start = compiler.joint_of, EagerKernels.__init__

    def joint_of(captured: Any, target: Any) -> fx.GraphModule:
        key = None if target.options.fuses else joint_key(captured.description, captured.tangents)
        whole = captured.whole and joint_key(captured.whole, captured.tangents)
        where = key, str(target.device.where), captured.micro, whole
        if key is None or where not in traced_graphs:
            joint = trace(captured, target)
            if key is not None and not joint.meta["constants"]:
                traced_graphs[where] = copy_step(joint)
            return joint
        return copy_step(traced_graphs[where])

    def starting(kernels: EagerKernels, device: torch.device) -> None:
        start(kernels, device)
        kernels.known = measured_kernels[str(device)]
        kernels.alone = measured_operations[str(device)]

    monkeypatch.setattr(compiler, "joint_of", joint_of)
    monkeypatch.setattr(EagerKernels, "__init__", starting)
