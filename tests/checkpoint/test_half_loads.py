"""A load that is stopped at any moment: all of it is there, nothing is, or the model refuses to run and to be saved."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile import checkpoint
from tests.helpers.stopping import equal, stopped_at

BATCH = torch.linspace(-1, 1, 32).view(4, 8)


class Training:
    """A small training, plain or compiled. ``saved``: the checkpoint of its first step."""

    def __init__(self, folder: Path, options: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        if options is not None:
            self.model = mtcompile.compile(self.model, memory="1MiB", optimizer=self.optimizer, **options)
        self.step()
        self.path = checkpoint.save(folder, self.model, self.optimizer, step=1)
        self.saved = self.state()
        self.step()

    def step(self) -> None:
        self.model(BATCH).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.rand(1), random.random()

    def state(self) -> list[Tensor]:
        moments = [value for entry in self.optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
        tensors = (*nn.Module.parameters(self.model), *self.model.buffers(), *moments)
        generators = torch.get_rng_state(), torch.tensor(random.getstate()[1])
        return [tensor.detach().clone() for tensor in (*tensors, *generators)]

    def refuses(self, folder: Path) -> bool:
        refusals = 0
        for use in (lambda: self.model(BATCH), lambda: checkpoint.save(folder, self.model, self.optimizer, step=2)):
            try:
                use()
            except mtcompile.StepError as error:
                assert "before all of" in str(error)
                refusals += 1
        assert refusals in (0, 2)
        return refusals == 2


LOADING = ("/mtcompile/", "/torch/nn/modules/module.py", "/torch/nn/modules/batchnorm.py", "/torch/optim/")
HELD_BACK = ("_tensors", "regular", "verify_files")  # libraries read files there, and Ctrl-C waits for them


def loads(frame: FrameType) -> bool:
    return any(part in frame.f_code.co_filename for part in LOADING) and frame.f_code.co_name not in HELD_BACK


def check_every(training: Training, call: Any, tries: int, folder: Path) -> set[str]:
    """Stops a call that loads at instants all over it. Returns what was left: before, after or said."""
    outcomes = set[str]()
    count = stopped_at(call, 0, loads)
    assert equal(training.state(), training.saved)
    ends = {*range(max(1, count - 400), count, 40), *range(max(1, count - 60), count, 3)}  # the generators come last
    for instant in sorted({*range(1, count, max(1, count // tries)), *ends}):
        call()
        training.step()
        before = training.state()
        stopped_at(call, instant, loads)
        now = training.state()
        left = "before" if equal(now, before) else "after" if equal(now, training.saved) else "half"
        said = training.refuses(folder)
        assert said or left != "half", f"at instant {instant} of {count}, half of it is loaded and nothing is said"
        outcomes.add("said" if said else left)
    call()
    assert equal(training.state(), training.saved) and not training.refuses(folder)
    return outcomes


WAYS: dict[str, dict[str, Any] | None] = {"plain": None, "step": {}, "backward": {"update": "backward"}}


@pytest.mark.parametrize("way", WAYS)
def test_a_load_that_is_stopped(way: str, tmp_path: Path) -> None:
    training = Training(tmp_path / "run", WAYS[way])
    outcomes = check_every(training, lambda: checkpoint.load(training.path, training.model, training.optimizer), 20, tmp_path)
    assert outcomes >= {"before", "said"}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_load_that_is_stopped_at_many_lines(way: str, tmp_path: Path) -> None:
    training = Training(tmp_path / "run", WAYS[way])
    check_every(training, lambda: checkpoint.load(training.path, training.model, training.optimizer), 1000, tmp_path)


@pytest.mark.parametrize("way", ["step", "backward"])
def test_load_state_dict_that_is_stopped(way: str, tmp_path: Path) -> None:
    training = Training(tmp_path / "run", WAYS[way])
    checkpoint.load(training.path, training.model, training.optimizer)
    model, optimizer = copy.deepcopy(training.model.state_dict()), copy.deepcopy(training.optimizer.state_dict())

    def load() -> None:
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(copy.deepcopy(optimizer))

    training.saved = training.state()
    count = stopped_at(load, 0, loads)
    for instant in range(1, count, max(1, count // 20)):
        load()
        training.step()
        before = list(nn.Module.parameters(training.model)), training.state()
        stopped_at(lambda: training.model.load_state_dict(model), instant, loads)
        now, said = training.state(), training.refuses(tmp_path)
        weights = len(before[0])
        whole = equal(now[:weights], before[1][:weights]) or equal(now[:weights], training.saved[:weights])
        assert said or whole, f"at instant {instant} of {count}, half of the model is loaded and nothing is said"


def test_a_load_that_raises_amid_the_weights_is_no_model(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", {})
    state = training.model.state_dict()
    before = training.state()
    nothing = type(state)({"other": torch.ones(1)})
    nothing._metadata = state._metadata
    with pytest.raises(RuntimeError, match="Missing key"):
        training.model.load_state_dict(nothing)
    assert equal(training.state(), before) and not training.refuses(tmp_path)
    wrong = {name: torch.zeros(9, 9) if name == "2.weight" else torch.zeros_like(value) for name, value in state.items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        training.model.load_state_dict(wrong)
    with pytest.raises(mtcompile.StepError, match="load_state_dict of the model ended before all of it was loaded"):
        training.model(BATCH)
    checkpoint.load(training.path, training.model, training.optimizer)
    training.step()
    part = {name: value for name, value in training.model.state_dict().items() if name.startswith("0.")}
    training.model.load_state_dict(part, strict=False)  # a part, as it is asked for
    training.step()
