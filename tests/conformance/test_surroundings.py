"""Programs that treat a compiled model as any module: odd outputs and inputs, and the contexts that calls stand in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import mtcompile

pytestmark = pytest.mark.slow  # it compiles many models


class Model(nn.Module):
    """Returns ``result(self, hidden, x)``."""

    def __init__(self, result: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.result = nn.Linear(8, 8), result

    def forward(self, x: Tensor) -> Any:
        return self.result(self, self.linear(x), x)


def compiled(model: nn.Module, **options: Any) -> Any:
    return mtcompile.compile(model, memory="64MiB", device="cpu", **options)


def gradients(result: Callable[[Any, Tensor, Tensor], Any], x: Tensor, **options: Any) -> list[Tensor]:
    """The loss and all gradients of one step; plain without options."""
    torch.manual_seed(0)
    model = Model(result)
    x = x.detach().clone().requires_grad_() if x.requires_grad and x.is_contiguous() else x
    outputs = (compiled(model, **options) if options else model)(x)
    loss = torch.stack([out.abs().pow(2).sum() for out in (outputs if isinstance(outputs, tuple) else (outputs,))]).sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


RESULTS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a view beside two uses": lambda m, h, x: (h[0], h.exp(), h.tanh()),
    "a late view beside two uses": lambda m, h, x: (h.exp(), h.tanh(), h.view(-1)),
    "a transposed view beside two uses": lambda m, h, x: (h.t(), h.exp(), h.tanh()),
    "a flat view that is used twice": lambda m, h, x: ((f := h.view(-1, 2, 4).flatten(1)), f.exp(), f.tanh()),
    "conjugated": lambda m, h, x: torch.complex(h, x).mH,
    "conjugated beside itself": lambda m, h, x: ((z := torch.complex(h, x)), z.conj()),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("policy", ["fastest", "checkpoint-all"])
def test_gradients_of_odd_outputs_have_the_bits_of_the_plain_run(name: str, policy: str) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    assert all(map(torch.equal, gradients(RESULTS[name], x), gradients(RESULTS[name], x, policy=policy)))


def numerics(result: Callable[[Any, Tensor, Tensor], Any], x: Tensor) -> str:
    model = compiled(Model(result))
    outputs = model(x)
    torch.stack([out.sum() for out in outputs]).sum().backward()
    return str(model.plan.numerics)


def test_what_cannot_be_had_is_named() -> None:
    two_views = numerics(lambda m, h, x: (h[0], h.exp(), h[1]), torch.randn(3, 8))
    assert "views of it that are returned are added up first" in two_views
    used_apart = numerics(lambda m, h, x: (*(parts := h.chunk(2, 1)), parts[0].exp() + parts[0].tanh()), torch.randn(3, 8))
    assert "views of it that are returned are added up first" in used_apart
    used_twice = numerics(lambda m, h, x: (h, x.exp()), torch.randn(3, 8, requires_grad=True))
    assert "if used outside the model too, the gradient of" in used_twice


@pytest.mark.parametrize("policy", ["fastest", "offload-all", "checkpoint-all"])
def test_dropout_of_an_empty_batch(policy: str) -> None:
    model = compiled(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2)), policy=policy)
    model(torch.randn(0, 8)).sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_an_expanded_input_gets_the_gradient_of_the_plain_run() -> None:
    def gradient(compile_it: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
        x = torch.randn(1, 8).expand(4, 8).requires_grad_()
        (compiled(model) if compile_it else model)(x).pow(2).sum().backward()
        assert x.grad is not None
        return x.grad

    plain, ours = gradient(False), gradient(True)
    assert torch.equal(plain, ours) and plain.stride() == ours.stride()


def test_an_output_that_is_nobodys_view_may_be_detached_in_place() -> None:
    def changed(m: Any, h: Tensor, x: Tensor) -> Tensor:
        copy = h.clone()
        copy.t()[2].add_(1)
        return copy

    output = compiled(Model(changed))(torch.randn(3, 8))
    output.sum().backward()
    assert not output._is_view()
    output.detach_()


def test_a_frozen_teacher_changed_in_forward_is_refused_by_its_line() -> None:
    def teach(m: Any, h: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.teacher.weight.lerp_(m.linear.weight, 0.1)  # this line
        return h - m.teacher(x)

    model = Model(teach)
    model.teacher = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(mtcompile.CaptureError, match=r"changes the parameter teacher\.weight in place[\s\S]*this line"):
        compiled(model)(torch.randn(3, 8))


def test_hooks_on_saved_tensors_are_refused_unless_they_are_torchs() -> None:
    model, x = compiled(nn.Sequential(nn.Linear(8, 16), nn.Tanh())), torch.randn(3, 8)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()),
        pytest.raises(mtcompile.StepError, match="saved_tensors_hooks"),
    ):
        model(x)
    with torch.autograd.graph.save_on_cpu():
        model(x).sum().backward()


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Watching, lambda: FlopCounterMode(display=False)])
@pytest.mark.parametrize("compiled_before", [True, False])
def test_a_call_within_a_dispatch_mode_is_refused(mode: Callable[[], Any], compiled_before: bool) -> None:
    model, x = compiled(nn.Sequential(nn.Linear(8, 16), nn.Tanh())), torch.randn(3, 8)
    if compiled_before:
        model(x).sum().backward()
    with mode(), pytest.raises(mtcompile.StepError, match=r"stands in (Watching|\w*Flop\w*), .*Call the model outside of it"):
        model(x)
    model(x).sum().backward()


@pytest.mark.parametrize("cached", [True, False])
def test_weights_that_change_within_one_autocast_are_refused_where_plain_autocast_keeps_old_ones(cached: bool) -> None:
    def losses(compile_it: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        called, history = compiled(model) if compile_it else model, []
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            for _ in range(3):
                loss = called(torch.randn(3, 8)).float().pow(2).sum()
                history.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return history

    if cached:
        with pytest.raises(mtcompile.StepError, match=r"Enter torch\.autocast for each forward anew"):
            losses(True)
    else:
        assert losses(True) == losses(False)


def test_autocast_entered_for_each_forward_runs() -> None:
    model = nn.Linear(8, 8)
    optimizer, called = torch.optim.SGD(model.parameters(), 0.1), compiled(model)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = called(torch.randn(3, 8)).float().pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def least(build: Callable[[], nn.Module], x: Tensor) -> Any:
    """The compiled model within the smallest budget that works."""
    try:
        mtcompile.compile(build(), memory=1, device="cpu")(x)
    except mtcompile.BudgetError as error:
        return mtcompile.compile(build(), memory=error.minimum_bytes, device="cpu")
    raise AssertionError("a budget of one byte was accepted")


def test_peaks_stay_within_the_plan_beside_another_model_and_for_any_values() -> None:
    x, z = torch.randn(3, 4), torch.randn(3, 8, requires_grad=True)
    generator = least(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8)), x)
    critic = least(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)), z)
    orthogonal = least(lambda: parametrizations.orthogonal(nn.Linear(4, 4)), x)
    critic(generator(x)).mean().backward()
    orthogonal(x).sum().backward()
    for model in (generator, critic, orthogonal):
        report = model.memory_report()
        assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"]


class Masked(nn.Module):
    """Skips a mask of ones, unless it is told that it is being compiled: as the models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.linear(x)
        if not torch.compiler.is_compiling() and mask.all():
            return hidden.sum()
        return (hidden * mask).sum() * 0.5


