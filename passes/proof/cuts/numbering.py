"""Numbers joint graphs before and after a cut: equal numbers mean equal values, by the rules of the kind of cut.

A rule gives the number of what an operation makes, or None where it says nothing; it must hold for all values. Rules are
about parts of values: the graph after the cut makes these, and the graph before it makes the wholes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from mtcompile.passes.proof.same_computation import SameComputationError, expect, well_formed
from mtcompile.passes.proof.values import Key, Operand, ValueNumbers, arguments, frozen, phase_of
from mtcompile.passes.step_graph import InputSpec, OutputSpec, inputs_of, is_check, is_random, outputs_of


class Layout(NamedTuple):
    """A value's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def along(self, dim: int, length: int) -> Layout:
        """Returns this layout with another length in one dimension."""
        return self._replace(shape=(*self.shape[:dim], length, *self.shape[dim + 1 :]))


Strided = tuple[Layout, tuple[int, ...]]
Inputs = dict[InputSpec, tuple[int, Strided]]  # that a graph is to take: the number and the layout of each
Results = dict[OutputSpec, tuple[int, fx.Node]]  # that it is to compute: the number of each, and the node that it was before


class Call(NamedTuple):
    """An operation with numbers for operands. ``keys``: what each positional operand is; () for other arguments."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: tuple[Any, ...]
    keys: tuple[Key, ...]
    layout: Layout


Rule = Callable[[Call], int | None]


class CutNumbers(ValueNumbers):
    """Numbers that the graphs of one proof share. ``parts``: what values are parts of that the graph before the cut makes
    itself; ``layouts``: of tensors; ``runs``: what the current graph runs in any case, each with its phase, in order: random
    operations, checks. ``is_cut``: True from the second graph on."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: dict[int, Layout] = {}
        self.parts: dict[int, Key] = {}
        self.is_cut = False
        self.rules: dict[Any, Rule] = {}
        self.runs: list[tuple[int, str]] = []

    def of(self, key: Key, layout: Layout | None) -> int:
        number = self.number(key)
        if layout is not None:
            self.layouts.setdefault(number, layout)
        return number

    def key(self, number: int) -> Key:
        """Returns what a value is, as a part if it is one."""
        return self.parts.get(number) or self.keys[number]

    def operation(self, target: Any, *args: Any, layout: Layout | None, kwargs: Any = ()) -> int:
        """Numbers an operation of the same arguments of which no rule says anything."""
        return self.of((target, *frozen(args), frozen(sorted(dict(kwargs).items())), None), layout)

    def call(self, node: fx.Node, env: Mapping[fx.Node, int], changed: Callable[[Any], Any] | None = None) -> int:
        """Numbers an operation of a graph, with its arguments ``changed`` first, if given. Raises SameComputationError if it is
        described with a wrong shape or dtype."""
        args, kwargs = arguments(node, env)
        layout, rule, number, random = layout_of(node), self.rules.get(node.target), None, is_random(node)
        if changed is not None:
            args = frozen(changed(node.args), env)
        if rule is not None and layout is not None:
            keys = tuple([self.key(arg.number) if type(arg) is Operand else () for arg in args])
            number = rule(Call(node, args, kwargs, keys, layout))
        if number is None:
            number = self.of((node.target, *args, kwargs, self.draw(node) if random else None), layout)
        elif (known := self.known.get((node.target, *args, kwargs, None), number)) != number:
            self.parts[known], number = self.keys[number], known  # the graph before the cut has this part
        if random or is_check(node):
            self.runs.append((number, phase_of(node)))
        if layout != (described := self.layouts.get(number, layout)):
            raise SameComputationError(f"I5: expected {node.name} to be {described}, found {layout}")
        return number

    def calls(self, graph: fx.GraphModule, env: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """Numbers all operations of a graph whose inputs are numbered."""
        for node in graph.graph.nodes:
            if node.op == "call_function":
                env[node] = self.call(node, env)
        return env

    def input(self, spec: InputSpec, layout: Strided) -> tuple[int, Strided]:
        """Numbers an input, by its meaning."""
        return self.of(("input", spec.role, spec.name, spec.index), layout[0]), layout

    def uncut(self, graph: fx.GraphModule) -> tuple[Inputs, Results]:
        """Numbers the graph before the cut."""
        inputs = {spec: self.input(spec, strided(node.meta["val"])) for spec, node in inputs_of(graph)}
        env = self.calls(graph, {node: inputs[spec][0] for spec, node in inputs_of(graph)})
        return inputs, {spec: (env[node], node) for spec, node in outputs_of(graph)}

    def restart(self) -> list[tuple[int, str]]:
        """Begins the next graph; returns what the last one runs in any case."""
        runs, self.runs, self.stream, self.is_cut = self.runs, [], 0, True
        return runs


def check_same_tables(before: fx.GraphModule, after: fx.GraphModule, *tables: str) -> None:
    """Raises SameComputationError unless both graphs have the same inputs or outputs, in order."""
    for table in tables:
        expect(before.meta[table] == after.meta[table], lambda t=table: f"{t} {before.meta[t]}, found {after.meta[t]}")


def check_computed(
    numbers: CutNumbers, before: fx.GraphModule, after: fx.GraphModule, inputs: Inputs, results: Results
) -> None:
    """Raises SameComputationError unless the graph ``after`` the cut takes these inputs alone, and computes these results, each
    in the phase in which the graph ``before`` does, with the same random numbers, constants and checks."""
    constants, given = before.meta["constants"], after.meta["constants"]
    same = constants.keys() == given.keys() and all(given[name] is tensor for name, tensor in constants.items())
    expect(same and before.meta["device"] == after.meta["device"], lambda: "the captured device and constants")
    runs, left, wanted, env = numbers.restart(), dict(inputs), dict(results), dict[fx.Node, int]()
    for spec, node in inputs_of(after):
        expect(spec in left, lambda s=spec: f"the inputs {[each.name for each in left]}, found {s}")
        (env[node], layout), described = left.pop(spec), strided(node.meta["val"])
        expect(layout == described, lambda s=spec, e=layout, d=described: f"{s.role} {s.name} as {e}, found {d}")
    expect(not left, lambda: f"all inputs, found none for {[spec.name for spec in left]}")
    with well_formed("operations with the arguments that they take"):
        numbers.calls(after, env)
    expect(runs == numbers.restart(), lambda: "the same random numbers to be drawn, and the same checks, in the same phases")
    for result, node in outputs_of(after):
        expect(result in wanted, lambda r=result: f"the results {[each.name for each in wanted]}, found {r}")
        number, captured = wanted.pop(result)
        expect(number == env[node], lambda r=result: f"{r.kind} {r.name} to be computed as in the captured graph")
        phases = [phase_of(each) if each.op == "call_function" else "" for each in (captured, node)]
        expect(phases[0] == phases[1], lambda r=result, p=phases: f"{r.kind} {r.name} in {p[0]}, found {p[1]}")
    expect(not wanted, lambda: f"all results, found none for {[spec.name for spec in wanted]}")


def layout_of(node: fx.Node) -> Layout | None:
    val = node.meta.get("val")
    return Layout(tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else None


def strided(val: torch.Tensor) -> Strided:
    return Layout(tuple(val.shape), val.dtype), tuple(val.stride())


def is_shape(given: Any, shape: tuple[int, ...], count: int) -> bool:
    """Tells whether an argument asks for a shape for so many elements: one length of it may be -1."""
    if given != shape and (len(given) != len(shape) or given.count(-1) > 1):
        return False
    return prod(shape) == count and all(asked in (-1, length) for asked, length in zip(given, shape, strict=True))
