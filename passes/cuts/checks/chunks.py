"""Proves that a joint graph whose loss heads are in chunks of rows computes what the whole one does.

Where A[s:e] are rows of A, the rules are these alone. Sums over rows are of parts that follow each other, from the first row to
the last:

    slice(v, 0, s, e)                          v[s:e]
    view(view(v)), view of v's own shape       view(v), v                  _to_copy(view(v))     view(_to_copy(v))
    mm(A[s:e], B)                              mm(A, B)[s:e]               _to_copy(v[s:e])      _to_copy(v)[s:e]
    addmm(bias, A[s:e], B)                     addmm(bias, A, B)[s:e]      t(A[s:e])             columns s:e of t(A)
    log_softmax(v[s:e], 1)                     log_softmax(v, 1)[s:e], and so for its backward
    nll_loss_backward(g, p[s:e], y[s:e], mean, n)    nll_loss_backward(g, p, y, mean, n)[s:e]
    nll_loss(p[s:e], y[s:e], sum)              rows s:e of two sums: of the losses, and of the labels that count
    sum of losses / labels that count          nll_loss(p, y, mean)
    mm(columns s:e of C, B[s:e])               rows s:e of the sum mm(C, B)
    addmm(rows s:m of mm(C, B), columns m:e of C, B[m:e])        rows s:e of that sum
    sum(A[s:e], 0)                             rows s:e of the sum sum(A, 0)
    rows s:m of a sum + rows m:e of it         rows s:e of it; all of them are the sum
    cat(v[0:a], v[a:b], ..., v[z:])            v

A sum in parts is rounded otherwise than the whole one: that is what chunks were asked for.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mtcompile.passes.cuts.checks.values import Call, Key, Layout, Operand, Values, check_same_results

aten: Any = torch.ops.aten
_MEAN, _SUM = 1, 2


def check_chunks(whole: fx.GraphModule, chunked: fx.GraphModule) -> None:
    """Raises SameComputationError unless ``chunked`` computes the results of ``whole``."""
    check_same_results(_Chunks(), whole, chunked)


class _Chunks(Values):
    """Values in rows, ``("rows", whole, start, end)``, columns likewise, and sums over some of ``count`` rows, ``("sum", whole,
    start, end, count)``."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = {
            **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), self._view),
            **dict.fromkeys((aten._log_softmax.default,), self._each_row),
            aten.slice.Tensor: self._slice,
            aten._to_copy.default: lambda call: self._cast(call.args[0].number, call),
            aten.t.default: self._turned,
            aten.mm.default: self._product,
            aten.addmm.default: self._product_and_sum,
            operator.getitem: self._item,
            aten.div.Tensor: self._divided,
            aten.nll_loss_backward.default: self._loss_backward,
            aten._log_softmax_backward_data.default: self._each_row,
            aten.sum.dim_IntList: self._summed,
            aten.add.Tensor: self._added,
            aten.cat.default: self._joined,
        }

    def _rows(self, whole: int, start: int, end: int) -> int:
        shape, dtype = self.layouts[whole]
        if (start, end) == (0, shape[0]):
            return whole
        return self.of(("rows", whole, start, end), Layout((end - start, *shape[1:]), dtype))

    def _sum(self, whole: int, start: int, end: int, count: int) -> int:
        return whole if (start, end) == (0, count) else self.of(("sum", whole, start, end, count), self.layouts[whole])

    def _of_rows(self, call: Call, places: tuple[int, ...]) -> tuple[int, int, int, tuple[Any, ...]] | None:
        """Returns (start, end, of how many, the arguments with wholes in their place) where all ``places`` hold the same rows
        of values with as many, and no other argument a part; else None."""
        parts = [call.keys[place] for place in places]
        if call.node.kwargs or not all(key[:1] == ("rows",) for key in parts) or len({key[2:] for key in parts}) != 1:
            return None
        counts = {self.layouts[key[1]].shape[0] for key in parts}
        others = [key for place, key in enumerate(call.keys) if place not in places]
        if len(counts) != 1 or any(key[:1] in (("rows",), ("columns",), ("sum",)) for key in others):
            return None
        args = [Operand(call.keys[at][1]) if at in places else arg for at, arg in enumerate(call.args)]
        return parts[0][2], parts[0][3], counts.pop(), tuple(args)

    def _whole(self, call: Call, args: tuple[Any, ...], rows: int | None = None) -> int:
        """Numbers the same operation on wholes, which makes so many rows; None: what it makes of parts."""
        layout = call.layout
        assert layout is not None
        layout = layout if rows is None else layout._replace(shape=(rows, *layout.shape[1:]))
        return self.operation(call.node.target, args, layout)

    def _in_rows(self, call: Call, places: tuple[int, ...]) -> int | None:
        if (of := self._of_rows(call, places)) is None:
            return None
        start, end, count, args = of
        return self._rows(self._whole(call, args, count), start, end)

    def _view(self, call: Call) -> int | None:
        layout, number = call.layout, call.args[0].number
        return None if layout is None or call.node.kwargs else self._viewed(number, layout)

    def _viewed(self, number: int, layout: Layout) -> int:
        base = self.keys[number][1] if self.keys[number][:1] == ("view",) else number
        return base if self.layouts.get(base) == layout else self.of(("view", base, layout.shape), layout)

    def _cast(self, number: int, call: Call) -> int | None:
        key, layout = self.key(number), call.layout
        if layout is None or not call.node.kwargs.keys() <= {"dtype", "layout", "device"} or len(call.args) != 1:
            return None
        if key[:1] == ("view",):
            base = self._cast(key[1], call)
            return None if base is None else self._viewed(base, self.layouts[number]._replace(dtype=layout.dtype))
        if key[:1] == ("rows",):
            whole = self._cast(key[1], call)
            return None if whole is None else self._rows(whole, *key[2:])
        kwargs = tuple(sorted(call.node.kwargs.items()))
        known = self.layouts.get(number, layout)._replace(dtype=layout.dtype)
        return self.operation(call.node.target, (Operand(number),), known, kwargs)

    def _slice(self, call: Call) -> int | None:
        if len(call.args) != 4 or call.args[1] != 0 or (known := self.layouts.get(call.args[0].number)) is None:
            return None
        _, _, start, end = call.args
        fits = self.is_cut and isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= known.shape[0]
        return self._rows(call.args[0].number, start, end) if fits else None

    def _turned(self, call: Call) -> int | None:
        if (of := self._of_rows(call, (0,))) is None or len(self.layouts[call.args[0].number].shape) != 2:
            return None
        start, end, count, args = of
        layout = call.layout
        assert layout is not None
        whole = self.operation(aten.t.default, args, layout._replace(shape=(layout.shape[0], count)))
        return self.of(("columns", whole, start, end), layout)

    def _product(self, call: Call) -> int | None:
        if (part := self._product_of_parts(call, *call.args, *call.keys)) is not None:
            return self._sum(*part)
        return self._in_rows(call, (0,))

    def _product_of_parts(self, call: Call, one: Any, other: Any, left: Key, right: Key) -> tuple[int, int, int, int] | None:
        """Returns (the product, start, end, of how many) where a product sums over rows of a longer sum."""
        if call.node.kwargs or left[:1] != ("columns",) or right[:1] != ("rows",) or left[2:] != right[2:]:
            return None
        count = self.layouts[right[1]].shape[0]
        if self.layouts[left[1]].shape[1] != count:
            return None
        whole = self.operation(aten.mm.default, (Operand(left[1]), Operand(right[1])), call.layout)
        return whole, left[2], left[3], count

    def _product_and_sum(self, call: Call) -> int | None:
        before = call.keys[0]
        if before[:1] == ("sum",):
            part = self._product_of_parts(call, *call.args[1:3], *call.keys[1:3])
            follows = part is not None and (part[0], part[3], part[1]) == (before[1], before[4], before[3])
            return self._sum(part[0], before[2], part[2], part[3]) if follows and part is not None else None
        bias = self.layouts.get(call.args[0].number)
        return self._in_rows(call, (1,)) if bias is not None and len(bias.shape) == 1 else None

    def _each_row(self, call: Call) -> int | None:
        """log_softmax(v, dim, ...), and its backward of (g, p, dim, ...), along another dimension than that of rows."""
        operands = tuple(place for place, arg in enumerate(call.args) if isinstance(arg, Operand))
        dim, layout = call.args[len(operands)], call.layout
        return self._in_rows(call, operands) if layout is not None and dim % len(layout.shape) else None

    def _item(self, call: Call) -> int | None:
        key, item = call.keys[0], call.args[1]
        if key[:1] != (aten.nll_loss_forward.default,) or key[3] is not None or item not in (0, 1):
            return None
        if key[4] not in (_MEAN, _SUM):
            return None
        scores, labels, ignored = key[1].number, key[2].number, key[5]
        rows, span = self.layouts[labels].shape[:1], None
        parts = self.key(scores), self.key(labels)
        if key[4] == _SUM and all(part[:1] == ("rows",) for part in parts) and parts[0][2:] == parts[1][2:]:
            scores, labels, span = parts[0][1], parts[1][1], parts[0][2:]
            rows = self.layouts[labels].shape[:1]
        if not rows or self.layouts[scores].shape[:1] != rows:
            return None
        kind = "labels that count" if item else "losses" if key[4] == _SUM else "mean loss"
        whole = self.of((kind, scores, labels, ignored), call.layout)
        return whole if span is None else self._sum(whole, span[0], span[1], rows[0])

    def _divided(self, call: Call) -> int | None:
        one, other = call.keys
        alike = one[:1] == ("losses",) and other[:1] == ("labels that count",) and one[1:] == other[1:]
        return self.of(("mean loss", *one[1:]), call.layout) if alike and not call.node.kwargs else None

    def _loss_backward(self, call: Call) -> int | None:
        mean = call.args[3] is None and call.args[4] == _MEAN
        return self._in_rows(call, (1, 2)) if mean and not self.layouts[call.args[0].number].shape else None

    def _summed(self, call: Call) -> int | None:
        if len(call.args) != 3 or list(call.args[1]) != [0] or (of := self._of_rows(call, (0,))) is None:
            return None
        start, end, count, args = of
        return self._sum(self._whole(call, args), start, end, count)

    def _added(self, call: Call) -> int | None:
        one, other = call.keys
        follows = one[:1] == other[:1] == ("sum",) and (one[1], one[4], one[3]) == (other[1], other[4], other[2])
        return self._sum(one[1], one[2], other[3], one[4]) if follows and not call.node.kwargs else None

    def _joined(self, call: Call) -> int | None:
        keys = [self.key(piece.number) for piece in call.args[0]]
        if call.args[1:] not in ((), (0,)) or any(key[:1] != ("rows",) or key[1] != keys[0][1] for key in keys):
            return None
        ends = [0, *(key[3] for key in keys)]
        follow = all(key[2] == end for key, end in zip(keys, ends, strict=False))
        return self._rows(keys[0][1], 0, ends[-1]) if follow else None
