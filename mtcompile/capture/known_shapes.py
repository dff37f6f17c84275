"""Operations of torch whose shapes depend on what tensors hold, as operations whose shapes are known when they are captured.

The kernels are torch's, so the bits are those of a plain run.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mtcompile.errors import CaptureError
from mtcompile.torch_private.known_values import is_mask
from mtcompile.torch_private.plain_torch import left_aligned

# ----------------------------------------------------------------------------------------------- elements that a mask chooses
#
# How many elements ``x[mask]`` has depends on what the mask holds. Where that number is known, it is the first argument here.


@dataclass(frozen=True, slots=True)
class Shaped:
    """See ``torch_private.known_values.Shaped``."""

    function: Callable[..., Any]
    masks: tuple[tuple[fx.Node, tuple[int, ...] | None], ...]
    counting: Callable[..., Any] = torch.count_nonzero


def shaped(node: fx.Node) -> Shaped | None:
    """The operation of known shape that may take the place of a call in Dynamo's graph; None for all other calls."""
    function = _OF_KNOWN_SHAPE.get(node.target)
    if function is None or "out" in node.kwargs or "output_size" in node.kwargs or (function is _where and len(node.args) != 1):
        return None
    if function is _getitem:
        index = node.args[1]
        indices: Sequence[Any] = index if isinstance(index, tuple) else (index,)
        masks = tuple((each, None) for each in indices if isinstance(each, fx.Node) and is_mask(each.meta.get("example_value")))
        return Shaped(function, masks) if masks else None
    operands = [operand for operand in (*node.args, *node.kwargs.values()) if isinstance(operand, fx.Node)]
    if function is _masked_select:
        shape = torch.broadcast_shapes(*(operand.meta["example_value"].shape for operand in operands))
        return Shaped(function, ((operands[1], tuple(shape)),))
    if function is _repeat_interleave:
        return Shaped(function, ((operands[1], None),), torch.sum) if len(operands) > 1 else None
    return Shaped(function, ((operands[0], None),))


def _indices(mask: Tensor, count: int) -> Tensor:
    """``mask.nonzero()``, with its strides."""
    return torch.nonzero_static(mask, size=count).t().contiguous().t()


def _nonzero(counts: Sequence[int], mask: Tensor, as_tuple: bool = False) -> Any:
    indices = _indices(mask, *counts)
    return indices.unbind(1) if as_tuple else indices


def _where(counts: Sequence[int], mask: Tensor) -> Any:
    return _nonzero(counts, mask, as_tuple=True)


def _masked_select(counts: Sequence[int], input: Tensor, mask: Tensor) -> Tensor:
    input, mask = torch.broadcast_tensors(input, mask)
    return input[_indices(mask, *counts).unbind(1)]


def _getitem(counts: Sequence[int], tensor: Tensor, index: Any) -> Tensor:
    if is_mask(index) and index.shape != tensor.shape[: index.dim()]:
        raise IndexError(f"the shape of the mask {list(index.shape)} does not match that of the tensor {list(tensor.shape)}")
    known, index = iter(counts), index if isinstance(index, tuple) else (index,)
    unbound = (_indices(each, next(known)).unbind(1) if is_mask(each) else (each,) for each in index)
    return tensor[tuple(itertools.chain.from_iterable(unbound))]


def _repeat_interleave(counts: Sequence[int], input: Tensor, repeats: Tensor, dim: int | None = None) -> Tensor:
    return torch.repeat_interleave(input, repeats, dim, output_size=counts[0])


_OF_KNOWN_SHAPE: dict[Any, Callable[..., Any]] = {
    torch.nonzero: _nonzero,
    "nonzero": _nonzero,
    torch.argwhere: _nonzero,
    "argwhere": _nonzero,
    torch.where: _where,
    torch.masked_select: _masked_select,
    "masked_select": _masked_select,
    operator.getitem: _getitem,
    "__getitem__": _getitem,
    torch.repeat_interleave: _repeat_interleave,
    "repeat_interleave": _repeat_interleave,
}

