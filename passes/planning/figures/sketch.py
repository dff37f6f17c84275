"""Sketches of a step as plans recompute it: its regions in order, what each reads and makes, without a graph.

The rewrites ``recompute`` and ``trim`` say what becomes of a region; a sketch asks them once for each region and choice of what
to keep. Most plans of a search differ from others in a few blocks, so nearly all of a sketch is known already.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.figures.drawn import Again, Drawn, Placed, Trimmed, all_placed
from mtcompile.passes.rewrites.recompute import Forwards, Fusion, fusion, kept_of, recompute
from mtcompile.passes.rewrites.repeat import Calls, Repetition, repeat_calls, repeat_forward
from mtcompile.passes.rewrites.trim import trim
from mtcompile.passes.step_graph import copy_step, kernel_of, outputs_of, regions, results


class Sketch(NamedTuple):
    """The ``regions`` of a step in order. ``graph``: whose inputs and outputs they read and make; ``readers``: of values, the
    positions of regions; until the next sketch is made."""

    graph: fx.GraphModule
    regions: Sequence[Placed]
    readers: Mapping[Any, tuple[int, ...]]


class Sketches:
    """Sketches one step for any plan: ``step``, a copy of it that has all their kernels."""

    def __init__(self, step: fx.GraphModule) -> None:
        self.step = copy_step(step)
        self.order = {region: place for place, region in enumerate(regions(self.step))}
        self._whole = [
            Drawn(region.meta["phase"], kernel_of(self.step, region), region.args, results(region)) for region in self.order
        ]
        self._forward = [region for region in self.order if region.meta["phase"] == "forward"]
        self._trimmed = Trimmed(self.step, {value for _, value in outputs_of(self.step)})
        self._complete = all(int(v.args[1]) == i for region in self._whole for i, v in enumerate(region.makes))
        self._kept: dict[tuple[fx.Node, object], tuple[frozenset[fx.Node], fx.Node | None]] = {}
        self._fusions: dict[tuple[fx.Node, tuple[object, ...]], tuple[Drawn, Fusion, dict[fx.Node, Again]]] = {}
        self._repetitions: dict[Hashable, Drawn] = {}

    def of(self, plan: Plan) -> Sketch:
        """Returns the sketch of the step as a plan recomputes it."""
        drawn = self._fused(plan) if self._complete else None
        if drawn is None:
            return self._rewritten(plan)
        if any(decision.kind == "activation" and decision.choice == "recompute" for decision in plan.decisions):
            drawn = self._repeated(plan, drawn)
        return Sketch(self.step, self._trimmed.update(drawn), self._trimmed.readers)

    def _rewritten(self, plan: Plan) -> Sketch:
        """Sketches what the rewrites make of the step."""
        step = copy_step(self.step)
        for transform in (recompute, repeat_forward, trim):
            step = transform(step, plan)
        drawn = [Drawn(r.meta["phase"], kernel_of(step, r), r.args, results(r)) for r in regions(step)]
        return Sketch(step, *all_placed(drawn))

    def _fused(self, plan: Plan) -> list[Drawn] | None:
        """Returns the regions with what they make again; None if one of those that do reads what another one makes again."""
        inlined: dict[fx.Node, tuple[Forwards, list[object]]] = {}
        for region in self._forward:
            decision = plan.find("variant", self.step.meta["blocks"][region.meta["block"]])
            choice = decision and (decision.choice == "save" or decision.values)
            if (region, choice) not in self._kept:
                self._kept[region, choice] = kept_of(self.step, region, plan, self.order)
            resident, reader = self._kept[region, choice]
            if reader is not None:
                forwards, choices = inlined.setdefault(reader, ([], []))
                forwards.append((region, resident))
                choices.append((region, choice))
        drawn = list(self._whole)
        for backward, (forwards, choices) in inlined.items():
            key = backward, tuple(choices)
            if key not in self._fusions:
                kernel, operands, later = fused = fusion(self.step, backward, forwards, self.order)
                again = {item: Again(item) for item in later}
                makes = (*self._whole[self.order[backward]].makes, *again.values())
                self._fusions[key] = Drawn("backward", kernel, operands, makes, True), fused, again
            region, fused, again = self._fusions[key]
            drawn[self.order[backward]] = region
            for item, users in fused.later.items():
                for user in users:
                    if user in inlined:
                        return None
                    reads = drawn[self.order[user]].reads
                    new = [again[item] if value is item else value for value in reads]
                    drawn[self.order[user]] = drawn[self.order[user]].reading(new)
        return drawn

    def _repeated(self, plan: Plan, drawn: Sequence[Drawn]) -> list[Drawn]:
        """Returns the regions, and those that are called once more for values between blocks."""
        calls = Calls[Any](list(self.order))
        editor = _InSketch(dict(zip(self.order, drawn, strict=True)), self._repetitions)
        repeat_calls(self.step, plan, calls, editor)
        return [editor.drawn[call] for call in sorted(calls.place, key=calls.place.__getitem__)]


class _InSketch:
    """Repeats regions in a sketch. ``drawn``: the region of each call; ``known``: repeated ones, which sketches share."""

    def __init__(self, drawn: dict[Any, Drawn], known: dict[Hashable, Drawn]) -> None:
        self.drawn, self.known = drawn, known

    def readers(self, values: Sequence[fx.Node]) -> dict[fx.Node, list[Any]]:
        readers: dict[fx.Node, list[Any]] = {value: [] for value in values}
        for call, region in self.drawn.items():
            if region.phase == "backward":
                for value in region.read_once & readers.keys():
                    readers[value].append(call)
        return readers

    def repeat(self, repetition: Repetition, before: Any) -> tuple[Any, list[Any]]:
        (region, values, kernel, reads), count = repetition, 0
        while (call := (region, *values, *reads, count)) in self.drawn:  # once more, from the same
            count += 1
        if call not in self.known:
            self.known[call] = Drawn("backward", kernel, reads, [Again(value) for value in values], True)
        self.drawn[call] = self.known[call]
        return call, list(self.known[call].makes)

    def read(self, call: Any, value: fx.Node, again: Any) -> None:
        region = self.drawn[call]
        self.drawn[call] = region.reading([again if read is value else read for read in region.reads])
