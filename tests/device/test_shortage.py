"""A device that has less memory than the budget says: one retry on a smaller plan, with the same bits, then an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mtcompile
from mtcompile.runtime.devices.cpu import CpuMemory
from tests.helpers.models import Small

WAYS: dict[str, dict[str, Any]] = {
    "step": {},
    "backward": {"update": "backward"},
    "ahead": {"update": "backward", "run_ahead": True},
}


class Failing:
    """Lets the ``at``-th kernel from now on fail, and those after it as long as ``times`` says."""

    def __init__(self, patch: pytest.MonkeyPatch, error: Exception) -> None:
        self.calls, self.at, self.times = 0, -1, 1
        patch.setattr(CpuMemory, "run", self._failing(CpuMemory.run, error))  # which that of a GPU calls

    def _failing(self, run: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def failing(memory: Any, *args: Any) -> Any:
            self.calls += 1
            if self.at <= self.calls < self.at + self.times and self.at > 0:
                raise type(error)(*error.args)
            return run(memory, *args)

        return failing


def trained(device: torch.device, way: str, failing: Failing, at: int, memory: int) -> tuple[list[Tensor], Any]:
    """Weights and buffers after four steps, in the third of which a kernel fails."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled: Any = mtcompile.compile(model, memory=memory, optimizer=optimizer, device=device, **WAYS[way])
    torch.manual_seed(1)
    batch = torch.linspace(-1, 1, 8 * 32).view(8, 32)
    for step in range(4):
        compiled.synchronize()
        failing.calls, failing.at = 0, at if step == 2 else -1
        compiled(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        compiled.synchronize()
    return [t.detach().cpu().clone() for t in (*compiled.parameters(), *compiled.buffers())], compiled


def memory_for(device: torch.device) -> int:
    """Bytes with which a smaller plan is possible."""
    model = Small()
    try:
        mtcompile.compile(model, memory=1, device=device, optimizer=torch.optim.AdamW(model.parameters()))(torch.ones(8, 32))
    except mtcompile.BudgetError as error:
        return 2 * error.minimum_bytes
    raise AssertionError("a budget of one byte was accepted")


@pytest.fixture(params=["device", pytest.param("emulated", marks=pytest.mark.long)])
def where(request: pytest.FixtureRequest, device: torch.device) -> torch.device:
    return device if request.param == "device" else torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["step", pytest.param("ahead", marks=pytest.mark.long)])
def test_a_kernel_finds_no_memory(way: str, where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check(way, torch.OutOfMemoryError("injected"), where, monkeypatch, instants=2)


def check(way: str, error: Exception, where: torch.device, monkeypatch: pytest.MonkeyPatch, instants: int) -> None:
    failing, memory = Failing(monkeypatch, error), memory_for(where)
    expected, _ = trained(where, way, failing, -1, memory)
    kernels = failing.calls
    assert kernels > 10
    retries = 0
    for at in range(1, kernels + 1, -(-kernels // instants)):
        try:
            with warnings.catch_warnings(record=True) as warned:
                state, compiled = trained(where, way, failing, at, memory)
        except mtcompile.BudgetError as refused:
            assert way != "step" and "among updates" in str(refused)  # and a checkpoint is asked for
            continue
        except type(error):  # of an update on the host, whose memory is not the device's
            assert way != "step"
            continue
        told = [str(warning.message) for warning in warned]
        assert any("ran out of memory in instruction" in text and "from now on, plans take" in text for text in told)
        retries += 1
        assert all(map(torch.equal, state, expected))
        assert compiled.memory_report()["planned_peak_device_bytes"] <= memory
    assert retries >= (min(instants, kernels) // 2 if way == "step" else 1)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_every_kernel_finds_no_memory(way: str, where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check(way, RuntimeError("CUDA error: out of memory"), where, monkeypatch, instants=100)


def test_memory_that_is_gone_for_good(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    failing, memory = Failing(monkeypatch, torch.OutOfMemoryError("injected")), memory_for(where)
    failing.times = 10**6
    with pytest.raises(mtcompile.BudgetError, match=r"in instruction \d+ of the plan .*nothing was changed") as raised:
        trained(where, "step", failing, 3, memory)
    holders = str(raised.value).partition("found\n")[2]
    assert any(what in holders for what in ("its arena", "parameters that stay", "free", "nothing of this model's"))


@pytest.mark.long
def test_a_smaller_plan_that_does_not_exist(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch, torch.OutOfMemoryError("injected"))
    with pytest.raises(mtcompile.BudgetError, match="a smaller plan does not help"):
        trained(where, "step", failing, 3, memory_for(where) // 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cap is the second device's")
def test_a_device_with_less_memory_than_its_budget_refuses(device: torch.device) -> None:
    memory, second = memory_for(device), torch.ops.second_device
    model, cap = Small(), second.cap()
    compiled: Any = mtcompile.compile(model, memory=memory, device=device, optimizer=torch.optim.AdamW(model.parameters()))
    second.set_cap(second.live() + memory // 8)
    try:
        with pytest.raises((mtcompile.BudgetError, torch.OutOfMemoryError)):
            compiled(torch.linspace(-1, 1, 8 * 32).view(8, 32)).backward()
    finally:
        second.set_cap(cap)
