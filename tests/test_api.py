"""A compiled module does what a PyTorch user expects: autograd, frames, guards, aliases, errors that lose nothing."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.api import CompiledModule
from tests.helpers.models import Tied, make
from tests.helpers.training import adamw, compiled_run, minimum_bytes, same, train


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop, self.scale, self.count = nn.Dropout(0.2), 2.0, 0
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        for layer in self.layers:
            x = torch.tanh(self.drop(layer(x)))
        return self.norm(x) * self.scale


def pair(factory: Any = Small, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    plain = factory()
    return plain, mtcompile.compile(copy.deepcopy(plain), **options)


def both(plain: nn.Module, compiled: nn.Module, act: Any) -> None:
    """Run ``act`` on each from the same generator state; results, gradients and buffers must be equal."""
    logs = []
    for model in (plain, compiled):
        torch.manual_seed(5)
        result = act(model)
        logs.append([result, *(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()])
    for one, other in zip(*logs, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.slow
def test_a_compiled_module_keeps_its_keys_and_class_and_reports_its_memory() -> None:
    plain, compiled = pair()
    step(compiled)
    assert list(plain.state_dict()) == list(compiled.state_dict())
    assert isinstance(compiled, Small) and isinstance(compiled, CompiledModule)
    assert compiled.plan is not None and compiled.schedule is not None and compiled.last_trace is not None
    report = compiled.memory_report()
    wanted = {"budget_device_bytes", "peak_device_bytes", "planned_peak_device_bytes", "peak_host_bytes", "state_bytes"}
    assert wanted <= set(report) and report["state_bytes"] and report["peak_device_bytes"]


@pytest.mark.slow
def test_changes_between_calls_are_noticed() -> None:
    plain, compiled = pair()
    both(plain, compiled, step)
    for change in (
        lambda m: setattr(m, "scale", 3.0),
        lambda m: setattr(m.drop, "p", 0.5),
        lambda m: m.eval(),
        lambda m: m.train(),
        lambda m: m.layers[1].requires_grad_(False),
        lambda m: m.layers[1].requires_grad_(True),
        lambda m: setattr(m, "scale", 2.0),
    ):
        change(plain)
        change(compiled)
        both(plain, compiled, step)
    assert plain.count == compiled.count  # side effects in Python happen too


@pytest.mark.slow
def test_inputs_may_change_shape_and_strides_and_require_gradients() -> None:
    plain, compiled = pair()
    both(plain, compiled, step)
    for x in (torch.randn(6, 8), torch.randn(8, 6).t(), torch.randn(1, 8).expand(4, 8), torch.randn(4, 16)[:, ::2]):
        both(plain, compiled, lambda m, x=x: step(m, x))

    def with_gradient(model: nn.Module) -> torch.Tensor:
        x = X.clone().requires_grad_()
        step(model, x)
        return x.grad

    both(plain, compiled, with_gradient)


@pytest.mark.slow
def test_autocast_gives_the_same_bits() -> None:
    plain, compiled = pair()

    def act(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(model)

    both(plain, compiled, act)
    both(plain, compiled, step)


def test_a_call_without_gradients_may_come_before_the_backward() -> None:
    plain, compiled = pair()

    def act(model: nn.Module) -> torch.Tensor:
        loss = model(X).sum()
        with torch.no_grad():
            seen = model(X * 2)
        loss.backward()
        return seen

    both(plain, compiled, act)


class Several(nn.Module):
    """Aliased outputs of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        left, right = y.chunk(2, dim=-1)
        return {
            "loss": y.sum(), "y": y, "flat": y.view(-1), "again": y, "weight": self.linear.weight, "x": x,
            "row": x[0], "left": left, "right": right.t(), "n": 3, "none": None,
        }  # fmt: skip


@pytest.mark.parametrize("keys", [("loss",), ("y",), ("flat",), ("y", "flat"), ("weight",), ("left", "right"), ("loss", "row")])
def test_gradients_flow_through_any_output(keys: tuple[str, ...]) -> None:
    plain, compiled = pair(Several)

    def act(model: nn.Module) -> torch.Tensor:
        model.zero_grad()
        x = X.clone().requires_grad_()
        out = model(x)
        assert out["n"] == 3 and out["none"] is None and out["x"] is x and out["weight"] is model.linear.weight
        sum((out[key] * torch.arange(out[key].numel()).view(out[key].shape)).sum() for key in keys).backward()
        return x.grad if x.grad is not None else torch.zeros(())

    for _ in range(2):
        both(plain, compiled, act)


@pytest.mark.slow
def test_autograd_grad_and_accumulated_gradients_are_the_same() -> None:
    plain, compiled = pair()

    def gradients(model: nn.Module) -> torch.Tensor:
        tensors = torch.autograd.grad(model(X).sum(), list(model.parameters()))
        return torch.cat([g.flatten() for g in tensors])

    def accumulate(model: nn.Module) -> torch.Tensor:
        for scale in (1.0, 2.0, 3.0):
            (model(X).sum() * scale).backward()
        return X

    both(plain, compiled, gradients)
    both(plain, compiled, accumulate)


