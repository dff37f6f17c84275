"""update="backward": the bits of the ordinary loop, whatever the budget and the order; refusals instead of silently other
numbers; nothing half done that is not said."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile.errors import StepError
from mtcompile.models.decoders import Decoder, fake
from mtcompile.models.shapes import Shape
from mtcompile.optim.written_update import norm_in_fp32
from mtcompile.passes.analysis.cost import Machine
from mtcompile.runtime.optim import host_kernels
from mtcompile.runtime.optim.host_kernels import nonfinite
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.verify import ScheduleError, verify
from mtcompile.torch_private import UsedGradient, cpu_allocator_peak
from tests.helpers.decoder import adamw, batch, same, state
from tests.helpers.decoder import small_decoder as made
from tests.helpers.stacks import Residual

pytestmark = pytest.mark.slow  # it compiles many models

RESIDENT, SMALL = "64MiB", "1MiB"
Optimizer = Callable[..., torch.optim.Optimizer]


def deep(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(Shape(64, 160, layers, 2, 1, 256, head_dim=32, dtype=torch.float32)).train()


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def compiled(
    memory: str = SMALL, optimizer: Optimizer = adamw, model: nn.Module | None = None, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    model = made() if model is None else model
    bound = optimizer(model.parameters())
    options = {"update": "backward", "device": "cpu", "memory": memory} | options
    return mtcompile.compile(model, optimizer=bound, **options), bound


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3, clip: float | None = None) -> list[Tensor]:
    losses = []
    for step in range(steps):
        loss = model(**batch(step))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def plain(optimizer: Optimizer = adamw, steps: int = 3, clip: float | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = made()
    bound = optimizer(model.parameters())
    losses = train(model, bound, steps, clip)
    return losses, state(model, bound)


# ------------------------------------------------------------------------------------------------------------ the bits


@pytest.mark.parametrize(
    ("memory", "clip", "run_ahead"),
    [
        (RESIDENT, None, False),
        (SMALL, 0.5, True),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((RESIDENT, None, True), *((RESIDENT, 0.5, each) for each in (False, True)))
        ),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((SMALL, 0.5, False), *((SMALL, None, each) for each in (False, True)))
        ),
    ],
)
def test_losses_weights_and_state_are_the_plain_loops(
    memory: str, clip: float | None, run_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    losses, wanted = plain(clip=clip)
    model, optimizer = compiled(memory, max_grad_norm=clip, run_ahead=run_ahead)
    assert all(map(torch.equal, losses, train(model, optimizer)))
    assert same(wanted, state(model, optimizer))
    assert all(parameter.grad is None for parameter in model.parameters())
    report = model.memory_report()
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= report["budget_device_bytes"]
    assert (model.grad_norm is not None) == (clip is not None)


@pytest.mark.parametrize(
    ("host_gbps", "clip"),
    [(0.05, None), (1.0, 0.5), *(pytest.param(*each, marks=pytest.mark.long) for each in ((0.05, 0.5), (1.0, None)))],
)
def test_large_parameters_and_a_slow_host_change_no_bits(
    host_gbps: float, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most parameters have homes of their own, and the host updates them in the order in which they are due."""
    monkeypatch.setattr("mtcompile.passes.joint.build._LARGE", 4096)
    monkeypatch.setenv("MT_CHECK", "1")
    losses, wanted = plain(clip=clip)
    model, optimizer = compiled("700KiB", max_grad_norm=clip, run_ahead=True, throttle=replace(FAIR_HOST, host_gbps=host_gbps))
    assert all(map(torch.equal, losses, train(model, optimizer)))
    assert same(wanted, state(model, optimizer))
    assert any(i.label.startswith("fetch_blocks_0_down_weight") for i in model.schedule.instructions)
    stored = [i.label for i in model.schedule.instructions if i.label.startswith("store_") and i.label.endswith("_weight")]
    assert len(stored) >= 2  # the gradients of a region leave home by home


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.long), 0.5])
def test_masters_are_those_of_the_ordinary_loop(clip: float | None) -> None:
    """The norm is fp32 there; torch's of bf16 gradients is rounded, so clipping is compared where it changes nothing."""
    ordinary, bound = compiled(update="step", precision="bf16-master32")
    losses = train(ordinary, bound)
    model, optimizer = compiled(precision="bf16-master32", max_grad_norm=clip and 1e3, run_ahead=True)
    assert all(map(torch.equal, losses, train(model, optimizer)))
    assert same(state(ordinary, bound), state(model, optimizer))
    wanted = mtcompile.master_parameters(ordinary)
    assert same(wanted, mtcompile.master_parameters(model))


