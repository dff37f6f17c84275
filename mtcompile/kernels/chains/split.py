"""Splits the body of a region into chains, which one kernel each can do, and calls that stay what eager calls.

    x ── cast ── square ──► mean ──► add ── rsqrt ── mul ── mul ── cast ──► mm
        └── a chain ──┘    (eager)   └───────────── a chain ──────────┘   (eager)

A chain holds elementwise operations, casts, concatenations and what makes constants, joined by views. Products, attention,
reductions, random numbers, and every operation that is not listed here stay eager.

A value's *level* is the number of eager calls on the longest way to it. A chain is a connected set of operations of one level,
so no way from one of its operations to another leaves it, and chains and eager calls never wait for each other in a circle.
Calls that have to keep their order, such as random ones, count as if each read the one before it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from mtcompile.passes.analysis.kernels import install
from mtcompile.passes.generators import replay, save_rng
from mtcompile.passes.step_graph import body_outputs, is_view, iter_tensors, must_run, new_node, placeholders, span_nbytes

aten = torch.ops.aten

_ELEMENTWISE = {
    getattr(aten, name)
    for name in (
        "abs", "add", "addcdiv", "addcmul", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clamp",
        "clamp_max", "clamp_min", "clone", "cos", "div", "elu", "elu_backward", "eq", "erf", "exp", "exp2", "expm1", "floor",
        "ge", "gelu", "gelu_backward", "gt", "hardsigmoid", "hardsigmoid_backward", "hardswish", "hardswish_backward",
        "hardtanh", "hardtanh_backward", "isinf", "isnan", "le", "leaky_relu", "leaky_relu_backward", "lerp", "log", "log1p",
        "log2", "log_sigmoid_forward", "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill",
        "maximum", "minimum", "mish", "mul", "ne", "neg", "pow", "reciprocal", "relu", "rsqrt", "rsub", "sgn", "sigmoid",
        "sigmoid_backward", "sign", "silu", "silu_backward", "sin", "softplus", "softplus_backward", "sqrt", "square", "sub",
        "tanh", "tanh_backward", "threshold", "threshold_backward", "where", "_to_copy",
    )
}  # fmt: skip
_PLACING = {aten.cat, aten.stack, aten.constant_pad_nd, aten.slice_backward, aten.select_backward}
_MAKING = {  # not arange: compiled, it counts in integers, which have no -0
    getattr(aten, name)
    for name in ("full", "full_like", "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like", "new_zeros")
}
_VIEWS = {
    getattr(aten, name)
    for name in (
        "alias", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
        "unbind", "unsqueeze", "view", "_unsafe_view",
    )
}  # fmt: skip
_DTYPES = {torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64}
_PARTS = 4  # a view of less of a value than this part is an operand itself; else the value is, and its views are in the chain
_LEAST_NBYTES = 16 << 10  # a chain that moves hardly less than its operations one by one is not worth a call

Excluded = Callable[[fx.Node], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A chain of a body. ``kernel``: its operations as a graph of its own, whose placeholders stand for ``operands`` and whose
    outputs are ``results``, nodes of the body, by position. ``nodes``: its operations there, in order. ``nbytes``: what
    they move one by one."""

    kernel: fx.GraphModule
    operands: tuple[fx.Node, ...]
    results: Mapping[fx.Node, int]
    nodes: tuple[fx.Node, ...]
    nbytes: int

    @property
    def saved_nbytes(self) -> int:
        """The bytes that a kernel of the chain moves less than its operations one by one."""
        return self.nbytes - _moved_nbytes(self.kernel)


def chains_of(body: fx.GraphModule, is_excluded: Excluded) -> list[Chain]:
    """Returns the chains of a body that are worth a kernel. ``is_excluded``: tells which operations have to stay eager though
    they are of a kind that chains hold."""
    owner, kernels, chains = nn.Module(), dict[str, fx.GraphModule](), list[Chain]()
    outputs = {node for node in body_outputs(body) if isinstance(node, fx.Node)}
    for nodes in _connected(body.graph, is_excluded):
        chain = _chain(nodes, outputs, owner, kernels)
        if sum(not _is_made(node) for node in nodes) > 1 and chain.saved_nbytes >= _LEAST_NBYTES:
            chains.append(chain)
    return chains


def is_elementwise(node: fx.Node) -> bool:
    """Tells whether an operation is of a kind that chains hold."""
    packet = getattr(node.target, "overloadpacket", None)
    if node.op != "call_function" or packet not in _ELEMENTWISE | _PLACING | _MAKING:
        return False
    result, operands = node.meta["val"], [val for operand in node.all_input_nodes for val in iter_tensors(operand)]
    if not isinstance(result, torch.Tensor) or not result.numel():
        return False
    one_place = {val.device for val in (result, *operands)}
    floats = any(val.is_floating_point() for val in operands)
    to_integers = floats and not result.is_floating_point() and result.dtype != torch.bool  # of NaN, it may be any
    return len(one_place) == 1 and not to_integers and all(val.dtype in _DTYPES for val in (result, *operands))