def test_old_gradients_are_not_overwritten() -> None:
    plain, compiled = pair()
    gradients = []
    for model in (plain, compiled):
        torch.manual_seed(5)
        step(model)
        earlier = [p.grad for p in model.parameters()]
        model.zero_grad()
        step(model, X * 3)
        gradients.append(torch.cat([g.flatten() for g in earlier]))
    assert torch.equal(*gradients)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_skipped() -> None:
    class Loss(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

    _, losses = pair(Loss)
    for factor in (1.0, float("nan"), 1.0):
        loss = losses(X * factor)
        if not loss.isfinite():
            continue
        loss.backward()


def test_weights_changed_before_backward_are_refused() -> None:
    _, compiled = pair()
    loss = compiled(X).sum()
    with torch.no_grad():
        compiled.layers[1].weight.mul_(2)
    with pytest.raises(mtcompile.StepError, match=r"layers.1.weight was changed in place"):
        loss.backward()


CHANGES: dict[str, Any] = {
    "dtype from torch.float32 to torch.float64": lambda m: m.to(torch.float64),
    "dtype from torch.float32 to torch.float16": lambda m: m.half(),
    "dtype from torch.float32 to torch.bfloat16": lambda m: m.to("cpu", torch.bfloat16),
    "strides": lambda m: m.to(memory_format=torch.channels_last),
    "what tensors hold": lambda m: m.to("meta"),
    "memory to that which processes share": lambda m: m.share_memory(),
    "values": lambda m: m._apply(lambda tensor: tensor * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changing_parameters_is_refused(change: str) -> None:
    _, compiled = pair()
    with pytest.raises(mtcompile.MtcompileError, match=f"found a change of {change}.*Convert the model first"):
        CHANGES[change](compiled)


@pytest.mark.slow
def test_naming_the_device_changes_nothing() -> None:
    """As training libraries do, before and between steps."""
    plain, compiled = pair()
    places = [p.data_ptr() for p in compiled.parameters()]
    for model in (plain, compiled):
        assert model.to("cpu") is model and model.cpu() is model and model.float() is model
        assert model.to(torch.device("cpu"), torch.float32, non_blocking=True) is model and model.to(X) is model
    assert places == [p.data_ptr() for p in compiled.parameters()]
    both(plain, compiled, step)
    compiled.to("cpu").train()
    both(plain, compiled, step)


@pytest.mark.slow
def test_replaced_data_and_parameters_are_noticed() -> None:
    plain, compiled = pair()
    both(plain, compiled, step)
    new = torch.randn(8, 8)
    for model in (plain, compiled):
        model.layers[0].weight.data = new.clone()
        model.layers[1].weight = nn.Parameter(new.clone() * 2)
        model.load_state_dict({**model.state_dict(), "layers.2.weight": new * 3})
    both(plain, compiled, step)


@pytest.mark.slow
def test_budget_too_small_says_the_smallest_that_works() -> None:
    model, data = make("tied")
    compiled = mtcompile.compile(copy.deepcopy(model), memory=100)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(mtcompile.BudgetError, match="largest parts") as caught:
        patch.setattr(gc, "collect", lambda *_: pytest.fail("garbage is collected, although no forward waits"))
        compiled(**data)
    minimum = caught.value.minimum_bytes
    mtcompile.compile(copy.deepcopy(model), memory=minimum)(**data)
    with pytest.raises(mtcompile.BudgetError):
        mtcompile.compile(copy.deepcopy(model), memory=minimum - 1)(**data)
    with pytest.raises(mtcompile.BudgetError, match=r"no plan fits host=100 B") as on_host:
        mtcompile.compile(copy.deepcopy(model), memory=minimum, host=100)(**data)
    ways = str(on_host.value)  # what helps there: a smaller batch would not
    assert 'update="backward"' in ways and "optimizer with less state" in ways and "LoRA" in ways and "disk=" in ways
    assert f"host={on_host.value.minimum_bytes}" in ways and "smaller batch" not in ways
    assert 'memory=100 is so many bytes: did you mean "100GiB"?' in str(caught.value)


def test_what_cannot_be_captured_names_the_line() -> None:
    class Branch(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            if h.sum() > 0:  # the line
                return h
            return x

    with pytest.warns(UserWarning, match=r"in parts(.|\n)*test_api.py:\d+.*\n?.*h.sum\(\) > 0"):
        mtcompile.compile(Branch(8, 8))(X)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_inside_a_step_changes_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtcompile.runtime.devices.cpu import CpuMemory

    plain, compiled = pair(memory=None)
    both(plain, compiled, step)
    before = [t.clone() for t in compiled.state_dict().values()] + [torch.get_rng_state()]
    original, calls = CpuMemory.run, []

    def failing(self: CpuMemory, *args: Any) -> None:
        calls.append(1)
        if len(calls) == (2 if where == "forward" else 5):
            raise OSError("a kernel failed")
        original(self, *args)

    compiled.zero_grad()
    if where == "backward":
        loss = compiled(X).square().mean()
        before = [t.clone() for t in compiled.state_dict().values()] + [torch.get_rng_state()]
        calls = [1] * 3
    monkeypatch.setattr(CpuMemory, "run", failing)
    with pytest.raises(OSError, match="a kernel failed"):
        compiled(X) if where == "forward" else loss.backward()
    after = [*compiled.state_dict().values(), torch.get_rng_state()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in compiled.parameters())
    monkeypatch.setattr(CpuMemory, "run", original)
    import threading

    assert not [t for t in threading.enumerate() if t.name.startswith("mtcompile")]
    for model in (plain, compiled):
        model.load_state_dict(plain.state_dict())
    both(plain, compiled, step)


@pytest.mark.slow
def test_compile_decorates_a_class_with_and_without_options() -> None:
    @mtcompile.compile
    class First(Small):
        pass

    @mtcompile.compile(memory="1GiB")
    class Second(Small):
        pass

    for cls in (First, Second):
        torch.manual_seed(0)
        model = cls()
        optimizer = adamw(model.parameters())
        assert model.bind(optimizer) is model and isinstance(model, Small)
        torch.manual_seed(0)
        plain = Small()
        both(plain, model, step)
    assert Second.__name__ == "Second" and model.memory_report()["budget_device_bytes"] == 2**30


def test_copy_is_the_plain_model() -> None:
    plain, compiled = pair()
    both(plain, compiled, step)
    again = copy.deepcopy(compiled)
    assert type(again) is Small
    both(plain, again, step)


@pytest.mark.slow
def test_an_optimizer_of_the_users_own_steps_under_a_scheduler() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad.sign() * group["lr"] * p.grad.norm())

    model, data = make("tied")
    logs = []
    for compiled in (False, True):
        copied = copy.deepcopy(model)
        optimizer = Own(copied.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if compiled:
            copied = mtcompile.compile(copied, memory=minimum_bytes(model, data), optimizer=optimizer)
        logs.append(train(copied, optimizer, data, 4, scheduler))
    assert same(*logs)


def test_same_bits_at_every_thread_count_setting() -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            plain, compiled = pair(Small, memory="1GiB")
            both(plain, compiled, step)
    finally:
        torch.set_num_threads(threads)


def test_options_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(ValueError, match="kernels"):
        mtcompile.compile(nn.Linear(2, 2), kernels="magic")
    with pytest.raises(TypeError, match=r"nn.Module"):
        mtcompile.compile(lambda x: x)
    with pytest.raises(TypeError, match="compiled already"):
        mtcompile.compile(mtcompile.compile(nn.Linear(2, 2)))


def assert_equal_gradients(plain: nn.Module, compiled: nn.Module) -> None:
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


@pytest.mark.slow
def test_evaluation_first_and_two_signatures_share_a_home() -> None:
    torch.manual_seed(0)
    model, data = Tied().train(), make("tied")[1]
    plain, compiled = copy.deepcopy(model), mtcompile.compile(model)
    with torch.no_grad():
        assert torch.equal(plain(**data), compiled(**data))
    shorter = {key: value[:5] for key, value in data.items()}
    pointers: list[int] = []
    for inputs in (data, shorter, data):
        one, other = plain(**inputs), compiled(**inputs)
        assert torch.equal(one, other)
        one.backward(), other.backward()
        pointers = pointers or [p.data_ptr() for p in compiled.parameters()]
        assert all(
            torch.equal(p.grad, q.grad)
            for p, q in zip(plain.parameters(), compiled.parameters(), strict=True)
            if p.grad is not None
        )
    assert pointers == [p.data_ptr() for p in compiled.parameters()]


@pytest.mark.slow
def test_the_step_is_planned_again_when_a_later_signature_needs_more() -> None:
    torch.manual_seed(0)
    model, data = Tied().train(), make("tied")[1]
    long = {key: value.repeat(40) for key, value in data.items()}
    budget = minimum_bytes(model, long) + 4096
    plain, compiled = copy.deepcopy(model), mtcompile.compile(copy.deepcopy(model), memory=budget)
    for inputs in (data, long, data):
        one, other = plain(**inputs), compiled(**inputs)
        one.backward(), other.backward()
        assert torch.equal(one, other)
        assert all(
            torch.equal(p.grad, q.grad)
            for p, q in zip(plain.parameters(), compiled.parameters(), strict=True)
            if p.grad is not None
        )


def test_the_measured_peak_is_within_the_budget() -> None:
    model, data = make("tied")
    _, report, _ = compiled_run(model, data, minimum_bytes(model, data))
    assert report["peak_device_bytes"] <= report["budget_device_bytes"]
