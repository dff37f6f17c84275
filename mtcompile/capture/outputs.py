"""The outputs of a captured graph: tensors that the program computes, inputs, and views of either.

A view is made as plain PyTorch makes it: by the user's own operations, run again on the tensor that it views. So it shares
memory with that tensor, has its own strides and ``grad_fn``, and is detached where the user detached it.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from mtcompile import torch_private
from mtcompile.errors import CaptureError
from mtcompile.torch_private import pytree


@dataclass(frozen=True, slots=True)
class View:
    """One operation between a tensor, ``_TENSOR`` among its arguments, and its view. ``method``: ``target`` is a method's name.
    ``without_grad``: the user called it under ``torch.no_grad()``."""

    target: Any
    method: bool
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    without_grad: bool

    def __call__(self, tensor: Any) -> Any:
        args, kwargs = pytree.tree_map(lambda value: tensor if value is _TENSOR else value, (self.args, dict(self.kwargs)))
        with torch.no_grad() if self.without_grad else contextlib.nullcontext():
            return getattr(args[0], self.target)(*args[1:], **kwargs) if self.method else self.target(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Passed:
    """An output that is an input of the call, or a view of it. ``detached``: no gradient flows through it."""

    index: int
    views: tuple[View, ...] = ()
    detached: bool = False


@dataclass(frozen=True, slots=True)
class Computed:
    """An output that is the ``position``-th tensor of the program, or a view of it. ``detached``: as in ``Passed``."""

    position: int
    views: tuple[View, ...] = ()
    detached: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """An output that is not a tensor."""

    value: Any


Output = Passed | Computed | Constant


@dataclass(frozen=True, slots=True)
class Flow:
    """How gradients flow between outputs. ``order``: the outputs that need gradients, as the forward makes them. ``viewed``:
    for an output that is a view of an output which is a view too, that other one. ``inner``: for each output that the forward
    goes on computing with, the name of its node. ``reached``: for each computed tensor, the inner outputs that its gradient
    flows to first. ``changed``: the inner outputs that the forward changes in place."""

    order: tuple[int, ...]
    viewed: Mapping[int, int]
    inner: Mapping[int, str]
    reached: tuple[tuple[int, ...], ...]
    changed: frozenset[int]


class _Tensor:
    """Stands for the viewed tensor among an operation's arguments."""

    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _Tensor()
_CALLS = ("call_function", "call_method")


def rebuilt(output: Output, inputs: Sequence[torch.Tensor], computed: Sequence[torch.Tensor]) -> Any:
    """Returns what the user's forward returned. ``computed``: the tensors of the program."""
    if isinstance(output, Constant):
        return output.value
    tensor = inputs[output.index] if isinstance(output, Passed) else computed[output.position]
    for view in output.views:
        tensor = view(tensor)
    return tensor.detach() if output.detached and tensor.requires_grad else tensor


def outputs_of(graph: fx.Graph, views: bool = True) -> tuple[tuple[Output, ...], tuple[fx.Node, ...], tuple[str, ...]]:
    """Returns how to rebuild each output of Dynamo's graph, the nodes that the program must compute for that, and the names of
    those whose gradient is added up from returned views and from uses in the forward in another order than in a plain run.
    ``views``: False computes an output that is a view of a computed tensor by itself. Raises CaptureError for outputs without
    a static shape."""
    outputs, computed = _rebuilding(graph, views, frozenset())
    unordered = list(_unordered(graph, outputs, computed))
    alone = frozenset(values[0] for _, values in unordered if len(values) == 1)
    if alone:
        outputs, computed = _rebuilding(graph, views, alone)
    return outputs, computed, tuple(base.name for base, values in unordered if len(values) > 1)