def operation_key(node: fx.Node) -> str:
    """Returns what an operation computes of which dtypes, whatever the shapes: as a chain that has it may differ from eager."""
    dtypes = map_arg((node.args, dict(node.kwargs)), lambda n: str([v.dtype for v in iter_tensors(n)]))
    numbers = [value for value in dtypes[0] if not isinstance(value, (tuple, list))]  # without sizes
    return f"{node.target} {numbers} {dtypes[1]}"


def elementwise_nbytes(body: fx.GraphModule) -> int:
    """Returns the bytes that all elementwise operations of a body move one by one."""
    return sum(_traffic(node) for node in body.graph.nodes if is_elementwise(node))


def _is_made(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _MAKING


def _is_inner_view(node: fx.Node) -> bool:
    """Tells whether a chain may hold this view."""
    if not is_view(node) or len(node.all_input_nodes) != 1:
        return False
    return node.target is operator.getitem or getattr(node.target, "overloadpacket", None) in _VIEWS


def viewed(node: fx.Node) -> fx.Node:
    """Returns what a value is a view of, through views that a chain may hold."""
    while _is_inner_view(node):
        node = node.all_input_nodes[0]
    return node


def in_order(node: fx.Node) -> bool:
    """Tells whether a call has to keep its place among others like it."""
    return must_run(node) or node.target in (save_rng, replay)


def _connected(graph: fx.Graph, is_excluded: Excluded) -> list[list[fx.Node]]:
    """Returns the operations of each chain in order, and the chains in the order of their last operations."""
    ready: dict[fx.Node, int] = {}
    leader: dict[fx.Node, fx.Node] = {}

    def first(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            leader[node] = node = leader[leader[node]]
        return node

    ordered = 0
    for node in graph.nodes:
        level = max((ready[operand] for operand in node.all_input_nodes), default=0)
        ready[node] = level
        if node.op != "call_function" or node.target is operator.getitem or _is_inner_view(node):
            continue
        if not is_elementwise(node) or is_excluded(node):
            ready[node] = 1 + (max(level, ordered) if in_order(node) else level)
            ordered = max(ordered, ready[node]) if in_order(node) else ordered
            continue
        leader[node] = node
        for base in map(viewed, node.all_input_nodes):
            if base in leader and ready[base] == level:
                leader[first(base)] = first(node)
    chains: dict[fx.Node, list[fx.Node]] = {}
    for node in leader:
        chains.setdefault(first(node), []).append(node)
    order = {node: position for position, node in enumerate(graph.nodes)}
    return sorted(chains.values(), key=lambda nodes: order[nodes[-1]])


def _chain(nodes: Sequence[fx.Node], outputs: set[fx.Node], owner: nn.Module, kernels: dict[str, fx.GraphModule]) -> Chain:
    """Builds a chain. Operations that are equal are done once."""
    inside, graph, copies, equal = set(nodes), fx.Graph(), dict[fx.Node, fx.Node](), dict[str, fx.Node]()
    operands = list(dict.fromkeys(value for node in nodes for value in _operands_of(node, inside)))
    for number, value in enumerate(operands):
        copies[value] = new_node(graph, "placeholder", f"x{number}", (), {}, f"x{number}")
        copies[value].meta["val"] = value.meta["val"]

    def copied(node: fx.Node) -> fx.Node:
        if node in copies:
            return copies[node]
        for operand in node.all_input_nodes:
            copied(operand)
        args, kwargs = map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
        key = f"{node.target} {args!r} {kwargs!r}"
        if key not in equal:
            equal[key] = new_node(graph, "call_function", node.target, args, kwargs, f"v{len(equal)}")
            equal[key].meta["val"] = node.meta["val"]
        copies[node] = equal[key]
        return equal[key]

    for node in nodes:
        copied(node)
    taken = [node for node in nodes if _is_read_outside(node, inside, outputs)]
    made = list(dict.fromkeys(copies[node] for node in taken))
    graph.output(tuple(made))
    kernel = owner.get_submodule(install(owner, kernels, graph))
    assert isinstance(kernel, fx.GraphModule)
    results = {node: made.index(copies[node]) for node in taken}
    return Chain(kernel, tuple(operands), results, tuple(nodes), sum(map(_traffic, nodes)))


def _operands_of(node: fx.Node, inside: set[fx.Node]) -> Iterator[fx.Node]:
    """Yields the values from outside a chain that an operation reads: what its operands are views of, or a view of a small
    part."""
    for operand in node.all_input_nodes:
        if (base := viewed(operand)) not in inside:
            yield base if base.meta["val"].numel() <= _PARTS * operand.meta["val"].numel() else operand


def _is_read_outside(node: fx.Node, inside: set[fx.Node], outputs: set[fx.Node]) -> bool:
    return node in outputs or any(
        _is_read_outside(user, inside, outputs) if _is_inner_view(user) else user not in inside for user in node.users
    )


def _traffic(node: fx.Node) -> int:
    return sum(span_nbytes(val) for each in (node, *node.all_input_nodes) for val in iter_tensors(each))


def _moved_nbytes(kernel: fx.GraphModule) -> int:
    values = (*placeholders(kernel.graph), *body_outputs(kernel))
    return sum(span_nbytes(node.meta["val"]) for node in values)
