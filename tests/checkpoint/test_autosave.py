"""Trainings that save themselves: after steps, after minutes, at SIGTERM, at their end and when an error ends them; and what a
save in the middle of an accumulation holds."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile import checkpoint
from mtcompile.checkpoint import shard_writer
from tests.checkpoint.runs import WAYS, Net, Run, seeded
from tests.helpers.stopping import stop, stopped_at

pytestmark = pytest.mark.slow  # it compiles models
AHEAD = {"memory": "40KiB", "update": "backward", "run_ahead": True}


def autosaved(run: Run, folder: Path, **options: Any) -> Any:
    return checkpoint.autosave(folder, run.model, run.optimizer, others={"scheduler": run.scheduler}, **options)


def uninterrupted(steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and final state of a plain run."""
    seeded()
    run = Run()
    return [run.step() for _ in range(steps)], run.state()


def goes_on(folder: Path, steps: int) -> int:
    """Loads into a plain run and trains on. Returns the step that it began at. The bits must be those of a plain run."""
    losses, state = uninterrupted(steps)
    run = Run()
    step = run.load(folder).step
    assert all(map(torch.equal, losses[step:], [run.step() for _ in range(step, steps)]))
    assert all(map(torch.equal, state[:7], run.state()[:7]))  # parameters and buffers
    return step


@pytest.mark.parametrize("background", [False, True])
def test_it_saves_every_few_steps_and_at_the_end(background: bool, tmp_path: Path) -> None:
    seeded()
    run = Run()
    with autosaved(run, tmp_path, every=2, keep=0, background=background) as saver:
        for step in range(1, 6):
            run.step()
            assert saver.after(step, {"seen": step})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004", "step-00000005"]
    assert checkpoint.inspect(tmp_path).extra == {"seen": 5} and goes_on(tmp_path / "step-00000002", 6) == 2


def test_it_saves_when_minutes_have_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with checkpoint.autosave(tmp_path, nn.Linear(2, 2), minutes=10, keep=0) as saver:
        for step in range(1, 9):
            now[0] += 240.0
            saver.after(step)
    assert [path.name[-1] for path in sorted(tmp_path.glob("step-*"))] == ["3", "6", "8"]


def test_sigterm_saves_and_ends_it(tmp_path: Path) -> None:
    seeded()
    run, before, step = Run(), signal.getsignal(signal.SIGTERM), 0
    with autosaved(run, tmp_path) as saver:
        while not saver.stopping:
            if (step := step + 1) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            run.step()
            assert saver.after(step) == (step < 3)
        assert (tmp_path / "step-00000003").exists()
    assert signal.getsignal(signal.SIGTERM) is before and goes_on(tmp_path, 5) == 3


@pytest.mark.parametrize("way", [None, AHEAD], ids=["plain", "run ahead"])
@pytest.mark.parametrize("where", ["forward", "step"])
def test_ctrl_c_saves_the_current_step(way: dict[str, Any] | None, where: str, tmp_path: Path) -> None:
    seeded()
    run, step = Run(way), 0

    def interrupt(*_: Any) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    if where == "step":
        run.optimizer.register_step_pre_hook(interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), autosaved(run, tmp_path) as saver:
            for step in range(1, 9):
                if where == "forward":
                    interrupt()
                run.step()
                saver.after(step)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert step == 3 and goes_on(tmp_path, 5) == 3


class Fault(Exception):
    pass


@pytest.mark.parametrize("way", [None, WAYS["small"], AHEAD], ids=["plain", "small", "run ahead"])
@pytest.mark.parametrize("where", ["before", "forward", "backward", "step"])
def test_an_error_saves_the_last_whole_step(way: dict[str, Any] | None, where: str, tmp_path: Path) -> None:
    """Running statistics, generators and the scheduler are those of that step, though the next one has begun."""
    seeded()
    run = Run(way)
    lost = where == "step" or (where == "backward" and way is AHEAD)
    said = "Step 2, the last that had ended, " + ("(is not|could not be) saved" if lost else "was saved")
    with pytest.warns(UserWarning, match=said), pytest.raises(Fault), autosaved(run, tmp_path) as saver:
        for step in (1, 2):
            run.step()
            saver.after(step)
        torch.rand(3)
        if where != "before":
            loss = run.model(torch.arange(8), torch.arange(8))
            if where != "forward":
                loss.backward()
            if where == "step":
                run.optimizer.step()
        raise Fault
    assert (checkpoint.latest(tmp_path) is None) == lost
    assert lost or goes_on(tmp_path, 4) == 2