def test_the_norm_of_masters_gradients_is_fp32() -> None:
    ordinary, bound = compiled(update="step", precision="bf16-master32")
    ordinary(**batch(0)).backward()
    wanted = torch.linalg.vector_norm(torch.stack([p.grad.float().norm() for p in ordinary.parameters()]))
    model, _ = compiled(precision="bf16-master32", max_grad_norm=0.5)
    model(**batch(0)).backward()
    assert model.grad_norm == float(wanted)
    del bound


def test_that_norm_takes_no_room_of_the_gradients_size() -> None:
    grad = torch.randn(1000, 3000, dtype=torch.bfloat16)
    with cpu_allocator_peak() as peak:
        norm = norm_in_fp32(grad)
    assert peak.nbytes is not None and peak.nbytes < 2**14
    assert math.isclose(norm, grad.double().norm(), rel_tol=1e-5)
    assert torch.equal(norm_in_fp32(grad.t()), norm)  # summed in the order in memory
    assert torch.equal(norm_in_fp32(grad[:, :50]), norm_in_fp32(grad[:, :50].contiguous()))


_OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW fused": lambda p: adamw(p, fused=True),
    "AdamW foreach": lambda p: adamw(p, foreach=True),
    "AdamW amsgrad": lambda p: adamw(p, amsgrad=True),
    "AdamW tensor lr": lambda p: adamw(p, lr=torch.tensor(2e-3)),
    **{
        name: lambda p, name=name: getattr(torch.optim, name)(p, lr=1e-3)  # type: ignore[misc]
        for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
}


_FEW = ("AdamW fused", "ASGD")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n not in _FEW)) for n in _OPTIMIZERS])
def test_every_optimizer_that_looks_at_one_parameter_at_a_time(name: str) -> None:
    losses, wanted = plain(_OPTIMIZERS[name])
    model, optimizer = compiled(optimizer=_OPTIMIZERS[name], run_ahead=True)
    assert all(map(torch.equal, losses, train(model, optimizer)))
    assert same(wanted, state(model, optimizer))


