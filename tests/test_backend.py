"""The torch.compile door: equal bits, activations within the budget, graph breaks, changing sizes, inference."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.backend import reports
from mtcompile.execution.runner import Frame
from mtcompile.torch_private import cpu_allocator_peak
from tests.helpers.models import Gpt, tokens

pytestmark = pytest.mark.slow  # it compiles many models


def gpt() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Gpt(), tokens(8)


def short_gpt() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Gpt(layers=2), tokens(8)


def vit() -> tuple[nn.Module, torch.Tensor]:
    from transformers import ViTConfig, ViTModel

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 12}
            self.model = ViTModel(ViTConfig(image_size=32, patch_size=8, hidden_dropout_prob=0.1, **sizes))

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.model(pixel_values=pixels).last_hidden_state.square().mean()

    torch.manual_seed(0)
    return Vit(), torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, call: Any, batches: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Losses, gradients and the generator's final state; and the allocator's peak over the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)
    log, peak = [], 0
    for index, batch in enumerate(batches):
        if index + 1 == len(batches):
            gc.collect()
            with cpu_allocator_peak() as measured:
                loss = call(batch)
                loss.backward()
            peak = measured.nbytes or 0
        else:
            loss = call(batch)
            loss.backward()
        log += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return [*log, torch.get_rng_state()], peak


def compiled(model: nn.Module, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend="mtcompile", options=options)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def smallest(model: nn.Module, batch: torch.Tensor, **options: Any) -> int:
    with pytest.raises(mtcompile.BudgetError, match="activation_memory") as caught:
        compiled(copy.deepcopy(model), activation_memory=1, **options)(batch)
    return caught.value.minimum_bytes


def test_dynamo_lists_the_backend() -> None:
    assert "mtcompile" in torch._dynamo.list_backends()


@pytest.mark.parametrize(
    ("make", "offload", "budgets"),
    [
        (short_gpt, True, 2),
        pytest.param(short_gpt, True, 3, marks=pytest.mark.long),
        pytest.param(gpt, False, 3, marks=pytest.mark.long),
        *(pytest.param(model, True, 10, marks=pytest.mark.long) for model in (gpt, vit)),
    ],
)
def test_every_budget_from_floor_to_resident_is_met_with_equal_bits(make: Any, offload: bool, budgets: int) -> None:
    """Equal bits at each; the allocator's peak is within the budget; planned peak and time are monotone."""
    model, batch = make()
    plain = copy.deepcopy(model)
    expected, _ = train(plain, plain, [batch] * 2)
    least = smallest(model, batch, offload=offload)
    resident, most = train(other := copy.deepcopy(model), compiled(other), [batch] * 2)
    assert same(expected, resident)
    most = max(r["planned_peak_device_bytes"] for r in reports())
    assert least < most
    peaks = []
    for i in range(budgets):
        budget = least + (most - least) * i // (budgets - 1)
        copied = copy.deepcopy(model)
        options = {"activation_memory": budget, "offload": offload}
        torch.compiler.reset()
        actual, peak = train(copied, torch.compile(copied, backend="mtcompile", options=options), [batch] * 2)
        assert same(expected[:-1], actual[: len(expected) - 1]), budget
        report = next(r for r in reports() if r["budget_device_bytes"] == budget)
        assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= budget
        assert 0 < peak + report["arena_device_bytes"] <= budget
        peaks.append(report["planned_peak_device_bytes"])
        del copied, options
        gc.collect()
    assert peaks == sorted(peaks)


@pytest.mark.parametrize(
    ("breaks", "sizes"), [((0,), (4, 6, 4, 2)), pytest.param((0, 1), (4, 4, 6, 2, 8, 4, 5, 6), marks=pytest.mark.long)]
)
def test_graph_breaks_and_changing_batch_sizes_give_equal_bits(breaks: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Gpt(layers=len(breaks) + 1, breaks=breaks)
    batches = [tokens(n) for n in sizes]
    plain = copy.deepcopy(model)
    expected, _ = train(plain, plain, batches)
    actual, _ = train(copied := copy.deepcopy(model), compiled(copied), batches)
    assert same(expected, actual)


@pytest.mark.long
def test_an_earlier_graph_makes_room_by_running_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that one graph's saved values leave too little of for the next: its forward runs again in the backward."""
    torch.manual_seed(0)
    model = Gpt(layers=4, breaks=(1,))
    batch = tokens(16)
    plain = copy.deepcopy(model)
    expected, _ = train(plain, plain, [batch] * 3)
    gradients = sum(p.nbytes for p in model.parameters())  # once returned they are the model's
    evicted = []
    evict = Frame.evict
    monkeypatch.setattr(Frame, "evict", lambda frame: (evicted.append(frame.spent), evict(frame)))
    budget = smallest(model, batch, offload=False) * 2
    for _ in range(9):
        copied = copy.deepcopy(model)
        try:
            actual, peak = train(copied, compiled(copied, activation_memory=budget, offload=False), [batch] * 3)
        except mtcompile.BudgetError as error:
            assert error.minimum_bytes > budget
            budget = error.minimum_bytes
            continue
        assert same(expected, actual)
        assert peak <= budget + gradients
        assert evicted
        return
    raise AssertionError(f"{budget} bytes were not enough although an error said so")


def test_inference_and_training_share_a_callable() -> None:
    model, batch = short_gpt()
    plain = copy.deepcopy(model)
    call = compiled(model)
    for part in (model, plain):
        part.eval()
    with torch.no_grad():
        assert torch.equal(call(batch), plain(batch))
    for part in (model, plain):
        part.train()
    torch.manual_seed(1)
    one = call(batch)
    torch.manual_seed(1)
    assert torch.equal(one, plain(batch))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"activation_budget": 1}, "activation_memory"),
        ({"kernels": "magic"}, "kernels"),
        ({"offload": "yes"}, "offload"),
        ({"activation_memory": "lots"}, "lots"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options: dict[str, Any], says: str) -> None:
    torch.compiler.reset()
    with pytest.raises(Exception, match=says):
        torch.compile(nn.Linear(2, 2), backend="mtcompile", options=options)(torch.ones(1, 2))
