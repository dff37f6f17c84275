"""Repeat forward regions for values between blocks that are not kept.

A value that crosses from block to block is made again by calling its forward region once more, from an earlier value that was
kept, just before the backward first reads it. Random operations are replayed from their saved generator state.

The same function repeats the calls of a step graph and of what stands for one without a graph (see ``Editor``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import fx

from mtcompile.passes.analysis.kernels import attach, install, saved_states
from mtcompile.passes.insert import add_call
from mtcompile.passes.plan import Plan
from mtcompile.passes.rewrites.recompute import inline, used_inputs
from mtcompile.passes.step_graph import is_region, kernel_of, new_node, regions, results

C = TypeVar("C")  # a call


def repeat_forward(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Makes the values between blocks that the plan recomputes again, by calling their forward regions once more before the
    first backward call that reads them."""
    repeat_calls(step, plan, Calls(regions(step)), _InGraph(step))
    return step


class Editor(Protocol[C]):
    """Reads and changes the calls of a step, as far as repeats need that."""

    def readers(self, values: Sequence[fx.Node]) -> Mapping[fx.Node, list[C]]:
        """Returns by value the calls of the backward that read it."""
        ...

    def repeat(self, repetition: Repetition, before: C) -> tuple[C, list[Any]]:
        """Puts a call before another one. Returns it, and what it makes for each of its values."""
        ...

    def read(self, call: C, value: fx.Node, again: Any) -> None:
        """Lets a call read what was made again for a value."""
        ...


def repeat_calls(step: fx.GraphModule, plan: Plan, calls: Calls[C], editor: Editor[C]) -> None:
    """Repeats the forward regions of a step whose values the plan makes again, among its ``calls``.

    Where neighbouring blocks are recomputed, all of the run is made again at once, from what enters it. With ``plan.span``,
    a longer run is halved: its first half is made again once to enter the second, and once more when its own turn comes;
    and so on, as deep as needed: less is live, and more is computed.
    """
    forward = [region for region in regions(step) if region.meta["phase"] == "forward"]
    marked = {region: [v for v in results(region) if plan.activation(v.name) == "recompute"] for region in forward}
    for run in _runs(forward, marked):
        _Run(step, run, marked, calls, editor).repeat(plan.span or len(run))


Place = tuple[int, ...]  # of a call: places sort in the order of calls


class Calls(Generic[C]):
    """The calls of a step, each with its ``place``. A call keeps it when others are put between."""

    def __init__(self, calls: Sequence[C]) -> None:
        self.place: dict[C, Place] = {call: (position,) for position, call in enumerate(calls)}
        self.at = {place: call for call, place in self.place.items()}
        self._put_before: dict[Place, int] = {}

    def put_before(self, place: Place, call: C) -> None:
        """Puts a new call directly before the one at a place."""
        count = self._put_before[place] = self._put_before.get(place, -1) + 1
        self.place[call] = new = (*place[:-1], place[-1] - 1, count)
        self.at[new] = call


def _runs(forward: list[fx.Node], marked: Mapping[fx.Node, list[fx.Node]]) -> list[list[fx.Node]]:
    """Runs of neighbouring regions with something to make again; the last run first, so that what a repeated call reads may
    be made again too."""
    runs: list[list[fx.Node]] = []
    for before, region in itertools.pairwise([None, *forward]):
        if region is not None and marked[region]:
            if runs and runs[-1][-1] is before:
                runs[-1].append(region)
            else:
                runs.append([region])
    return runs[::-1]


