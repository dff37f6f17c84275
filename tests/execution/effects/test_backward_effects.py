"""What a backward changes in place, in custom functions and hooks: as in a plain run, or refused before anything changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import mtcompile
from mtcompile.passes import rewrite
from mtcompile.passes.analysis.kernels import drop_dead
from mtcompile.passes.plan import Plan
from mtcompile.passes.proof.same_computation import SameComputationError, same_computation
from mtcompile.passes.step_graph import inputs_of
from tests.helpers.tracing import trace

Log = list[Tensor | None]
Train = Callable[[Any, torch.optim.Optimizer], None]


class Watch(torch.autograd.Function):
    """Scales by a running maximum of its gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, largest: Tensor) -> Tensor:
        ctx.largest = largest
        return values * largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        scale = ctx.largest.clone()
        ctx.largest.mul_(0.9).add_(0.1 * gradient.abs().amax())
        return gradient * scale, None


class Fused(torch.autograd.Function):
    """A product whose weight's gradient is added to ``weight.main_grad``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        weight.main_grad.add_(gradient.t() @ rows)
        return gradient @ weight, None


class Layer(nn.Module):
    largest: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(width, width), nn.Parameter(torch.randn(width, width) / width)
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + Fused.apply(Watch.apply(self.linear(x), self.largest).tanh(), self.weight)


class Net(nn.Module):
    """Equal layers, of which each changes its own buffer and its part of what all gradients are added to, and a hook with
    statistics and a counter."""

    norms: Tensor
    count: Tensor
    place: Tensor

    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.last = nn.ModuleList(Layer(width) for _ in range(layers)), nn.Linear(width, 4)
        self.register_buffer("norms", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        gradients = torch.zeros(layers, width, width, dtype=torch.float64)
        for layer, part in zip(self.layers, gradients, strict=True):
            layer.weight.main_grad = part

    def note(self, gradient: Tensor) -> None:
        self.norms.copy_(self.norms.roll(1))
        self.norms[:2].mul_(0.5).add_(gradient.norm())
        self.norms[2] = gradient[self.place].sum()
        self.count.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x.register_hook(self.note)
        return self.last(x).square().mean()

    def seen(self) -> Log:
        parameters = list(self.parameters())
        main = [p.main_grad.clone() for p in parameters if hasattr(p, "main_grad")]
        return [*main, *(p.grad for p in parameters), *(t.detach().clone() for t in (*parameters, *self.buffers()))]


def data(rows: int = 8) -> Tensor:
    return torch.randn(rows, 16)


def same(one: Log, other: Log) -> bool:
    pairs = zip(one, other, strict=True)
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def run(train: Train, compiled: bool, **options: Any) -> Log:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if compiled:
        model = mtcompile.compile(model, optimizer=optimizer, **options)
    torch.manual_seed(1)
    train(model, optimizer)
    return model.seen()


def steps(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        model(data()).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_many_ways(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Two forwards before two backwards in both orders, and before one; a backward twice; changes in between."""
    one, two = model(data()), model(data())
    one.backward()
    three = model(data())
    three.backward()
    two.backward()
    optimizer.step()
    (model(data()) + model(data())).backward()
    loss = model(data())
    loss.backward(retain_graph=True)
    model.norms.zero_()
    model.layers[0].weight.main_grad.zero_()
    model.layers[1].largest.fill_(3)
    loss.backward()
    model(data())  # without a backward, nothing changes
    model.norms = torch.full((3,), 5.0)
    model(data()).backward()


def test_changes_are_those_of_a_plain_run() -> None:
    assert same(run(in_many_ways, False), run(in_many_ways, True, memory="1MiB"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"memory": "31KiB"}, {"memory": "64KiB", "update": "backward", "run_ahead": True}])
def test_changes_do_not_depend_on_the_plan(options: dict[str, Any]) -> None:
    assert same(run(steps, False), run(steps, True, **options))


@pytest.mark.slow
def test_changes_through_torch_compile() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    for copied, layer in zip(plain.layers, model.layers, strict=True):
        copied.weight.main_grad = layer.weight.main_grad.clone()
    torch.manual_seed(1)
    steps(plain, torch.optim.SGD(plain.parameters(), 0.1))
    torch.manual_seed(1)
    steps(torch.compile(model, backend="mtcompile"), torch.optim.SGD(model.parameters(), 0.1))
    assert same(plain.seen(), model.seen())


