"""Proves that a joint graph whose weights are cut computes what the whole one does.

Both graphs are numbered: equal numbers are equal values. In the cut one, parts are numbered as rows or columns of wholes, by
these rules alone, and parts that follow each other from the first to the last are the whole:

    W[s:e]                    rows s:e of W             mm(x, columns of B)            columns of mm(x, B)
    slice(v, dim, s, e)       rows or columns of v      addmm(rows of b, x, columns of B)    columns of addmm(b, x, B)
    t(rows of W)              columns of t(W)           mm(rows of A, x)               rows of mm(A, x)
    cat(columns of v, ...)    v                         mm(columns of g, rows of W)    a part of the sum mm(g, W)
    t(t(v))                   v                         addmm(part, columns of g, rows of W)    more of that sum
    bmm(rows of A, rows of B) rows of bmm(A, B)         transpose(rows of A, 1, 2)     rows of transpose(A, 1, 2)
    view(v, its own shape)    v                         alias(v)                       v

Products of groups of rows, with rows that are brought to the front by the end of the group before, are numbered by ``grouped``.

A sum in parts is the whole sum only where the cut may split sums. It shares no code with the cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mtcompile.passes.cuts.checks.values import Operand
from mtcompile.passes.cuts.fragments import check_grouped as grouped
from mtcompile.passes.proof.same_computation import expect
from mtcompile.passes.step_graph import inputs_of, is_random, outputs_of

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
Key = tuple[Any, ...]


def check_cut(whole: fx.GraphModule, cut: fx.GraphModule, splits: bool) -> None:
    """Raises SameComputationError unless ``cut`` computes the results of ``whole``, each once or in rows that fill it.
    ``splits``: sums may be computed in parts."""
    numbers = Numbers(splits)
    expected = {(spec.kind, spec.index): value for spec, value in zip(*_results(numbers, whole), strict=True)}
    parts = {spec.index: spec.fragment for spec in cut.meta["inputs"] if spec.fragment is not None}
    rows: dict[tuple[str, int], int] = {}  # of what comes back in rows: how many are there
    for spec, value in zip(*_results(numbers, cut), strict=True):
        part = parts.get(spec.index) if spec.kind == "grad" else None
        about = spec.kind, spec.index if part is None else part.index
        expect(about in expected, lambda a=about: f"a result of the whole graph, found {a}")
        if part is None:
            expect(value == expected.pop(about), lambda s=spec: f"{s.kind} {s.name} to be computed as from whole weights")
            continue
        same = numbers.keys[value] == ("part", 0, expected[about], part.start, part.end)
        expect(same and part.start == rows.get(about, 0), lambda s=spec: f"{s.name} to be the next rows of the gradient")
        rows[about] = part.end
        if part.end == numbers.sizes[expected[about]][0]:
            del expected[about]
    expect(not expected, lambda: f"all results, found none for {sorted(expected)}")


def _results(numbers: Numbers, graph: fx.GraphModule) -> tuple[list[Any], list[int]]:
    """Numbers a graph; returns the meaning and the number of each result."""
    env: dict[fx.Node, int] = {}
    for spec, node in inputs_of(graph):
        part, val = spec.fragment, node.meta["val"]
        if part is None:
            env[node] = numbers.of(("input", spec.role, spec.name, spec.index), val)
        else:
            whole = numbers.of(("input", spec.role, part.parameter, part.index), None)
            env[node] = numbers.part(0, whole, part.start, part.end)
            expect(len(val) == part.end - part.start, lambda s=spec: f"{s.name} of as many rows as it says")
    for node in graph.graph.nodes:
        if node.op == "call_function":
            env[node] = numbers.call(node, env)
    outputs = outputs_of(graph)
    return [spec for spec, _ in outputs], [env[value] for _, value in outputs]


class Numbers:
    """Numbers of values, one for each way to compute one. ``keys``: what each is; ``sizes``: of the tensors."""

    def __init__(self, splits: bool) -> None:
        self.splits = splits
        self.known: dict[Key, int] = {}
        self.keys: list[Key] = []
        self.sizes: dict[int, tuple[int, ...]] = {}

    def of(self, key: Key, val: Any) -> int:
        if key not in self.known:
            self.known[key] = len(self.keys)
            self.keys.append(key)
        number = self.known[key]
        if isinstance(val, torch.Tensor):
            self.sizes[number] = tuple(val.shape)
        return number

    def part(self, dim: int, whole: int, start: int, end: int) -> int:
        """Numbers the rows (``dim`` 0) or columns (1) of a value; all of them are the value."""
        sizes = self.sizes.get(whole, ())
        if dim < len(sizes) and (start, end) == (0, sizes[dim]):
            return whole
        return self.of(("part", dim, whole, start, end), None)

    def sum(self, key: Key, span: Key, length: int, val: Any) -> int:
        """Numbers a part of the sum ``key`` over a dimension of that length."""
        return self.of(key, val) if span == (0, length) and self.splits else self.of(("sum", key, *span), None)

    def call(self, node: fx.Node, env: dict[fx.Node, int]) -> int:
        args: tuple[Any, ...] = fx.node.map_arg(node.args, lambda operand: Operand(env[operand]))
        val, target = node.meta.get("val"), node.target
        parts = [self.keys[arg.number] if isinstance(arg, Operand) else () for arg in args]
        kinds = [key[:2] if key[:1] == ("part",) else () for key in parts]
        spans = [key[3:] if kind else () for key, kind in zip(parts, kinds, strict=True)]
        rows, columns = ("part", 0), ("part", 1)
        if (number := grouped.number(self, node, args)) is not None:
            return number
        if node.kwargs:
            pass
        elif target is aten.alias.default:
            return int(args[0].number)
        elif target in _VIEWS and args[0].number in self.sizes and self.sizes[args[0].number] == tuple(node.meta["val"].shape):
            return int(args[0].number)
        elif target is aten.t.default and kinds[0]:
            return self.part(1 - parts[0][1], self.of((aten.t.default, Operand(parts[0][2])), None), *spans[0])
        elif target is aten.t.default and parts[0][:1] == (aten.t.default,):
            return int(parts[0][1].number)
        elif target is aten.slice.Tensor and len(args) == 4 and self._has_part(args[0].number, *args[1:]):
            return self.part(args[1], args[0].number, args[2], args[3])
        elif target is aten.cat.default and len(args) == 2 and (joined := self._joined(args[0], args[1])) is not None:
            return joined
        elif target is aten.transpose.int and kinds[0] == rows and _turns_matrices(node):
            turned = grouped.turned_back(self.keys[parts[0][2]], args[1:], 3)
            turned = self.of((target, Operand(parts[0][2]), *args[1:]), None) if turned is None else turned
            return self.part(0, turned, *spans[0])
        elif target is aten.bmm.default and kinds == [rows, rows] and spans[0] == spans[1]:
            return self.part(0, self.of((target, Operand(parts[0][2]), Operand(parts[1][2])), None), *spans[0])
        elif target is aten.mm.default and kinds == [(), columns]:
            return self.part(1, self.of((target, args[0], Operand(parts[1][2])), None), *spans[1])
        elif target is aten.mm.default and kinds == [rows, ()]:
            return self.part(0, self.of((target, Operand(parts[0][2]), args[1]), None), *spans[0])
        elif target is aten.mm.default and kinds == [columns, rows] and spans[0] == spans[1]:
            return self.sum((target, Operand(parts[0][2]), Operand(parts[1][2])), spans[0], self._rows(parts[1][2]), val)
        elif target is aten.addmm.default and kinds == [rows, (), columns] and spans[0] == spans[2]:
            return self.part(1, self.of((target, Operand(parts[0][2]), args[1], Operand(parts[2][2])), None), *spans[2])
        elif target is aten.addmm.default and parts[0][:1] == ("sum",) and kinds[1:] == [columns, rows]:
            key = aten.mm.default, Operand(parts[1][2]), Operand(parts[2][2])
            if parts[0][1] == key and spans[1] == spans[2] and spans[1][1] == parts[0][2]:
                return self.sum(key, (spans[1][0], parts[0][3]), self._rows(parts[2][2]), val)
        more = (_frozen(tuple(sorted(node.kwargs.items()))),) if node.kwargs else ()
        return self.of((target, *_frozen(args), *more, *((node.name,) if is_random(node) else ())), val)

    def _has_part(self, number: int, dim: int, start: int, end: int) -> bool:
        sizes = self.sizes.get(number, ())
        return dim in (0, 1) and dim < len(sizes) and 0 <= start < end <= sizes[dim]

    def _rows(self, number: int) -> int:
        return self.sizes.get(number, (-1,))[0]

    def _joined(self, pieces: Any, dim: Any) -> int | None:
        """Returns the value whose parts, one behind the other, are all of it."""
        keys = [self.keys[piece.number] for piece in pieces]
        at = 0
        for key in keys:
            if key[:3] != ("part", dim, keys[0][2] if len(keys[0]) > 2 else None) or key[3] != at:
                return None
            at = key[4]
        whole: int = keys[0][2]
        sizes = self.sizes.get(whole, ())
        return whole if dim < len(sizes) and sizes[dim] == at else None


def _turns_matrices(transpose: fx.Node) -> bool:
    """Tells whether a transpose is that of each matrix of a stack."""
    dims: Any = transpose.args[1:]
    return transpose.meta["val"].dim() == 3 and {dim % 3 for dim in dims} == {1, 2}


def _frozen(value: Any) -> Any:
    if isinstance(value, Operand):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)
