"""Calls without gradients, and steps without a program, find every tensor on a device with memory of its own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from tests.execution.plain.models import (
    MODELS,
    WIDTH,
    Language,
    Odd,
    floats,
    losses_after_sharing,
    plain,
    programs,
    results,
    texts,
)
from tests.helpers.training import adamw


def same_results(model: nn.Module, memory: int | None, device: torch.device, run: Callable[[nn.Module], list[Any]]) -> Any:
    expected = run(copy.deepcopy(model).to(device))
    compiled = mtcompile.compile(model, memory=memory, device=device)
    values = run(compiled)
    assert len(values) == len(expected)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(values, expected, strict=True))
    return compiled


@pytest.mark.parametrize("memory", [None, 1 << 20])
@pytest.mark.parametrize("name", ["deep", "attending", "writing"])
def test_bits_are_those_of_the_plain_model_on_the_device(name: str, memory: int | None, device: torch.device) -> None:
    make_inputs = MODELS[name][1]
    compiled = same_results(
        plain(name), memory, device, lambda model: results(model, lambda *size: make_inputs(*size).to(device))
    )
    assert not compiled._mt_model._programs
    report = compiled.memory_report()
    assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= report["budget_device_bytes"]


def test_a_view_that_is_returned_is_a_copy_and_that_is_said(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Odd("a view is returned")
    compiled = mtcompile.compile(model, memory="1MiB", device=device)
    with torch.no_grad(), pytest.warns(UserWarning, match="keeps a view of weight: without gradients, that is a copy"):
        assert torch.equal(compiled(floats(2).to(device)).cpu(), model.weight[1:].cpu())


@pytest.mark.parametrize("way", ["wide", "returned", "held", "in threads"])
def test_unusual_forwards(way: str, device: torch.device) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            return [model(floats(2).to(device)).clone() for _ in range(3)]

    torch.manual_seed(0)
    same_results(Odd(way), 1 << 20, device, run)


class Wrapping(nn.Module):
    """Reads a parameter that it has also put elsewhere, with a scripted part or a function."""

    def __init__(self, scripted: bool) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)
        weight = self.part.weight
        self.apply_weight: Any = torch.jit.script(self.part) if scripted else lambda x: x * weight[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_weight(x).tanh()  # type: ignore[no-any-return]


def test_scripted_parts_find_their_parameters(device: torch.device) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit's
        model, other = Wrapping(scripted=True), Wrapping(scripted=True)
    other.load_state_dict(model.state_dict())
    compiled, x = mtcompile.compile(model, memory="1MiB", device=device), floats(3).to(device)
    with torch.no_grad():
        assert torch.equal(compiled(x), other.to(device)(x))


def test_a_forward_that_reads_a_parameter_unseen_is_planned(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Wrapping(scripted=False)
    expected = floats(3).to(device).mul(model.part.weight[0].to(device)).tanh()
    compiled = mtcompile.compile(model, memory="1MiB", device=device)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="reads a tensor of the host"):
            value = compiled(floats(3).to(device))
        assert torch.equal(value, expected)
        assert torch.equal(compiled(floats(3).to(device)), expected)


def test_weights_that_share_memory_go_on_sharing_it(device: torch.device) -> None:
    """The forward halves one, and reads the other."""
    torch.manual_seed(0)
    model = Odd("shared")
    before, x = model.part.weight.detach().clone(), floats(2).to(device)
    compiled = mtcompile.compile(model, memory="1MiB", device=device)
    with torch.no_grad():
        value = compiled(x)
        half = (before / 2).to(device)
        assert torch.equal(value, nn.functional.linear(x, half, model.same.bias.to(device)))
    assert torch.equal(model.part.weight, before / 2) and model.same.weight.data_ptr() == model.part.weight.data_ptr()


@pytest.mark.parametrize("tied", [False, True])
def test_memory_that_is_shared_after_calls_stays_shared(tied: bool, device: torch.device) -> None:
    expected, losses = losses_after_sharing(tied, device)
    assert losses == expected and len(set(losses)) == 3


def test_layers_that_go_after_calls(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    mtcompile.compile(model, memory="1MiB", device=device)
    with torch.no_grad():
        for _ in range(5):
            model(floats(3))
    del model[0]
    plain = nn.Sequential(*(copy.deepcopy(layer) for layer in model)).to(device)
    for each in (model, plain):
        each(floats(3).to(device)).sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(p.grad.to(device), q.grad) for p, q in pairs if p.grad is not None and q.grad is not None)


def test_steps_at_other_shapes_are_plain_where_everything_fits(device: torch.device) -> None:
    """Dropout, running statistics and tied weights; the statistics are on the host, and change in every step."""
    torch.manual_seed(0)
    model = Language()
    plain = copy.deepcopy(model).to(device)
    optimizer = adamw(model.parameters())
    compiled: Any = mtcompile.compile(model, optimizer=optimizer, device=device)
    for batch in texts(6):
        rows = []
        plain.load_state_dict(model.state_dict())
        for each in (model, plain):
            torch.manual_seed(3)
            loss = each(batch.to(device))
            loss.backward()
            rows.append([loss, *(p.grad.clone() for p in each.parameters()), *(b.to(device) for b in each.buffers())])
        assert all(map(torch.equal, *rows))
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
    assert programs(compiled) == 1 and {b.device.type for b in compiled.buffers()} == {"cpu"}
    report = compiled.memory_report()
    assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"]