def noted(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(("/mtcompile/checkpoint/autosave.py", "/mtcompile/reading.py"))


def ended_within_after(way: dict[str, Any] | None, folder: Path, instant: int, stop: Callable[[], None]) -> int:
    """Trains two steps, and stops the second one's ``after`` at an instant; 0: only counts those that note the step."""
    seeded()
    run, count = Run(way), 0
    with warnings.catch_warnings(), contextlib.suppress(Fault, KeyboardInterrupt), autosaved(run, folder) as saver:
        warnings.simplefilter("ignore")
        run.step()
        saver.after(1)
        if stop is ctrl_c:
            stop()  # the first waits for after
        run.step()
        if not instant:
            return stopped_at(lambda: saver.note(2), 0, noted)
        count = stopped_at(lambda: saver.after(2), instant, noted, stop)
        raise Fault
    return count


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(None, id="plain", marks=pytest.mark.long),
        pytest.param({"memory": "40KiB", "update": "backward"}, id="backward"),
    ],
)
@pytest.mark.parametrize("stop", [stop, ctrl_c])
def test_what_is_saved_is_one_step_wherever_after_stops(
    stop: Callable[[], None], way: dict[str, Any] | None, tmp_path: Path
) -> None:
    """A second Ctrl-C waits until the step is noted, so that it is saved; what cannot wait may lose it."""
    seeded()
    run, loaded = Run(), Run()
    whole = [[*run.state(), torch.get_rng_state()] for _ in range(3) if run.step() is not None]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        count = ended_within_after(way, tmp_path / "count", 0, stop)
        saved = list[int]()
        for instant in range(1, count + 10, 1 if way is None else 9):
            folder = tmp_path / str(instant)
            ended_within_after(way, folder, instant, stop)
            saved.append(0)
            if checkpoint.latest(folder) is not None:
                saved[-1] = loaded.load(folder).step
                now = [*loaded.state(), torch.get_rng_state()]
                assert all(map(torch.equal, now, whole[saved[-1] - 1])), f"instant {instant} of {count}"
                assert loaded.scheduler.last_epoch == saved[-1]
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(saved) <= {0, 2} and saved[-1] == 2
    if stop is ctrl_c and way is None:
        entered = saved.index(2)  # lines until Ctrl-C is held back: a step of which nothing is noted is lost
        assert entered < len(saved) // 2 and set(saved[entered:]) == {2}


