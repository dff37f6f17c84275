"""Rewrites a joint graph so that it takes only those rows of an embedding that its batch names.

    W [rows, n] on the host                        W on the host
         | prefetch                                     | prefetch_rows: those that ids name, one behind the other
    W on the device                    becomes     W' [held, n] on the device
    y = embedding(W, ids)                          y = embedding(W', places of ids in W')
    dW = embedding_dense_backward(dy, ids)         dW' = embedding_dense_backward(dy, places)
         | offload                                      | offload_rows: zeros in all other rows
    dW on the host                                 dW on the host

``held`` is the number of indices, however many rows there are: so an embedding larger than the device trains. Places keep the
order of the rows, and equal numbers have equal places: so each row's gradient is the same sum in the same order. Numbers that
pad an embedding, and have no gradient, get a spare place in the backward, which never crosses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.kernels import drop_dead
from mtcompile.passes.analysis.rows import Rows, input_of, lookup, made_by_rows
from mtcompile.passes.joint.regions import STARTS_BLOCK
from mtcompile.passes.step_graph import InputSpec, Places, inputs_of, outputs_of, restride

aten = torch.ops.aten
FIRST_INDEX = 1 << 21  # of an input that holds places: above those of a program's inputs and of fragments


def take_rows(joint: fx.GraphModule, wanted: Mapping[str, Rows]) -> None:
    """Rewrites a normalized joint graph in place, and notes in ``joint.meta["rows"]`` of what it takes rows. ``wanted``: the
    parameters, by name, as ``read_by_rows`` returns them."""
    for name, rows in wanted.items():
        _take(joint, name, rows)
    joint.meta["rows"] = {**joint.meta.get("rows", {}), **wanted}
    drop_dead(joint.graph)
    joint.graph.lint()
    joint.recompile()


def _take(joint: fx.GraphModule, name: str, rows: Rows) -> None:
    spec, weight = next((spec, node) for spec, node in inputs_of(joint) if spec.name == name)
    gradient = next((value for out, value in outputs_of(joint) if out.kind == "grad" and out.index == spec.index), None)
    places = _Places(joint, weight, spec, rows)
    for reader in list(weight.users):
        pair = lookup(reader)
        assert pair is not None, f"{reader} reads more of {name} than rows"
        reader.args = (weight, places.of(pair[1]), *((-1, *reader.args[3:]) if len(reader.args) > 2 else ()))
    for node in made_by_rows(gradient) or () if gradient is not None else ():
        arguments: Any = node.args
        if node.target is aten.embedding_dense_backward.default:
            dy, index, _, padding, by_frequency = arguments
            spare = rows.count if padding >= 0 else -1
            node.args = (dy, places.of(index, padding), rows.held, spare, by_frequency)
        elif node.target is restride:
            node.args = (arguments[0], (rows.held, *arguments[1][1:]), arguments[2])
        node.meta["val"] = _held(node, rows)
    weight.meta = {**weight.meta, "val": _held(weight, rows)}


def _held(node: fx.Node, rows: Rows) -> torch.Tensor:
    val: torch.Tensor = node.meta["val"]
    return val.new_empty((rows.held, *val.shape[1:]))


class _Places:
    """The places of a parameter's indices: an input for each that these are picked from, and the same picks from it."""

    def __init__(self, joint: fx.GraphModule, weight: fx.Node, spec: InputSpec, rows: Rows) -> None:
        self.joint, self.weight, self.spec, self.rows = joint, weight, spec, rows
        self.specs = {node: each for each, node in inputs_of(joint)}
        by_name = {each.name: each.index for each in self.specs.values() if each.role == "input"}
        self.among = tuple(by_name[name] for name in rows.indices)
        self.known: dict[tuple[fx.Node, int], fx.Node] = {}

    def of(self, index: fx.Node, without: int = -1) -> fx.Node:
        """Returns the places of an index. ``without``: the number that has no gradient; negative for none."""
        key = index, max(-1, without)
        if key not in self.known:
            self.known[key] = self._input(*key) if index is input_of(index) else self._picked(*key)
        return self.known[key]

    def _input(self, index: fx.Node, without: int) -> fx.Node:
        joint, named = self.joint, self.specs[index]
        number = sum(each.places is not None for each in joint.meta["inputs"])
        spare = self.rows.count if without >= 0 else -1
        places = Places(named.index, self.among, self.rows.rows, without, spare)
        spec = InputSpec("input", f"{self.spec.name}[places {number} by {named.name}]", FIRST_INDEX + number, places=places)
        with joint.graph.inserting_before(self.weight):
            node = joint.graph.placeholder(f"{self.weight.name}_places{number}")
        node.meta = dict(index.meta)
        at = joint.meta["inputs"].index(self.spec)
        joint.meta["inputs"] = (*joint.meta["inputs"][:at], spec, *joint.meta["inputs"][at:])
        return node

    def _picked(self, index: fx.Node, without: int) -> fx.Node:
        operand, *others = index.args
        assert isinstance(operand, fx.Node)
        places, graph = self.of(operand, without), self.joint.graph
        with graph.inserting_before(index):
            node = graph.create_node("call_function", index.target, (places, *others), index.kwargs)
        node.meta = {key: value for key, value in index.meta.items() if key != STARTS_BLOCK}
        return node
