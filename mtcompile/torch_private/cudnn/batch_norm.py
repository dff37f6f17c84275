"""Batch norm by cuDNN, as eager runs it on a GPU. torch's own traces decompose it to another kernel, which rounds otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_TRAINING, _EPS = 5, 7  # positions of these arguments

torch.library.define(
    "mtcompile::cudnn_batch_norm",
    "(Tensor input, Tensor weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training, "
    "float exponential_average_factor, float epsilon) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.needs_exact_strides,),
)


def cudnn_batch_norm(*args: Any) -> tuple[Tensor, ...]:
    """Computes ``aten.cudnn_batch_norm`` while a program is traced, in its place.

    Returns the result, the mean and inverse deviation that its backward reads, and cuDNN's reserve. The new running statistics
    are copied to where the old ones are."""
    *results, mean, var = torch.ops.mtcompile.cudnn_batch_norm(*args)
    if args[_TRAINING] and args[3] is not None:
        args[3].copy_(mean)
        args[4].copy_(var)
    return tuple(results)


def _run(*args: Any) -> tuple[Tensor, ...]:
    """Returns (result, mean, inverse deviation, reserve, new running mean, new running variance)."""
    statistics = [value if value is None or not args[_TRAINING] else value.clone() for value in args[3:5]]
    results = aten.cudnn_batch_norm.default(*args[:3], *statistics, *args[_TRAINING:])
    if not args[_TRAINING] or statistics[0] is None:
        statistics = [_empty(args), _empty(args)]
    return (*results, *statistics)


def _fake(*args: Any) -> tuple[Tensor, ...]:
    x, weight, training = args[0], args[1], args[_TRAINING]
    saved = [weight.new_empty(x.shape[1] if training else 0) for _ in range(2)]
    reserve = x.new_empty(reserve_nbytes(x) if training else 0, dtype=torch.uint8)
    changed = training and args[3] is not None
    running = [torch.empty_like(value) if changed else _empty(args) for value in args[3:5]]
    return (torch.empty_like(x), *saved, reserve, *running)


def reserve_nbytes(x: Tensor) -> int:
    """Returns the bytes that cuDNN keeps of a batch norm in training for its backward."""
    return int(torch._C._get_cudnn_batch_norm_reserve_space_size(x, True))  # type: ignore[attr-defined]


def _empty(args: tuple[Any, ...]) -> Tensor:
    return args[1].new_empty(0)  # type: ignore[no-any-return]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, running_mean, running_var, ctx.training, _, ctx.eps = inputs
    running = (None, None) if ctx.training else (running_mean, running_var)  # a backward in training does not read them
    ctx.save_for_backward(x, weight, *running, *output[1:4])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """Computes the gradients of input, weight and bias by the kernels that eager's backward calls."""
    if gradient is None:
        return (None,) * 8
    x, weight, *running, mean, deviation, reserve = ctx.saved_tensors
    if ctx.training:
        layout = torch.channels_last if _is_channels_last(x) else torch.contiguous_format
        layout = torch.channels_last_3d if x.dim() == 5 and layout is torch.channels_last else layout
        rows = gradient.contiguous(memory_format=layout)
        grads = aten.cudnn_batch_norm_backward.default(x, rows, weight, *running, mean, deviation, ctx.eps, reserve)
    else:
        needed = list(ctx.needs_input_grad[:3])
        grads = aten.native_batch_norm_backward.default(gradient, x, weight, *running, mean, deviation, False, ctx.eps, needed)
    return (*grads, None, None, None, None, None)


def _is_channels_last(x: Tensor) -> bool:
    """Tells whether torch takes images or volumes for channels-last, as ``suggest_memory_format`` does."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return layout is not None and torch._prims_common.suggest_memory_format(x) is layout


torch.library.register_fake("mtcompile::cudnn_batch_norm", _fake)
torch.library.impl("mtcompile::cudnn_batch_norm", "CompositeExplicitAutograd", _run)
torch.library.register_autograd("mtcompile::cudnn_batch_norm", _gradient, setup_context=_keep)
