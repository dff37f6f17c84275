"""Proves that a joint graph which takes only rows of some parameters computes what the whole one does.

Both graphs are numbered: equal numbers are equal values. In the one with rows, by these rules alone, where ``W'`` holds the
rows of W that the inputs ``among`` name, and ``places(v)`` are those of the numbers v in it, v picked from one of these inputs:

    W'                                     rows of W
    pick(places(v))                        places(pick(v))
    embedding(W', places(v))               embedding(W, v)
    embedding_dense_backward(dy, places(v), held)    rows of embedding_dense_backward(dy, v, rows)
    add(rows of a, rows of b)              rows of add(a, b), and so for casts and copies
    a gradient of W in such rows           that gradient, which is zero in all others

A lookup's result depends on its weight and index alone: what else it is told is for its gradient. It shares no code with the
rewrite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.rows import Rows
from mtcompile.passes.proof.same_computation import expect
from mtcompile.passes.step_graph import inputs_of, is_random, outputs_of, restride

aten: Any = torch.ops.aten
_PICKS = {  # what lays numbers out anew, and computes none
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.expand.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int, aten.slice.Tensor, aten.t.default),
    *(aten.transpose.int, aten.permute.default, aten.alias.default, aten.detach.default, aten.clone.default),
}
_INTEGERS = {torch.int32, torch.int64}


def check_rows(whole: fx.GraphModule, taken: fx.GraphModule) -> None:
    """Raises SameComputationError unless ``taken`` computes the results of ``whole``, gradients of parameters of which it takes
    rows in these rows."""
    numbers = _Numbers()
    rows: Mapping[str, Rows] = taken.meta["rows"]
    expected = numbers.results(whole, {})
    results = numbers.results(taken, rows)
    expect(expected.keys() == results.keys(), lambda: f"the results of the whole graph, found {sorted(map(str, results))}")
    names = {spec.index: spec.name for spec in whole.meta["inputs"] if spec.role == "param"}
    sizes = {spec.name: tuple(node.meta["val"].shape) for spec, node in inputs_of(whole) if spec.role == "param"}
    for name, node in ((spec.name, node) for spec, node in inputs_of(taken) if spec.name in rows):
        size = rows[name].rows, *node.meta["val"].shape[1:]
        expect(sizes.get(name) == size, lambda n=name, s=size: f"{n} of size {s}, found {sizes.get(n)}")
    for about, number in expected.items():
        each = rows.get(names.get(about[1], "")) if about[0] == "grad" else None
        right = number if each is None else ("rows", _key(each), each.held, number)
        expect(results[about] == right, lambda a=about: f"{a[0]} {a[2]} to be computed as from all rows")


class _Numbers:
    """Numbers of values, one for each way to compute one; of what is there in rows, ``("rows", which, held, number)``, and of
    places among these, ``("places", which, without, number)``. ``counts``: of rows that are named at most."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}
        self.counts: dict[Any, int] = {}

    def of(self, *key: Any) -> int:
        return self.known.setdefault(key, len(self.known))

    def results(self, graph: fx.GraphModule, rows: Mapping[str, Rows]) -> dict[tuple[str, int, str], Any]:
        """Numbers a graph; returns the number of each result, by its meaning."""
        inputs = inputs_of(graph)
        indices = {spec.name: (spec.index, node) for spec, node in inputs if spec.role == "input" and spec.places is None}
        env: dict[fx.Node, Any] = {}
        for spec, node in inputs:
            if spec.places is None:
                env[node] = self.of("input", spec.role, spec.name, spec.index)
                if spec.role == "param" and spec.name in rows:
                    self._held(rows[spec.name], node, [indices[name][1] for name in rows[spec.name].indices])
                    self.counts[_key(rows[spec.name])] = rows[spec.name].count
                    env[node] = ("rows", _key(rows[spec.name]), rows[spec.name].held, env[node])
        by_index = {index: (name, node) for name, (index, node) in indices.items()}
        for spec, node in inputs:
            if (places := spec.places) is not None:
                which = tuple(by_index[index][0] for index in places.among), places.rows
                expect(which in self.counts and places.index in places.among, lambda s=spec: f"{s.name} to be of rows")
                _, of = by_index[places.index]
                same = node.meta["val"].shape == of.meta["val"].shape and node.meta["val"].dtype == of.meta["val"].dtype
                spare = self.counts[which] if places.without >= 0 else -1
                expect(same and places.spare == spare, lambda s=spec: f"{s.name} as many as the numbers that they are of")
                env[node] = ("places", which, places.without, env[of])
        for node in graph.graph.nodes:
            if node.op == "call_function":
                env[node] = self._call(node, env)
        return {(spec.kind, spec.index, spec.name): env[value] for spec, value in outputs_of(graph)}

    def _held(self, rows: Rows, weight: fx.Node, indices: list[fx.Node]) -> None:
        named = sum(index.meta["val"].numel() for index in indices)
        val = weight.meta["val"]
        nbytes = rows.count * val.shape[1] * val.element_size()
        right = named == rows.count <= rows.held == len(val) and rows.nbytes == nbytes
        expect(right, lambda: f"{weight} to have room for {named} rows, found {rows}")

    def _call(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        args: Any = fx.node.map_arg(node.args, lambda operand: _Operand(env[operand]))
        kinds = [_kind(arg) for arg in args]
        if "rows" in kinds or "places" in kinds:
            number = self._in_rows(node, args, kinds)
            expect(number is not None, lambda: f"an operation that rows are enough for, found {node.format_node()}")
            return number
        if node.target is aten.embedding.default:
            args = args[:2]
        return self._plain(node, args)

    def _plain(self, node: fx.Node, args: Any) -> int:
        keywords = repr(sorted(node.kwargs.items(), key=lambda item: item[0]))  # no values: ATen takes them by position
        return self.of(str(node.target), repr(args), keywords, node.name if is_random(node) else "")

    def _in_rows(self, node: fx.Node, args: Any, kinds: list[str]) -> Any:
        """Numbers an operation on rows or places; None for one that these rules do not know."""
        _, which, about, first = args[0].number if kinds[0] else ("", (), 0, 0)
        widens = node.target is aten._to_copy.default and node.meta["val"].dtype == torch.int64 and _dtype(node) in _INTEGERS
        if kinds[0] == "places" and kinds.count("places") == 1 and (node.target in _PICKS or widens):
            return ("places", which, about, self._plain(node, (_Operand(first), *args[1:])))
        if node.target is aten.embedding.default and kinds[:2] == ["rows", "places"]:
            _, of, without, index = args[1].number
            return self._plain(node, (_Operand(first), _Operand(index))) if of == which and without < 0 else None
        if node.target is aten.embedding_dense_backward.default and kinds[:2] == ["", "places"]:
            _, of, without, index = args[1].number
            count, (_, _, held, spare, by_frequency) = self.counts[of], args
            if spare != (count if without >= 0 else -1) or held < max(count, spare + 1):
                return None
            return ("rows", of, held, self._plain(node, (args[0], _Operand(index), of[1], without, by_frequency)))
        if node.target is aten.add.Tensor and kinds == ["rows", "rows"] and not node.kwargs:
            same = args[1].number[:3] == args[0].number[:3]
            return ("rows", which, about, self._plain(node, (_Operand(first), _Operand(args[1].number[3])))) if same else None
        if kinds == ["rows"] and node.target is aten._to_copy.default and node.meta["val"].is_floating_point():
            return ("rows", which, about, self._plain(node, (_Operand(first),)))
        if kinds == ["rows", "", ""] and node.target is restride and args[1][0] == about:
            return ("rows", which, about, self._plain(node, (_Operand(first), (which[1], *args[1][1:]), args[2])))
        return None


def _key(rows: Rows) -> tuple[tuple[str, ...], int]:
    """Returns which rows those are: the inputs that name them, and of how many rows."""
    return rows.indices, rows.rows


class _Operand:
    """The number of an operand, unlike any argument that is a number."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"


def _kind(argument: Any) -> str:
    """Returns "rows" or "places" of what is there in part; "" of all else, also of several values."""
    number = argument.number if isinstance(argument, _Operand) else ()
    return str(number[0]) if isinstance(number, tuple) and number else ""


def _dtype(node: fx.Node) -> torch.dtype:
    operand: Any = node.args[0]
    dtype: torch.dtype = operand.meta["val"].dtype
    return dtype
