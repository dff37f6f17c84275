"""A stand-in, in ``p.grad``, for a gradient that an update in the backward has used. It has no storage, and refuses any use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mtcompile.errors import StepError

_ZEROING = ("zero_", "_foreach_zero_")
_BEFORE_ZEROING = ("grad_fn", "requires_grad", "requires_grad_", "detach_", "detach", "data")
_ABOUT = (*_BEFORE_ZEROING, "is_sparse", "device", "dtype", "layout")  # what ``zero_grad`` asks


class UsedGradient(torch.Tensor):
    """Stands for a gradient that has been used, with the shape, dtype and device of its parameter. Each use raises StepError,
    also one within autograd; only setting it to zero works, which sets ``zeroed``."""

    zeroed: bool
    why: str

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, why: str, zeroed: bool = False) -> UsedGradient:
        gradient: UsedGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        gradient.zeroed, gradient.why = zeroed, why
        return gradient

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UsedGradient({self.why})"

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute: Any = func.__self__  # type: ignore[attr-defined]
            # The property that stands for ``.data`` (see data_writes.py) has no name; nor has any property before Python 3.13.
            name = "data" if attribute is torch.Tensor.data else getattr(attribute, "__name__", "")
        used = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, UsedGradient)]
        if name in _ZEROING:
            for gradient in used:
                gradient.zeroed = True
            others = [value for value in pytree.tree_leaves(args) if not isinstance(value, UsedGradient)]
            for other in others:
                other.zero_()
            return args[0]
        if name not in (_ABOUT if sys._getframe(1).f_code.co_name == "zero_grad" else _BEFORE_ZEROING):
            raise StepError(used[0].why)
        if name in ("detach", "detach_", "data"):
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:  # as torch does itself where it takes or hands out a tensor
            return args[0]
        raise StepError(next(v.why for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, UsedGradient)))


def on_device(gradient: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Returns a gradient where the new ``memory`` of its parameter is."""
    if isinstance(gradient, UsedGradient):
        return UsedGradient(memory, gradient.why, gradient.zeroed)
    return gradient.to(memory.device)
