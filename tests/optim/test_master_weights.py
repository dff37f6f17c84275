"""Split state: fp32 masters are exact, are what a plain fp32 update makes of the same gradients, and survive whatever an
ordinary program does with a model and its optimizer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile.passes.analysis.cost import Machine
from tests.helpers.decoder import batch
from tests.helpers.decoder import small_decoder as made

pytestmark = pytest.mark.slow  # it compiles many models

MEMORY = "1MiB"


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, memory: str = "64MiB") -> Any:
    return mtcompile.compile(model, memory=memory, optimizer=optimizer, precision="bf16-master32", device="cpu")


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 2e-3, "weight_decay": 0.1} | options)


def half_away(master: Tensor) -> Tensor:
    """The bf16 that a master shows: the nearer one, ties away from zero."""
    bits = (master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF) + 0x8000
    return (bits >> 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)


class Reference:
    """A plain bf16 model whose fp32 masters are updated by the formula that ``formula.adamw`` documents."""

    def __init__(self, model: nn.Module, lr: float = 2e-3, decay: float = 0.1) -> None:
        self.masters = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.model, self.lr, self.decay, self.step = copy.deepcopy(model), lr, decay, 0
        self.m = {name: torch.zeros_like(p) for name, p in self.masters.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.masters.items()}
        for name, p in self.model.named_parameters():
            p.data = half_away(self.masters[name])

    def train(self, data: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**data)
        loss.backward()
        self.step += 1
        one = torch.tensor(1.0, dtype=torch.float64)

        def scalar(value: Any) -> Tensor:
            return torch.as_tensor(value, dtype=torch.float64).to(torch.float32)

        size = scalar(self.lr / (one - 0.9**self.step))
        rise = scalar(1 / (one - 0.999**self.step).sqrt())
        for name, p in self.model.named_parameters():
            assert p.grad is not None
            g, w, m, v = p.grad.float(), self.masters[name], self.m[name], self.v[name]
            m = m + scalar(1 - 0.9) * (g - m)
            v = scalar(0.999) * v + (scalar(1 - 0.999) * g) * g
            d = torch.from_numpy(numpy.sqrt(v.numpy())) * rise + scalar(1e-8)  # rounded to nearest everywhere
            w = scalar(1 - self.lr * self.decay) * w
            self.masters[name], self.m[name], self.v[name] = w - (size * m) / d, m, v
            p.data = half_away(self.masters[name])
            p.grad = None
        return loss.detach()


def same_masters(model: Any, expected: dict[str, Tensor]) -> bool:
    masters = mtcompile.master_parameters(model)
    return masters.keys() == expected.keys() and all(torch.equal(masters[name], expected[name]) for name in expected)


def test_masters_are_read_after_updates_that_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = made()
    options: dict[str, Any] = {"update": "backward", "run_ahead": True, "precision": "bf16-master32"}
    model: Any = mtcompile.compile(plain, memory=MEMORY, optimizer=adamw(plain), device="cpu", **options)
    model(**batch(0)).backward()
    drained: list[bool] = []
    monkeypatch.setattr(model._mt_model.session.runner, "drain", lambda: drained.append(True))
    mtcompile.master_parameters(model)
    assert drained


@pytest.mark.parametrize("steps", [6, pytest.param(200, marks=pytest.mark.long)])
def test_masters_are_those_of_a_plain_reference(steps: int) -> None:
    """Losses, masters and the bf16 weights, bit for bit; and near torch's own AdamW on fp32 weights fed the same gradients."""
    model = made()
    reference, fp32 = Reference(model), copy.deepcopy(model)
    theirs = adamw(fp32)
    optimizer = adamw(model)
    model = compiled(model, optimizer, MEMORY)
    for step in range(steps):
        data = batch(step)
        expected = reference.train(data)
        loss = model(**data)
        loss.backward()
        assert torch.equal(loss.detach(), expected)
        for p, plain in zip(model.parameters(), fp32.parameters(), strict=True):
            assert p.dtype == torch.bfloat16 and p.grad is not None
            plain.grad = p.grad.float()
        theirs.step()
        optimizer.step()
        optimizer.zero_grad()
    assert same_masters(model, reference.masters)
    for name, p in model.named_parameters():
        assert torch.equal(p.detach(), half_away(reference.masters[name]))
    for master, plain in zip(mtcompile.master_parameters(model).values(), fp32.parameters(), strict=True):
        assert (master - plain).norm() <= 1e-6 * plain.norm()


