"""``x.requires_grad = True`` in a forward, on a tensor that it has computed: from there on autograd follows the tensor.

Dynamo refuses to trace it, or, as ``x.requires_grad_()``, refuses to return what was computed from the tensor. Here the
variable stands for a new leaf of the same memory from then on, as in a plain run. Nobody may see the leaf itself outside of the
forward, where its ``grad`` would be missing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from mtcompile.torch_private.thread_setting import ThreadSetting

_tracing = ThreadSetting(False)


def new_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf that requires grad and shares the memory of ``tensor``."""
    return tensor.detach().requires_grad_()


@contextlib.contextmanager
def tracing_new_leaves() -> Iterator[None]:
    """Captures inside, in this thread, trace what makes a computed tensor require grad."""
    _replace_methods()
    with _tracing.during(True):
        yield


def returned_leaf(graph: fx.Graph) -> fx.Node | None:
    """The first new leaf that a captured graph returns."""
    return next((node for node in graph.output_node().all_input_nodes if node.target is new_leaf), None)


def _become_leaf(tx: Any, variable: Any) -> bool:
    """Lets a variable stand for a new leaf, where it stands for a computed tensor that has no gradient so far."""
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.builder import wrap_fx_proxy

    if type(variable) is not TensorVariable or variable.source is not None:
        return False
    example = variable.proxy.node.meta["example_value"]
    if not (example.is_floating_point() or example.is_complex()):
        return False
    if not example.requires_grad:
        leaf: Any = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", new_leaf, (variable.proxy,), {}))
        variable.proxy = leaf.proxy
        variable.synchronize_attributes(tx)
    return True


@functools.cache
def _replace_methods() -> None:
    """Lets Dynamo ask here first. Outside ``tracing_new_leaves``, nothing is changed."""
    from torch._dynamo.variables import ConstantVariable, TensorVariable, builtin

    def is_true(value: Any) -> bool:
        return value is True or (isinstance(value, ConstantVariable) and value.value is True)

    def assigning(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call_setattr(function: Any, tx: Any, variable: Any, name: Any, value: Any) -> Any:
            named = isinstance(name, ConstantVariable) and name.value == "requires_grad"
            traced = named and is_true(value) and _tracing.value and _become_leaf(tx, variable)
            return value if traced else plain(function, tx, variable, name, value)

        return call_setattr

    def calling(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method_requires_grad_(variable: Any, tx: Any, requires_grad: Any = True) -> Any:
            traced = is_true(requires_grad) and _tracing.value and _become_leaf(tx, variable)
            return variable if traced else plain(variable, tx, requires_grad)

        return method_requires_grad_

    classes = {"SetAttrBuiltinVariable": "_call_setattr", "BuiltinVariable": "call_setattr"}  # from torch 2.13 on, and before
    places = [(getattr(builtin, owner, None), name, assigning) for owner, name in classes.items()]
    for owner, name, replaced in (*places, (TensorVariable, "method_requires_grad_", calling)):
        if (plain := getattr(owner, name, None)) is not None:
            setattr(owner, name, functools.wraps(plain)(replaced(plain)))
