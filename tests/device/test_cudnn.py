"""Recurrent layers and batch norm through the operations that run cuDNN, whose place computations of the host take here. Plain
PyTorch calls torch's own operations and derivatives."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtcompile.errors import CaptureError
from mtcompile.torch_private import pytree
from mtcompile.torch_private.cudnn import batch_norm
from tests.device.reference import compare, compiled_at, floor, on
from tests.device.second import NAME

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has cuDNN's own")

aten = torch.ops.aten
_CALLS = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)  # by cuDNN's numbers of them
_LAYERS = (aten.rnn_relu, aten.rnn_tanh, aten.lstm, aten.gru)


def on_host(function: Callable[..., Any], *args: Any) -> Any:
    """``function`` of copies on the host, in a thread of its own: one where autograd is at work."""
    device = next(value.device for value in pytree.tree_leaves(args) if isinstance(value, Tensor))
    copies = pytree.tree_map_only(Tensor, lambda value: value.detach().cpu().clone(), args)
    with ThreadPoolExecutor(1) as thread:
        results = thread.submit(function, *copies).result()
    return pytree.tree_map_only(Tensor, lambda value: value.detach().to(device), results)


def layer(x: Tensor, weights: Any, stride: int, hx: Tensor, cx: Tensor | None, *how: Any) -> tuple[Tensor, ...]:
    mode, _, _, layers, batch_first, dropout, train, both, *_ = how
    assert not how[8] and dropout == 0
    states = hx if cx is None else (hx, cx)
    results = _CALLS[mode](x, states, list(weights), stride > 3, layers, 0.0, train, both, batch_first)
    return results if cx is not None else (*results, x.new_empty(0))


def run_layer(x: Tensor, weights: Any, stride: int, buffer: Any, hx: Tensor, cx: Any, *how: Any) -> tuple[Tensor, ...]:
    output, hy, cy = on_host(layer, x, weights, stride, hx, cx, *how)
    reserve = torch.full((64,), 7, dtype=torch.uint8, device=x.device)
    packed = torch.cat([weight.flatten() for weight in weights])
    return output, hy, cy, reserve if how[6] else reserve[:0].clone(), packed


def run_layer_backward(*args: Any) -> Any:
    x, weights, stride, packed, hx, cx, output, *gradients = args[:10]
    how, reserve, mask = args[10:20], *args[20:]
    assert how[6], "cuDNN has no backward in evaluation"
    as_saved = bool((reserve == 7).all()) and torch.equal(packed, torch.cat([weight.flatten() for weight in weights]))
    reserve.fill_(0)  # cuDNN writes there too

    def backward(x: Tensor, weights: Any, hx: Tensor, cx: Any, gradients: Any, output: Tensor) -> Any:
        operands = [value.requires_grad_() for value in (x, hx, cx, *weights) if value is not None]
        results = layer(x, weights, stride, hx, cx, *how)
        wrong = 0.0 if as_saved and torch.equal(results[0], output) else math.nan
        reached = [(r, g + wrong) for r, g in zip(results, gradients, strict=True) if g is not None]
        results, gradients = zip(*reached, strict=True)
        return torch.autograd.grad(results, operands, gradients, allow_unused=True)

    grads = list(on_host(backward, x, list(weights), hx, cx, gradients, output))
    dx, dhx, dcx = grads.pop(0), grads.pop(0), grads.pop(0) if cx is not None else None
    buffer = torch.cat([grad.flatten() for grad in grads])  # which all gradients of weights are parts of
    parts = [part.view_as(grad) for part, grad in zip(buffer.split([grad.numel() for grad in grads]), grads, strict=True)]
    kept = [value if needed else None for value, needed in zip((dx, dhx, dcx), mask, strict=False)]
    return (*kept, parts if mask[3] else [])


def run_norm(x: Tensor, weight: Tensor, bias: Any, mean: Any, var: Any, training: bool, *how: float) -> tuple[Tensor, ...]:
    def normalize(x: Tensor, *others: Any) -> Any:
        return *aten.native_batch_norm.default(x, *others, training, *how), others[2:]

    y, saved, deviation, running = on_host(normalize, x, weight, bias, mean, var)
    if training and mean is not None:
        mean.copy_(running[0])
        var.copy_(running[1])
    reserve = torch.full((32,), 9, dtype=torch.uint8, device=x.device)
    return (y, saved, deviation, reserve) if training else (y, saved[:0].clone(), saved[:0].clone(), reserve[:0].clone())


def run_norm_backward(x: Tensor, gradient: Tensor, weight: Tensor, *others: Any) -> Any:
    _, _, mean, deviation, eps, reserve = others
    gradient = gradient + (0.0 if gradient.is_contiguous() and bool((reserve == 9).all()) else math.nan)

    def backward(x: Tensor, gradient: Tensor, weight: Tensor, mean: Tensor, deviation: Tensor) -> Any:
        return aten.native_batch_norm_backward.default(
            gradient, x, weight, None, None, mean, deviation, True, eps, [True, True, True]
        )

    return on_host(backward, x, gradient, weight, mean, deviation)


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Inside, recurrent layers on the device call what eager calls on a GPU."""

    def calling(mode: int) -> Callable[..., Any]:
        def call(x: Tensor, state: Any, weights: Any, biases: bool, layers: int, *how: Any) -> Any:
            dropout, train, both, batch_first = how
            hx, cx = state if mode == 2 else (state, None)
            hidden, projected = hx.shape[2], 0
            if cx is not None and cx.shape[2] != hidden:
                hidden, projected = cx.shape[2], hidden
            stride = (4 if biases else 2) + bool(projected)
            sizes = (mode, hidden, projected, layers, batch_first, dropout, train, both)
            results = aten._cudnn_rnn.default(x, weights, stride, None, hx, cx, *sizes, [], None)
            return results[: 3 if mode == 2 else 2]

        return call

    with torch.library._scoped_library("aten", "IMPL") as library:
        for mode, packet in enumerate(_LAYERS):
            library.impl(packet.input, calling(mode), "AutogradHPU")
        yield