class Counted(nn.Linear):
    """Counts its forwards, and saves that beside its tensors."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_what_changes_after_the_step_is_saved_as_it_was_then(tmp_path: Path) -> None:
    model, average = Counted(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    others, extra = {"scheduler": scheduler, "average": average}, {"seen": torch.zeros(2)}
    said = "Step 1, the last that had ended, was saved"
    saving = checkpoint.autosave(tmp_path, model, optimizer, others=others)
    with pytest.warns(UserWarning, match=said), pytest.raises(Fault), saving as saver:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        saver.after(1, extra)
        then = average.weight.detach().clone()
        scheduler.step()  # a new epoch begins
        optimizer.param_groups[0]["momentum"] = 0.9
        average.weight.data.zero_()
        extra["seen"] += 1
        model(torch.ones(1, 2))
        raise Fault
    assert model.calls == 2
    loaded = checkpoint.load(tmp_path, model, optimizer, others=others)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], scheduler.last_epoch, model.calls) == (1.0, 0.5, 0, 1)
    assert torch.equal(average.weight, then) and torch.equal(loaded.extra["seen"], torch.zeros(2))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("through_data", [False, True])
def test_weights_that_were_swapped_are_not_those_of_the_step(compiled: bool, through_data: bool, tmp_path: Path) -> None:
    model: Any = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = mtcompile.compile(model, optimizer=optimizer, memory="1MiB") if compiled else model
    said = "is not saved: parameters, .* have been changed since"
    saving = checkpoint.autosave(tmp_path, model, optimizer)
    with pytest.warns(UserWarning, match=said), pytest.raises(Fault), saving as saver:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        saver.after(1)
        with torch.no_grad():  # an average, for an evaluation
            (model.weight.data if through_data else model.weight).mul_(0.5)
        raise Fault
    assert checkpoint.latest(tmp_path) is None


def test_a_loss_that_is_not_finite_stops_and_saves(tmp_path: Path) -> None:
    seeded()
    run = Run({"memory": "64MiB", "update": "backward", "nonfinite": "stop"})
    said = "Step 2, the last that had ended, was saved"
    with pytest.warns(UserWarning, match=said), pytest.raises(mtcompile.StepError), autosaved(run, tmp_path) as saver:
        for step in (1, 2):
            run.step()
            saver.after(step)
        (run.model(torch.arange(8), torch.arange(8)) * float("nan")).backward()
    assert goes_on(tmp_path, 4) == 2


def accumulated(options: dict[str, Any] | None, folder: Path | None = None, before: Path | None = None) -> list[Tensor]:
    """Two steps of three micro-batches, with a scaler. ``folder``: saves there in the middle of the second; ``before``: goes on
    from there."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    others = {"scaler": scaler}
    if options is not None:
        model = mtcompile.compile(model, optimizer=optimizer, **options)
    done = 0
    if before is not None:
        model(torch.randn(4, 16)).sum().backward()  # gradients of something else
        done = checkpoint.load(before, model, optimizer, others=others).step
    for batch in range(done, 6):
        scaler.scale(model(torch.randn(4, 16)).square().mean() / 3).backward()
        if batch == 4 and folder is not None:
            checkpoint.save(folder, model, optimizer, step=batch + 1, others=others)
        if batch % 3 == 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    moments = [value for entry in optimizer.state.values() for key, value in sorted(entry.items())]
    return [torch.tensor(scaler.get_scale()), *(p.detach().clone() for p in model.parameters()), *moments]


@pytest.mark.parametrize("options", [None, {"memory": "40KiB"}, {"memory": "64MiB"}], ids=["plain", "small", "resident"])
def test_a_save_in_the_middle_of_an_accumulation(options: dict[str, Any] | None, tmp_path: Path) -> None:
    expected = accumulated(None)
    assert all(map(torch.equal, expected, accumulated(options, tmp_path)))
    assert all(map(torch.equal, expected, accumulated(options, before=tmp_path)))


def test_gradients_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.arange(2)).sum().backward()
    with pytest.raises(TypeError, match=r"expected dense gradients.* found torch.sparse_coo for weight"):
        checkpoint.save(tmp_path, embedding, step=1)
    embedding.zero_grad()
    checkpoint.save(tmp_path, embedding, step=1)
    checkpoint.load(tmp_path, embedding)


def test_a_loader_without_state_gets_a_warning(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    loader: Any = torch.utils.data.DataLoader([torch.ones(2)])
    for use in (
        lambda: checkpoint.save(tmp_path, model, step=1, others={"loader": loader}),
        lambda: checkpoint.load(tmp_path, model, others={"loader": loader}),
    ):
        with pytest.warns(UserWarning, match="loader is a DataLoader without state_dict"):
            use()


def test_masters_are_joined_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before: all of them take 4 bytes per parameter."""
    monkeypatch.setattr(shard_writer, "_PIECE_NBYTES", 64)
    options = {"memory": "64MiB", "precision": "bf16-master32"}
    seeded()
    run = Run(options, Net(norm=nn.LayerNorm))
    run.step()
    largest = []
    plain = mtcompile.optim.master_weights.joined

    def counted(high: Tensor, low: Tensor) -> Tensor:
        largest.append(high.numel())
        return plain(high, low)

    monkeypatch.setattr(mtcompile.optim.master_weights, "joined", counted)
    path = run.save(tmp_path)
    assert max(largest) == 16
    monkeypatch.undo()
    masters = mtcompile.master_parameters(run.model)
    other = Run(options, Net(norm=nn.LayerNorm))
    other.load(path)
    assert all(torch.equal(masters[name], value) for name, value in mtcompile.master_parameters(other.model).items())
    assert isinstance(run.optimizer.state_dict()["state"][0]["master"], Tensor)