def test_updates_below_bf16_resolution_are_kept() -> None:
    model = made()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    pure = copy.deepcopy(model).to(torch.bfloat16)
    optimizer, theirs = adamw(model, lr=1e-6, weight_decay=0.0), adamw(pure, lr=1e-6, weight_decay=0.0)
    model = compiled(model, optimizer)
    for step in range(3):
        for each, stepper in ((model, optimizer), (pure, theirs)):
            each(**batch(step)).backward()
            stepper.step()
            stepper.zero_grad()
    masters = mtcompile.master_parameters(model)
    weight = "blocks.0.up.weight"
    assert (masters[weight] != start[weight]).float().mean() > 0.9  # in fp32 they move
    large = start[weight].abs() > 2e-3  # half a unit in their last place is more than three updates
    assert large.float().mean() > 0.9
    assert torch.equal(pure.get_parameter(weight)[large], start[weight].to(torch.bfloat16)[large])  # in bf16 they do not


def test_the_contract_and_the_bytes_are_said() -> None:
    model = made()
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = adamw(model)
    model = compiled(model, optimizer, MEMORY)
    model(**batch(0)).backward()
    optimizer.step()
    report = model.memory_report()
    assert report["state_bytes"] == pytest.approx(14 * parameters, rel=0.01)  # 2 of them the gradient's
    assert report["peak_host_bytes"] <= report["planned_peak_host_bytes"]
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= 2**20
    assert "fp32 masters" in model.plan.numerics and "rounded half away" in model.plan.numerics
    planned = mtcompile.plan(made, batch(0), memory=MEMORY, machine=Machine(), precision="bf16-master32")
    assert planned.state_bytes == pytest.approx(14 * parameters, rel=0.05)


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_a_checkpoint_goes_on_with_the_same_bits() -> None:
    model = made()
    optimizer = adamw(model)
    model = compiled(model, optimizer, MEMORY)
    trained(model, optimizer, range(3))
    weights = {name: t.clone() for name, t in mtcompile.master_parameters(model).items()}
    saved = copy.deepcopy(optimizer.state_dict())
    assert all(entry["master"].dtype == torch.float32 for entry in saved["state"].values())
    expected = trained(model, optimizer, range(3, 6))

    again = made(1)
    stepper = adamw(again)
    again = compiled(again, stepper)
    again.load_state_dict(weights)  # fp32 weights, kept exactly
    assert same_masters(again, weights)
    stepper.load_state_dict(saved)
    assert same_masters(again, weights)
    losses = trained(again, stepper, range(3, 6))
    assert all(map(torch.equal, losses, expected))
    assert same_masters(again, mtcompile.master_parameters(model))


def test_the_optimizer_state_goes_to_a_plain_adamw_and_back() -> None:
    model = made()
    optimizer = adamw(model)
    model = compiled(model, optimizer)
    trained(model, optimizer, range(2))
    plain = made()
    plain.load_state_dict(mtcompile.master_parameters(model))
    theirs = adamw(plain)
    theirs.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], theirs.state[q]["exp_avg"])
    trained(plain, theirs, range(2, 3))
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict({**theirs.state_dict(), "state": _without_masters(theirs.state_dict()["state"])})
    assert same_masters(model, {name: p.detach() for name, p in plain.named_parameters()})
    assert all(optimizer.state[p]["exp_avg"].dtype == torch.float32 for p in model.parameters())


def _without_masters(state: dict[int, Any]) -> dict[int, Any]:
    return {index: {key: value for key, value in entry.items() if key != "master"} for index, entry in state.items()}


