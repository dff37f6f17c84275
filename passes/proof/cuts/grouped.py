"""Rules for products of groups of rows whose weights are in fragments.

Where ``first`` is the end of the group before ``a``, 0 for the first one, and ``range`` counts the rows of all groups:

    alias(v)                                       v
    ends[a:b] - first                              the ends of groups a to b, counted from there
    x[min(range + first, rows - 1)]                x with the rows of group a in front; likewise its transpose
    grouped(x in front, W[a:b], these ends)        groups a to b of grouped(x, W, ends), in front
    grouped(x.t() in front, y in front, these ends)    matrices a to b of grouped(x.t(), y, ends)
    v in front[max(range - first, 0)]              groups a to b of v, at their rows
    where(range >= first of c, groups c to b, groups a to c)    groups a to b, at their rows

All groups at their rows are the whole value: rows behind the last group are undefined in it, too.
"""

from __future__ import annotations

from typing import Any

import torch

from mtcompile.passes.proof.cuts.numbering import Call
from mtcompile.passes.proof.cuts.parts import Parts
from mtcompile.passes.proof.values import Key, Operand

aten: Any = torch.ops.aten


class Groups(Parts):
    """Numbers of places, ``(kind, rows, ends, group)``: row numbers moved "ahead" or "back" by the first row of a group, or
    compared with it; of rows in front, ``("front", dim, whole, ends, group)``; and of groups from start to end,
    ``("groups", whole, ends, start, end)`` with the first one in front, and ``("at", ...)`` at their rows."""

    def __init__(self, splits: bool) -> None:
        super().__init__(splits)
        self.rules |= {
            aten.alias.default: lambda call: int(call.args[0].number),
            aten.arange.default: self._range,
            aten.add.Tensor: lambda call: self._from_range(call, "ahead") or self._added(call),
            aten.sub.Tensor: lambda call: self._ends(call) or self._from_range(call, "back"),
            aten.ge.Tensor: lambda call: self._from_range(call, "from"),
            aten.clamp.default: self._clamp,
            aten.index_select.default: self._select,
            aten._grouped_mm.default: self._product,
            aten.unsqueeze.default: self._unsqueeze,
            aten.where.self: self._where,
        }

    def _range(self, call: Call) -> int | None:
        kwargs = call.node.kwargs
        plain = len(call.args) == 1 and kwargs.get("dtype") == torch.int64 and kwargs.keys() <= {"dtype", "device"}
        return self.of(("range", call.args[0]), call.layout) if plain else None

    def _from_range(self, call: Call, kind: str) -> int | None:
        """Numbers range + first, range - first and range >= first."""
        if call.kwargs or len(call.keys) != 2 or call.keys[0][:1] != ("range",) or (first := _first(call.keys[1])) is None:
            return None
        return self.of((kind, call.keys[0][1], *first), call.layout)

    def _ends(self, call: Call) -> int | None:
        key, first = call.keys[0], _first(call.keys[1])
        right = key[:2] == ("part", 0) and first == key[2:4] and len(call.args) == 2 and not call.kwargs
        return self.of(("ends", *key[2:]), call.layout) if right else None

    def _clamp(self, call: Call) -> int | None:
        key, limits = call.keys[0], call.args[1:]
        within = {("ahead",): (None, key[1] - 1), ("back",): (0,)}.get(key[:1]) if len(key) == 4 else None
        return self.of(("clamped", *key), call.layout) if limits == within and not call.kwargs else None

    def _select(self, call: Call) -> int | None:
        if call.kwargs or len(call.args) != 3 or call.args[1] != 0 or call.keys[2][:1] != ("clamped",):
            return None
        value, of = call.args[0].number, call.keys[0]
        _, kind, count, ends, start = call.keys[2]
        if kind == "ahead" and self.layouts[value].shape[0] == count:
            return self.of(("front", 0, value, ends, start), call.layout)
        if kind == "back" and of[:1] == ("groups",) and of[2:4] == (ends, start) and self.layouts[of[1]].shape[0] == count:
            return self.of(("at", *of[1:]), call.layout)
        return None

    def _product(self, call: Call) -> int | None:
        if call.kwargs or len(call.args) != 3:
            return None
        _, right, of = call.keys
        if of[:1] == ("ends",):
            _, ends, start, end = of
        elif of[:2] == ("part", 0) and of[3] == 0:  # of the first groups, whose rows are in front already
            _, _, ends, start, end = of
        else:
            return None
        by_matrices = right[:2] == ("part", 0) and right[3:] == (start, end)
        x = self._in_front(call, 0, 0 if by_matrices else 1, ends, start)
        y = right[2] if by_matrices else self._in_front(call, 1, 0, ends, start)
        if x is None or y is None or len(call.layout.shape) != (2 if by_matrices else 3):
            return None
        layout = call.layout if by_matrices else call.layout.along(0, self.layouts[ends].shape[0])
        whole = self.operation(call.node.target, Operand(x), Operand(y), Operand(ends), layout=layout)
        if not by_matrices:
            return self.part(0, whole, start, end)
        return self.of(("groups", whole, ends, start, end), layout) if start else self._at(whole, ends, 0, end)

    def _in_front(self, call: Call, place: int, dim: int, ends: int, start: int) -> int | None:
        """Returns the value whose rows of a group are in front in an operand; of the first group, they always are."""
        key = call.keys[place]
        if key[:1] == ("front",):
            return int(key[2]) if (key[1], *key[3:]) == (dim, ends, start) else None
        return None if start else int(call.args[place].number)

    def _at(self, whole: int, ends: int, start: int, end: int) -> int:
        """Numbers groups of a value at their rows; all of them are the value."""
        all_groups = (start, end) == (0, self.layouts[ends].shape[0])
        return whole if all_groups else self.of(("at", whole, ends, start, end), self.layouts[whole])

    def _unsqueeze(self, call: Call) -> int | None:
        key = call.keys[0]
        return self.of(("rows from", *key[1:]), call.layout) if key[:1] == ("from",) and call.args[1:] == (1,) else None

    def _where(self, call: Call) -> int | None:
        if [key[:1] for key in call.keys] != [("rows from",), ("at",), ("at",)] or call.kwargs:
            return None
        (_, count, ends, border), (_, whole, of, middle, end), (_, other, also, start, until) = call.keys
        alike = (whole, ends, ends, border, border) == (other, of, also, middle, until)
        return self._at(whole, ends, start, end) if alike and self.layouts[whole].shape[0] == count else None


def _first(key: Key) -> tuple[int, int] | None:
    """Returns (ends, group) of the end of the group before one."""
    return (key[2], key[4]) if key[:2] == ("part", 0) and key[4] == key[3] + 1 else None
