"""Values on the device "meta" that operations make, for the operations that are traced and added most. torch's own functions
for them are in Python and load Dynamo or the package of symbolic numbers, which takes longer than a plan's own work; what these
here do not know is left to those."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
_META = torch.device("meta")


class Unsure(Exception):
    """Raised where torch's ways to trace give a value different strides."""


def result_of(target: Any, args: Any, kwargs: Any, exact: bool = False) -> Any:
    """Returns what an operation makes of tensors on the device "meta". ``exact``: raises Unsure where a trace under a
    FakeTensorMode would have other strides."""
    rule = _RULES.get(target) if not kwargs and all(map(_is_on_meta, args)) else None
    try:
        result = None if rule is None else rule(*args)
    except Unsure:
        if exact:
            raise
        result = None
    return target(*args, **kwargs) if result is None else result


def _is_on_meta(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return all(map(_is_on_meta, argument))
    return not isinstance(argument, torch.Tensor) or argument.is_meta


def _contiguous(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def _in_order(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor is in row-major order, and its strides say so also where a dimension is 1."""
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:
            return False
        step *= size
    return True


def _pointwise(*operands: Any) -> torch.Tensor | None:
    """Returns a value like that of an operation on each element, in floating point."""
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    known = all(isinstance(operand, (torch.Tensor, int, float)) and not isinstance(operand, bool) for operand in operands)
    dtypes = {tensor.dtype for tensor in tensors}
    if not known or not all(dtype.is_floating_point for dtype in dtypes):
        return None
    if len(dtypes) > 1 and not all(tensor.dim() for tensor in tensors):  # those without dimensions do not count
        return None
    dtype = functools.reduce(torch.promote_types, dtypes)
    if len({tensor.shape for tensor in tensors}) > 1:
        tensors = list(torch.broadcast_tensors(*tensors))
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        if not all(map(_in_order, tensors)):
            raise Unsure(f"a value of {tuple(first.shape)} with unusual strides")
        return _contiguous(first.shape, dtype)
    if any(map(_in_channels_last, tensors)):
        return None
    by_ones = 1 in first.shape[1:] or (first.shape[0] == 1 and not _is_outermost(tensors))
    by_first = 0 in first.stride() and not all(0 in tensor.stride() or _in_order(tensor) for tensor in tensors)
    if by_ones or by_first:
        raise Unsure(f"a value of {tuple(first.shape)}, not in row-major order")
    strides = _strides(first.shape, [tensor.stride() for tensor in tensors])
    return torch.empty_strided(first.shape, strides, dtype=dtype, device=_META)


def _is_outermost(tensors: Sequence[torch.Tensor]) -> bool:
    """Tells whether the first dimension is the outermost one in memory of all tensors that have it."""
    having = [tensor.stride() for tensor in tensors if tensor.stride(0)]
    return bool(having) and all(strides[0] > max(strides[1:], default=0) for strides in having)


def _strides(shape: Sequence[int], of_operands: Sequence[Sequence[int]]) -> list[int]:
    """Returns the strides that torch's iterators over several tensors give a result: its dimensions are in memory in the order
    of those of the operands, of which the first ones decide."""

    def order(inner: int, outer: int) -> int:
        for strides in of_operands:
            if strides[inner] and strides[outer]:
                if strides[inner] != strides[outer]:
                    return 1 if strides[inner] > strides[outer] else -1
                if shape[inner] > shape[outer]:
                    return 1
        return 0

    dims = list(range(len(shape)))[::-1]  # the innermost first
    for position in range(1, len(dims)):
        moved = position
        for before in reversed(range(position)):
            comparison = order(dims[before], dims[moved])
            if comparison < 0:
                break
            if comparison > 0:
                dims[before], dims[moved] = dims[moved], dims[before]
                moved = before
    strides, step = [0] * len(shape), 1
    for dim in dims:
        strides[dim] = step
        step *= shape[dim]
    return strides


def _in_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _reduced(x: torch.Tensor, dims: Any, keeps: bool = False) -> torch.Tensor | None:
    """Returns a value like that of a sum or mean over dimensions."""
    if not x.is_floating_point() or not _in_order(x) or not dims:
        return None
    those = {dim % x.dim() for dim in dims}
    shape = [1 if dim in those else size for dim, size in enumerate(x.shape) if keeps or dim not in those]
    return _contiguous(shape, x.dtype)


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    first, *others = tensors
    alike = all(other.dtype == first.dtype and other.dim() == first.dim() for other in others)
    if not alike or not first.dim() or any(map(_in_channels_last, tensors)):
        return None
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return _contiguous(shape, first.dtype)


def _log_softmax(x: torch.Tensor, dim: int, to_float: bool) -> torch.Tensor | None:
    return None if to_float or not _in_order(x) else _contiguous(x.shape, x.dtype)


def _log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor | None:
    return None if not _in_order(grad) or grad.dtype != dtype else _contiguous(grad.shape, grad.dtype)


def _loss(x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int) -> Any:
    if x.dim() != 2 or weight is not None or reduction == 0:
        return None
    return _contiguous((), x.dtype), _contiguous((), x.dtype)


def _loss_backward(grad: Any, x: torch.Tensor, target: Any, weight: Any, reduction: int, ignored: int, total: Any) -> Any:
    if x.dim() != 2 or weight is not None or reduction == 0 or not _in_order(x):
        return None
    return _contiguous(x.shape, x.dtype)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float = 0.0, causal: bool = False) -> Any:
    if (attended := _pointwise(query)) is None:
        return None
    batch, heads, length, _ = query.shape
    dtype = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
    sums = torch.empty((batch, length, heads), dtype=dtype, device=_META).transpose(1, 2)
    return attended, sums


_POINTWISE = (
    *(aten.neg.default, aten.rsqrt.default, aten.cos.default, aten.sin.default, aten.silu.default),
    *(aten.add.Tensor, aten.add.Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar),
    *(aten.pow.Scalar, aten.pow.Tensor_Scalar),
)
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    aten.sum.dim_IntList: _reduced,
    aten.mean.dim: _reduced,
    aten.cat.default: _joined,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.nll_loss_forward.default: _loss,
    aten.nll_loss_backward.default: _loss_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
}
