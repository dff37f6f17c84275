"""A disk that nothing needs changes nothing: the same plan, the same homes, the same instructions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from tests.helpers.stacks import WIDTH, Adapted, Residual, ResidualBlock, step


def compiled(plain: nn.Module, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.compiler.reset()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return mtcompile.compile(model, optimizer=optimizer, device="cpu", memory="1MiB", **options), optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "update", "host", "rows"),
    [
        (Adapted, "backward", "8MB", 16),
        (Adapted, "step", "2.4MB", 160),  # in fragments, and with less than whole weights need
        *(pytest.param(*each, "8MB", 16, marks=pytest.mark.long) for each in ((Adapted, "step"), (ResidualBlock, "backward"))),
    ],
)
def test_where_all_fits_the_host_a_disk_changes_nothing(
    block: type[nn.Module], update: Any, host: str, rows: int, tmp_path: Path
) -> None:
    plain, x = Residual(block), torch.randn(rows, WIDTH)
    without = {"host": host, "update": update}
    models = [compiled(plain, **options) for options in (without, {**without, "disk": f"{tmp_path}:16MiB"})]
    losses = [step(*each, x) for each in models]
    assert torch.equal(*losses)
    schedules, plans = ([getattr(model, what) for model, _ in models] for what in ("schedule", "plan"))
    assert schedules[0].instructions == schedules[1].instructions and schedules[0].buffers == schedules[1].buffers
    assert plans[0].decisions == plans[1].decisions and plans[0].total_us == plans[1].total_us
    assert plans[1].peak_bytes == {**plans[0].peak_bytes, "disk": 0}
    assert (
        all(d.choice != "disk" for d in plans[1].decisions) and "host" in models[1][0]._mt_model.door.parameters.tiers.values()
    )


@pytest.mark.slow
def test_frozen_weights_leave_the_homes_of_those_that_train_when_a_larger_batch_needs_a_disk(tmp_path: Path) -> None:
    plain = Residual(Adapted)
    model, optimizer = compiled(plain, host="1.8MB", disk=f"{tmp_path}:16MiB")
    other = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    store, on_disk = model._mt_model.door.parameters, []
    for rows in (16, 160, 16):
        x = torch.randn(rows, WIDTH)
        assert torch.equal(step(model, optimizer, x), step(plain, other, x))
        there = [place for place in store.places.values() if store.slabs[place.block].tier == "disk"]
        assert not any(place.parameter.requires_grad for place in there)
        on_disk.append([place.name for place in there])
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), plain.parameters(), strict=True))
    assert not on_disk[0] and on_disk[1] and on_disk[1] == on_disk[2]
    report = model.memory_report()
    assert report["peak_host_bytes"] <= report["planned_peak_host_bytes"] <= report["budget_host_bytes"]  # of all programs


@pytest.mark.slow
@pytest.mark.parametrize("width", [pytest.param(WIDTH, marks=pytest.mark.long), WIDTH - 1])
def test_a_layer_larger_than_the_device_trains_in_fragments_beside_an_unneeded_disk(width: int, tmp_path: Path) -> None:
    """Also where rows of that size leave no fragment that a disk could read."""
    torch.manual_seed(0)
    plain, x = nn.Linear(width, 4096), torch.randn(4, width)
    torch.compiler.reset()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, plain)]
    options: dict[str, Any] = {"memory": "1536KiB", "host": "16MB", "disk": f"{tmp_path}:64MiB", "update": "backward"}
    ours: Any = mtcompile.compile(model, optimizer=optimizers[0], device="cpu", **options)
    for _ in range(2):
        losses = []
        for one, optimizer in zip((ours, plain), optimizers, strict=True):
            losses.append(one(x).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)
    assert torch.equal(ours.weight, plain.weight) and "fragments" in str(ours.plan)
    assert ours.memory_report()["peak_device_bytes"] < plain.weight.nbytes
    assert any("not on disk: weight" in note for note in ours.plan.notes) == (width < WIDTH)
    assert mtcompile.plan(plain, {"input": x}, machine="rtx4090", **options).feasible
