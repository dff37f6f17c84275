"""Equal bits for loss, gradients, buffers and stepped weights, at three budgets, and peaks that keep their promise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers.training import adamw, compiled_run, minimum_bytes, same, train


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(images).mean((2, 3))), labels)


class Tied(nn.Module):
    """Tied weights and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


class Chain(nn.Module):
    """One long chain without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 16, 16) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(24):
            x = torch.sin(x @ self.weight[index]) + x.square() * 0.01
        return x.square().mean()


class Constants(nn.Module):
    """Two constants that differ only in value, and GELUs of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            shift = torch.tensor([1.0, 2.0]) if index % 2 else torch.tensor([3.0, 4.0])
            x = F.gelu(layer(x), approximate="tanh" if index < 2 else "none") + shift.repeat(4)
        return x.square().mean()


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0)
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    )


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def _labels(count: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(3))


CASES: dict[str, Any] = {
    "llama": (_llama, _tokens),
    "gpt2": (_gpt2, _tokens),
    "t5": (_t5, _tokens),
    "cnn": (Cnn, lambda: {"images": _floats(4, 3, 8, 8), "labels": _labels(5, 4)}),
    "tied": (Tied, lambda: {"tokens": _labels(40, 12), "labels": _labels(40, 12)}),
    "chain": (Chain, lambda: {"x": _floats(8, 16)}),
    "constants": (Constants, lambda: {"x": _floats(6, 8)}),
}

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": adamw,
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


_LONG = ("t5", "gpt2", "cnn", "chain", "constants")  # other tests of these run in any case


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    factory, data = CASES[name]
    return factory().train(), data()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in _LONG)) for n in CASES])
def test_equal_bits_at_three_budgets(name: str) -> None:
    model, data = make(name)
    plain = copy.deepcopy(model)
    expected = train(plain, adamw(plain.parameters()), data)
    floor = minimum_bytes(model, data)
    resident, report, _ = compiled_run(model, data, None)
    assert same(expected, resident)
    full = report["planned_peak_device_bytes"]
    for budget in ((full + floor) // 2, int(floor * 1.05)):
        found, report, _ = compiled_run(model, data, max(budget, floor))
        assert same(expected, found), f"at {budget} of {full}"
        assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= report["budget_device_bytes"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_as_they_do_alone(name: str) -> None:
    model, data = make("tied")
    plain = copy.deepcopy(model)
    expected = train(plain, OPTIMIZERS[name](plain.parameters()), data)
    found, _, _ = compiled_run(model, data, minimum_bytes(model, data), OPTIMIZERS[name])
    assert same(expected, found)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_delays_and_poison_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = make("gpt2")
    plain = copy.deepcopy(model)
    expected = train(plain, adamw(plain.parameters()), data)
    monkeypatch.setenv("MT_CHECK", "1")
    monkeypatch.setenv("MT_CHECK_SEED", str(seed))
    found, _, _ = compiled_run(model, data, int(minimum_bytes(model, data) * 1.2))
    assert same(expected, found)


class Bag(nn.Module):
    """An operation whose result is the start of a larger storage."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(50, 8, mode="max"), nn.Linear(8, 8)

    def forward(self, words: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(words, starts)).square().mean()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_results_of_more_bytes_than_declared(mode: str) -> None:
    torch.manual_seed(0)
    model = Bag()
    model.bag.mode = mode
    data = {"words": _labels(50, 40), "starts": torch.arange(0, 40, 4)}
    plain = copy.deepcopy(model)
    expected = train(plain, adamw(plain.parameters()), data)
    for budget in (None, minimum_bytes(model, data)):
        found, report, _ = compiled_run(model, data, budget)
        assert same(expected, found)
        assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"]
