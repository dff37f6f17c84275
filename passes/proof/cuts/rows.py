"""Proves that a joint graph which takes only rows of some parameters computes what the whole one does.

Where ``W'`` holds the rows of W that the inputs ``among`` name, and ``places(v)`` are the places in it of the row
numbers v, which are picked from one of these inputs, these rules alone hold:

    W'                                     rows of W
    pick(places(v))                        places(pick(v))
    embedding(W', places(v))               embedding(W, v)
    embedding_dense_backward(dy, places(v), held)    rows of embedding_dense_backward(dy, v, rows)
    add(rows of a, rows of b)              rows of add(a, b), and so for casts and copies
    a gradient of W in such rows           that gradient, which is zero in all others

A lookup's result depends on its weight and index alone: its other arguments are for its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.rows import Rows
from mtcompile.passes.proof.cuts.numbering import Call, CutNumbers, check_computed, check_same_tables
from mtcompile.passes.proof.same_computation import expect, well_formed
from mtcompile.passes.proof.values import Operand
from mtcompile.passes.step_graph import OutputSpec, restride

aten: Any = torch.ops.aten
_PICKS = (  # what lays numbers out anew, and computes none
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.expand.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int, aten.slice.Tensor, aten.t.default),
    *(aten.transpose.int, aten.permute.default, aten.alias.default, aten.detach.default, aten.clone.default),
)
Which = tuple[tuple[str, ...], int]  # which rows: the inputs that name them, and of how many rows


def check_rows(whole: fx.GraphModule, taken: fx.GraphModule) -> None:
    """Raises SameComputationError unless ``taken`` computes the results of ``whole``. Where it takes rows of a
    parameter, the gradient is of these rows."""
    check_same_tables(whole, taken, "outputs")
    rows: Mapping[str, Rows] = taken.meta["rows"]
    numbers = _RowNumbers()
    inputs, results = numbers.uncut(whole)
    params = {spec.name: spec for spec in inputs if spec.role == "param"}
    indices = {spec.index: (spec.name, inputs[spec]) for spec in inputs if spec.role == "input"}
    by_name = dict(indices.values())
    with well_formed("rows of parameters that inputs name"):
        for name, each in rows.items():
            spec, which = params[name], (each.indices, each.rows)
            number, (layout, strides) = inputs[spec]
            count = sum(prod(by_name[index][1][0].shape) for index in each.indices)
            nbytes = count * layout.shape[1] * layout.dtype.itemsize
            right = each == Rows(each.indices, count, nbytes, layout.shape[0], max(count, each.held))
            expect(right, lambda n=name, c=count: f"room for the {c} rows of {n} that are named")
            numbers.counts[which] = count
            inputs[spec] = numbers.rows(which, each.held, number), (layout.along(0, each.held), strides)
            if (gradient := OutputSpec("grad", spec.index, name)) in results:
                number, node = results[gradient]
                results[gradient] = numbers.rows(which, each.held, number), node
        for spec in taken.meta["inputs"]:
            if (places := spec.places) is not None:
                which = tuple(indices[index][0] for index in places.among), places.rows
                spare = numbers.counts[which] if places.without >= 0 else -1
                right = spec.role == "input" and places.index in places.among and places.spare == spare
                expect(right, lambda s=spec: f"{s.name} to be places among rows")
                _, (number, layout_of_index) = indices[places.index]
                inputs[spec] = numbers.of(("places", which, places.without, number), layout_of_index[0]), layout_of_index
    check_computed(numbers, whole, taken, inputs, results)


class _RowNumbers(CutNumbers):
    """Numbers of what is there in rows, ``("rows", which, held, number)``, and of places among these,
    ``("places", which, without, number)``. ``counts``: how many rows are named at most."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Which, int] = {}
        self.rules = {
            **dict.fromkeys(_PICKS, self._picked),
            aten._to_copy.default: self._cast,
            aten.embedding.default: self._looked_up,
            aten.embedding_dense_backward.default: self._gradient,
            aten.add.Tensor: self._added,
            restride: self._restrided,
        }

    def rows(self, which: Which, held: int, number: int) -> int:
        return self.of(("rows", which, held, number), self.layouts[number].along(0, held))

    def _whole(self, call: Call, *args: Any) -> int:
        """Numbers the same operation on wholes."""
        return self.operation(call.node.target, *args, layout=None, kwargs=call.node.kwargs)

    def _in_rows(self, call: Call, *args: Any) -> int:
        """Numbers an operation as it is for each row of its first operand. ``args``: of that on wholes."""
        _, which, held, _ = call.keys[0]
        return self.rows(which, held, self._whole(call, *args))

    def _picked(self, call: Call) -> int | None:
        key, *others = call.keys
        if key[:1] != ("places",) or any(others):
            return None
        _, which, without, number = key
        whole = self._whole(call, Operand(number), *call.args[1:])
        return self.of(("places", which, without, whole), self.layouts[whole])

    def _cast(self, call: Call) -> int | None:
        key, dtype = call.keys[0], call.layout.dtype
        if key[:1] == ("places",) and dtype == torch.int64 and self.layouts[call.args[0].number].dtype in (torch.int32, dtype):
            return self._picked(call)
        alone = key[:1] == ("rows",) and len(call.args) == 1 and dtype.is_floating_point
        return self._in_rows(call, Operand(key[3])) if alone else None

    def _looked_up(self, call: Call) -> int | None:
        """Numbers embedding(w, index, ...), in both graphs."""
        (weight, index), keys = call.args[:2], call.keys[:2]
        if [key[:1] for key in keys] == [("rows",), ("places",)]:
            (_, which, _, held), (_, of, without, number) = keys
            if which != of or without >= 0:
                return None
            weight, index = Operand(held), Operand(number)
        return self.operation(call.node.target, weight, index, layout=call.layout, kwargs=call.node.kwargs)

    def _gradient(self, call: Call) -> int | None:
        if call.keys[1][:1] != ("places",):
            return None
        (_, which, without, number), (dy, _, held, spare, by_frequency) = call.keys[1], call.args
        count = self.counts[which]
        if spare != (count if without >= 0 else -1) or held < max(count, spare + 1):
            return None
        return self.rows(which, held, self._whole(call, dy, Operand(number), which[1], without, by_frequency))

    def _added(self, call: Call) -> int | None:
        one, other = call.keys
        if one[:1] != ("rows",) or one[:3] != other[:3] or call.kwargs:
            return None
        return self._in_rows(call, Operand(one[3]), Operand(other[3]))

    def _restrided(self, call: Call) -> int | None:
        key = call.keys[0]
        if key[:1] != ("rows",) or call.args[1][0] != key[2]:
            return None
        return self._in_rows(call, Operand(key[3]), (key[1][1], *call.args[1][1:]), call.args[2])