class _Run(Generic[C]):
    """A run of regions whose ``marked`` values are made again."""

    def __init__(
        self,
        step: fx.GraphModule,
        run: Sequence[fx.Node],
        marked: Mapping[fx.Node, list[fx.Node]],
        calls: Calls[C],
        editor: Editor[C],
    ) -> None:
        self.step, self.run, self.marked, self.calls, self.editor = step, run, marked, calls, editor
        self.readers = editor.readers([value for region in run for value in marked[region]])
        self.copies: dict[fx.Node, list[tuple[Place, Any]]] = {v: [] for v in self.readers}  # each, and what it stands before

    def repeat(self, span: int) -> None:
        """Makes the values again, of at most ``span`` blocks at once, and lets the backward read them."""
        self._serve(0, len(self.run), span, ())
        for value, users in self.readers.items():
            for user in users:
                if (again := self._latest(value, self.calls.place[user])) is not value:
                    self.editor.read(user, value, again)

    def _serve(self, low: int, high: int, span: int, after: Place) -> None:
        """Makes the run's blocks from ``low`` to ``high`` again for what reads them later than at ``after``."""
        place = min((place for place in self._reads(low, high) if place > after), default=None)
        if place is None:
            return
        if high - low <= span:
            self._make(low, high, place)
            return
        middle = (low + high + 1) // 2
        self._make(low, middle, place)
        self._serve(middle, high, span, after)
        self._serve(low, middle - 1, span, max(self._reads(middle, high), default=place))

    def _reads(self, low: int, high: int) -> list[Place]:
        values = (value for region in self.run[low:high] for value in self.marked[region])
        return [self.calls.place[user] for value in values for user in self.readers[value]]

    def _make(self, low: int, high: int, place: Place) -> None:
        for region in self.run[low:high]:
            args = {value: self._latest(value, place) for value in region.args}
            again = _repetition(self.step, region, self.marked[region], args)
            call, made = self.editor.repeat(again, self.calls.at[place])
            self.calls.put_before(place, call)
            for value, new in zip(self.marked[region], made, strict=True):
                self.copies[value].append((place, new))

    def _latest(self, value: fx.Node, place: Place) -> Any:
        """The last copy of a value before a call; the value itself where there is none."""
        return next((again for before, again in reversed(self.copies.get(value, ())) if before <= place), value)


class _InGraph:
    """Repeats regions in a step graph."""

    def __init__(self, step: fx.GraphModule) -> None:
        self.step = step

    def readers(self, values: Sequence[fx.Node]) -> Mapping[fx.Node, list[fx.Node]]:
        return {v: [user for user in v.users if is_region(user) and user.meta["phase"] == "backward"] for v in values}

    def repeat(self, repetition: Repetition, before: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        region, values, kernel, reads = repetition
        with self.step.graph.inserting_before(before):
            name = attach(self.step, kernel)
            call = new_node(self.step.graph, "call_module", name, reads, {}, f"{region.name}_again")
            call.meta.update(region.meta, phase="backward", recomputes=(region.meta["block"],))
            return call, add_call(self.step.graph, call, [(f"{v.name}_again", dict(v.meta)) for v in values])

    def read(self, call: fx.Node, value: fx.Node, again: fx.Node) -> None:
        call.replace_input_with(value, again)


class Repetition(NamedTuple):
    """A forward region that makes some of its ``values`` again: the ``kernel`` that does, and what that ``reads``."""

    region: fx.Node
    values: Sequence[fx.Node]
    kernel: fx.GraphModule
    reads: tuple[Any, ...]


def _repetition(step: fx.GraphModule, region: fx.Node, again: Sequence[fx.Node], args: Mapping[fx.Node, Any]) -> Repetition:
    """Returns what calls a region once more for some of its results. ``args``: what stands for its operands."""
    items = {int(item.args[1]): item for item in results(region)}
    states = {name: items[position] for name, position in saved_states(kernel_of(step, region)).items()}
    values = list(dict.fromkeys((*region.args, *states.values())))
    positions = tuple(int(value.args[1]) for value in again)
    memo, key = step.meta["memo"], ("again", str(region.target), tuple(map(values.index, region.args)), positions)
    if key not in memo:
        body, used = _repeated_body(step, region, values, states, positions)
        memo[key] = step.get_submodule(install(step, step.meta["kernels"], body)), used
    kernel, used = memo[key]
    return Repetition(region, again, kernel, tuple(args.get(values[i], values[i]) for i in used))


def _repeated_body(
    step: fx.GraphModule,
    region: fx.Node,
    values: list[fx.Node],
    states: Mapping[str, fx.Node],
    positions: tuple[int, ...],
) -> tuple[fx.Graph, tuple[int, ...]]:
    """A region's body with only the results at ``positions``, and the positions of the ``values`` that it takes."""
    body = fx.Graph()
    taken = {value: body.placeholder(value.name) for value in values}
    for value, node in taken.items():
        node.meta = {"val": value.meta.get("held", value.meta["val"])}
    replayed = {name: taken[state] for name, state in states.items()}
    outputs = inline(body, kernel_of(step, region), [taken[a] for a in region.args], replayed)
    body.output(tuple(outputs[position] for position in positions))
    return body, used_inputs(body, taken)