def test_a_truth_value_of_the_inputs_is_taken_before_the_code_is_told_that_it_is_compiled() -> None:
    torch.manual_seed(0)
    plain = Masked()
    model, x = compiled(plain), torch.randn(3, 8)
    for mask in (torch.ones(3, 8, dtype=torch.bool), torch.rand(3, 8) > 0.5, torch.ones(3, 8, dtype=torch.bool)):
        assert torch.equal(model(x, mask), plain.forward(x, mask))
    assert "told" not in model.plan.numerics


def test_hooks_on_parameters_see_the_gradients_of_the_plain_run_in_some_order() -> None:
    def hooked(compile_it: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, gradients = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), dict[str, Tensor]()
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: gradients.__setitem__(name, gradient.clone()))
        (compiled(model) if compile_it else model)(torch.randn(3, 8)).pow(2).sum().backward()
        return gradients

    plain, ours = hooked(False), hooked(True)
    assert plain.keys() == ours.keys() and all(torch.equal(plain[name], ours[name]) for name in plain)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("statistics", [torch.bfloat16, torch.float32])
def test_batch_norm_in_bf16_has_the_bits_of_the_plain_run(statistics: torch.dtype, affine: bool) -> None:
    def trained(compile_it: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, affine=affine), nn.ReLU()).bfloat16()
        norm: Any = model[1]
        norm.running_mean, norm.running_var = norm.running_mean.to(statistics), norm.running_var.to(statistics)
        if affine:
            norm.to(statistics)
        called = compiled(model, policy="checkpoint-all") if compile_it else model
        loss = called(torch.randn(2, 3, 6, 6).bfloat16()).float().pow(2).sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    assert all(map(torch.equal, trained(False), trained(True)))


class Tabled(nn.Module):
    """Multiplies by a table that autocast casts at its only use."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(-1, 1, 64).view(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x @ self.table).float().pow(2).sum()


@pytest.mark.parametrize("policy", ["fastest", "offload-all", "checkpoint-all"])
def test_a_buffer_that_autocast_casts(policy: str) -> None:
    def trained(compile_it: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Tabled()
        called = compiled(model, policy=policy) if compile_it else model
        with torch.autocast("cpu", torch.bfloat16):
            loss = called(torch.randn(3, 8))
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    assert all(map(torch.equal, trained(False), trained(True)))
