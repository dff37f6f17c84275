"""Outputs that are views: same memory, strides, ``requires_grad`` and gradients as those of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import mtcompile

pytestmark = pytest.mark.slow  # it compiles many models

Outputs = Callable[["Layer", Tensor, Tensor], Any]


class Layer(nn.Module):
    """Returns whatever ``outputs(self, hidden, x)`` makes."""

    def __init__(self, outputs: Outputs) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.outputs = outputs
        self.noted: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        return self.outputs(self, self.linear(x), x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


def noting(layer: Layer, hidden: Tensor, x: Tensor) -> Tensor:
    layer.noted = hidden.detach()
    return hidden * 2


def viewed_without_grad(layer: Layer, hidden: Tensor, x: Tensor) -> Any:
    with torch.no_grad():
        view = hidden.view(-1)
    return hidden, view


def changed_in_place(layer: Layer, hidden: Tensor, x: Tensor) -> Any:
    doubled = hidden * 2
    doubled.relu_()
    return doubled.view(-1), doubled


def written_into(layer: Layer, hidden: Tensor, x: Tensor) -> Any:
    zeros = torch.zeros(4, 8)
    zeros[:, :] = hidden
    return zeros[:, 0], zeros


def expanded_twice(layer: Layer, hidden: Tensor, x: Tensor) -> Any:
    row = hidden.sum(0)
    return row, row.expand(4, 8), row.expand(3, 8)


CASES: dict[str, Outputs] = {
    "codebook": lambda m, h, x: (h, h.detach(), m.weight.detach()),
    "detached first": lambda m, h, x: (h.detach(), h, m.linear(h).pow(2).sum()),
    "detached view first": lambda m, h, x: (h.detach().t(), h.view(-1)),
    "data": lambda m, h, x: (h, h.data),
    "kept as attribute": noting,
    "viewed without grad": viewed_without_grad,
    "changed in place": changed_in_place,
    "written into": written_into,
    "expanded": lambda m, h, x: h.sum(0).expand(4, 8),
    "expanded twice": expanded_twice,
    "chunks": lambda m, h, x: h.chunk(2, 1),
    "one chunk": lambda m, h, x: h.chunk(2, 1)[0],
    "split and whole": lambda m, h, x: (*h.split(3, 1), h),
    "parts": lambda m, h, x: (h[:, 0], h[1:], h[None], h.narrow(1, 2, 3), h.unfold(1, 4, 2)),
    "parameter": lambda m, h, x: (m.weight, m.weight.t(), m.weight.view(-1), h),
    "input": lambda m, h, x: (x, x.t(), x.detach(), x.expand(2, 4, 8), h),
    "conjugate": lambda m, h, x: (torch.view_as_complex(h.view(4, 4, 2)).conj(), h),
    "of several results": lambda m, h, x: (*h.max(1), h.max(1)[0].unsqueeze(0)),
    "activation in place": lambda m, h, x: (nn.functional.leaky_relu(h, 0.1, True), m.linear(h)),
    "same twice": lambda m, h, x: (h, {"again": h, "views": [h.view(2, -1)]}),
}


def tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def trained(case: Outputs, compiled: bool, input_grad: bool) -> tuple[Layer, Tensor, list[Tensor], Tensor]:
    torch.manual_seed(0)
    model = Layer(case)
    if compiled:
        model = mtcompile.compile(model, memory="1GiB")
    x = torch.randn(4, 8, requires_grad=input_grad)
    outputs = tensors(model(x)) + tensors(model.noted)
    loss = model.weight.sum() * 0
    for seed, output in enumerate(outputs):
        values = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
        if output.requires_grad:
            weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))
            loss = loss + (values * weights).sum() + (values * values).sum()
        elif output.is_floating_point():
            loss = loss + (values * model.weight.sum()).sum()
    loss.backward()
    return model, x, outputs, loss


@pytest.mark.parametrize(("case", "input_grad"), [*((case, True) for case in CASES), ("input", False), ("codebook", False)])
def test_views_are_those_of_plain_pytorch(case: str, input_grad: bool) -> None:
    plain, plain_x, plain_outputs, plain_loss = trained(CASES[case], False, input_grad)
    model, x, outputs, loss = trained(CASES[case], True, input_grad)

    def layout(tensor: Tensor) -> tuple[Any, ...]:
        place = tensor.shape, tensor.stride(), tensor.storage_offset()
        return *place, tensor.dtype, tensor.requires_grad, tensor.is_leaf, tensor.is_conj()

    def shared(these: list[Tensor]) -> list[list[bool]]:
        addresses = [tensor.untyped_storage().data_ptr() for tensor in these]
        return [[one == other for other in addresses] for one in addresses]

    assert [layout(output) for output in outputs] == [layout(output) for output in plain_outputs]
    assert shared(outputs) == shared(plain_outputs)
    assert all(torch.equal(output, other) for output, other in zip(outputs, plain_outputs, strict=True))
    assert torch.equal(loss, plain_loss)
    for parameter, other in zip((*model.parameters(), x), (*plain.parameters(), plain_x), strict=True):
        assert (parameter.grad is None) == (other.grad is None)
        assert parameter.grad is None or torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize("of_input", [False, True])
def test_a_function_that_returns_its_operand_keeps_its_own_gradient(of_input: bool) -> None:
    """Its output shares memory with the operand in plain PyTorch, and its backward is not a view's."""
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Layer(lambda m, h, x: (h, Reversed.apply(x if of_input else h)))
        if compiled:
            model = mtcompile.compile(model, memory="1GiB")
        x = torch.randn(4, 8, requires_grad=True)
        hidden, reversed_ = model(x)
        (hidden.sum() + reversed_.pow(2).sum()).backward()
        gradients.append([x.grad, *(p.grad for p in model.linear.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class Remembers(nn.Module):
    """Reads its last result: detached, as truncated backpropagation does, and under no_grad, as a running average does."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 8)
        self.state: torch.Tensor | None = None
        self.average: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
        before = self.state if given is None else given
        self.state = self.cell(x, None if before is None else before.detach())
        loss = self.state.pow(2).mean()
        with torch.no_grad():
            self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss
        return loss


@pytest.mark.parametrize("update", [pytest.param("step", marks=pytest.mark.long), "backward"])
def test_results_of_the_last_call_are_read_without_a_gradient(update: str) -> None:
    torch.manual_seed(0)
    plain = Remembers()
    compiled, results = copy.deepcopy(plain), []
    for model in (plain, compiled):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if model is compiled:
            model = mtcompile.compile(model, memory="1GiB", optimizer=optimizer, update=update)
        for step in range(4):
            x = torch.linspace(-1, 1, 30).reshape(5, 6) * (step + 1)
            model(x, model.state if step == 2 else None).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([model.state, model.average, *model.parameters()])
    assert all(map(torch.equal, *results))


def _copied(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(torch.empty(3, 8).copy_(x))


def _written_through_a_view(linear: nn.Linear, x: Tensor) -> Tensor:
    h = torch.zeros(3, 8)
    row = h[0]
    row.add_(x[1])
    h[2] = x[0]
    return linear(h)


def _written_in_a_list(linear: nn.Linear, x: Tensor) -> Tensor:
    h = torch.zeros(3, 8)
    torch._foreach_add_([h], [x])
    return linear(h)


def _into_out(linear: nn.Linear, x: Tensor) -> Tensor:
    h = torch.zeros(3, 8)
    h.addcmul_(x, x)
    return linear(h) + linear(nn.functional.relu(x.clone(), inplace=True))


def _mapped(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear(torch.vmap(torch.sin)(x) + torch.func.jvp(torch.sin, (x,), (torch.ones(3, 8),))[1])


@pytest.mark.parametrize("write", [_mapped, _copied, _written_through_a_view, _written_in_a_list, _into_out])
def test_inputs_that_are_written_or_mapped_get_their_gradient(write: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    class Writing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return write(super().forward, x).pow(2).sum()

    torch.manual_seed(0)
    plain, gradients = Writing(8, 8), []
    for model in (plain, mtcompile.compile(copy.deepcopy(plain), memory="1GiB")):
        leaf = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
        model(leaf * 1.5).backward()  # an input that another computation made
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
