"""An embedding larger than the device's memory trains by the rows of its batches: plain's bits, within the planned bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from tests.helpers.training import adamw

WORDS, WIDTH = 4096, 64  # 1 MiB
MEMORY = 1 << 19


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH, **options)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.table(ids)).logsumexp(-1).mean()


def batch(number: int) -> torch.Tensor:
    drawn = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(number))
    drawn[0], drawn[1, 0] = drawn[1], 3
    return drawn


def steps(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Losses, gradients and weights of steps on other rows each, and a loss without gradients."""
    log = []
    for number in range(3):
        loss = model(batch(number))
        loss.backward()
        log += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        log += [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        return [*log, model(batch(9))]


CASES: dict[str, dict[str, Any]] = {
    "by step()": {"policy": "megatrain"},
    "searched": {},
}


@pytest.mark.parametrize(
    "case", [case if case == "by step()" else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_an_embedding_larger_than_the_device_trains_with_the_same_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    options = CASES[case]
    plain, model = Model(padding_idx=3), Model(padding_idx=3)
    optimizer = adamw(model.parameters())
    compiled = mtcompile.compile(model, memory=MEMORY, optimizer=optimizer, device="cpu", embeddings="used", **options)
    log, expected = steps(compiled, optimizer), steps(plain, adamw(plain.parameters()))
    assert len(log) == len(expected) and all(map(torch.equal, log, expected))
    report = compiled.memory_report()
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= MEMORY
    assert report["peak_host_bytes"] <= report["planned_peak_host_bytes"]
    assert report["fetched_bytes"] < MEMORY
    assert "table.weight: the device holds the rows that a batch names, at most 32 of 4096" in compiled.plan.notes


class Tables(nn.Module):
    """Several tables of 512 KiB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(WORDS // 2, WIDTH) for _ in range(8))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(sum(table(ids) for table in self.tables)).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("frozen", [True, False])
def test_embeddings_at_home_on_disk(frozen: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come to the host as a whole; the device has rows."""
    monkeypatch.setenv("MT_CHECK", "1")
    plain, model = Tables(), Tables()
    for each in (plain, model):
        each.tables.requires_grad_(not frozen)
    reference, optimizer = adamw(plain.head.parameters()), adamw(model.head.parameters())
    if not frozen:
        reference, optimizer = adamw(plain.parameters()), adamw(model.parameters())
    options: dict[str, Any] = {"memory": 400 << 10, "host": "3500KiB" if frozen else "13MiB", "embeddings": "used"}
    options |= {"disk": f"{tmp_path}:64MiB", "update": "backward"}
    compiled = mtcompile.compile(model, optimizer=optimizer, device="cpu", **options)
    for number in range(3):
        ids = batch(number) % (WORDS // 2)
        losses = compiled(ids), plain(ids)
        for loss, stepped in zip(losses, (optimizer, reference), strict=True):
            loss.backward()
            stepped.step()
            stepped.zero_grad()
        assert torch.equal(*losses)
    assert all(map(torch.equal, compiled.parameters(), plain.parameters()))
    homes = {decision.subject: decision.choice for decision in compiled.plan.decisions if decision.kind == "params"}
    assert "disk" in {homes[f"tables.{number}.weight"] for number in range(8)} and len(compiled.plan.notes) == 8
    report = compiled.memory_report()
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"]
    assert report["peak_host_bytes"] <= report["planned_peak_host_bytes"]


def test_all_rows_do_not_fit() -> None:
    compiled = mtcompile.compile(Model(), memory=MEMORY, device="cpu", embeddings="all", policy="megatrain")
    with pytest.raises(mtcompile.BudgetError):
        compiled(batch(0))


def test_a_number_that_is_no_row_raises_as_in_plain() -> None:
    compiled = mtcompile.compile(Model(), memory=MEMORY, device="cpu", embeddings="used", policy="megatrain")
    wrong = batch(0)
    for number in (WORDS, -1):
        wrong[2, 2] = number
        with pytest.raises(IndexError, match="index out of range"):
            compiled(wrong)
    assert torch.equal(compiled(batch(0)), Model()(batch(0)))


@pytest.mark.long
def test_everything_stays_on_a_device_that_has_room() -> None:
    optimizer = adamw((model := Model()).parameters())
    compiled = mtcompile.compile(model, memory="64MiB", optimizer=optimizer, device="cpu", embeddings="used")
    compiled(batch(0)).backward()
    assert compiled.plan.all_resident and not compiled.plan.notes


@pytest.mark.long
def test_forecasts_take_rows_where_training_would() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(1 << 16, 256), nn.Linear(256, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids)).square().mean()

    data = {"ids": torch.zeros(2, 4, dtype=torch.int64)}
    forecast = mtcompile.plan(Large(), data, memory="1MiB", machine="rtx4090", optimizer="adamw")
    assert forecast.feasible and forecast.peak_bytes["device"] <= 1 << 20
    assert forecast.ledger["host"]["weights"] >= 1 << 26
    least = mtcompile.plan(Large(), data, machine="rtx4090", solve="memory")
    assert least.feasible and least.solved["memory"] < 1 << 20