def test_a_backward_that_cannot_make_its_changes_makes_none() -> None:
    model: Any = mtcompile.compile(Net(2), memory="1MiB")

    def replacing(loss: Tensor) -> None:
        model.norms = torch.zeros(3)
        loss.backward()

    refused: list[tuple[Callable[[Tensor], Any], type[Exception], str]] = [
        (lambda loss: torch.autograd.grad(loss, [model.last.weight]), mtcompile.StepError, "without that of layers.0"),
        (lambda loss: loss.backward(inputs=[model.last.weight]), mtcompile.StepError, "some gradients alone"),
        (lambda loss: loss.backward(create_graph=True), mtcompile.StepError, "create_graph=True"),
        (replacing, mtcompile.StepError, "norms, which .* was replaced"),
        (lambda loss: loss.backward(), IndexError, "out of bounds|out of range"),  # within the backward
    ]
    for backward, error, message in refused:
        model.place.fill_(99 if error is IndexError else 0)
        loss, before = model(data()), model.seen()
        with pytest.raises(error, match=message):
            backward(loss)
        assert same(before, model.seen())
    model.place.zero_()
    torch.autograd.grad(model(data()), [p for p in model.parameters() if p.ndim == 1 or not hasattr(p, "main_grad")])
    assert model.count == 1  # all the gradients that there are


class Changing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, changed: Tensor) -> Tensor:
        ctx.changed = changed
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.changed.add_(1)  # the line
        return gradient * 2, None


class OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.mul_(2)  # the line


class Refused(nn.Module):
    def __init__(self, within: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.within = nn.Linear(16, 16), within
        self.register_buffer("buffer", torch.zeros(16))
        self.part = self.buffer[3:5]

    def forward(self, x: Tensor) -> Any:
        return self.within(self, self.linear(x))


def changing_both(model: Any, h: Tensor) -> Tensor:
    model.buffer.mul_(0.5)
    return Changing.apply(h, model.buffer).sum()


def returning(model: Any, h: Tensor) -> tuple[Tensor, Tensor]:
    made = h.detach().clone()
    return Changing.apply(h, made).sum(), made


def storing(model: Any, h: Tensor) -> Tensor:
    model.stored = h.detach() + 1
    return Changing.apply(h, model.stored).sum()


@pytest.mark.parametrize(
    "within, message",
    [
        (lambda model, h: Changing.apply(h, model.linear.bias).sum(), "the parameter linear.bias in place"),
        (lambda model, h: Changing.apply(h * model.buffer.sum(), model.part).sum(), "part in place, which shares memory with"),
        (lambda model, h: OwnGradient.apply(h), "a gradient that arrives"),
        (changing_both, "buffer in place, which forward changes too"),
        (returning, "which forward returns or keeps"),
        (storing, "which forward returns or keeps"),
    ],
)
def test_what_cannot_be_written_back_is_refused_with_its_line(within: Callable[[Any, Tensor], Any], message: str) -> None:
    model = mtcompile.compile(Refused(within), memory="1MiB")
    with pytest.raises(mtcompile.CaptureError, match=rf"(?s){message}.*test_backward_effects.py:\d+ in backward: .*# the line"):
        model(data())
    assert torch.equal(model.buffer, torch.zeros(16))


@pytest.mark.slow
def test_micro_batches_are_refused() -> None:
    model = mtcompile.compile(Net(1), memory="1MiB", accumulate=2)
    with pytest.raises(mtcompile.CaptureError, match=r"accumulate=2: the model has a backward that changes .* in place"):
        model(data())


def test_no_write_is_dropped() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    write = graph.call_function(torch.ops.aten.copy_.default, (x, x))
    graph.output((x,))
    with pytest.raises(ValueError, match=r"expected operations that change nothing.*copy_"):
        drop_dead(graph)
    assert write in graph.nodes


def test_the_proof_refuses_a_forward_that_reads_what_only_the_backward_finds() -> None:
    traced = trace(Net(1), {"x": data()})
    step = rewrite(traced.step, Plan())
    same_computation(traced.joint, step)
    fetches = {c for spec, node in inputs_of(step) if spec.in_backward for c in node.users if c.op != "output"}
    assert len([spec for spec in step.meta["inputs"] if spec.in_backward]) == 4
    for call in fetches:
        call.meta["phase"] = "forward"
        with pytest.raises(SameComputationError, match="in backward to be read in the backward alone"):
            same_computation(traced.joint, step)
        call.meta["phase"] = "backward"
