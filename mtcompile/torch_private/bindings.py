"""torch's own Python bindings of operations.

Which operation a binding calls depends on its operands. So each is tried with those of a call, and serves only if it calls just
that operation, with the same operands.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

_BINDINGS = (types.BuiltinFunctionType, types.MethodDescriptorType)


def binding_of(target: Any, args: Any, kwargs: Any) -> Any:
    """Returns the binding that calls an operation of ``torch.ops``, with such operands; None if there is none."""
    if not isinstance(target, OpOverload):
        return None
    name = target._schema.name.removeprefix("aten::")
    for owner in (torch, torch.Tensor):
        binding = getattr(owner, name, None)
        if isinstance(binding, _BINDINGS) and _calls(binding, target, args, kwargs):
            return binding
    return None


class _Noting(TorchDispatchMode):
    """Notes the operations that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # asked for when a result is handed out
            self.called.append((func, _operands(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _calls(binding: Any, target: Any, args: Any, kwargs: Any) -> bool:
    noting = _Noting()
    try:
        with noting:
            binding(*args, **kwargs)
    except Exception:
        return False
    expected = _operands(target, args, kwargs)
    return [func for func, _ in noting.called] == [target] and all(map(_same, noting.called[0][1], expected))


def _operands(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """All operands in the order of the operation's schema."""
    given = dict(zip((each.name for each in func._schema.arguments), args)) | kwargs
    return [given.get(each.name, each.default_value) for each in func._schema.arguments]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other))
