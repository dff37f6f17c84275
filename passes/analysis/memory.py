"""Alias-aware liveness and peak of a kernel's body, from shapes alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import fx

from mtcompile.passes.analysis.tiles import inside_nbytes, program_of, run_tiles
from mtcompile.passes.step_graph import body_outputs, is_view, iter_tensors, storage_nbytes
from mtcompile.runtime.schedule import aligned


def owner(node: fx.Node) -> fx.Node:
    """The node whose storage ``node`` shares: follows views back to what they view."""
    while is_view(node):
        node = node.args[0]
    return node


def made_nbytes(node: fx.Node) -> int:
    """Bytes an operation allocates for its results; a view and a placeholder make none, a getitem none of its own."""
    if node.op != "call_function" or is_view(node) or node.target is operator.getitem:
        return 0
    if isinstance(node.meta.get("val"), (tuple, list)) or "val" in node.meta:
        return sum(aligned(storage_nbytes(val)) for val in iter_tensors(node))
    return sum(
        aligned(storage_nbytes(val)) for user in node.users if user.target is operator.getitem for val in iter_tensors(user)
    )


def body_peak(body: fx.Graph) -> int:
    """The largest of ``body_lives``, in bytes."""
    return max(body_lives(body), default=0)


def nbytes_of_tiles(node: fx.Node) -> int:
    """Bytes that an operation in tiles needs inside."""
    if node.target is not run_tiles:
        return 0
    program = program_of(str(node.args[0]))
    return inside_nbytes(program, body_peak(program.tile.graph))


def body_lives(
    body: fx.Graph, given: Mapping[fx.Node, int] = MappingProxyType({}), inside: Callable[[fx.Node], int] = nbytes_of_tiles
) -> list[int]:
    """Live bytes made inside a body run in order, at each node, each storage freed after the last use of any view of it.
    ``given``: bytes of inputs that count as if the body had made them. ``inside``: bytes that an operation needs beside its
    results; by shapes, only those in tiles are known to. A kernel's workspace is measured where it can be run.
    """

    def size(node: fx.Node) -> int:
        return given.get(node, 0) or made_nbytes(node)

    nodes = list(body.nodes)
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        for operand in node.all_input_nodes:
            root = owner(operand)
            while root.target is operator.getitem:  # the storages of a multi-output operation count together
                root = root.args[0]
            last[root] = position
    live, lives = 0, []
    expiring: dict[int, list[fx.Node]] = {}
    for root, position in last.items():
        expiring.setdefault(position, []).append(root)
    for position, node in enumerate(nodes):
        if node.op == "output":
            break
        live += size(node)
        lives.append(live + inside(node))
        if node not in last:
            live -= size(node)
        live -= sum(size(root) for root in expiring.get(position, ()))
    return lives


def output_nbytes(kernel: fx.GraphModule) -> int:
    """The bytes of a kernel's results."""
    return sum(aligned(storage_nbytes(node.meta["val"])) for node in body_outputs(kernel))


def workspace_nbytes(kernel: fx.GraphModule) -> int:
    """Bytes a kernel needs beside its inputs and outputs, by shapes alone (an analytic figure)."""
    if "workspace" not in kernel.meta:
        kernel.meta["workspace"] = max(0, body_peak(kernel.graph) - output_nbytes(kernel))
    return int(kernel.meta["workspace"])
