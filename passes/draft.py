"""A draft of a step graph: what rewrites read and write of an ``fx.GraphModule``, and nothing else.

A planner rewrites a step hundreds of times and keeps one result. ``fx`` checks and indexes every node that it makes, which is
most of the time of a rewrite. A draft does neither: passes cannot tell it from a step graph, and whoever chose a plan by its
draft rewrites the step graph itself and compares. Names are those that ``fx`` gives.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import fx

from mtcompile.passes.step_graph import calls, is_move, read, results, write
from mtcompile.runtime.schedule import placed

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?$")
_NOT_IN_NAMES = re.compile(r"[^0-9a-zA-Z_]+")


class Draft:
    """Stands for an ``fx.GraphModule``: a graph, kernels by name, and metadata. It cannot be run."""

    __slots__ = ("_modules", "graph", "meta")

    def __init__(self, graph: DraftGraph, kernels: Mapping[str, torch.nn.Module], meta: Mapping[str, Any]) -> None:
        self.graph, self._modules, self.meta = graph, dict(kernels), dict(meta)

    def add_module(self, name: str, kernel: torch.nn.Module) -> None:
        self._modules[name] = kernel

    def get_submodule(self, name: str) -> torch.nn.Module:
        return self._modules[name]


def draft_of(step: fx.GraphModule) -> fx.GraphModule:
    """Returns a draft of a step graph, or a copy of a draft. The type says what it may be used as."""
    graph = DraftGraph()
    copies: dict[Any, DraftNode] = {}

    def copy(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([copy(a) if type(a) is tuple else copies.get(a, a) for a in args])

    for node in step.graph.nodes:
        copied = graph.create_node(node.op, node.target, copy(tuple(node.args)), node.kwargs, node.name)
        copied.meta = dict(node.meta)
        copies[node] = copied
    kernels = {name: kernel for name, kernel in step._modules.items() if kernel is not None}
    return cast(fx.GraphModule, Draft(graph, kernels, step.meta))


def bundle(draft: fx.GraphModule) -> fx.GraphModule:
    """Merges the values that a call makes for the same readers into one, in a draft that is only lowered from now on.

    They have the same lifetime, so peaks and times stay the same, and the draft has several times fewer values. ``nbytes`` is
    the sum of their bytes; ``slot_nbytes``: what they take one behind the other in a slot (``slots.slots_of``)."""
    first_of: dict[fx.Node, fx.Node] = {}  # what is left out, and what stands for it
    for call in calls(draft):
        alike: dict[tuple[object, ...], fx.Node] = {}
        for item in results(call):
            if any(user.op == "output" for user in item.users):
                continue
            first = alike.setdefault((item.meta["tier"], item.meta["role"], frozenset(item.users)), item)
            if first is not item:
                first_of[item] = first
                meta = first.meta
                where = meta["tier"], call.target is read or any(user.target is write for user in item.users)
                before = meta.get("slot_nbytes", placed(meta["nbytes"], *where))
                meta["slot_nbytes"] = before + placed(item.meta["nbytes"], *where)
                meta["nbytes"] += item.meta["nbytes"]
    for call in calls(draft):
        if not first_of.keys().isdisjoint(call.args):
            operands = [first_of.get(operand, operand) for operand in call.args]
            call.args = tuple([operand for operand in call.args if operand not in first_of])
            for item in results(call) if is_move(call) else ():
                item.args = (call, call.args.index(operands[item.args[1]]))
    for item in first_of:
        draft.graph.erase_node(item)
    return draft


class DraftNode:
    """Stands for an ``fx.Node``. ``kwargs`` hold no nodes.

    Replaced operands are exchanged when ``args`` are read next: the output node has an operand for each gradient, and passes
    replace them one by one."""

    __slots__ = ("_args", "_replaced", "kwargs", "meta", "name", "next", "op", "prev", "target", "users")

    def __init__(self, name: str, op: str, target: Any, kwargs: Mapping[str, Any]) -> None:
        self.name, self.op, self.target, self.kwargs = name, op, target, kwargs
        self.users: dict[DraftNode, None] = {}
        self.meta: dict[str, Any] = {}
        self._args: tuple[Any, ...] = ()
        self._replaced: dict[DraftNode, DraftNode] | None = None  # operands still in ``_args``, and what stands for each
        self.prev = self.next = self

    def __repr__(self) -> str:
        return self.name

    @property
    def args(self) -> tuple[Any, ...]:
        if self._replaced:
            self._args, self._replaced = _exchanged(self._args, self._replaced), None
        return self._args

    @args.setter
    def args(self, args: tuple[Any, ...]) -> None:
        if self._args:
            for operand in _nodes(self.args):
                operand.users.pop(self, None)
        self._args = args
        for operand in _nodes(args):
            operand.users[self] = None

    @property
    def all_input_nodes(self) -> list[DraftNode]:
        return list(dict.fromkeys(_nodes(self.args)))

    def replace_input_with(self, old: DraftNode, new: DraftNode) -> None:
        if self in old.users:
            del old.users[self]
            if self._replaced is None or new in self._replaced:  # an operand that comes back would close a circle
                self._args, self._replaced = self.args, {}
            self._replaced[old] = new
            new.users[self] = None

    def replace_all_uses_with(self, new: DraftNode) -> None:
        for user in list(self.users):
            user.replace_input_with(self, new)


class DraftGraph:
    """Stands for an ``fx.Graph``: nodes in a ring that starts and ends at ``root``."""

    __slots__ = ("_insert_before", "_numbers", "_used", "root")

    def __init__(self) -> None:
        self.root = self._insert_before = DraftNode("", "root", "", {})
        self._used: set[str] = set()
        self._numbers: dict[str, int] = {}  # the last number that was put behind a name

    @property
    def nodes(self) -> Iterator[DraftNode]:
        node = self.root.next
        while node is not self.root:
            yield node
            node = node.next

    def find_nodes(self, *, op: str) -> list[DraftNode]:
        return [node for node in self.nodes if node.op == op]

    def output_node(self) -> DraftNode:
        return self.root.prev

    def create_node(
        self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None, name: str = ""
    ) -> DraftNode:
        node = DraftNode(self._unused(name), op, target, kwargs or {})
        node.args = args
        following = self._insert_before
        node.prev, node.next = following.prev, following
        following.prev.next = following.prev = node
        return node

    def erase_node(self, node: DraftNode) -> None:
        assert not node.users, f"{node} is still read by {list(node.users)}"
        node.args = ()
        node.prev.next, node.next.prev = node.next, node.prev

    @contextlib.contextmanager
    def inserting_before(self, node: DraftNode) -> Iterator[None]:
        before, self._insert_before = self._insert_before, node
        try:
            yield
        finally:
            self._insert_before = before

    def _unused(self, candidate: str) -> str:
        """Returns the name that ``fx`` gives a node: the candidate, or the next number behind it."""
        if candidate not in self._used and candidate.isidentifier() and not candidate[-1].isdigit():
            self._used.add(candidate)  # most names: nothing to count
            return candidate
        if not candidate.isidentifier():
            candidate = _NOT_IN_NAMES.sub("_", candidate)
        match = _NUMBERED.match(candidate)
        assert match is not None
        base, digits = match.groups()
        number = self._numbers.get(base, 0) if digits is None or candidate in self._used else int(digits)
        while candidate in self._used:
            number += 1
            candidate = f"{base}_{number}"
        self._used.add(candidate)
        self._numbers[base] = number
        return candidate


def _nodes(args: tuple[Any, ...]) -> Iterator[DraftNode]:
    """Yields the nodes among ``args``, in tuples within too."""
    for argument in args:
        if type(argument) is DraftNode:
            yield argument
        elif type(argument) is tuple:
            yield from _nodes(argument)


def _exchanged(args: tuple[Any, ...], replaced: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Returns ``args`` with what stands for each in the end, in tuples within too."""
    exchanged = []
    for argument in args:
        if type(argument) is tuple:
            argument = _exchanged(argument, replaced)
        while argument in replaced:
            argument = replaced[argument]
        exchanged.append(argument)
    return tuple(exchanged)
