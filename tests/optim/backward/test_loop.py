"""Loops around a model with update="backward": each event has plain PyTorch's numbers, or raises before anything changed."""

from __future__ import annotations

import copy
import gc
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import mtcompile
from mtcompile.errors import StepError

pytestmark = pytest.mark.slow  # it compiles some models

WIDTH = 4


class Loop:
    """A model, its optimizer, and the events of a loop around them. ``seen``: what the loop sees."""

    def __init__(self, update: str | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.other = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.first = next(self.model.parameters())
        self.hooks: list[Any] = []
        self.start = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        if update is not None:
            mtcompile.compile(self.model, optimizer=self.optimizer, update=update, memory="1MiB", device="cpu", **options)
        self.restart()

    def restart(self) -> None:
        self.model.load_state_dict(self.start[0])
        self.optimizer.load_state_dict(self.start[1])
        self.model.zero_grad()
        self.model.requires_grad_(True)
        self.count, self.stepped, self.kept = 0, True, torch.zeros(())
        for hook in self.hooks:
            hook.remove()
        self.seen: list[Tensor] = []

    def batch(self) -> Tensor:
        self.count += 1
        return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(self.count))

    def loss(self) -> Tensor:
        loss: Tensor = self.model(self.batch()).square().mean()
        self.seen.append(loss.detach())
        return loss

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def same(self, other: Loop) -> bool:
        """Compares all that may be compared: between a backward and its step, weights are those after it, as is documented."""
        if not all(map(torch.equal, self.seen, other.seen)):
            return False
        if not self.stepped:
            return True
        weights = zip(self.model.parameters(), other.model.parameters(), strict=True)
        states = (o.optimizer.state_dict()["state"] for o in (self, other))
        rows = [{(i, k): torch.as_tensor(v) for i, row in s.items() for k, v in row.items()} for s in states]
        equal = rows[0].keys() == rows[1].keys() and all(torch.equal(rows[0][key], rows[1][key]) for key in rows[0])
        return equal and all(torch.equal(p, q) for p, q in weights)


def train(loop: Loop, loss: Callable[[], Tensor] | None = None) -> None:
    (loop.loss() if loss is None else loss()).backward()
    loop.stepped = False


def step(loop: Loop, *closure: Any) -> None:
    loop.optimizer.step(*closure)
    loop.stepped = True


def by_closure(loop: Loop, penalty: float = 0.0, clears: bool = True) -> None:
    def closure() -> Tensor:
        if clears:
            loop.optimizer.zero_grad()
        loss = loop.loss()
        if penalty:
            loss = loss + penalty * loop.first.square().sum()
        loss.backward()
        return loss

    step(loop, closure)


def scale(loop: Loop) -> None:
    for gradient in loop.gradients():
        gradient.mul_(0.5)


def clip_in_two(loop: Loop) -> None:
    clip_grads_with_norm_(loop.model.parameters(), 0.01, get_total_norm(loop.gradients()))


def replace(loop: Loop) -> None:
    if loop.first.grad is not None:
        loop.first.grad = torch.ones_like(loop.first)


def clear_one(loop: Loop) -> None:
    loop.first.grad = None


def clear_by_hand(loop: Loop) -> None:
    for gradient in loop.gradients():
        gradient.zero_()


def change_rate(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] *= 0.5


def evaluate(loop: Loop) -> None:
    with torch.no_grad():
        loop.seen.append(loop.model(loop.batch()))


def load(loop: Loop) -> None:
    loop.model.load_state_dict(loop.start[0])
    loop.optimizer.load_state_dict(loop.start[1])
    loop.stepped = True


def change_weights(loop: Loop) -> None:
    with torch.no_grad():
        loop.first.mul_(0.5)


def change_weights_unseen(loop: Loop) -> None:
    loop.first.data.mul_(0.5)


def clear_state(loop: Loop) -> None:
    loop.optimizer.state.clear()


