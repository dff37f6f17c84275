"""Builds the kernels that a plan calls, then lowers the plan again with the workspace that they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from mtcompile import knobs, progress
from mtcompile.kernels.chains.build import ExactKernels
from mtcompile.kernels.cuda_graphs import Graphs, graphed
from mtcompile.kernels.eager import Built, EagerKernels
from mtcompile.kernels.inductor import InductorKernels
from mtcompile.kernels.zeros.run import looks_up_values
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.generators import rng_preserved
from mtcompile.passes.planning.planner import relowered
from mtcompile.passes.planning.problem import Planned

Bodies = Mapping[str, fx.GraphModule]


class BuiltStep(NamedTuple):
    """A plan with the kernels that it calls. ``workspaces``: the bytes that each kernel needs beside its operands and results,
    as measured. ``held_nbytes``: the device bytes that all of them keep from call to call."""

    planned: Planned
    kernels: dict[str, Callable[..., Any]]
    workspaces: Mapping[str, int]
    held_nbytes: int = 0

    def workspace(self, body: fx.GraphModule) -> int:
        """Returns the workspace in bytes of the kernel for a body."""
        return self.workspaces[str(body.meta["name"])]


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Builds kernels on one device. ``compiling``: compiles those it can, or parts of them; None: they are eager. ``graphs``:
    makes CUDA graphs of those that gain by it; None: of none."""

    where: torch.device
    eager: EagerKernels
    compiling: InductorKernels | ExactKernels | None
    graphs: Graphs | None

    def notes(self) -> tuple[str, ...]:
        """Says what kernels have shown that the plans which call them do not."""
        return self.compiling.notes() if isinstance(self.compiling, ExactKernels) else ()

    def has_room(self, planned: Planned, machine: Machine) -> bool:
        """Tells whether a plan still fits with the workspace that its kernels are measured to need. If it does not, plans go by
        kernels that are measured from now on."""
        progress.tell("building kernels")
        limit = planned.schedule.budget_nbytes.get("device")
        if limit is None or self._measured(planned, machine, _bodies(planned)).schedule.peak_nbytes["device"] <= limit:
            return True
        self.eager.measures_each = True
        return False

    def _measured(self, planned: Planned, machine: Machine, bodies: Bodies) -> Planned:
        """Returns a plan with the workspace that its kernels are measured to need: what it was made with, or rarely more."""
        needed = {name: self.eager.measured(body) for name, body in bodies.items()}
        if all(i.workspace == needed[i.kernel] for i in planned.schedule.instructions if i.kernel in needed):
            return planned
        return relowered(planned, machine, self.eager.measured)

    def build(self, planned: Planned, machine: Machine) -> BuiltStep:
        """Returns the plan, lowered again with the workspace its kernels need, and a callable for each kernel."""
        bodies = _bodies(planned)
        planned = self._measured(planned, machine, bodies)
        built = {name: self.eager(body) for name, body in bodies.items()}
        if self.compiling is not None:
            planned, built = self._compiled(planned, machine, bodies, built, self.compiling)
        if notes := Counter(kernel.note for kernel in built.values() if kernel.note):
            told = (f"{count} kernel(s) had no room to be measured whole: measured {note}" for note, count in notes.items())
            planned = _with_notes(planned, *told)
        if isinstance(self.compiling, ExactKernels):
            planned = _with_notes(planned, *told_fused(planned, built, bool(self.compiling.refused)))
        step = BuiltStep(planned, {n: k.call for n, k in built.items()}, {n: k.workspace for n, k in built.items()})
        return step if self.graphs is None else self._graphed(self.graphs, step, machine, bodies)

    def _compiled(
        self,
        planned: Planned,
        machine: Machine,
        bodies: Bodies,
        eager: Mapping[str, Built],
        compiling: InductorKernels | ExactKernels,
    ) -> tuple[Planned, dict[str, Built]]:
        """Compiles by Inductor. If the plan then no longer fits, kernels that need more workspace than eager stay eager."""
        compiled = compiling.build(bodies.values(), self.eager)
        lowered = relowered(planned, machine, lambda body: compiled[body.meta["name"]].workspace)
        limit = planned.schedule.budget_nbytes.get("device")
        if limit is None or lowered.schedule.peak_nbytes["device"] <= limit:
            return lowered, compiled
        mixed = {n: k if k.workspace <= eager[n].workspace else eager[n] for n, k in compiled.items()}
        return relowered(planned, machine, lambda body: mixed[body.meta["name"]].workspace), mixed

    def _graphed(self, graphs: Graphs, step: BuiltStep, machine: Machine, bodies: Bodies) -> BuiltStep:
        """Turns kernels that gain by it into CUDA graphs, as long as the memory they hold fits beside the plan."""
        planned, calls = step.planned, dict(step.kernels)
        limit = planned.schedule.budget_nbytes.get("device")
        room, held = None if limit is None else limit - planned.schedule.peak_nbytes["device"], 0
        for name, call in step.kernels.items():
            if looks_up_values(bodies[name]):  # it is recorded on made-up inputs
                continue
            with rng_preserved(str(self.where)):
                graph = graphed(bodies[name], call, step.workspaces[name], graphs, self.eager.examples(bodies[name]))
            if graph is not None and (room is None or held + graph[1] <= room):
                calls[name] = graph[0]
                held += graph[1]
        return BuiltStep(relowered(planned, machine, step.workspace, held), calls, step.workspaces, held)


def _bodies(planned: Planned) -> dict[str, fx.GraphModule]:
    """Returns the kernels that a plan calls, by name."""
    used = {i.kernel for i in planned.schedule.instructions if i.op == "run"}
    bodies: dict[str, Any] = {str(name): body for name, body in planned.step.named_children() if name in used}
    return bodies


def _with_notes(planned: Planned, *notes: str) -> Planned:
    return replace(planned, plan=replace(planned.plan, notes=(*planned.plan.notes, *notes)))


def told_fused(planned: Planned, built: Mapping[str, Built], is_refused: bool) -> list[str]:
    """Says how much of a step's elementwise work its exact kernels fuse. ``is_refused``: chains could not be compiled."""
    runs = [built[i.kernel] for i in planned.schedule.instructions if i.op == "run" and i.kernel in built]
    nbytes, in_chains = sum(kernel.elementwise_nbytes for kernel in runs), sum(kernel.in_chains_nbytes for kernel in runs)
    if not in_chains:
        return [] if is_refused else ["exact kernels: no elementwise operations that are worth fusing"]
    return [f"exact kernels: fused are {in_chains / nbytes:.0%} of the bytes that elementwise operations move"]


def chosen_kernels(kernels: str) -> str:
    """Returns the kernels that ``Options.kernels`` means. ``"auto"`` is eager: on the emulated device compiling costs more than
    it spares, and on a GPU exact kernels are not yet measured."""
    return "eager" if kernels == "auto" else kernels


def toolchain_for(where: torch.device, kernels: str) -> Toolchain:
    """Returns what builds ``kernels``, as ``Options.kernels`` names them, on one device."""
    graphs = Graphs(where) if where.type == "cuda" and knobs.cuda_graphs() else None
    compiling = {"inductor": InductorKernels, "exact": ExactKernels}.get(kernels)
    return Toolchain(where, EagerKernels(where), None if compiling is None else compiling(where), graphs)
