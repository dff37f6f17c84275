"""Actions of a forward beside computing its outputs, where a model is captured: locks that it takes, gradients and backwards
that it runs itself, optimizers that it steps. Uses torch's private APIs, as ``torch_private`` does.

``with lock:`` is traced as nothing: calls of compiled models take turns anyway. Dynamo traces ``torch.autograd.grad`` into the
graph if the gradient passes through operations of torch only.
``tensor.backward()`` is left to Python, since it adds to ``grad``, which no graph returns. A step of an optimizer is refused.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from mtcompile.errors import CaptureError
from mtcompile.torch_private.dynamo import replace_method
from mtcompile.torch_private.patched import patched
from mtcompile.torch_private.thread_setting import ThreadSetting

STEPS_WITHIN = (
    "forward steps an optimizer\n"
    "  expected a forward that leaves parameters as they are: step that optimizer outside forward, as after the backward"
)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_traces = ThreadSetting(False)


@contextlib.contextmanager
def tracing_side_actions() -> Iterator[None]:
    """Captures inside, in this thread, treat what a forward does beside computing as this module's docstring says."""
    from torch._dynamo import config

    _replace_variables()
    gradients = patched(config, **{"trace_autograd_ops": True}) if _traces_gradients() else contextlib.nullcontext()
    with gradients, _traces.during(True):
        yield


def _traces_gradients() -> bool:
    """Tells whether this torch can trace ``torch.autograd.grad``."""
    from torch._dynamo import config

    return hasattr(config, "trace_autograd_ops")


@functools.cache
def _replace_variables() -> None:
    """Lets Dynamo ask here first. Outside ``tracing_side_actions``, nothing is changed."""
    from torch._dynamo import config
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables import ConstantVariable, TensorVariable
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable
    from torch._dynamo.variables.optimizer import OptimizerVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    class LockVariable(GenericContextWrappingVariable):
        """A lock in a ``with`` statement. Calls of ``acquire`` and ``release`` are Python's: one of them might be left out."""

        def enter(self, tx: Any) -> Any:
            return ConstantVariable.create(True)

        def exit(self, tx: Any, *args: Any) -> Any:
            tx.active_generic_context_managers.pop()
            return ConstantVariable.create(None)

    def wrapping(plain: Callable[..., Any]) -> Callable[..., Any]:
        def _wrap(builder: Any, value: Any) -> Any:
            if not _traces.value or not isinstance(value, _LOCKS):
                return plain(builder, value)
            builder.install_guards(GuardBuilder.TYPE_MATCH)
            return LockVariable(value, source=builder.source)

        return _wrap

    def leaving(plain: Callable[..., Any], leaves: Callable[[Any], bool] = lambda tx: True) -> Callable[..., Any]:
        def to_python(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            left = _traces.value and _traces_gradients() and leaves(tx)
            with patched(config, **{"trace_autograd_ops": False}) if left else contextlib.nullcontext():
                return plain(variable, tx, *args, **kwargs)

        return to_python

    def refusing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def attribute(optimizer: Any, tx: Any, name: str) -> Any:
            if _traces.value and name == "step":
                raise CaptureError(STEPS_WITHIN)
            return plain(optimizer, tx, name)

        return attribute

    attributes = [(OptimizerVariable, name, refusing) for name in ("var_getattr", "tp_getattro_impl")]  # torch 2.14: the latter
    places = ((VariableBuilder, "_wrap", wrapping), (TensorVariable, "method_backward", leaving), *attributes)
    for owner, name, replaced in places:
        replace_method(owner, name, replaced)
    handlers = TorchInGraphFunctionVariable._get_handlers()
    if (handler := handlers.get(torch.autograd.grad)) is not None:
        handlers[torch.autograd.grad] = leaving(handler, _has_carried_graphs)


def _has_carried_graphs(tx: Any) -> bool:
    """Tells whether there may be operators in the way of a gradient that carry a graph, such as functions of the user's own:
    torch would differentiate their backward in another way than a plain run. It runs a checkpoint as it stands."""
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    targets = {node.target for node in tx.output.graph.nodes if node.op == "call_function"}
    carrying = (target for target in targets if isinstance(target, HigherOrderOperator) and target is not checkpoint)
    return len(tx.output.tracers) > 1 or any(carrying)


def differentiates(graph: fx.GraphModule) -> bool:
    """Tells whether a captured graph takes gradients itself."""
    return bool(graph.graph.find_nodes(op="call_function", target=torch.autograd.grad))


def seeing_hooks(graph: fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a wrapper that makes a program of ``graph`` refuse inputs with hooks, if it takes their gradients: in a plain
    run, ``torch.autograd.grad`` runs the hooks of these inputs, which a graph does not know."""
    sources = set[fx.Node]()
    for call in graph.graph.find_nodes(op="call_function", target=torch.autograd.grad):
        wanted = call.args[1] if len(call.args) > 1 else call.kwargs["inputs"]
        sources.update(node for node in pytree.tree_leaves(wanted) if isinstance(node, fx.Node))
    places = [i for i, node in enumerate(graph.graph.find_nodes(op="placeholder")) if node in sources]

    def checked(program: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: torch.Tensor) -> Any:
            if any(inputs[i]._backward_hooks for i in places):
                raise CaptureError(
                    "forward calls torch.autograd.grad for a parameter or argument that has a hook (register_hook), which a "
                    "plain run calls there\n  expected no hook on it: remove it, or change the gradients in forward"
                )
            return program(*inputs)

        return call if places else program

    return checked
