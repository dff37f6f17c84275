"""CTC loss as an operation whose shapes are known when it is captured.

torch's own operation keeps a table for its backward whose width is that of the longest target: of what a tensor holds. This one
keeps nothing, and its backward computes the table again. The kernels are torch's, so the bits are those of a plain run.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcompile.errors import CaptureError

_NONE, _MEAN, _SUM = range(3)  # torch's reductions
_REDUCTIONS = {"none": _NONE, "mean": _MEAN, "sum": _SUM}


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """As ``torch.ctc_loss``: ``log_probs`` (T, N, C) or (T, C); lengths are tensors or sequences of ints."""
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    inputs, lengths = _tensor(input_lengths), _tensor(target_lengths)
    losses = torch.ops.mtcompile.ctc_loss(batched, targets, inputs, lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == math.inf, torch.zeros((), dtype=losses.dtype, device=losses.device), losses)
    if reduction == _MEAN:
        return (losses / lengths.to(losses).clamp_min(1)).mean()
    if reduction == _SUM:
        return losses.sum()
    return losses if log_probs.dim() == 3 else losses.squeeze(0)


def named_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """As ``torch.nn.functional.ctc_loss``."""
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, _REDUCTIONS[reduction], zero_infinity)


STAND_INS = {torch.ctc_loss: ctc_loss, F.ctc_loss: named_ctc_loss}


def _tensor(lengths: Any) -> Tensor:
    return lengths if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)


def _table(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, *how: Any) -> tuple[Any, ...]:
    known = (log_probs, targets, inputs.flatten().tolist(), lengths.flatten().tolist())
    return known, torch.ops.aten._ctc_loss.default(*known, *how)


@torch.library.custom_op("mtcompile::ctc_loss", mutates_args=())
def _forward(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    _, (losses, _) = _table(log_probs, targets, inputs, lengths, blank, zero_infinity)
    return losses


@torch.library.custom_op("mtcompile::ctc_loss_backward", mutates_args=())
def _backward(
    gradient: Tensor, log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    known, (losses, table) = _table(log_probs, targets, inputs, lengths, blank, zero_infinity)
    return torch.ops.aten._ctc_loss_backward.default(gradient, *known, losses, table, blank, zero_infinity)


@_forward.register_fake
def _losses(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    if log_probs.is_cuda and targets.dtype == torch.int32 and targets.dim() == 1 and not blank:
        raise CaptureError(
            "ctc_loss may run cuDNN's kernel here, which rounds otherwise than torch's own\n"
            "  expected targets of dtype int64, with which plain runs take torch's own too"
        )
    return log_probs.new_empty(log_probs.shape[1])


@_backward.register_fake
def _gradients(gradient: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.how = inputs[4:]


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.mtcompile.ctc_loss_backward(gradient, *ctx.saved_tensors, *ctx.how), None, None, None, None, None


_forward.register_autograd(_gradient, setup_context=_keep)