def change_state(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def load_one(loop: Loop, which: int) -> None:
    (loop.model, loop.optimizer)[which].load_state_dict(loop.start[which])


def save(loop: Loop) -> None:
    weights, rows = loop.model.state_dict(), sorted(loop.optimizer.state_dict()["state"].items())
    loop.seen += [value.clone() for value in (*weights.values(), *(v for _, row in rows for v in row.values()))]


def skip(loop: Loop) -> None:
    loop.kept = loop.loss()  # without a backward


def add_up(loop: Loop) -> None:
    loop.first.square().sum().backward()


def through_inputs(loop: Loop) -> None:
    x = loop.batch().requires_grad_()
    train(loop, lambda: loop.model(x).square().mean())
    assert x.grad is not None
    loop.seen.append(x.grad)


def frozen_through_inputs(loop: Loop) -> None:
    loop.model.requires_grad_(False)
    x = loop.batch().requires_grad_()
    loop.model(x).square().mean().backward()
    loop.model.requires_grad_(True)
    assert x.grad is not None
    loop.seen.append(x.grad)


def hook_that_scales(loop: Loop) -> None:
    loop.hooks.append(loop.optimizer.register_step_pre_hook(lambda *_: scale(loop)))


def freeze_late(loop: Loop) -> None:
    loss = loop.loss()
    loop.first.requires_grad_(False)
    try:
        train(loop, lambda: loss)
    finally:
        loop.first.requires_grad_(True)


EVENTS: dict[str, Callable[[Loop], Any]] = {
    "train": train,
    "train frozen": freeze_late,
    "train with a penalty": lambda loop: train(loop, lambda: loop.loss() + loop.first.square().sum()),
    "train through inputs": through_inputs,
    "through the frozen model": frozen_through_inputs,
    "add up outside": add_up,
    "zero_grad": lambda loop: loop.optimizer.zero_grad(),
    "zeros": lambda loop: loop.model.zero_grad(set_to_none=False),
    "zeros by hand": clear_by_hand,
    "clear one": clear_one,
    "replace one": replace,
    "scale": scale,
    "clip": lambda loop: loop.seen.append(clip_grad_norm_(loop.model.parameters(), 0.01)),
    "clip in two": clip_in_two,
    "read": lambda loop: loop.seen.extend(gradient.clone() for gradient in loop.gradients()),
    "step": step,
    "hook that scales": hook_that_scales,
    "hook that looks on": lambda loop: loop.hooks.append(loop.optimizer.register_step_pre_hook(lambda *_: None)),
    "step(closure)": by_closure,
    "step(closure that adds up)": lambda loop: by_closure(loop, clears=False),
    "step(closure with a penalty)": lambda loop: by_closure(loop, penalty=0.1),
    "step(closure without a backward)": lambda loop: step(loop, lambda: None),
    "another optimizer's step": lambda loop: loop.other.step(),
    "change the rate": change_rate,
    "evaluate": evaluate,
    "load": load,
    "load the model": lambda loop: load_one(loop, 0),
    "load the optimizer": lambda loop: load_one(loop, 1),
    "save": save,
    "skip": skip,
    "train with the one skipped": lambda loop: train(loop, lambda: loop.loss() + loop.kept),
    "train at another size": lambda loop: train(loop, lambda: loop.model(loop.batch()[:5]).square().mean()),
    "change weights": change_weights,
    "change weights through .data": change_weights_unseen,
    "change state": change_state,
    "clear state": clear_state,
}


def run(plain: Loop, ours: Loop, events: Sequence[str]) -> str | None:
    """Runs a sequence; returns the event that was refused, None if all were as plain. Fails for other numbers."""
    plain.restart()
    ours.restart()
    for event in events:
        before = [p.detach().clone() for p in ours.model.parameters()]
        EVENTS[event](plain)
        try:
            EVENTS[event](ours)
        except StepError as error:
            text = str(error)
            assert "Load a checkpoint" in text or all(map(torch.equal, before, ours.model.parameters())), (events, event, text)
            return event
        assert plain.same(ours), f"after {event!r} of {list(events)}"
    return None


@pytest.fixture(scope="module")
def loops() -> tuple[Loop, Loop]:
    return Loop(None), Loop("backward")


def test_every_event_after_two_others_is_plain_or_refused(loops: tuple[Loop, Loop]) -> None:
    """What is left after the last event shows in a call or a step after it."""
    refused = {
        (event, *more): run(*loops, ("train", event, *more, last))
        for event, last in itertools.product(EVENTS, ("evaluate", "step"))
        for more in ((), ("zero_grad",), ("step",))
    }
    assert refused["step", "zero_grad"] is None and refused["change the rate", "step"] == "step"
    assert run(*loops, ("hook that scales", "train", "step")) == run(*loops, ("train", "hook that scales", "step")) == "step"
    assert refused["scale",] == "scale" and refused["step",] in (None, "step") and refused["zero_grad",] == "step"


def test_what_people_write_runs(loops: tuple[Loop, Loop]) -> None:
    usual = ("train", "step", "zero_grad")
    for events in (
        ("hook that looks on", *usual * 2),
        ("zero_grad", "train", "step") * 2,
        ("train", "step", "zeros") * 2,
        ("skip", *usual, "skip", "skip", *usual, "save"),
        ("train", "step", "evaluate", "zero_grad", "train at another size", "step", "save"),
        ("train", "step", "zeros by hand") * 2,
        ("step(closure)",) * 3,
        ("train", "step(closure without a backward)", "zero_grad") * 2,
        (*usual, "through the frozen model", *usual),
        (*usual, "change the rate", "evaluate", *usual, "load", *usual),
        (*usual, "change weights", *usual, "change state", *usual, "clear state", *usual),
        ("add up outside", "step", "zero_grad", *usual),
    ):
        assert run(*loops, events) is None, events


def test_before_the_first_update_a_backward_is_refused_whose_updates_would_not_be_all(loops: tuple[Loop, Loop]) -> None:
    for event in ("train with a penalty", "train through inputs", "train frozen", "step(closure with a penalty)"):
        assert run(*loops, (event,)) == event


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.long)])
def test_drawn_loops_are_plain_or_refused(loops: tuple[Loop, Loop], count: int) -> None:
    usual = ("train", "step", "zero_grad")
    for seed in range(count):
        drawn = random.Random(seed)
        events: list[str] = []
        for place in itertools.cycle(usual):
            events.append(place if drawn.random() < 0.75 else drawn.choice(list(EVENTS)))
            if len(events) == 12:
                break
        run(*loops, events)


