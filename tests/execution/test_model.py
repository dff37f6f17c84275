"""Equal bits for loss, gradients, buffers and stepped weights, at three budgets, and peaks that keep their promise."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from tests.helpers.models import CASES, labels, make
from tests.helpers.training import adamw, compiled_run, minimum_bytes, same, train

pytestmark = pytest.mark.slow  # it compiles many models

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": adamw,
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


_LONG = ("t5", "gpt2", "llama", "tied", "chain", "constants")  # other tests of these run in any case


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in _LONG)) for n in CASES])
def test_bits_are_equal_at_three_budgets(name: str) -> None:
    model, data = make(name)
    plain = copy.deepcopy(model)
    expected = train(plain, adamw(plain.parameters()), data)
    floor = minimum_bytes(model, data)
    resident, report, _ = compiled_run(model, data, None)
    assert same(expected, resident)
    full = report["planned_peak_device_bytes"]
    for budget in ((full + floor) // 2, int(floor * 1.05)):
        actual, report, _ = compiled_run(model, data, max(budget, floor))
        assert same(expected, actual), f"at {budget} of {full}"
        assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= report["budget_device_bytes"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n not in ("sgd", "adamw-foreach"))) for n in OPTIMIZERS]
)
def test_optimizers_step_as_they_do_alone(name: str) -> None:
    model, data = make("tied")
    plain = copy.deepcopy(model)
    expected = train(plain, OPTIMIZERS[name](plain.parameters()), data)
    actual, _, _ = compiled_run(model, data, minimum_bytes(model, data), OPTIMIZERS[name])
    assert same(expected, actual)


@pytest.mark.parametrize(
    ("name", "seed"), [("cnn", 0), *(pytest.param("gpt2", seed, marks=pytest.mark.long) for seed in range(4))]
)
def test_delays_and_poison_change_nothing(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = make(name)
    plain = copy.deepcopy(model)
    expected = train(plain, adamw(plain.parameters()), data)
    monkeypatch.setenv("MT_CHECK", "1")
    monkeypatch.setenv("MT_CHECK_SEED", str(seed))
    actual, _, _ = compiled_run(model, data, int(minimum_bytes(model, data) * 1.2))
    assert same(expected, actual)


class Bag(nn.Module):
    """An operation whose result is the start of a larger storage."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(50, 8, mode="max"), nn.Linear(8, 8)

    def forward(self, words: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return self.head(self.bag(words, starts)).square().mean()


@pytest.mark.parametrize("mode", [*(pytest.param(mode, marks=pytest.mark.long) for mode in ("sum", "mean")), "max"])
def test_results_may_take_more_bytes_than_declared(mode: str) -> None:
    torch.manual_seed(0)
    model = Bag()
    model.bag.mode = mode
    data = {"words": labels(50, 40), "starts": torch.arange(0, 40, 4)}
    plain = copy.deepcopy(model)
    expected = train(plain, adamw(plain.parameters()), data)
    for budget in (None, minimum_bytes(model, data)):
        actual, report, _ = compiled_run(model, data, budget)
        assert same(expected, actual)
        assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"]


@pytest.mark.parametrize("policy", ["resident", "offload-all", "checkpoint-all"])
def test_batches_cut_from_one_tensor_have_the_bits_of_their_addresses(policy: str) -> None:
    """Some kernels add up in another order where a tensor does not begin at a multiple of 16 bytes."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    compiled = mtcompile.compile(copy.deepcopy(plain), memory="1GiB", device="cpu", policy=policy)
    batches = torch.sin(torch.arange(240.0)).reshape(40, 6).split(5)
    assert {batch.data_ptr() % 16 for batch in batches} == {0, 8}
    results = []
    for model in (plain, compiled):
        outputs = []
        for batch in batches:
            output = model(batch)
            output.pow(2).sum().backward()
            outputs.append(output.detach())
        results.append([*outputs, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *results))


def test_a_batch_that_forward_changes_at_an_odd_address_rounds_as_a_copy_does() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.add_(1))

    torch.manual_seed(0)
    plain = Shifted(6, 8)
    compiled = mtcompile.compile(copy.deepcopy(plain), memory="1GiB", device="cpu")
    results = []
    for model, copied in ((plain, False), (plain, True), (compiled, False)):
        batch = torch.sin(torch.arange(240.0)).reshape(40, 6)[5:10]
        results.append(model(batch.clone() if copied else batch).detach())
    at_its_address, of_a_copy, result = results
    assert torch.equal(result, of_a_copy)
    assert torch.allclose(result, at_its_address)


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.long), {"update": "backward", "run_ahead": True}], ids=["step", "ahead"]
)
def test_a_deleted_model_frees_what_it_held(options: dict[str, Any]) -> None:
    """Dynamo keeps what it was given until it is reset."""
    model, data = make("tied")
    memory = minimum_bytes(model, data)

    def held() -> list[weakref.ref[Any]]:
        copied = copy.deepcopy(model)
        optimizer = adamw(copied.parameters())
        compiled: Any = mtcompile.compile(copied, memory=memory, optimizer=optimizer, **options)
        train(compiled, optimizer, data, steps=2)
        with torch.no_grad():
            compiled(**data)
        session, parameter = compiled._mt_model.session, next(copied.parameters())
        return [weakref.ref(one) for one in (copied, session, session.arenas, optimizer, parameter)]

    references = held()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
