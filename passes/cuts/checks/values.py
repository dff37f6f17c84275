"""Numbers of the values of joint graphs, for a check of a cut: equal numbers are equal values, by the rules of the check.

An operation on the same numbers is the same value. A check adds rules for parts of values (``Values.rules``): each gives the
number of what an operation makes, or None, and must hold for all values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from mtcompile.passes.proof.numbering import phase_of
from mtcompile.passes.proof.same_computation import expect
from mtcompile.passes.step_graph import InputSpec, inputs_of, is_random, must_run, outputs_of

Key = tuple[Any, ...]


class Layout(NamedTuple):
    """A value's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Strided = tuple[Layout, tuple[int, ...]]


class Operand(tuple):  # type: ignore[type-arg]
    """The number of an operand, unlike any argument that is a number."""

    def __new__(cls, number: int) -> Operand:
        return tuple.__new__(cls, ("operand", number))

    @property
    def number(self) -> int:
        return int(self[1])


class Call(NamedTuple):
    """An operation with numbers for operands. ``keys``: what each positional operand is; () for other arguments."""

    node: fx.Node
    args: tuple[Any, ...]
    keys: tuple[Key, ...]

    @property
    def layout(self) -> Layout | None:
        return layout_of(self.node)


Rule = Callable[[Call], int | None]


class Values:
    """Numbers that the graphs of one check share. ``keys``: what each is; ``parts``: what those of the whole graph are
    parts of that it makes itself; ``layouts``: of tensors; ``runs``: what the current graph runs in any case, each with its
    phase, in order: random operations, checks. ``is_cut``: True from the second graph on."""

    def __init__(self) -> None:
        self.known: dict[Key, int] = {}
        self.keys: list[Key] = []
        self.layouts: dict[int, Layout] = {}
        self.parts: dict[int, Key] = {}
        self.is_cut = False
        self.rules: dict[Any, Rule] = {}
        self.runs: list[tuple[int, str]] = []
        self.stream = 0

    def of(self, key: Key, layout: Layout | None) -> int:
        number = self.known.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        if layout is not None:
            self.layouts.setdefault(number, layout)
        return number

    def key(self, number: int) -> Key:
        """Returns what a value is, as a part if it is one."""
        return self.parts.get(number, self.keys[number])

    def operation(self, target: Any, args: Any, layout: Layout | None, kwargs: Any = (), place: Any = None) -> int:
        """Numbers an operation of the same arguments."""
        return self.of(plain_key(target, args, kwargs, place), layout)

    def call(self, node: fx.Node, env: Mapping[fx.Node, int], changed: Callable[[Any], Any] = tuple) -> int:
        """Numbers an operation of a graph; with ``changed`` arguments, if they are. Raises SameComputationError where it is
        described as of another shape or dtype than it has."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: Operand(env[operand]))
        args = changed(args)
        layout, rule, number = layout_of(node), self.rules.get(node.target), None
        keywords = tuple(sorted(kwargs.items()))
        if rule is not None:
            keys = tuple(self.key(arg.number) if isinstance(arg, Operand) else () for arg in args)
            number = rule(Call(node, args, keys))
        if number is None:
            number = self.operation(node.target, args, layout, keywords, self.draw(node) if is_random(node) else None)
        elif (known := self.known.get(plain_key(node.target, args, keywords), number)) != number:
            self.parts[known], number = self.keys[number], known  # the whole graph has this part
        if must_run(node):
            self.runs.append((number, phase_of(node)))
        described = self.layouts.get(number, layout)
        expect(layout == described, lambda: f"{node.name} to be {described}, found {layout}")
        return number

    def draw(self, node: fx.Node) -> Any:
        """Returns which random numbers an operation draws: by their place in the generator's stream."""
        self.stream += 1
        return self.stream

    def calls(self, graph: fx.GraphModule, env: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """Numbers all operations of a graph whose inputs are numbered."""
        for node in graph.graph.nodes:
            if node.op == "call_function":
                env[node] = self.call(node, env)
        return env

    def graph(self, graph: fx.GraphModule) -> dict[fx.Node, int]:
        """Numbers a graph, with inputs by position."""
        return self.calls(
            graph, {node: self.of(("input", at), layout_of(node)) for at, (_, node) in enumerate(inputs_of(graph))}
        )

    def restart(self) -> list[tuple[int, str]]:
        """Begins the next graph; returns what the last one runs in any case."""
        runs, self.runs, self.stream, self.is_cut = self.runs, [], 0, True
        return runs


def check_same_results(values: Values, before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Raises SameComputationError unless ``after`` takes what ``before`` does, and computes the same results, each
    in the same phase, by the rules of ``values``."""
    for table in ("inputs", "outputs"):
        expect(before.meta[table] == after.meta[table], lambda t=table: f"{t} {before.meta[t]}, found {after.meta[t]}")
    same_constants(before, after)
    for (spec, node), (_, other) in zip(inputs_of(before), inputs_of(after), strict=True):
        same_input(spec, strided(node.meta["val"]), other)
    expected = values.graph(before)
    runs = values.restart()
    found = values.graph(after)
    expect(runs == values.restart(), lambda: "the same random numbers to be drawn, and the same checks, in the same phases")
    for (result, node), (_, other) in zip(outputs_of(before), outputs_of(after), strict=True):
        expect(expected[node] == found[other], lambda r=result: f"{r.kind} {r.name} to be computed as in the captured graph")
        same_phase(f"{result.kind} {result.name}", node, other)


def same_constants(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Raises SameComputationError unless both graphs hold the same tensors, and compute on the same device."""
    constants, given = before.meta["constants"], after.meta["constants"]
    same = constants.keys() == given.keys() and all(given[name] is tensor for name, tensor in constants.items())
    expect(same and before.meta["device"] == after.meta["device"], lambda: "the captured device and constants")


def same_input(spec: InputSpec, one: Strided, other: fx.Node) -> None:
    """Raises SameComputationError unless an input is described as of that layout."""
    described = strided(other.meta["val"])
    expect(one == described, lambda: f"{spec.role} {spec.name} as {one}, found {described}")


def same_phase(name: str, one: fx.Node, other: fx.Node) -> None:
    """Raises SameComputationError unless a result is made in the same phase."""
    phases = [phase_of(node) if node.op == "call_function" else "" for node in (one, other)]
    expect(phases[0] == phases[1], lambda: f"{name} in {phases[0]}, found {phases[1]}")


def layout_of(node: fx.Node) -> Layout | None:
    val = node.meta.get("val")
    return Layout(tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else None


def strided(val: torch.Tensor) -> Strided:
    return Layout(tuple(val.shape), val.dtype), tuple(val.stride())


def plain_key(target: Any, args: Any, kwargs: Any, place: Any = None) -> Key:
    """Returns what an operation is whose result no rule says anything of."""
    return (target, *_frozen(args), _frozen(kwargs), place)


def _frozen(value: Any) -> Any:
    if isinstance(value, Operand):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, float):
        return repr(value)  # unlike a whole number, and 0.0 unlike -0.0
    if isinstance(value, bool):
        return repr(value)
    return value if isinstance(value, (int, str, type(None))) else repr(value)