def _unordered(
    graph: fx.Graph, outputs: Sequence[Output], computed: Sequence[fx.Node]
) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yields a computed value of which views are returned, and at least two more gradients arrive at, of which one within the
    program; and what is returned of it."""
    needed, todo = set[fx.Node](), list(computed)
    while todo:
        if (node := todo.pop()) not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    returned = pytree.tree_leaves(graph.output_node().args[0])
    for position, base in enumerate(computed):
        if not fake_of(base).requires_grad:
            continue

        def uses_of(node: fx.Node) -> list[fx.Node]:
            return [user for user in node.users if user in needed and _requires_grad(user)]

        uses = uses_of(base)
        pairs = zip(outputs, returned, strict=True)
        own = [(o, value) for o, value in pairs if isinstance(o, Computed) and o.position == position and not o.detached]
        ways = [_way_to(value, base) for output, value in own if output.views]
        within = (sum(user not in way for node in way for user in uses_of(node)) for way in ways)
        if ways and ((uses and len(own) + len(uses) > 2) or max(within) > 1):
            yield base, [value for _, value in own]


def _way_to(value: fx.Node, base: fx.Node) -> list[fx.Node]:
    """Returns a view, the views that it is made of, and their base."""
    way = [value]
    while way[-1] is not base and (parent := _parent(way[-1])) is not None:
        way.append(parent)
    return way


def _requires_grad(node: fx.Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def only_values(graph: fx.Graph) -> frozenset[int]:
    """Returns the indices of the inputs that require grad, and of which forward reads nothing but the values: each reader
    detaches them, or runs under ``torch.no_grad()``."""
    without_grad = _without_grad(graph)

    def cuts(reader: fx.Node) -> bool:
        return reader in without_grad or reader.target in ("detach", torch.detach)

    inputs = enumerate(graph.find_nodes(op="placeholder"))
    return frozenset(i for i, node in inputs if _requires_grad(node) and node.users and all(map(cuts, node.users)))


def _rebuilding(graph: fx.Graph, views: bool, alone: frozenset[fx.Node]) -> tuple[tuple[Output, ...], tuple[fx.Node, ...]]:
    """Returns how to rebuild each output, and the nodes to compute for that. ``alone``: views to compute by themselves."""
    inputs = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    positions: dict[fx.Node, int] = {}
    outputs: list[Output] = []
    without_grad = _without_grad(graph)
    for value in pytree.tree_leaves(graph.output_node().args[0]):
        if not isinstance(value, fx.Node):
            outputs.append(Constant(value))
            continue
        val = value.meta.get("example_value")
        if not isinstance(val, torch.Tensor):
            raise CaptureError(f"output {value.name} is {type(val).__name__}; expected a tensor of static shape")
        base, operations = _viewed(value, without_grad)
        if (not views or value in alone) and base not in inputs:
            base, operations = value, ()
        detached = fake_of(base).requires_grad and not val.requires_grad
        if base in inputs:
            outputs.append(Passed(inputs[base], operations, detached))
        else:
            outputs.append(Computed(positions.setdefault(base, len(positions)), operations, detached))
    return tuple(outputs), tuple(positions)


def flow_of(graph: fx.Graph, outputs: Sequence[Output], computed: Sequence[fx.Node]) -> Flow | None:
    """Returns how gradients flow between the outputs of Dynamo's graph, as ``outputs_of`` describes them; None if there are not
    several that need gradients."""
    own: dict[fx.Node, int] = {}  # a leaf, as an input may be, is no output of the forward's own
    for index, (output, value) in enumerate(zip(outputs, pytree.tree_leaves(graph.output_node().args[0]), strict=True)):
        if (isinstance(output, Computed) or _views(output)) and fake_of(value).requires_grad:
            own.setdefault(value, index)
    if len(own) < 2:
        return None
    operands, reached = dict[fx.Node, frozenset[int]](), dict[fx.Node, frozenset[int]]()  # the outputs that gradients flow to
    written, last_write = defaultdict[int, frozenset[int]](frozenset), dict[int, int]()  # by storage
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        stored = [written[storage] for operand in node.all_input_nodes for storage in _storages(operand)]
        found = frozenset[int]().union(*(reached[operand] for operand in node.all_input_nodes), *stored)
        through = _views(outputs[own[node]]) if node in own else _requires_grad(node)  # autograd makes views of each other
        operands[node] = found
        reached[node] = (found if through else frozenset()) | ({own[node]} if node in own else set())
        if node.op in _CALLS and (changes_operand(node) or node.target is operator.setitem):
            for storage in _storages(node) | _storages(node.all_input_nodes[0]):
                written[storage], last_write[storage] = written[storage] | found | reached[node], places[node]

    def made(node: fx.Node) -> tuple[int, int]:
        return max(places[node], *(last_write.get(storage, 0) for storage in _storages(node))), places[node]

    order = [own[node] for node in sorted(own, key=made)]
    nodes = {index: node for node, index in own.items()}
    reaching = []
    for position, node in enumerate(computed):
        users = [order.index(i) for i, o in enumerate(outputs) if i in nodes and getattr(o, "position", None) == position]
        shared = {index for index, other in nodes.items() if _storages(other) & _storages(node)}
        within = operands[node].union(*(written[storage] - shared for storage in _storages(node)))
        reaching.append(tuple(sorted(i for i in within if order.index(i) < min(users, default=0))))
    inner = {index: nodes[index].name for index in order if any(index in each for each in reaching)}
    changed = frozenset(i for i in inner if made(nodes[i])[0] > places[nodes[i]] or _used_as_before(nodes[i], places))
    viewed = {index: own[base] for node, index in own.items() if (base := _viewed_output(node, own, outputs)) is not None}
    return Flow(tuple(order), viewed, inner, tuple(reaching), changed)


def _used_as_before(node: fx.Node, places: Mapping[fx.Node, int]) -> bool:
    """Tells whether the forward goes on to use a tensor that an operation has changed, otherwise than by its result."""
    base = node
    while base.op in _CALLS and changes_operand(base):
        base = base.all_input_nodes[0]
        if any(places[user] > places[node] and user.op != "output" for user in base.users):
            return True
    return False


def _views(output: Output) -> tuple[View, ...]:
    return () if isinstance(output, Constant) else output.views


def _viewed_output(node: fx.Node, own: Mapping[fx.Node, int], outputs: Sequence[Output]) -> fx.Node | None:
    """Returns the nearest output that this output is a view of, if both are views."""
    base: fx.Node | None = node if _views(outputs[own[node]]) else None
    while base is not None and (base := _parent(base)) is not None:
        if base in own:
            return base if _views(outputs[own[base]]) else None
    return None


def fake_of(node: fx.Node) -> torch.Tensor:
    return node.meta["example_value"]  # type: ignore[no-any-return]


def storage_of(node: fx.Node) -> int:
    return torch_private.storage_id(fake_of(node))


def _without_grad(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that the user's code runs under ``torch.no_grad()``."""
    enabled = torch.is_grad_enabled()
    nodes = set()
    for node in graph.nodes:
        if node.target is torch_private.set_grad_enabled:
            enabled = bool(node.args[0])
        elif not enabled:
            nodes.add(node)
    return nodes


