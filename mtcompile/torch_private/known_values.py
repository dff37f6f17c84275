"""Python values that a forward takes from tensors, where these come from the inputs of the call alone: ``mask.any().item()``.

Dynamo cannot branch on what a tensor holds. But what is computed from the call's inputs and the model's buffers, and from no
parameter, is known when the call begins. A capture takes such a value as it is then, and notes where it came from; each later
call computes it again before anything runs. Where it is another one, ``OtherValues`` is raised, and the caller captures again.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mtcompile.errors import MtcompileError
from mtcompile.passes.generators import rng_preserved
from mtcompile.torch_private.lazy_modules import Drawing

_MARK = "mtcompile expects "  # begins the message of a check that stands for a noted value until the capture is done
_MOST_NBYTES = 1 << 24  # of all tensors that a value is computed by: they are beside the budget
_CHANGING = ("batch_norm", "instance_norm")  # functions that change buffers, which their schemas do not say
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class OtherValues(MtcompileError):
    """Raised before anything runs when values that a capture took from its inputs are others in this call."""


class _Taking(threading.local):
    on = False


_taking = _Taking()


@contextlib.contextmanager
def taking_known_values(on: bool) -> Iterator[None]:
    """Captures inside, in this thread, take values that the call's inputs decide."""
    _replace_methods()
    before, _taking.on = _taking.on, on
    try:
        yield
    finally:
        _taking.on = before


def known_value(tx: Any, variable: Any) -> bool | int | None:
    """The value of a tensor of one element that is being captured, where the call's inputs decide it; else None."""
    if not _taking.on or tx.output.current_tracer is not tx.output.root_tracer:
        return None
    node = variable.proxy.node
    cone = _cone(node.graph, [node])
    if not _is_decided(node, cone):
        return None
    inputs = [each.meta["grapharg"].example for each in cone if each.op == "placeholder"]
    value: bool | int
    drawing = Drawing()
    try:
        with drawing:
            (value,) = _values(_extracted([node], cone), inputs)
    except Exception:  # an operation that cannot run on these devices, ...
        return None
    if drawing.drew:
        return None
    tx.output.create_proxy("call_function", torch._assert_async, (variable.proxy, f"{_MARK}{value!r}"), {})
    return value


def _cone(graph: fx.Graph, results: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that ``results`` are computed by, in their order."""
    needed, todo = set(results), list(results)
    while todo:
        new = [operand for operand in todo.pop().all_input_nodes if operand not in needed]
        needed.update(new)
        todo += new
    return [node for node in graph.nodes if node in needed]


def _is_decided(node: fx.Node, cone: Sequence[fx.Node]) -> bool:
    """Tells whether a node stands for one number that the call's inputs decide, and nothing so far has changed in place."""
    val = node.meta.get("example_value")
    if not isinstance(val, torch.Tensor) or val.numel() != 1 or val.dtype not in _INTEGERS:
        return False
    if any(each.target is torch.amp.autocast_mode._enter_autocast for each in node.graph.nodes):
        return False
    values = [each.meta.get("example_value") for each in cone]
    nbytes = sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
    return nbytes <= _MOST_NBYTES and all(map(_is_known, cone, values))


def _is_known(node: fx.Node, value: Any) -> bool:
    if node.op == "placeholder":
        example = getattr(node.meta.get("grapharg"), "example", None)
        if not isinstance(example, torch.Tensor) or isinstance(example, torch.nn.Parameter) or example.requires_grad:
            return False
        if any(getattr(user.target, "__name__", "") in _CHANGING for user in node.users):
            return False
    elif node.op not in ("call_function", "call_method"):
        return False
    return not isinstance(value, torch.Tensor) or value._version == 0


def _extracted(nodes: Sequence[fx.Node], cone: Sequence[fx.Node]) -> fx.GraphModule:
    """A graph of ``cone`` that returns ``nodes``."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in cone:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in nodes))
    return fx.GraphModule(torch.nn.Module(), graph)


def _values(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    with torch.no_grad(), rng_preserved("cpu"):
        return [value.item() for value in module(*inputs)]


@dataclass(frozen=True, slots=True)
class _Expectations:
    """The values that a capture took. ``positions``: which inputs of its graph ``module`` computes them from."""

    module: fx.GraphModule
    positions: tuple[int, ...]
    values: tuple[Any, ...]

    def check(self, inputs: Sequence[Any]) -> None:
        if tuple(_values(self.module, [inputs[position] for position in self.positions])) != self.values:
            raise OtherValues("a value that forward takes from its inputs differs from the captured one")


def expecting_values(graph: fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Takes the notes out of a captured graph. Returns a decorator for what runs it, which first compares the values."""
    nodes = graph.graph
    marks = [n for n in nodes.find_nodes(op="call_function", target=torch._assert_async) if str(n.args[1]).startswith(_MARK)]
    if not marks:
        return lambda program: program
    taken: list[Any] = [mark.args[0] for mark in marks]
    cone = _cone(nodes, taken)
    positions = tuple(index for index, node in enumerate(nodes.find_nodes(op="placeholder")) if node in cone)
    values = tuple(ast.literal_eval(str(mark.args[1]).removeprefix(_MARK)) for mark in marks)
    expectations = _Expectations(_extracted(taken, cone), positions, values)
    for mark in marks:
        nodes.erase_node(mark)

    def expecting(program: Callable[..., Any]) -> Callable[..., Any]:
        def compared(*inputs: Any) -> Any:
            expectations.check(inputs)
            return program(*inputs)

        return compared

    return expecting


@functools.cache
def _replace_methods() -> None:
    """Lets Dynamo ask here first for the values of tensors. Outside ``taking_known_values``, nothing is changed."""
    from torch._dynamo.variables import ConstantVariable, TensorVariable
    from torch._dynamo.variables.base import VariableTracker

    def item(plain: Callable[..., Any]) -> Callable[..., Any]:
        def known(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            value = known_value(tx, variable)
            return plain(variable, tx, *args, **kwargs) if value is None else ConstantVariable.create(value)

        return known

    def tolist(plain: Callable[..., Any]) -> Callable[..., Any]:
        def listed(tx: Any, part: Any) -> Any:
            example = part.proxy.node.meta["example_value"]
            if example.dim() == 0:
                return known_value(tx, part)
            indices = [VariableTracker.build(tx, index) for index in range(example.shape[0])]
            return [listed(tx, part.call_method(tx, "__getitem__", [index], {})) for index in indices]

        def known(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            values = listed(tx, variable) if _taking.on else None
            if None in pytree.tree_leaves(values, is_leaf=lambda value: value is None):
                return plain(variable, tx, *args, **kwargs)
            return VariableTracker.build(tx, values)

        return known

    for name, replaced in (("method_item", item), ("method_tolist", tolist)):
        if (plain := getattr(TensorVariable, name, None)) is not None:
            setattr(TensorVariable, name, functools.wraps(plain)(replaced(plain)))
