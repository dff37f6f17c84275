"""A stand-in, in ``p.grad``, for a gradient that an update in the backward has used. It has no storage, and refuses any use."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mtcompile.errors import StepError

_ZEROING = ("zero_", "_foreach_zero_")
_BEFORE_ZEROING = ("grad_fn", "requires_grad", "requires_grad_", "detach_", "detach", "data")
_ABOUT = (*_BEFORE_ZEROING, "is_sparse", "device", "dtype", "layout")  # what ``zero_grad`` asks
_CLIPPING = ("linalg_vector_norm", "_foreach_norm", "mul_", "_foreach_mul_", "device")  # of ``clip_grad_norm_``
_NEAR = 1e-4  # of two factors: norms may have been added up in another order


@dataclass(slots=True)
class Clipping:
    """The clipping that a backward has done for a loop, which would call ``clip_grad_norm_`` after it. ``norms``: of gradients
    (value, dtype, device), by the names of their parameters; empty if nobody asked for them. ``factor``: what all were
    multiplied by; None: nothing was. ``is_asked``: the model was told to clip, so a loop need not. ``expected``: what the loop
    may do, in words. ``skips``: no update was made. ``confirmed``: the parameters whose gradients the loop has multiplied by
    ``factor``. ``wait``: for the updates, and what they write here."""

    norms: dict[str, tuple[float, torch.dtype, torch.device]] = field(default_factory=dict)
    factor: float | None = None
    is_asked: bool = True
    expected: str = "no clipping"
    skips: bool = False
    confirmed: set[str] = field(default_factory=set)
    wait: Callable[[], None] = lambda: None

    @property
    def is_missing(self) -> bool:
        """True if the gradients were scaled for a loop that has not asked for it."""
        scaled = self.factor is not None and self.factor != 1.0
        return scaled and not (self.is_asked or self.skips or self.confirmed >= self.norms.keys())

    def norm_of(self, gradient: UsedGradient) -> torch.Tensor:
        """Returns the norm of a gradient before it was clipped. Raises StepError if nobody knows it, or it is another now."""
        self.wait()
        if gradient.parameter_name in self.confirmed or (norm := self.norms.get(gradient.parameter_name)) is None:
            raise StepError(gradient.why)
        value, dtype, device = norm
        return torch.tensor(value, dtype=dtype, device=device)

    def multiply(self, gradient: UsedGradient, by: float) -> None:
        """Notes that the loop clips a gradient. Raises StepError unless the backward has multiplied it by the same factor."""
        self.wait()
        if gradient.parameter_name not in self.norms or gradient.parameter_name in self.confirmed:
            raise StepError(gradient.why)
        factor = 1.0 if self.factor is None else self.factor
        if by == 1.0 and (self.is_asked or factor == 1.0):
            return
        if not (self.skips or math.isclose(by, factor, rel_tol=_NEAR) or (math.isnan(by) and math.isnan(factor))):
            raise StepError(
                f"the gradients are scaled by {by:.6g} after a backward that has used them, scaled by {factor:.6g}: with "
                f'update="backward" that step has been made. Expected {self.expected}; or update="step"'
            )
        self.confirmed.add(gradient.parameter_name)


class UsedGradient(torch.Tensor):
    """Stands for a gradient that has been used, with the shape, dtype and device of its parameter. Each use raises StepError,
    also one within autograd; only setting it to zero works, which sets ``zeroed``, and ``clip_grad_norm_`` where the backward
    has done the same."""

    zeroed: bool
    why: str
    parameter_name: str
    clipping: Clipping

    @staticmethod
    def __new__(
        cls, parameter: torch.Tensor, why: str, zeroed: bool = False, name: str = "", clipping: Clipping | None = None
    ) -> UsedGradient:
        gradient: UsedGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        gradient.zeroed, gradient.why, gradient.parameter_name, gradient.clipping = zeroed, why, name, clipping or Clipping()
        return gradient

    def like(self, parameter: torch.Tensor) -> UsedGradient:
        """Returns the same stand-in for a parameter whose memory is elsewhere now."""
        return UsedGradient(parameter, self.why, self.zeroed, self.parameter_name, self.clipping)

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
        if name in _CLIPPING and not any(gradient.zeroed for gradient in used):
            return _clipped(name, func, args, kwargs or {})
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


def _clipped(name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Answers what ``clip_grad_norm_`` asks of gradients, or tells them."""
    if name == "device":
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    gradients, operand = args[0], args[1] if len(args) == 2 else None
    several = gradients if isinstance(gradients, (list, tuple)) else [gradients]
    used = [gradient for gradient in several if isinstance(gradient, UsedGradient)]
    if len(used) == len(several) and name.endswith("norm") and operand == 2.0:
        norms = [gradient.clipping.norm_of(gradient) for gradient in used]
        return norms if several is gradients else norms[0]
    if len(used) == len(several) and name.endswith("mul_") and isinstance(operand, torch.Tensor):
        for gradient in used:
            gradient.clipping.multiply(gradient, float(operand))
        return None if several is gradients else gradients
    raise StepError(next(value.why for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, UsedGradient)))


def on_device(gradient: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Returns a gradient where the new ``memory`` of its parameter is."""
    if isinstance(gradient, UsedGradient):
        return gradient.like(memory)
    return gradient.to(memory.device)
