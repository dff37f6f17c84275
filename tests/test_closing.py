"""``close()`` and ``del model``: everything that mtcompile holds is free at once, and the weights are those of the training."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile.optim.backward import kernels as backward_kernels
from mtcompile.runtime.optim.operands import split

pytestmark = pytest.mark.slow  # it compiles many models

WAYS: dict[str, dict[str, Any]] = {
    "step": {},
    "resident": {"memory": "64MiB"},
    "backward": {"update": "backward", "max_grad_norm": 1.0},
    "ahead": {"update": "backward", "run_ahead": True},
    "masters": {"precision": "bf16-master32", "update": "backward", "run_ahead": True},
    "disk": {"host": "900KiB", "update": "backward"},
}


def ways(quick: str) -> list[Any]:
    return [pytest.param(way, marks=[pytest.mark.long] * (way != quick)) for way in WAYS]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


class Training:
    def __init__(self, way: str, folder: Path) -> None:
        options = {"memory": "700KiB", **WAYS[way]}
        if way == "disk":
            options["disk"] = f"{folder}:64MiB"
        model = Small()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model: Any = mtcompile.compile(model, optimizer=self.optimizer, **options)
        self.batch = torch.linspace(-1, 1, 8 * 64, dtype=next(model.parameters()).dtype).view(8, 64)
        self.steps(2)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.model(self.batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """What is freed inside is freed by reference counts. A capture leaves cycles of Dynamo's, which hold the model."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def descriptors() -> set[str]:
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return {os.readlink(link) for link in links if link.is_symlink()}


def mine() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mtcompile")]


def memory_of(model: Any) -> list[weakref.ref[Any]]:
    """All that holds memory for a model: arenas, homes, programs, and the objects around them."""
    compiled = model._mt_model
    session, store = compiled.session, compiled.door.parameters
    memory = [*session.arenas._arenas.values(), *(slab.memory for slab in store.slabs.values())]
    disk = [] if store.disk is None else [store.disk]
    return [weakref.ref(each) for each in (*memory, *disk, *compiled.programs, session, store, compiled)]


@pytest.mark.parametrize("way", ways("ahead"))
def test_a_closed_model_is_a_plain_one(way: str, tmp_path: Path) -> None:
    before = descriptors()
    training, plain = Training(way, tmp_path), Training("step", tmp_path)
    assert way != "disk" or training.model.memory_report()["peak_disk_bytes"] > 0
    references, weights = memory_of(training.model), [p.detach().clone() for p in training.model.parameters()]
    with no_collection():
        training.model.close()
        training.model.close()
        assert [reference() for reference in references] == [None] * len(references)
    assert not mine() and descriptors() <= before
    parameters = list(training.model.parameters())
    assert all(map(torch.equal, parameters, weights))
    assert all(p.device.type == "cpu" and p.untyped_storage().nbytes() == p.nbytes for p in parameters)
    if way == "masters":
        exact = {name: value.clone() for name, value in mtcompile.master_parameters(training.model).items()}
        training.steps(1)
        updated = mtcompile.master_parameters(training.model)
        assert all(updated[name].dtype == torch.float32 and not torch.equal(updated[name], exact[name]) for name in exact)
        assert all(map(torch.equal, training.model.parameters(), (split(value)[0] for value in updated.values())))
        with pytest.raises(TypeError, match="closed with fp32 masters"):
            mtcompile.compile(training.model)
    elif way != "backward":  # which clips
        training.steps(2)
        plain.steps(2)
        assert all(map(torch.equal, training.model.parameters(), plain.model.parameters()))
        again: Any = mtcompile.compile(training.model, memory="700KiB", optimizer=training.optimizer)
        assert again is training.model
        training.steps(1)
        plain.steps(1)
        assert again.plan is not None and all(map(torch.equal, again.parameters(), plain.model.parameters()))
    else:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)  # which update="backward" refuses


@pytest.mark.parametrize("way", ways("disk"))
def test_a_deleted_model_is_gone_at_once(way: str, tmp_path: Path) -> None:
    before = descriptors()
    training = Training(way, tmp_path)
    with torch.no_grad():
        training.model(training.batch)
    references = [weakref.ref(training.model), *memory_of(training.model)]
    with no_collection():
        del training
        assert [reference() for reference in references] == [None] * len(references)
    assert not mine() and descriptors() <= before


def test_the_optimizer_of_a_deleted_model_keeps_its_parameters(tmp_path: Path) -> None:
    training = Training("step", tmp_path)
    optimizer, weights = training.optimizer, [p.detach().clone() for p in training.model.parameters()]
    del training
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], weights))


def test_a_backward_after_the_model_is_deleted_or_closed(tmp_path: Path) -> None:
    training, other = Training("step", tmp_path), Training("step", tmp_path)
    loss, parameters = training.model(training.batch), list(training.model.parameters())
    other.model(training.batch).backward()
    del training
    loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(parameters, other.model.parameters(), strict=True))
    loss = other.model(other.batch)
    other.model.close()
    with pytest.raises(mtcompile.StepError, match=r"after model\.close\(\)"):
        loss.backward()


def test_a_closed_model_says_so(tmp_path: Path) -> None:
    training = Training("step", tmp_path)
    with training.model as model:
        assert model is training.model
    for ask in (lambda: model.plan, lambda: model.schedule, model.memory_report, lambda: model.bind(training.optimizer)):
        with pytest.raises(mtcompile.StepError, match="one that was closed"):
            ask()
    model.synchronize()
    assert model.double() is model and next(model.parameters()).dtype == torch.float64
    copied = copy.deepcopy(model)
    assert isinstance(copied, Small) and not copied._state_dict_pre_hooks and not copied._load_state_dict_pre_hooks
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="of the user's"), Training("step", tmp_path).model as model:
        raise ValueError("of the user's")
    assert model._mt_model is None


def test_updates_that_failed_behind_the_forward_are_told_of_once_closed(tmp_path: Path, monkeypatch: Any) -> None:
    training = Training("ahead", tmp_path)
    training.model.synchronize()  # an update of an earlier step would fail too

    def fail(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(backward_kernels, "update_plain", fail)
    with pytest.raises(MemoryError):
        training.model(training.batch).backward()
        training.model.close()
    assert training.model._mt_model is None or training.model.close() is None
    with pytest.raises(mtcompile.StepError, match="Load a checkpoint"):
        training.model.state_dict()
