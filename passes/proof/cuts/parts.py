"""Rules for rows and columns of values, and for sums in parts, which chunks and fragments share.

Where A[s:e] are rows of A, parts are numbered by these rules alone. Sums are of parts that follow each other:

    slice(v, dim, s, e)                        rows or columns s:e of v
    cat(v[0:a], v[a:b], ..., v[y:z])           v[0:z]; all rows or columns are the value
    view(view(v)), view of v's own shape       view(v), v
    t(t(v)), transpose twice in the same dims  v                           t(rows of A)          columns of t(A), and so on
    _to_copy(view(v))                          view(_to_copy(v))           _to_copy(v[s:e])      _to_copy(v)[s:e]
    mm(rows of A, B), mm(A, columns of B)      rows, columns of mm(A, B)   bmm(A[s:e], B[s:e])   bmm(A, B)[s:e]
    addmm(bias, rows of A, B)                  rows of addmm(bias, A, B)
    addmm(bias[s:e], A, columns s:e of B)      columns s:e of addmm(bias, A, B)
    mm(columns s:e of C, B[s:e])               part s:e of the sum mm(C, B)
    addmm(part s:m of mm(C, B), columns m:e of C, B[m:e])        part s:e of that sum
    part s:m of a sum + part m:e of it         part s:e of it; all parts are the sum, if sums may be split
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from mtcompile.passes.proof.cuts.numbering import Call, CutNumbers, Layout, is_shape
from mtcompile.passes.proof.values import Key, Operand

aten: Any = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
SUM = -1  # in place of a dimension: the result is a part of a sum


class Parts(CutNumbers):
    """Numbers of parts, ``("part", dim, whole, start, end)``, and of sums over some of ``count`` rows,
    ``("sum", whole, start, end, count)``. ``splits``: sums may be computed in parts."""

    def __init__(self, splits: bool = True) -> None:
        super().__init__()
        self.splits = splits
        self.rules = {
            **dict.fromkeys(_VIEWS, self._view),
            aten.expand.default: self._own_shape,
            aten.slice.Tensor: self._slice,
            aten.cat.default: self._joined,
            aten._to_copy.default: lambda call: self._cast(call.args[0].number, call, call.layout),
            aten.t.default: lambda call: self._turned(call, (0, 1)),
            aten.transpose.int: lambda call: self._turned(call, call.args[1:]),
            aten.mm.default: lambda call: self.of_parts(call, ((0, None), 0), ((None, 1), 1), ((1, 0), SUM)),
            aten.bmm.default: lambda call: self.of_parts(call, ((0, 0), 0)),
            aten.addmm.default: self._product_and_sum,
            aten.add.Tensor: self._added,
        }

    def part(self, dim: int, whole: int, start: int, end: int) -> int:
        """Numbers some rows (``dim`` 0) or columns (1) of a value; all of them are the value."""
        layout = self.layouts[whole]
        if (start, end) == (0, layout.shape[dim]):
            return whole
        return self.of(("part", dim, whole, start, end), layout.along(dim, end - start))

    def sum(self, whole: int, start: int, end: int, count: int) -> int:
        """Numbers a sum over some of ``count`` rows; that over all of them is the whole one."""
        all_rows = (start, end) == (0, count) and self.splits
        return whole if all_rows else self.of(("sum", whole, start, end, count), self.layouts[whole])

    def of_parts(self, call: Call, *ways: tuple[Sequence[int | None], int], target: Any = None) -> int | None:
        """Numbers what an operation makes of parts. ``ways``: in which dimension each operand may be a part (None: it is whole,
        as are those that are left out), and in which one the result then is. ``target``: the operation, if not that of the
        call."""
        kinds = [key[:2] if key[:1] == ("part",) else key[:1] if key[:1] == ("sum",) else () for key in call.keys]
        for dims, out in ways:
            wanted = [() if dim is None else ("part", dim) for dim in dims]
            if kinds != [*wanted, *[()] * (len(kinds) - len(wanted))] or call.kwargs:
                continue
            parts = [key for key in call.keys if key[:1] == ("part",)]
            lengths = {self.layouts[whole].shape[dim] for _, dim, whole, _, _ in parts}
            if len({key[3:] for key in parts}) == len(lengths) == 1:
                start, end, length = *parts[0][3:], lengths.pop()
                args = [Operand(key[2]) if kind else arg for arg, key, kind in zip(call.args, call.keys, kinds, strict=True)]
                layout = call.layout if out == SUM else call.layout.along(out, length)
                whole = self.operation(target or call.node.target, *args, layout=layout)
                return self.sum(whole, start, end, length) if out == SUM else self.part(out, whole, start, end)
        return None

    def _view(self, call: Call) -> int | None:
        number, layout = call.args[0].number, call.layout
        if call.kwargs or len(call.args) != 2 or not is_shape(call.args[1], layout.shape, prod(self.layouts[number].shape)):
            return None
        return self._viewed(number, layout)

    def _viewed(self, number: int, layout: Layout) -> int:
        base = self.keys[number][1] if self.keys[number][:1] == ("view",) else number
        return base if self.layouts.get(base) == layout else self.of(("view", base, layout.shape), layout)

    def _own_shape(self, call: Call) -> int | None:
        number, shape = call.args[0].number, call.layout.shape
        if call.kwargs or len(call.args) != 2 or len(call.args[1]) != len(shape) or self.layouts.get(number) != call.layout:
            return None
        return number if all(asked in (-1, length) for asked, length in zip(call.args[1], shape, strict=True)) else None

    def _cast(self, number: int, call: Call, layout: Layout) -> int | None:
        key, dtype = self.key(number), layout.dtype
        if len(call.args) != 1 or not call.node.kwargs.keys() <= {"dtype", "layout", "device"}:
            return None
        if key[:1] == ("view",):
            base = self._cast(key[1], call, layout)
            return None if base is None else self._viewed(base, self.layouts[number]._replace(dtype=dtype))
        if key[:1] == ("part",):
            whole = self._cast(key[2], call, layout)
            return None if whole is None else self.part(key[1], whole, *key[3:])
        layout = self.layouts.get(number, layout)._replace(dtype=dtype)
        return self.operation(call.node.target, Operand(number), layout=layout, kwargs=call.node.kwargs)

    def _slice(self, call: Call) -> int | None:
        value, shape = call.args[0].number, self.layouts[call.args[0].number].shape
        if not self.is_cut or len(call.args) != 4 or call.kwargs or call.args[1] not in range(min(2, len(shape))):
            return None
        _, dim, start, end = call.args
        fits = type(start) is type(end) is int and 0 <= start < end <= shape[dim]
        return self.part(dim, value, start, end) if fits else None

    def _joined(self, call: Call) -> int | None:
        """Numbers parts that follow each other from the first row or column on."""
        pieces, dim = (*call.args, 0)[:2]
        keys, at = [self.key(piece.number) for piece in pieces], 0
        for key in keys:
            if call.kwargs or key[:2] != ("part", dim) or key[2] != keys[0][2] or key[3] != at:
                return None
            at = key[4]
        return self.part(dim, keys[0][2], 0, at)

    def _turned(self, call: Call, dims: tuple[Any, ...]) -> int | None:
        count = len(call.layout.shape)
        axes = {dim % count for dim in dims} if count > 1 else set()
        return None if call.kwargs or len(axes) != 2 else self._transposed(call, call.args[0].number, axes, call.layout)

    def _transposed(self, call: Call, number: int, axes: set[int], layout: Layout) -> int:
        """Numbers a value with two dimensions exchanged by the operation of a call."""
        key, target, others = self.key(number), call.node.target, call.args[1:]
        if key[:1] == (target,) and (not others or {dim % len(layout.shape) for dim in key[2:4]} == axes):
            return int(key[1].number)
        if key[:1] not in (("part",), ("front",)):
            return self.operation(target, Operand(number), *others, layout=layout)
        kind, dim, whole, *rest = key
        turned = sum(axes) - dim if dim in axes else dim
        again = self._transposed(call, whole, axes, layout.along(turned, self.layouts[whole].shape[dim]))
        return self.part(turned, again, *rest) if kind == "part" else self.of((kind, turned, again, *rest), layout)

    def _product_and_sum(self, call: Call) -> int | None:
        if len(call.args) != 3 or call.kwargs:
            return None
        before = call.keys[0]
        if before[:1] != ("sum",):
            bias = self.layouts[call.args[0].number].shape
            return self.of_parts(call, ((None, 0, None), 0), ((0, None, 1), 1)) if len(bias) == 1 else None
        product = call._replace(args=call.args[1:], keys=call.keys[1:])
        part = self.of_parts(product, ((1, 0), SUM), target=aten.mm.default)
        return None if part is None else self.follow(before, self.keys[part])

    def _added(self, call: Call) -> int | None:
        return None if call.kwargs else self.follow(*call.keys)

    def follow(self, one: Key, other: Key) -> int | None:
        """Numbers two parts of a sum together, if they follow each other."""
        if not one[:1] == other[:1] == ("sum",):
            return None
        for (_, whole, start, middle, count), (_, same, after, end, rows) in ((one, other), (other, one)):
            if (whole, count, middle) == (same, rows, after):
                return self.sum(whole, start, end, count)
        return None