def test_what_is_written_to_a_parameter_becomes_its_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    model = made()
    optimizer = adamw(model)
    model = compiled(model, optimizer)
    trained(model, optimizer, range(1))
    weight = model.get_parameter("blocks.0.down.weight")
    with torch.no_grad():
        weight.mul_(2.0)
    assert torch.equal(mtcompile.master_parameters(model)["blocks.0.down.weight"], weight.detach().float())
    trained(model, optimizer, range(1, 2))
    values = torch.randn_like(weight)
    weight.data = values.clone()  # noticed by the next forward
    model(**batch(1)).backward()
    optimizer.zero_grad()
    assert torch.equal(mtcompile.master_parameters(model)["blocks.0.down.weight"], values.float())
    weight.data.mul_(2.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(**batch(2)).backward()
    with pytest.raises(mtcompile.StepError, match=r"blocks.0.down.weight.*through \.data"):
        optimizer.step()
    assert all(torch.equal(p.detach(), before[name]) for name, p in model.named_parameters())  # nothing was half updated


def test_looking_for_such_writes_takes_none_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    model: Any = made()
    optimizer = adamw(model)
    options: Any = {"memory": "1GiB", "policy": "resident", "update": "backward", "precision": "bf16-master32"}
    model = mtcompile.compile(model, optimizer=optimizer, device="cpu", **options)
    trained(model, optimizer, range(2))
    report = model.memory_report()
    assert report["planned_peak_host_bytes"] < report["peak_device_bytes"] <= report["planned_peak_device_bytes"]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_accumulated_in_fp32(to_none: bool) -> None:
    """The sum of bf16 gradients in the order of the backwards, each addition rounded to fp32; one alone stays bf16."""
    model = made()
    optimizer = adamw(model)
    model = compiled(model, optimizer)
    for _ in range(2):
        alone = []
        held = [p.grad for p in model.parameters()]
        for step in range(4):
            optimizer.zero_grad()
            model(**batch(step)).backward()
            assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
            alone.append([p.grad.float().clone() for p in model.parameters()])
        for p, grad in zip(model.parameters(), held, strict=True):
            p.grad = grad  # none, or zeros in fp32
        expected = [functools.reduce(torch.add, grads) for grads in zip(*alone, strict=True)]
        for step in range(4):
            model(**batch(step)).backward()
        for p, total in zip(model.parameters(), expected, strict=True):
            assert p.grad.dtype == torch.float32 and torch.equal(p.grad, total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.isfinite()
        report = model.memory_report()
        assert report["gradients_bytes"] == 4 * sum(p.numel() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


_LONG = ("adamw-foreach", "sgd-momentum")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in _LONG)) for n in OPTIMIZERS])
def test_each_optimizer_is_near_torch_on_fp32_weights(name: str) -> None:
    model = made()
    fp32 = copy.deepcopy(model)
    optimizer, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](fp32.parameters())
    model = compiled(model, optimizer)
    for step in range(4):
        model(**batch(step)).backward()
        for p, plain in zip(model.parameters(), fp32.parameters(), strict=True):
            assert p.grad is not None
            plain.grad = p.grad.float()
        theirs.step()
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters())  # shown again
        optimizer.zero_grad()
    for master, plain in zip(mtcompile.master_parameters(model).values(), fp32.parameters(), strict=True):
        assert (master - plain).norm() <= 1e-6 * plain.norm()


def clipped(model: Any, optimizer: torch.optim.Optimizer, step: int, norms: list[Tensor]) -> Tensor:
    """A closure's work."""
    optimizer.zero_grad()
    loss: Tensor = model(**batch(step))
    loss.backward()
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    return loss