def test_state_is_whole_for_whoever_looks_at_it_while_updates_run_on() -> None:
    plain, ours = Loop(None), Loop("backward", run_ahead=True, max_grad_norm=0.01)
    norms = []
    for _ in range(3):
        for loop in (plain, ours):
            train(loop)
            if loop is plain:
                norms.append(clip_grad_norm_(loop.model.parameters(), 0.01))
            step(loop)
            loop.optimizer.zero_grad()
        assert ours.model.grad_norm == float(norms[-1])
        for p, q in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
            assert torch.equal(plain.optimizer.state[p]["exp_avg"], ours.optimizer.state[q]["exp_avg"])
            plain.optimizer.state[p]["exp_avg"].mul_(0.5)
            ours.optimizer.state[q]["exp_avg"].mul_(0.5)
    assert plain.same(ours) and copy.deepcopy(ours.optimizer).state_dict()["state"].keys() == {0, 1, 2, 3}


def test_a_head_that_is_replaced_between_steps_leaves_nothing_behind() -> None:
    weights = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if ours:
            mtcompile.compile(model, optimizer=optimizer, update="backward", memory="1MiB", device="cpu")
        model(torch.ones(3, WIDTH)).square().mean().backward()
        optimizer.step()
        model[1] = nn.Linear(WIDTH, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if ours:
            model.bind(optimizer)  # type: ignore[operator]
        model[0].zero_grad()
        model(torch.ones(3, WIDTH)).square().mean().backward()
        if ours:
            with pytest.raises(StepError, match="has used this gradient"):
                model[0].weight.grad.data.mul_(0.5)
        optimizer.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


def test_an_optimizer_of_two_models_is_refused() -> None:
    models = [nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    options: dict[str, Any] = {"optimizer": optimizer, "update": "backward", "memory": "1MiB", "device": "cpu"}
    mtcompile.compile(models[0], **options)
    with pytest.raises(StepError, match="found that of another compiled model"):
        mtcompile.compile(models[1], **options)
    del models[0]
    gc.collect()
    mtcompile.compile(models[0], **options)