# ------------------------------------------------------------------------------------------------------------------- CTC loss
#
# torch's own operation keeps a table for its backward whose width is that of the longest target. This one keeps nothing, and
# its backward computes the table again.

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
    """Computes ``torch.ctc_loss``: ``log_probs`` (T, N, C) or (T, C); lengths are tensors or sequences of ints."""
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    inputs, lengths = _tensor(input_lengths), _tensor(target_lengths)
    losses: Tensor = torch.ops.mtcompile.ctc_loss(batched, targets, inputs, lengths, blank, zero_infinity)
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
    """Computes ``torch.nn.functional.ctc_loss``."""
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, _REDUCTIONS[reduction], zero_infinity)


def _tensor(lengths: Any) -> Tensor:
    return lengths if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)


def _table(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, *how: Any) -> tuple[Any, ...]:
    known = (log_probs, targets, inputs.flatten().tolist(), lengths.flatten().tolist())
    return known, torch.ops.aten._ctc_loss.default(*known, *how)


@torch.library.custom_op("mtcompile::ctc_loss", mutates_args=())
def _forward(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool) -> Tensor:
    _, (losses, _) = _table(log_probs, targets, inputs, lengths, blank, zero_infinity)
    return losses  # type: ignore[no-any-return]


@torch.library.custom_op("mtcompile::ctc_loss_backward", mutates_args=())
def _backward(
    gradient: Tensor, log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    known, (losses, table) = _table(log_probs, targets, inputs, lengths, blank, zero_infinity)
    result: Tensor = torch.ops.aten._ctc_loss_backward.default(gradient, *known, losses, table, blank, zero_infinity)
    return result


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

# ---------------------------------------------------------------------------------------- the weight of targets that count
#
# The mean of smoothed losses divides by the sum of the weights of all targets that are not ignored. A plain run sums only these
# weights. Under tracing, torch also adds a zero for each ignored target, and the sum rounds differently.


_OF_CROSS_ENTROPY = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Computes ``torch.nn.functional.cross_entropy``."""
    given = {**dict(zip(_OF_CROSS_ENTROPY, args, strict=False)), **kwargs}
    weight, label_smoothing = given.get("weight"), given.get("label_smoothing", 0.0)
    ignore_index, reduction = given.get("ignore_index", -100), given.get("reduction", "mean")
    if given.get("size_average") is not None or given.get("reduce") is not None:
        reduction = "none" if given.get("reduce") is False else "sum" if given.get("size_average") is False else "mean"
    how = _REDUCTIONS[reduction], ignore_index, label_smoothing
    if weight is None or not 0.0 < label_smoothing <= 1.0 or reduction != "mean" or target.is_floating_point():
        cross_entropy_loss: Tensor = torch.ops.aten.cross_entropy_loss(input, target, weight, *how)
        return cross_entropy_loss
    if torch.is_autocast_enabled("cpu") and input.device.type == "cpu":
        input, weight = (x if x.dtype == torch.float64 else x.float() for x in (input, weight))
    class_dim = 0 if input.dim() == 1 else 1
    log_probs = F.log_softmax(input, class_dim, dtype=input.dtype)
    losses = -(log_probs * weight.view(-1, *(1,) * (input.dim() - 1 - class_dim))).sum(class_dim)
    smooth = losses.masked_fill(target == ignore_index, 0.0).sum()
    mean: Tensor = smooth / torch.ops.mtcompile.weight_of_targets(weight, target, ignore_index)
    nll = F.nll_loss(log_probs, target, weight, ignore_index=ignore_index)
    loss: Tensor = nll * (1 - label_smoothing) + mean * (label_smoothing / input.shape[class_dim])
    return loss


@torch.library.custom_op("mtcompile::weight_of_targets", mutates_args=())
def _weight_of_targets(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    return weight.gather(0, target.masked_select(target != ignore_index)).sum()


@_weight_of_targets.register_fake
def _one_weight(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    return weight.new_empty(())


# ---------------------------------------------------------------------------------------------- encoders of nested tensors
#
# In evaluation, nn.TransformerEncoder packs the tokens that its mask keeps, if they come first in each row of the mask.


def is_left_aligned(tensor: Tensor, mask: Tensor) -> Any:
    """Computes ``plain_torch.left_aligned`` by tensor operations."""
    if torch.is_grad_enabled() and tensor.requires_grad:  # an encoder asks here too, but packs nothing
        return False
    return (mask[:, 1:] <= mask[:, :-1]).all()


STAND_INS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ctc_loss: ctc_loss,
    F.ctc_loss: named_ctc_loss,
    F.cross_entropy: cross_entropy,
    left_aligned: is_left_aligned,
}
