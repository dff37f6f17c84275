"""Gradients that a backward adds to are counted from when there are some, and those that it makes once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile

pytestmark = pytest.mark.slow

_WIDTH, _LAYERS = 64, 4
GRADIENTS = 4 * _LAYERS * (_WIDTH * _WIDTH + _WIDTH)  # bytes


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def data(seed: int) -> Tensor:
    return torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(seed))


def loss(model: Any, seed: int) -> Tensor:
    value: Tensor = model(data(seed)).square().mean()
    return value


def once(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss(model, step).backward()


def accumulates(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    for part in range(3):
        loss(model, 3 * step + part).backward()


def sums(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Two forwards wait at a time."""
    (loss(model, 2 * step) + loss(model, 2 * step + 1)).backward()


def adds_beside(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Gradients come from elsewhere between a forward and its backward."""
    value = loss(model, step)
    sum(p.square().sum() for p in model.parameters()).backward()
    value.backward()


def keeps_zeros(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    loss(model, step).backward()


Loop = Callable[[Any, torch.optim.Optimizer, int], None]
LOOPS: Iterable[Loop] = (once, accumulates, sums, adds_beside, keeps_zeros)


def trained(loop: Loop, steps: int = 3, **options: Any) -> tuple[Any, list[Tensor]]:
    model: Any = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options:
        model = mtcompile.compile(model, optimizer=optimizer, device="cpu", **options)
    for step in range(steps):
        loop(model, optimizer, step)
        optimizer.step()
        if loop is not keeps_zeros:
            optimizer.zero_grad()
    return model, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("memory", ["1MiB", "180KiB"], ids=["resident", "streamed"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_bits_and_peaks_hold_whatever_adds_to_gradients(loop: Loop, memory: str) -> None:
    model, ours = trained(loop, memory=memory)
    assert all(map(torch.equal, ours, trained(loop)[1]))
    report = model.memory_report()
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"]
    assert report["peak_host_bytes"] <= report["planned_peak_host_bytes"]
    if memory == "1MiB":  # there is room for both, so that nothing is planned again
        assert len(report["programs"]) == 1


def test_a_plan_counts_gradients_once_until_a_backward_adds_to_them() -> None:
    peaks = {}
    for loop in (once, accumulates):
        report = trained(loop, memory="1MiB", policy="resident")[0].memory_report()
        peaks[loop] = report["planned_peak_device_bytes"]
    assert 4 * GRADIENTS <= peaks[once] < 4.5 * GRADIENTS
    assert peaks[accumulates] == pytest.approx(peaks[once] + GRADIENTS, rel=0.02)


def test_gradients_that_are_there_and_have_no_room_let_the_forward_run_again() -> None:
    limit = trained(once, memory="1MiB", policy="resident")[0].memory_report()["planned_peak_device_bytes"]
    model, ours = trained(adds_beside, memory=limit)
    assert all(map(torch.equal, ours, trained(adds_beside)[1]))
    report = model.memory_report()
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= limit


def test_a_host_holds_new_gradients_beside_those_that_they_are_added_to() -> None:
    hosts = {loop: trained(loop, memory="180KiB")[0].memory_report()["planned_peak_host_bytes"] for loop in (once, accumulates)}
    assert hosts[accumulates] - hosts[once] > GRADIENTS / 2


class Parts(nn.Module):
    """A forward that is captured in two parts, each of which waits for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = made(), made()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)  # type: ignore[no-any-return]


def test_parts_of_a_forward_add_to_no_gradients_of_each_other() -> None:
    model: Any = mtcompile.compile(Parts(), memory="1MiB", device="cpu")
    for _ in range(2):
        loss(model, 0).backward()
        model.zero_grad()
    assert len(model.memory_report()["programs"]) == 2 and not model._mt_model.session.door.sums
    loss(model, 0).backward()
    loss(model, 1).backward()
    assert len(model.memory_report()["programs"]) == 2 and model._mt_model.session.door.sums == 1
