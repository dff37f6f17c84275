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
    """Raised where torch's ways to trace give a value different strides. ``value``: that of its functions for "meta", if it is
    known here."""

    def __init__(self, shape: Sequence[int], value: torch.Tensor | None = None) -> None:
        super().__init__(f"a value of {tuple(shape)} with unusual strides")
        self.value = value


def result_of(target: Any, args: Any, kwargs: Any, exact: bool = False) -> Any:
    """Returns what an operation makes of tensors on the device "meta". ``exact``: raises Unsure where a trace under a
    FakeTensorMode would have other strides."""
    rule = _RULES.get(target) if not kwargs and all(map(_is_on_meta, args)) else None
    try:
        result = None if rule is None else rule(*args)
    except Unsure as error:
        if exact:
            raise
        result = error.value
    return target(*args, **kwargs) if result is None else result


def _is_on_meta(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return all(map(_is_on_meta, argument))
    return not isinstance(argument, torch.Tensor) or argument.is_meta


def _contiguous(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def in_row_major_order(tensor: torch.Tensor) -> bool:
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
    shape = tensors[0].shape
    if all(map(in_row_major_order, tensors)):
        return _contiguous(shape, dtype)
    if any(map(_in_channels_last, tensors)):
        if 1 in shape:
            raise Unsure(shape)
        return None
    if all(tensor.is_contiguous() for tensor in tensors):
        strides, is_sure = _contiguous(shape, dtype).stride(), False
    else:
        strides = _strides(shape, [tensor.stride() for tensor in tensors])
        is_sure = 1 not in shape[1:] and (shape[0] > 1 or _is_outermost(tensors)) and not _only_later_ones_decide(tensors)
    value = torch.empty_strided(shape, strides, dtype=dtype, device=_META)
    if not is_sure:
        raise Unsure(shape, value if len(dtypes) == 1 else None)
    return value


def _only_later_ones_decide(tensors: Sequence[torch.Tensor]) -> bool:
    """Tells whether the first tensor is the same along a dimension, and a later one, which is not, has an order of its own."""
    return 0 in tensors[0].stride() and not all(0 in tensor.stride() or in_row_major_order(tensor) for tensor in tensors)


def _power(x: torch.Tensor, exponent: Any) -> torch.Tensor | None:
    if exponent in (0, 1) and not in_row_major_order(x):  # torch makes a copy with the same strides
        same = x.is_contiguous() and exponent == 1
        raise Unsure(x.shape, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META) if same else None)
    return _pointwise(x, exponent)


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
    if not x.is_floating_point() or not in_row_major_order(x) or not dims:
        return None
    those = {dim % x.dim() for dim in dims}
    shape = [1 if dim in those else size for dim, size in enumerate(x.shape) if keeps or dim not in those]
    return _contiguous(shape, x.dtype)


def _sum(x: torch.Tensor) -> torch.Tensor | None:
    if x.dtype.is_complex:
        return None
    return _contiguous((), x.dtype if x.is_floating_point() else torch.int64)


def _compared(x: torch.Tensor, number: Any) -> torch.Tensor | None:
    return _contiguous(x.shape, torch.bool) if in_row_major_order(x) else None


def _filled(x: torch.Tensor, mask: torch.Tensor, number: Any) -> torch.Tensor | None:
    return _contiguous(x.shape, x.dtype) if in_row_major_order(x) and mask.shape == x.shape else None


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    first, *others = tensors
    alike = all(other.dtype == first.dtype and other.dim() == first.dim() for other in others)
    if not alike or not first.dim() or any(map(_in_channels_last, tensors)):
        return None
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return _contiguous(shape, first.dtype)


def _log_softmax(x: torch.Tensor, dim: int, to_float: bool) -> torch.Tensor | None:
    return None if to_float or not in_row_major_order(x) else _contiguous(x.shape, x.dtype)


def _log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor | None:
    return None if not in_row_major_order(grad) or grad.dtype != dtype else _contiguous(grad.shape, grad.dtype)


def _loss(x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int) -> Any:
    if x.dim() != 2 or weight is not None or reduction == 0:
        return None
    return _contiguous((), x.dtype), _contiguous((), x.dtype)


def _loss_backward(grad: Any, x: torch.Tensor, target: Any, weight: Any, reduction: int, ignored: int, total: Any) -> Any:
    if x.dim() != 2 or weight is not None or reduction == 0 or not in_row_major_order(x):
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
    aten.pow.Scalar,
)
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    aten.pow.Tensor_Scalar: _power,
    aten.sum.dim_IntList: _reduced,
    aten.sum.default: _sum,
    aten.ne.Scalar: _compared,
    aten.eq.Scalar: _compared,
    aten.masked_fill.Scalar: _filled,
    aten.mean.dim: _reduced,
    aten.cat.default: _joined,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.nll_loss_forward.default: _loss,
    aten.nll_loss_backward.default: _loss_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
}
