"""Transforms and traces run the plain forward; what a plan's forward and backward cannot give is refused in one sentence."""

import io

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import mtcompile

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def stacked(model):
    weights = {name: torch.stack([p.detach(), p.detach() * 2]) for name, p in model.named_parameters()}
    with torch.no_grad():
        return torch.func.vmap(lambda each, x: torch.func.functional_call(model, each, (x,)), (0, None))(weights, X)


@pytest.mark.parametrize(
    "transformed",
    [
        stacked,
        lambda model: torch.func.jacrev(model)(X[0]),
        lambda model: torch.func.jvp(model, (X,), (torch.ones(4, 8),))[1],
        lambda model: torch.func.linearize(model, X)[1](torch.ones(4, 8)),
        lambda model: torch.jit.trace(model, X)(X),
        lambda model: torch.jit.script(model)(X),
    ],
)
def test_a_transform_is_that_of_the_plain_model(transformed):
    assert torch.equal(transformed(mtcompile.compile(net(), memory="1MiB")), transformed(net()))


def test_dual_tensors_and_batched_gradients_are_refused():
    model = mtcompile.compile(net(), memory="1MiB")
    with forward_ad.dual_level(), pytest.raises(mtcompile.StepError, match="dual tensor"):
        model(forward_ad.make_dual(X, torch.ones_like(X)))
    x = X.clone().requires_grad_()
    with pytest.raises(mtcompile.StepError, match="several gradients at once"):
        torch.autograd.grad(model(x), x, torch.ones(3, 4, 8), is_grads_batched=True)


def test_a_product_with_a_complex_number_is_planned():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            hidden = self.linear(x)
            return ((torch.complex(hidden, hidden.flip(0)) * (2 - 1j)) / 1j).exp().real.sum()

    plain, compiled = Complex(), mtcompile.compile(Complex(), memory="1MiB")
    for model in (plain, compiled):
        model(X).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), compiled.parameters(), strict=True))


def test_a_compiled_submodule_is_called_without_gradients():
    inner = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="eager")
    plain = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8))
    with torch.no_grad():
        expected = plain(X)
        model = mtcompile.compile(plain, memory="1MiB", policy="megatrain", update="backward", optimizer=None)
        assert torch.equal(model(X), expected)


def test_a_saved_model_is_loaded_by_weights_only():
    model, file = mtcompile.compile(net(), memory="1MiB"), io.BytesIO()
    compiled_class = type(model)
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
        loaded = torch.load(file, weights_only=True)
    assert type(loaded) is nn.Sequential and type(model) is compiled_class
    assert torch.equal(loaded(X), net()(X))


@pytest.mark.parametrize("inside", ["the model", "a function around it"])
def test_torch_compile_of_a_compiled_model_keeps_its_plan(inside):
    """As of Trainer's ``torch_compile=True``: the model's own part is planned, within its budget, with plain PyTorch's bits."""
    torch.compiler.reset()
    plain, model = net(), mtcompile.compile(net(), memory="1MiB", policy="checkpoint-all")
    compiled = torch.compile(model, backend="eager")
    if inside != "the model":
        compiled = torch.compile(lambda x: model(x * 1.0), backend="eager")
    for _ in range(2):
        plain(X).square().sum().backward()
        compiled(X).square().sum().backward()
    assert model.plan is not None and len(model.memory_report()["programs"]) == 1
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_graph_that_must_be_whole_cannot_hold_a_compiled_model():
    torch.compiler.reset()
    model = mtcompile.compile(net(), memory="1MiB")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(X)