def test_schedules_groups_clipping_and_closures() -> None:
    """A scheduler attached before and one after, two groups, a group added, a frozen part, as ordinary programs have them."""
    results = []
    for order in ("before", "after"):
        model = made()
        biases = [p for p in model.parameters() if p.dim() < 2]
        rest = [p for name, p in model.named_parameters() if p.dim() >= 2 and "head" not in name]
        optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": biases, "lr": 1e-2}], lr=1e-3)
        make = torch.optim.lr_scheduler.StepLR
        schedule = make(optimizer, 1, 0.5) if order == "before" else None
        model = compiled(model, optimizer)
        schedule = schedule or make(optimizer, 1, 0.5)
        norms = []
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [model.head.weight], "lr": 5e-4})
                model.embed.weight.requires_grad_(False)
            if step == 3:
                model.embed.weight.requires_grad_(True)

            loss = optimizer.step(functools.partial(clipped, model, optimizer, step, norms))
            assert loss is not None and loss.isfinite()
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 16)
        results.append((norms, mtcompile.master_parameters(model)))
    assert all(map(torch.equal, *(norms for norms, _ in results)))
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_scales_and_skips(fused: bool) -> None:
    """Powers of two change no bit; a step with an infinite gradient changes nothing at all."""
    masters = []
    for scaled in (False, True):
        model = made()
        optimizer = adamw(model, fused=fused)
        model = compiled(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled, growth_interval=1000)
        for step in range(3):
            loss = model(**batch(step))
            scaler.scale(loss).backward()
            if scaled and step == 1:
                before = mtcompile.master_parameters(model), copy.deepcopy(optimizer.state_dict()["state"])
                model.head.weight.grad[0, 0] = float("inf")
                scaler.step(optimizer)
                after = optimizer.state_dict()["state"]
                assert same_masters(model, before[0])
                assert all(torch.equal(after[i]["exp_avg"], before[1][i]["exp_avg"]) for i in after)
                assert all(torch.equal(after[i]["step"], before[1][i]["step"]) for i in after)
            elif scaled or step != 1:
                scaler.step(optimizer)
            scaler.update(256.0 if scaled else None)
            optimizer.zero_grad()
        masters.append(mtcompile.master_parameters(model))
    assert all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0])


def test_what_cannot_be_honoured_is_refused() -> None:
    model = made()
    with pytest.raises(TypeError, match="AdamW, Adam or SGD"):
        compiled(model, torch.optim.Adagrad(model.parameters()))
    with pytest.raises(ValueError, match="expected precision to be one of"):
        mtcompile.compile(made(), precision="fp8")
    model = made()
    optimizer = adamw(model, amsgrad=True)
    model = compiled(model, optimizer)
    model(**batch(0)).backward()
    with pytest.raises(mtcompile.StepError, match="without amsgrad"):
        optimizer.step()
    with pytest.raises(TypeError, match="bf16-master32"):
        mtcompile.master_parameters(made())


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("model", torch.float32)])
def test_other_precisions_are_a_cast_and_nothing_else(precision: str, dtype: torch.dtype) -> None:
    model = made()
    plain = copy.deepcopy(model)
    if precision != "model":
        for p in plain.parameters():
            p.data = p.data.to(dtype)
    optimizer, theirs = adamw(model), adamw(plain)
    model = mtcompile.compile(model, memory="2MiB", optimizer=optimizer, precision=precision, device="cpu")
    losses, expected = (trained(m, o, range(3)) for m, o in ((model, optimizer), (plain, theirs)))
    assert all(map(torch.equal, losses, expected))
    assert all(p.dtype == dtype and torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.slow
def test_gradients_of_a_step_that_failed_are_not_used_again() -> None:
    """After ``load_state_dict``. Without it, the model refuses: its masters have been updated."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = mtcompile.compile(model, memory="16MiB", optimizer=optimizer, precision="bf16-master32")

    def backward(seed: int) -> None:
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()).square().mean().backward()

    def state() -> list[Tensor]:
        return [master.clone() for master in mtcompile.master_parameters(model).values()]

    backward(0)
    optimizer.step()
    optimizer.zero_grad()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    backward(1)
    optimizer.step()
    optimizer.zero_grad()
    expected = state()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    backward(7)
    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    hook.remove()
    optimizer.zero_grad()
    with pytest.raises(mtcompile.StepError, match="ended among its updates"):
        backward(1)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    backward(1)
    optimizer.step()
    optimizer.zero_grad()
    assert all(map(torch.equal, expected, state()))
    assert not model._mt_model.door.masters._hidden_gradients


@pytest.mark.parametrize("cast_input", [False, True])
def test_operands_of_two_dtypes_are_told_by_what_was_cast(cast_input: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.randn(3, 4)
    compiled = mtcompile.compile(
        model, memory="1MiB", precision="bf16-master32", optimizer=torch.optim.AdamW(model.parameters())
    )
    with pytest.raises(RuntimeError, match=r'(?s)BFloat16.*"bf16-master32" has cast the parameters only'):
        compiled(x.bfloat16() if cast_input else x)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.bfloat16()
    assert torch.isfinite(compiled(x.bfloat16())).all()
