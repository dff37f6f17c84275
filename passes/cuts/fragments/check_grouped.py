"""Numbers products of groups of rows in fragments, for the proof of a cut (``check``).

Where ``first`` is the end of the group before ``a``, 0 for the first one, and ``range`` counts the rows of all groups:

    ends[a:b] - first                              the ends of groups a to b, counted from there
    x[min(range + first, rows - 1)]                x with the rows of group a in front; so its transpose
    transpose(transpose(v, i, j), i, j)            v
    grouped(x in front, W[a:b], these ends)        groups a to b of grouped(x, W, ends), in front
    grouped(x.t() in front, y in front, these ends)    matrices a to b of grouped(x.t(), y, ends)
    v in front[max(range - first, 0)]              groups a to b of v, at their rows
    where(range >= first of c, groups c to b, groups a to c)    groups a to b, at their rows

All groups at their rows are the whole value: rows behind the last group are undefined in it, too.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import fx

aten: Any = torch.ops.aten
Key = tuple[Any, ...]


class Numbered(Protocol):
    """The numbers of values. ``keys``: what each is; ``sizes``: of the tensors."""

    keys: list[Key]
    sizes: dict[int, tuple[int, ...]]

    def of(self, key: Key, val: Any) -> int: ...

    def part(self, dim: int, whole: int, start: int, end: int) -> int: ...


def number(numbers: Numbered, node: fx.Node, args: Any) -> int | None:
    """Returns the number of an operation on groups in fragments; None for any other. ``args``: with numbers for values."""
    rule = _RULES.get(node.target)
    keys = [numbers.keys[arg.number] if hasattr(arg, "number") else () for arg in args]
    return None if rule is None else rule(numbers, node, args, keys)


def _first(key: Key) -> tuple[int, int] | None:
    """Returns (ends, group) of the end of the group before one."""
    if key[:2] != ("part", 0) or key[4] != key[3] + 1:
        return None
    return key[2], key[4]


def _range(numbers: Numbered, node: fx.Node, args: Any, keys: list[Key]) -> int | None:
    plain = len(args) == 1 and node.kwargs.get("dtype") == torch.int64 and node.kwargs.keys() <= {"dtype", "device"}
    return numbers.of(("range", args[0]), node.meta["val"]) if plain else None


def _from_range(kind: str) -> Any:
    """Returns the rule of range + first, range - first and range >= first."""

    def rule(numbers: Numbered, node: fx.Node, args: Any, keys: list[Key]) -> int | None:
        if node.kwargs or len(keys) != 2:
            return None
        if kind == "back" and keys[0][:2] == ("part", 0) and (before := _first(keys[1])) is not None:
            if before == keys[0][2:4]:
                return numbers.of(("ends", *keys[0][2:]), None)
        before = _first(keys[1]) if keys[0][:1] == ("range",) else None
        return None if before is None else numbers.of((kind, keys[0][1], *before), None)

    return rule


def _clamp(numbers: Numbered, node: fx.Node, args: Any, keys: list[Key]) -> int | None:
    key, limits = keys[0], tuple(args[1:])
    if node.kwargs or key[:1] not in (("ahead",), ("back",)) or limits != ((None, key[1] - 1) if key[0] == "ahead" else (0,)):
        return None
    return numbers.of(("clamped", *key), None)


def _select(numbers: Numbered, node: fx.Node, args: Any, keys: list[Key]) -> int | None:
    if node.kwargs or len(args) != 3 or args[1] != 0 or keys[2][:1] != ("clamped",):
        return None
    _, kind, count, ends, start = keys[2]
    if kind == "ahead" and numbers.sizes.get(args[0].number, ())[:1] == (count,):
        return numbers.of(("front", args[0].number, ends, start), None)
    if kind == "back" and keys[0][:1] == ("groups",) and keys[0][2:4] == (ends, start) and _rows(numbers, keys[0][1]) == count:
        return numbers.of(("at", *keys[0][1:]), None)
    return None


def _rows(numbers: Numbered, value: int) -> int:
    return numbers.sizes.get(value, (-1,))[0]


def _transpose(numbers: Numbered, node: fx.Node, args: Any, keys: list[Key]) -> int | None:
    dims, count = set(args[1:]), node.meta["val"].dim()
    if (back := turned_back(keys[0], args[1:], count)) is not None:
        return back
    if keys[0][:1] != ("front",) or count != 2 or {dim % 2 for dim in dims} != {0, 1}:
        return None
    _, whole, ends, start = keys[0]
    turned = numbers.of((node.target, type(args[0])(whole), *args[1:]), None)
    return numbers.of(("front of columns", turned, ends, start), None)


def turned_back(key: Key, dims: Any, count: int) -> int | None:
    """Returns the value that was transposed in the same two of ``count`` dimensions before; None if none was."""
    if key[:1] != (aten.transpose.int,) or {dim % count for dim in key[2:]} != {dim % count for dim in dims}:
        return None
    return int(key[1].number)


def _product(numbers: Numbered, node: fx.Node, args: Any, keys: list[Key]) -> int | None:
    if node.kwargs or len(args) != 3:
        return None
    left, right, of = keys
    if of[:1] == ("ends",):
        _, ends, start, end = of
    elif of[:2] == ("part", 0) and of[3] == 0:  # of the first groups, whose rows are in front already
        ends, start, end = of[2:]
    else:
        return None
    operand = type(args[0])
    if right[:2] == ("part", 0) and right[3:] == (start, end):  # by matrices
        x = _in_front(left, "front", args[0].number, ends, start)
        if x is None:
            return None
        whole = numbers.of((node.target, operand(x), operand(right[2]), operand(ends)), None)
        numbers.sizes.setdefault(whole, tuple(node.meta["val"].shape))
        return numbers.of(("groups", whole, ends, start, end), None) if start else _at(numbers, whole, ends, 0, end)
    x = _in_front(left, "front of columns", args[0].number, ends, start)
    y = _in_front(right, "front", args[1].number, ends, start)
    if x is None or y is None or len(node.meta["val"].shape) != 3:
        return None
    whole = numbers.of((node.target, operand(x), operand(y), operand(ends)), None)
    return numbers.part(0, whole, start, end)


def _in_front(key: Key, kind: str, value: int, ends: int, start: int) -> int | None:
    """Returns the value whose rows of a group are in front; of the first group, they always are."""
    if key[:1] == (kind,):
        return key[1] if key[2:] == (ends, start) else None
    return value if start == 0 else None


def _at(numbers: Numbered, whole: int, ends: int, start: int, end: int) -> int:
    """Numbers groups of a value at their rows; all of them are the value."""
    if (start, end) == (0, _rows(numbers, ends)):
        return whole
    return numbers.of(("at", whole, ends, start, end), None)


def _unsqueeze(numbers: Numbered, node: fx.Node, args: Any, keys: list[Key]) -> int | None:
    return numbers.of(("rows from", *keys[0][1:]), None) if keys[0][:1] == ("from",) and args[1:] == (1,) else None


def _where(numbers: Numbered, node: fx.Node, args: Any, keys: list[Key]) -> int | None:
    if len(keys) != 3 or keys[0][:1] != ("rows from",) or keys[1][:1] != ("at",) or keys[2][:1] != ("at",):
        return None
    (_, count, ends, border), (_, whole, *later), (_, other, *earlier) = keys
    alike = whole == other and later[0] == earlier[0] == ends and later[1] == earlier[2] == border
    return _at(numbers, whole, ends, earlier[1], later[2]) if alike and _rows(numbers, whole) == count else None


_RULES: dict[Any, Any] = {
    aten.arange.default: _range,
    aten.add.Tensor: _from_range("ahead"),
    aten.sub.Tensor: _from_range("back"),
    aten.ge.Tensor: _from_range("from"),
    aten.clamp.default: _clamp,
    aten.index_select.default: _select,
    aten.transpose.int: _transpose,
    aten._grouped_mm.default: _product,
    aten.unsqueeze.default: _unsqueeze,
    aten.where.self: _where,
}