def test_a_backward_for_some_inputs_is_refused_before_anything_changes() -> None:
    model, _ = compiled()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(mtcompile.StepError, match=r"backward\(inputs=\.\.\.\) was called"):
        model(**batch(0)).backward(inputs=[next(model.parameters())])
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def grouped(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    named = list(model.named_parameters())
    flat = [p for _, p in named if p.dim() < 2]
    rest = [p for _, p in named if p.dim() >= 2]
    optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": flat, "lr": 5e-3}], lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[2e-3, 6e-3], total_steps=5)


def test_groups_schedulers_and_hooks_of_the_optimizer() -> None:
    """The rate of a step is what it was when its backward began, though the scheduler moves on while updates run."""

    def run(model: Any, optimizer: torch.optim.Optimizer, scheduler: Any) -> tuple[list[Tensor], int]:
        called = []
        optimizer.register_step_post_hook(lambda *_: called.append(1))
        losses = []
        for step in range(4):
            loss = model(**batch(step))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, len(called)

    reference = made()
    bound, scheduler = grouped(reference)
    wanted = run(reference, bound, scheduler)
    model = made()
    optimizer, rates = grouped(model)
    mtcompile.compile(model, optimizer=optimizer, memory=SMALL, device="cpu", update="backward", run_ahead=True)
    losses, calls = run(model, optimizer, rates)
    assert all(map(torch.equal, wanted[0], losses)) and calls == wanted[1] == 4
    assert same(state(reference, bound), state(model, optimizer))


def test_what_the_optimizer_does_not_have_keeps_its_gradient() -> None:
    reference, model = made(), made()
    names = [name for name, _ in model.named_parameters()][:3]
    for each in (reference, model):
        dict(each.named_parameters())[names[2]].requires_grad_(False)
    optimizer = adamw([p for n, p in model.named_parameters() if n not in names])
    mtcompile.compile(model, optimizer=optimizer, memory=SMALL, device="cpu", update="backward")
    model(**batch(0)).backward()
    reference(**batch(0)).backward()
    theirs, mine = dict(reference.named_parameters()), dict(model.named_parameters())
    for name in names[:2]:
        assert torch.equal(theirs[name].grad, mine[name].grad)
    assert all(isinstance(p.grad, UsedGradient) for name, p in mine.items() if name not in names)
    optimizer.step()
    optimizer.add_param_group({"params": [mine[names[0]]]})  # from now on it is the optimizer's
    model.zero_grad()
    before = mine[names[0]].detach().clone()
    model(**batch(1)).backward()
    assert isinstance(mine[names[0]].grad, UsedGradient) and not torch.equal(before, mine[names[0]])


def test_a_closure_makes_a_step() -> None:
    losses, wanted = plain(steps=2)
    model, optimizer = compiled()

    def closure(step: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(**batch(step))
            loss.backward()
            return loss.detach()

        return run

    assert [optimizer.step(closure(step)) for step in range(2)] == losses
    assert same(wanted, state(model, optimizer))


# ---------------------------------------------------------------------------------------------------- what is refused


def refused(model: Any, optimizer: torch.optim.Optimizer, match: str, act: Callable[[], Any]) -> None:
    """``act`` raises, and has changed nothing; the model goes on."""
    before = state(model, optimizer)
    with pytest.raises(StepError, match=match):
        act()
    assert same(before, state(model, optimizer))


def test_what_would_silently_be_other_numbers_is_refused() -> None:
    model, optimizer = compiled()
    first = next(model.parameters())

    def backward(factor: float = 1.0) -> None:
        (model(**batch(0)) * factor).backward()

    refused(model, optimizer, "GradScaler", lambda: backward(65536.0))
    refused(model, optimizer, "autograd.grad", lambda: torch.autograd.grad(model(**batch(0)), first, allow_unused=True))
    for register in (first.register_hook, first.register_post_accumulate_grad_hook):
        handle = register(lambda *_: None)
        refused(model, optimizer, "hook", backward)
        handle.remove()
    first.grad = torch.zeros_like(first)
    refused(model, optimizer, "a gradient already", backward)
    first.grad = None
    backward()
    for look in (backward, model.state_dict, optimizer.state_dict):
        with pytest.raises(StepError, match=r"between backward\(\) and optimizer\.step"):
            look()
    optimizer.step()
    refused(model, optimizer, r"still has the gradient of the step before", backward)


def test_options_that_cannot_be_honoured() -> None:
    for options, match in (
        ({"update": "later"}, "step or backward"),
        ({"update": "step", "run_ahead": True}, 'expected update="backward" with run_ahead, found'),
        ({"update": "step", "max_grad_norm": 1.0}, "with max_grad_norm, .* or clip before"),
        ({"max_grad_norm": -1.0}, "above 0"),
        ({"nonfinite": "ignore"}, "stop, skip, continue"),
    ):
        with pytest.raises(ValueError, match=match):
            compiled(**options)
    with pytest.raises(TypeError, match="LBFGS"):
        compiled(optimizer=lambda p: torch.optim.LBFGS(p))
    model = mtcompile.compile(made(), update="backward", memory=SMALL, device="cpu")
    with pytest.raises(StepError, match="needs an optimizer"):
        model(**batch(0))


# --------------------------------------------------------------------------------------------------- what is not finite


def poisoned(model: Any, value: float) -> None:
    """One weight is not finite, in a region in the middle."""
    with torch.no_grad():
        wide = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        wide[len(wide) // 2].view(-1)[0] = value


def test_a_loss_that_is_not_finite_stops_before_anything_changes() -> None:
    model, optimizer = compiled()
    train(model, optimizer, 1)
    poisoned(model, float("inf"))
    refused(model, optimizer, "the loss is nan; nothing was changed", lambda: model(**batch(1)).backward())


class Exploding(nn.Module):
    """The loss is finite, the gradient of the first layer is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x).tanh()
        x = (x - x.detach() + at).sqrt()  # an infinite slope at 0
        for layer in self.layers[2:]:
            x = layer(x).tanh()
        return x.square().mean()


class ExplodingLast(nn.Module):
    """The loss is finite, all gradients are not."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        x = self.layers(x.to(self.layers[0].weight.dtype)).float()
        return (x - x.detach() + at).sqrt().mean()


def exploding(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    return compiled("1MiB", model=Exploding(), **options)


GOOD, BAD = torch.ones(()), torch.zeros(())
X = torch.linspace(-1, 1, 16).view(2, 8)


def test_a_gradient_that_is_not_finite_stops_in_the_middle_and_says_so() -> None:
    model, optimizer = exploding()
    model(X, GOOD).backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(StepError, match=r"gradient of layers.[01].* other weights have been updated"):
        model(X, BAD).backward()
    with pytest.raises(StepError, match=r"Load a checkpoint.*after step 1"):
        model(X, GOOD)
    with pytest.raises(StepError, match="Load a checkpoint"):
        model.state_dict()
    model.load_state_dict(saved[0])
    with pytest.raises(StepError, match="Load a checkpoint"):
        model(X, GOOD)
    optimizer.load_state_dict(saved[1])
    model(X, GOOD).backward()


@pytest.mark.parametrize("precision", ["model", "bf16-master32"])
def test_a_region_with_a_gradient_that_is_not_finite_is_not_touched(precision: str) -> None:
    """Neither its other parameters nor their state, which it would have for the first time."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = compiled("1MiB", model=ExplodingLast(layers), precision=precision)
    before = [parameter.detach().clone() for parameter in layers.parameters()]
    refused(model, optimizer, "gradient of .* nothing was changed", lambda: model(X, BAD).backward())
    assert all(map(torch.equal, before, layers.parameters())) and not any(optimizer.state.values())
    model(X, GOOD).backward()
    assert not any(map(torch.equal, before, layers.parameters()))
    assert all(int(optimizer.state[parameter]["step"]) == 1 for parameter in layers.parameters())


@pytest.mark.parametrize("precision", ["model", "bf16-master32"])
def test_what_is_not_finite_is_used_where_that_is_asked_for(precision: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = compiled("1MiB", model=ExplodingLast(layers), precision=precision, nonfinite="continue")
    with pytest.warns(UserWarning, match="not finite; it goes on, as asked"):
        model(X, BAD).backward()
    optimizer.step()
    assert not any(bool(parameter.isfinite().all()) for parameter in layers.parameters())
    assert all(int(optimizer.state[parameter]["step"]) == 1 for parameter in layers.parameters())


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_is_skipped_whole(clip: float | None) -> None:
    model, optimizer = exploding(nonfinite="skip", max_grad_norm=clip)
    model(X, GOOD).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = state(model, optimizer)
    with pytest.warns(UserWarning, match=r"layers.1.*skipped"):
        model(X, BAD).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert same(before, state(model, optimizer))
    model(X, GOOD).backward()
    optimizer.step()
    assert not same(before, state(model, optimizer))


def test_with_a_norm_a_gradient_that_is_not_finite_stops_before_anything_changes() -> None:
    model, optimizer = exploding(max_grad_norm=1.0)
    refused(model, optimizer, r"gradient of layers.1.*nothing was changed", lambda: model(X, BAD).backward())
    model(X, GOOD).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str)
def test_every_value_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.full((7, 5), largest, dtype=dtype).t()[1:, ::2]
    good = [values, values[:0], values.conj()]
    ways: tuple[Any, ...] = (None, "torch")
    assert all(nonfinite(good, by) is None for by in ways)
    for bad in (math.inf, -math.inf, math.nan):
        changed = values.clone()
        changed[2, 1] = complex(0, bad) if dtype.is_complex else bad
        for tensor in (changed, changed.contiguous(), changed.reshape(-1)):
            assert all(nonfinite([*good, tensor, tensor], by) == 3 for by in ways)


@pytest.mark.parametrize("make", [adamw, plain_sgd])
@pytest.mark.parametrize("by_torch", [False, True])
def test_updates_on_the_device_take_no_more_than_was_planned(
    make: Optimizer, by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first backward that finds optimizer state is the one with most in memory. Where update.c was not built, torch updates
    in pieces; SGD without momentum writes one that nobody reads."""
    if by_torch:
        monkeypatch.setattr(host_kernels, "library", lambda: None)
    torch.manual_seed(0)
    model = Residual().bfloat16()
    optimizer = make(model.parameters())
    trained: Any = mtcompile.compile(
        model, optimizer=optimizer, update="backward", policy="resident", precision="bf16-master32"
    )
    for _ in range(3):
        trained(torch.randn(16, 128).bfloat16()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert trained.plan.all_resident
    report = trained.memory_report()
    assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"]


def test_going_on_names_the_first_region() -> None:
    model, _ = exploding(nonfinite="continue")
    with pytest.warns(UserWarning, match=r"layers.[01].*goes on"):
        model(X, BAD).backward()
    assert any(not bool(p.isfinite().all()) for p in model.parameters())


def test_a_fault_among_the_updates_refuses_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    model, optimizer = compiled(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    train(model, optimizer, 1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step = torch.optim.SGD.step

    def failing(self: Any, closure: Any = None) -> Any:
        if next(calls) == 2:
            raise RuntimeError("no memory")
        return step(self, closure)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            model(**batch(1)).backward()
    with pytest.raises(StepError, match=r"step 2 failed among its updates.*after step 1"):
        model(**batch(1))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    losses, wanted = plain(lambda p: torch.optim.SGD(p, lr=0.1))
    got = []
    for number in (1, 2):
        loss = model(**batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        got.append(loss.detach())
    assert all(map(torch.equal, losses[1:], got)) and same(wanted, state(model, optimizer))


# ------------------------------------------------------------------------------------------------------- running ahead


SLOW_HOST = Machine(flops=2e10, memory_gbps=20, h2d_gbps=4, d2h_gbps=4, host_gbps=0.05, issue_us=2)
FAIR_HOST = Machine(flops=2e10, memory_gbps=20, h2d_gbps=4, d2h_gbps=4, host_gbps=1, issue_us=2)


def test_updates_run_behind_the_next_forward_and_nobody_sees_them_under_way() -> None:
    """The host is so slow that most updates are left when the backward returns."""
    losses, wanted = plain(steps=2)
    model, optimizer = compiled(run_ahead=True, throttle=SLOW_HOST)
    runner = model._mt_model.session.runner
    loss = model(**batch(0))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert runner.pending is not None
    second = model(**batch(1))
    assert runner.pending is None  # the forward has drained it
    assert torch.equal(loss, losses[0]) and torch.equal(second, losses[1])
    second.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert runner.pending is not None
    seen = model.state_dict()
    assert runner.pending is None and all(torch.equal(seen[name], wanted[name]) for name in seen)
    for look in (
        lambda: list(model.parameters()),
        lambda: optimizer.state_dict(),
        lambda: next(iter(optimizer.state.values())),
        lambda: model.synchronize(),
        lambda: evaluated(model),
        lambda: model(**{name: rows[:1] for name, rows in batch(0).items()}),
    ):
        model(**batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert runner.pending is not None
        look()
        assert runner.pending is None


@torch.no_grad()
def evaluated(model: Any) -> Tensor:
    return model(**batch(0))  # type: ignore[no-any-return]


def test_an_ordinary_loop_waits_for_nothing_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = compiled(run_ahead=True)
    train(model, optimizer, 2)
    runner, drained = model._mt_model.session.runner, []
    monkeypatch.setattr(runner, "drain", lambda: drained.append(runner.pending))
    train(model, optimizer, 2)
    assert not any(drained) and runner.pending is not None
    monkeypatch.undo()
    model.synchronize()


def schedule_that_runs_ahead() -> Schedule:
    model, _ = compiled("600KiB", model=deep(12), run_ahead=True, throttle=FAIR_HOST)
    model(**batch(0)).backward()
    schedule: Schedule = model.schedule
    return schedule


def test_a_forward_waits_for_its_own_updates_and_the_proof_wants_each_wait() -> None:
    schedule = schedule_that_runs_ahead()
    verify(schedule)
    waiting = [i for i, instruction in enumerate(schedule.instructions) if instruction.previous_step_deps]
    first, last = schedule.instructions[waiting[0]], schedule.instructions[waiting[-1]]
    assert len(waiting) > 2 and first.previous_step_deps < last.previous_step_deps, (
        "prefetches wait each for its own region's update"
    )
    caught = 0
    sampled = waiting[:: max(1, len(waiting) // 8)]
    for index in sampled:
        rows = list(schedule.instructions)
        rows[index] = replace(rows[index], previous_step_deps=())
        with pytest.raises(ScheduleError) as error:
            verify(replace(schedule, instructions=tuple(rows)))
        caught += error.value.invariant == "I2" and "previous step" in str(error.value)
    assert caught == len(sampled)


def test_a_failed_update_is_raised_by_the_next_forward() -> None:
    model, optimizer = exploding(run_ahead=True)
    model(X, GOOD).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(StepError, match=r"gradient of layers.[01]"):  # it may be found while the backward goes on
        model(X, BAD).backward()
        optimizer.step()
        model(X, GOOD)
    with pytest.raises(StepError, match="Load a checkpoint"):
        model(X, GOOD)


# ------------------------------------------------------------------------------------------------------------ the proof


def test_an_update_is_proven_to_come_after_every_read() -> None:
    model, _ = compiled()
    model(**batch(0)).backward()
    schedule = model.schedule
    index = next(i for i, each in enumerate(schedule.instructions) if any(schedule.buffers[w].version_of for w in each.writes))
    below = schedule.buffers[schedule.instructions[index].writes[0]].version_of
    reader = next(i for i, each in enumerate(schedule.instructions) if below in each.reads and each.phase == "backward")
    rows = list(schedule.instructions)
    rows.insert(index + 1, replace(rows[reader], deps=(index,), writes=rows[reader].writes))
    with pytest.raises(ScheduleError, match=r"I1|I2"):
        verify(replace(schedule, instructions=tuple(rows)))
    buffers = dict(schedule.buffers)
    taken = [name for name, buffer in buffers.items() if buffer.version_of][:2]
    buffers[taken[0]] = replace(buffers[taken[0]], version_of=buffers[taken[1]].version_of)
    with pytest.raises(ScheduleError, match="I0"):
        verify(replace(schedule, buffers=buffers))
    rows = [
        replace(each, reads=tuple(r for r in each.reads if schedule.buffers[r].role != "grad"), deps=each.deps)
        if i == index
        else each
        for i, each in enumerate(schedule.instructions)
    ]
    with pytest.raises(ScheduleError, match=r"I4.*grad"):
        verify(replace(schedule, instructions=tuple(rows)))


# -------------------------------------------------------------------------------------------------------- bytes and time


@pytest.mark.parametrize(
    ("update", "most", "layers", "options"),
    [
        ("backward", 12.6, 12, {}),
        pytest.param("step", 14.5, 12, {"policy": "megatrain"}, marks=pytest.mark.long),  # which needs no search
        *(pytest.param("backward", 12.5, layers, {}, marks=pytest.mark.long) for layers in (16, 20)),
        pytest.param("step", 14.5, 12, {}, marks=pytest.mark.long),
    ],
)
def test_host_bytes_per_parameter(
    update: str, most: float, layers: int, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """State, gradients and slots, as held after three steps and as planned; activations are few here."""
    monkeypatch.setenv("MT_EFFORT", "normal")
    model, optimizer = compiled("1MiB", model=deep(layers), update=update, precision="bf16-master32", **options)
    train(model, optimizer)
    parameters = sum(p.numel() for p in model.parameters())
    resident = model.schedule.resident_nbytes.get("device", 0)
    report = model.memory_report()
    held = report["peak_host_bytes"] + resident
    arena = sum(b.nbytes for b in model.schedule.buffers.values() if b.tier == "host" and b.role == "activation")
    assert (held - arena) / parameters <= most
    assert report["peak_host_bytes"] <= report["planned_peak_host_bytes"]


def decoder_of_4(batch: int, seq: int) -> Any:
    tokens = torch.zeros((batch, seq), dtype=torch.int64)
    return fake(Shape(256, 1024, 4, 4, 2, 512, head_dim=64, dtype=torch.bfloat16)), {"tokens": tokens, "targets": tokens}


def planned(host_gbps: float, **options: Any) -> mtcompile.Forecast:
    machine = Machine(flops=1e10, memory_gbps=4, h2d_gbps=2, d2h_gbps=2, host_gbps=host_gbps, issue_us=20)
    return mtcompile.plan(decoder_of_4, batch=2, seq=64, memory="10MB", machine=machine, precision="bf16-master32", **options)


@pytest.mark.long
def test_updates_add_next_to_nothing_where_the_host_has_less_to_do() -> None:
    """The simulator says so; after the backward, updates would add the time they take."""
    after, along = planned(3), planned(3, update="backward")
    assert after.update_us > 0.1 * (after.step_time_us - after.update_us)
    assert along.update_us < 0.02 * along.step_time_us


@pytest.mark.long
def test_running_ahead_hides_what_a_backward_is_too_short_for() -> None:
    along, ahead = planned(0.25, update="backward"), planned(0.25, update="backward", run_ahead=True)
    assert ahead.step_time_us < 0.95 * along.step_time_us