def _viewed(output: fx.Node, without_grad: set[fx.Node]) -> tuple[fx.Node, tuple[View, ...]]:
    """Returns the node whose memory an output shares, and the operations that lead to the output. An output that cannot be made
    again in this way is its own node: the program computes it."""
    operations: list[fx.Node] = []
    base = output
    while (parent := _parent(base)) is not None:
        if not changes_operand(base):
            operations.append(base)
        elif not _alike(fake_of(base), fake_of(parent)):
            return output, ()
        base = parent
    if not isinstance(base.meta["example_value"], torch.Tensor):  # several new tensors, of which the next operation takes one
        base = operations.pop()
    views = []
    for node in reversed(operations):
        view = _as_view(node, node in without_grad)
        if view is None:
            return output, ()
        views.append(view)
    try:
        tensor = rebuilt(Passed(0, tuple(views)), (fake_of(base),), ())
    except Exception:  # the operation needs more than the tensor that it views
        return output, ()
    same = _alike(tensor, fake_of(output)) and (tensor.requires_grad or not fake_of(output).requires_grad)
    return (base, tuple(views)) if same else (output, ())


def _parent(node: fx.Node) -> fx.Node | None:
    """Returns the operand whose memory a node shares, or None if it has its own."""
    if node.op not in _CALLS:
        return None
    storages = _storages(node)
    return next((operand for operand in node.all_input_nodes if not storages.isdisjoint(_storages(operand))), None)


def _storages(node: fx.Node) -> set[int]:
    """Returns the storages of a node's value, which may be several tensors."""
    tensors = [t for t in pytree.tree_leaves(node.meta.get("example_value")) if isinstance(t, torch.Tensor)]
    return {torch_private.storage_id(tensor) for tensor in tensors}


def changes_operand(node: fx.Node) -> bool:
    """Tells whether an operation returns its first operand, which it changes."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place_operator = getattr(operator, name, None) is node.target and name.startswith("i") and hasattr(operator, name[1:])
    return (name.endswith("_") and not name.endswith("__")) or in_place_operator or "out" in node.kwargs or _is_inplace(node)


def _is_inplace(node: fx.Node) -> bool:
    """Tells whether a function of torch.nn.functional is called with ``inplace=True``."""
    code = getattr(node.target, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given.get("inplace") is True


def _alike(one: Any, other: torch.Tensor) -> bool:
    def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
        place = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return tensor.dtype, place, tensor.is_conj(), tensor.is_neg()

    return isinstance(one, torch.Tensor) and layout(one) == layout(other)


def _as_view(node: fx.Node, without_grad: bool) -> View | None:
    """Returns the operation as one on its viewed operand, or None if it has other operands in the graph."""
    viewed = _parent(node)
    if set(node.all_input_nodes) != {viewed}:
        return None
    arguments: Any = node.args, node.kwargs
    args, kwargs = map_arg(arguments, lambda operand: _TENSOR)  # type: ignore[arg-type, return-value]
    return View(node.target, node.op == "call_method", tuple(args), tuple(dict(kwargs).items()), without_grad)
