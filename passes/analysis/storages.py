"""Operations that see more of an operand than its elements: what they make depends on its storage."""

from __future__ import annotations

import torch
from torch import fx

from mtcompile.passes.analysis.memory import owner

aten = torch.ops.aten
# These find their elements by their place in the operand's storage, whatever the operand itself shows of it.
_BY_PLACE = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
# These copy all of the operand's storage, and return a view of the copy.
_COPY_STORAGE = (aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default, aten.copy.default)


def reads_by_place(node: fx.Node) -> bool:
    """Tells whether an operation finds elements by their place in the storage of its first operand."""
    return node.target in _BY_PLACE


def reads_storage(node: fx.Node) -> bool:
    """Tells whether an operation looks at its operands' storages. A custom operation that changes its arguments does, as
    captured: it is given copies of them. oneDNN's recurrent layers copy a state that shares its storage with another one."""
    if node.op != "call_function":
        return False
    name = str(getattr(node.target, "__name__", ""))
    by_storage = node.target in _BY_PLACE or node.target in _COPY_STORAGE
    return by_storage or name.startswith(("auto_functionalized", "mkldnn_rnn_layer"))


def inputs_read_by_place(graph: fx.Graph) -> set[fx.Node]:
    """Returns the placeholders, seen through views, in whose storage an operation finds elements by their place."""
    inputs = set()
    for node in graph.nodes:
        if reads_by_place(node):
            inputs.add(owner(node.args[0]))
    return {base for base in inputs if base.op == "placeholder"}