class Eager(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        with eagerly():
            return self.model(**inputs)


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "cudnn_is_acceptable", lambda x: x.device.type == NAME)
    monkeypatch.setattr(batch_norm, "reserve_nbytes", lambda x: 32)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_cudnn_rnn", run_layer, "HPU")
        library.impl("_cudnn_rnn_backward", run_layer_backward, "HPU")
        library.impl("cudnn_batch_norm", run_norm, "HPU")
        library.impl("cudnn_batch_norm_backward", run_norm_backward, "HPU")
        yield


class Sequences(nn.Module):
    """Reads the last states as well."""

    def __init__(self, layer: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.first, self.recurrent = nn.Linear(6, 8), layer(8, 8, **options)
        self.head = nn.LazyLinear(3)
        self.head(self.recurrent(torch.zeros(2, 2, 8))[0])

    def forward(self, x: Tensor) -> Tensor:
        output, states = self.recurrent(self.first(x).tanh())
        return self.head(output).square().mean() + sum(state.sum() for state in pytree.tree_leaves(states))


LAYERS = {
    "LSTM, both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "LSTM with a projection": (nn.LSTM, {"proj_size": 4}),
    "GRU without biases": (nn.GRU, {"bias": False}),
    "RNN": (nn.RNN, {"nonlinearity": "relu"}),
}


def assert_plain(model: nn.Module, data: dict[str, Tensor], device: torch.device) -> None:
    least = floor(model, data, device)
    for memory in (least, None):
        compiled, optimizer = compiled_at(model, memory, device)
        compare(compiled, optimizer, Eager(model), data, device)
        report = compiled.memory_report()
        assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n != "LSTM, both ways")) for n in LAYERS])
def test_recurrent_layers(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    layer, options = LAYERS[name]
    assert_plain(Sequences(layer, **options), {"x": torch.randn(4, 3, 6)}, device)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        how = (norm.running_mean, norm.running_var, self.training, 0.1, norm.eps)
        return torch.cudnn_batch_norm(self.first(x), norm.weight, norm.bias, *how)[0].square().mean()


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.long)])
def test_batch_norm(training: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    assert_plain(Normed().train(training), {"x": torch.randn(2, 3, 6, 6)}, device)


def test_what_cudnn_keeps_to_itself_is_refused(device: torch.device) -> None:
    data = on(device, {"x": torch.randn(4, 3, 6)})
    with pytest.raises(CaptureError, match=r"drops out between its layers .*\n.*\n? *expected dropout=0, with nn.Dropout"):
        compiled_at(Sequences(nn.GRU, num_layers=2, dropout=0.1), None, device)[0](**data)
    with pytest.raises(CaptureError, match="no backward in evaluation"):
        compiled_at(Sequences(nn.GRU).eval(), None, device)[0](**data)
