"""Recurrent layers by cuDNN, as eager runs them on a GPU. torch's own traces make products of them, which round otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._dispatch.python import no_python_dispatcher
from torch._ops import OpOverload
from torch.fx import traceback
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

from mtcompile.capture.refusals import place_in
from mtcompile.errors import CaptureError
from mtcompile.runtime.devices.arena import Layout, layout_of
from mtcompile.torch_private import pytree

aten = torch.ops.aten
_RELU, _TANH, _LSTM, _GRU = range(4)  # cuDNN's numbers of its layers
# The layers' operations, and the modes and overloads of them: on sequences of one length, and on packed ones.
_LAYERS = {aten.rnn_relu: _RELU, aten.rnn_tanh: _TANH, aten.lstm: _LSTM, aten.gru: _GRU}
_OPERANDS = "Tensor input, Tensor[] weight, int weight_stride, Tensor hx, Tensor? cx"
_SETTINGS = "int mode, int hidden_size, int proj_size, int num_layers, bool batch_first, bool train, bool bidirectional"

torch.library.define("mtcompile::cudnn_rnn", f"({_OPERANDS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
torch.library.define(
    "mtcompile::cudnn_rnn_backward",
    f"({_OPERANDS}, Tensor output, Tensor reserve, Tensor weight_buffer, "
    f"Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, {_SETTINGS}, bool[4] output_mask) -> Tensor[]",
)
_OF_OPERANDS = 5  # how many arguments _OPERANDS are


def stand_ins() -> dict[OpOverload[..., Any], Callable[..., Any]]:
    """Returns the operations of recurrent layers, and what a trace runs in their place: cuDNN where eager runs it too."""
    return {
        **{packet.input: functools.partial(_unpacked, packet.input, mode) for packet, mode in _LAYERS.items()},
        **{packet.data: functools.partial(_packed, packet.data) for packet in _LAYERS},
    }


def _unpacked(operation: Any, mode: int, x: Tensor, state: Any, weights: list[Tensor], *how: Any) -> Any:
    """Computes ``aten.lstm.input`` and its like. ``how``: biases, layers, dropout, training, both ways, batch first."""
    if not torch.cudnn_is_acceptable(x):
        return operation._op_dk(DispatchKey.CompositeImplicitAutograd, x, state, weights, *how)
    has_biases, layers, dropout, train, bidirectional, batch_first = how
    _check(operation, dropout if train else 0.0)
    hx, cx = state if mode == _LSTM else (state, None)
    hidden, projected = hx.shape[2], 0
    if cx is not None and cx.shape[2] != hidden:
        hidden, projected = cx.shape[2], hidden
    stride = (4 if has_biases else 2) + (1 if projected else 0)
    settings = (mode, hidden, projected, layers, batch_first, train, bidirectional)
    output, hy, cy, _, _ = torch.ops.mtcompile.cudnn_rnn(x, weights, stride, hx, cx, *settings)
    return (output, hy, cy) if mode == _LSTM else (output, hy)


def _packed(operation: Any, data: Tensor, *args: Any) -> Any:
    if not torch.cudnn_is_acceptable(data):
        return operation._op_dk(DispatchKey.CompositeImplicitAutograd, data, *args)
    _refuse(operation, "runs cuDNN on packed sequences, whose lengths a graph does not hold", "pass padded sequences")


def _check(operation: Any, dropout: float) -> None:
    if dropout > 0:
        advice = "expected dropout=0, with nn.Dropout between single layers where it is wanted"
        _refuse(operation, "drops out between its layers by numbers of cuDNN's own, which nothing can draw again", advice)
    if torch.is_autocast_enabled("cuda"):
        advice = "put it under torch.autocast('cuda', enabled=False), in plain runs as well, or use a model in half precision"
        _refuse(operation, "runs cuDNN under autocast, which casts and packs weights in one", advice)


def _refuse(operation: Any, why: str, advice: str) -> None:
    off = "or switch cuDNN off before, in plain runs as well (torch.backends.cudnn.enabled = False)"
    raise CaptureError(f"{operation} {why}{place_in(''.join(traceback.format_stack()))}\n  {advice}, {off}")


def _run(*args: Any) -> tuple[Tensor, ...]:
    """Returns (output, last state, last cell, reserve, the weights as cuDNN packs them)."""
    x, weights, stride, *states = args[:_OF_OPERANDS]
    *sizes, train, bidirectional = args[_OF_OPERANDS:]
    how = (*sizes, 0.0, train, bidirectional, [], None)
    return aten._cudnn_rnn.default(x, weights, stride, None, *states, *how)  # type: ignore[no-any-return]


def _fake(*args: Any) -> tuple[Tensor, ...]:
    return tuple(_like(args[0], layouts_of_a_run(_run, args)))


def _like(x: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    return [x.new_empty_strided(layout.size, layout.stride, dtype=layout.dtype) for layout in layouts]


def layouts_of_a_run(run: Callable[..., Sequence[Tensor]], args: tuple[Any, ...]) -> tuple[Layout, ...]:
    """Returns the layouts of what ``run`` gives for operands like those among ``args``: how much cuDNN reserves for a backward,
    how many numbers its packed weights have, and in which order it leaves results, only a run on zeros shows."""
    leaves, spec = pytree.tree_flatten(args)
    known = tuple((layout_of(leaf), leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return _layouts(run, known, spec)


@functools.cache
def _layouts(run: Callable[..., Sequence[Tensor]], known: tuple[Any, ...], spec: Any) -> tuple[Layout, ...]:
    def made(leaf: Any) -> Any:
        if not isinstance(leaf, tuple):
            return leaf
        layout, device = leaf
        reach = sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
        zeros = torch.zeros(0 if 0 in layout.size else 1 + reach, dtype=layout.dtype, device=device)
        return zeros.as_strided(layout.size, layout.stride)

    with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
        return tuple(map(layout_of, run(*pytree.tree_unflatten(map(made, known), spec))))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, ctx.stride, hx, cx, *ctx.settings = inputs
    result, _, _, reserve, packed = output
    ctx.save_for_backward(x, hx, cx, result, reserve, packed, *weights)
    ctx.mark_non_differentiable(reserve, packed)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    x, hx, cx, output, reserve, packed, *weights = ctx.saved_tensors
    settings = len(ctx.settings)
    if not ctx.settings[-2]:
        raise CaptureError(
            "cuDNN's recurrent layers have no backward in evaluation, which plain PyTorch refuses too\n"
            "  expected model.train() before a step, or torch.no_grad() around an evaluation"
        )
    if all(gradient is None for gradient in gradients[:3]):
        return (None,) * (_OF_OPERANDS + settings)
    needs = ctx.needs_input_grad
    mask = [needs[0], needs[3], needs[4], any(needs[1])]
    saved = (output, reserve, packed, *gradients[:3])
    grads = list(torch.ops.mtcompile.cudnn_rnn_backward(x, weights, ctx.stride, hx, cx, *saved, *ctx.settings, mask))
    dx, dhx, dcx = (grads.pop(0) if wanted else None for wanted in mask[:3])
    return (dx, grads if mask[3] else [None] * len(weights), None, dhx, dcx, *(None,) * settings)


def _run_backward(*args: Any) -> list[Tensor]:
    """Returns the gradients that the mask asks for: of input, states, and each weight. cuDNN's own are parts of one buffer."""
    x, weights, stride, *states, output, reserve, packed, grad_output, grad_hy, grad_cy = args[:11]
    *sizes, train, bidirectional, mask = args[11:]
    how = (*sizes, 0.0, train, bidirectional, [], None)
    gradients = (grad_output, grad_hy, grad_cy)
    # cuDNN writes into the reserve while it goes back: what was saved may be read again
    *of_inputs, of_weights = aten._cudnn_rnn_backward.default(
        x, weights, stride, packed, *states, output, *gradients, *how, reserve.clone(), mask
    )
    wanted = [gradient for gradient, needed in zip(of_inputs, mask, strict=False) if needed]
    return [*wanted, *(gradient.clone() for gradient in of_weights)] if mask[3] else wanted


def _fake_backward(*args: Any) -> list[Tensor]:
    return _like(args[0], layouts_of_a_run(_run_backward, args))


torch.library.register_fake("mtcompile::cudnn_rnn", _fake)
torch.library.register_fake("mtcompile::cudnn_rnn_backward", _fake_backward)
torch.library.impl("mtcompile::cudnn_rnn", "CompositeExplicitAutograd", _run)
torch.library.impl("mtcompile::cudnn_rnn_backward", "CompositeExplicitAutograd", _run_backward)
torch.library.register_autograd("mtcompile::cudnn_rnn", _gradient, setup_context=_keep)


@register_flop_formula([torch.ops.mtcompile.cudnn_rnn, torch.ops.mtcompile.cudnn_rnn_backward], get_raw=True)
def _flops(x: Any, weights: Any, *others: Any, out_val: Any = None, **_: Any) -> int:
    """Each weight matrix multiplies every step of every sequence; a backward does so twice."""
    steps = x.shape[0] * x.shape[1]
    products = sum(2 * steps * weight.numel() for weight in weights if weight.dim() == 2)
    return int(products) * (2 if isinstance(out_val, list) else 1)
