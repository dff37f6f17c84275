"""The door of a model that several ranks train: parameters are at home on the host, where gradients are combined."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from mtcompile.distributed.ranks import Ranks
from mtcompile.errors import StepError
from mtcompile.execution.compiled import CompiledStep, Frame, LiveFrames
from mtcompile.execution.model_door import ModelDoor
from mtcompile.options import Options
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets, is_trained
from mtcompile.passes.joint.build import InputHomes
from mtcompile.passes.planning.problem import Planned
from mtcompile.passes.step_graph import inputs_of
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import Phase


class RanksDoor(ModelDoor):
    """A ``ModelDoor`` whose training steps are those of all ``ranks`` together."""

    alone = False

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        device: Device,
        frames: LiveFrames,
        drain: Callable[[], None],
        ranks: Ranks,
    ) -> None:
        super().__init__(model, options, device, frames, drain)
        self.ranks = ranks

    def input_homes(self, joint: fx.GraphModule) -> InputHomes:
        return replace(super().input_homes(joint), frozen_apart=True, ranks=self.ranks.count, hosts=self.ranks.hosts)

    def constraints(self, step: fx.GraphModule) -> tuple[Budgets, Mapping[str, str]]:
        budgets, fixed = super().constraints(step)
        return replace(budgets, exchange=self.ranks.exchange_nbytes), fixed

    def _fixed_homes(self, step: fx.GraphModule) -> Mapping[str, str]:
        return dict.fromkeys(step.meta["homes"].values(), "host") | self.parameters.tiers

    def adopt(self, step: fx.GraphModule, planned: Planned) -> None:
        """Puts frozen weights where all ranks of the host have them in common. A GPU's copies need memory that is pinned, of
        which each rank would get a copy."""
        self.parameters.shared = self.ranks.common_memory if self.device.where.type == "cpu" else None
        try:
            super().adopt(step, planned)
        finally:
            self.parameters.shared = None

    def share_of(self, machine: Machine) -> Machine:
        return machine.shared_by(self.ranks.count // self.ranks.hosts)

    def place_for_calls(self, tier: str) -> None:
        super().place_for_calls("host")

    def host_kernels(self, step: fx.GraphModule) -> Mapping[str, Any]:
        return {**super().host_kernels(step), **self.ranks.kernels(step)}

    def before_backward(self, keeps: bool) -> None:
        with self.ranks.phase():
            super().before_backward(keeps)
            if torch.is_grad_enabled():
                raise StepError(
                    "backward was called with create_graph=True, whose gradients would be those of one rank alone; expected a "
                    "backward without it where several ranks train"
                )

    @contextlib.contextmanager
    def backward(self, node: Any, frame: Frame, tangents: Sequence[torch.Tensor | None]) -> Iterator[None]:
        with self.ranks.phase(), super().backward(node, frame, tangents):
            yield

    @contextlib.contextmanager
    def phase(self, compiled: CompiledStep, phase: Phase) -> Iterator[None]:
        trained = {spec.name for spec, _ in inputs_of(compiled.step) if is_trained(spec)}
        parameters = {name: p for name, p in self._parameters().items() if name in trained} if phase == "backward" else {}
        if phase == "backward":  # ``backward`` surrounds it
            self.ranks.agree(compiled.step, phase, parameters)
            yield
        else:
            with self.ranks.phase():
                self.ranks.agree(compiled.step, phase, parameters)
                yield

    def disk_staging_nbytes(self) -> int:
        return super().disk_staging_nbytes() + self.ranks.exchange_nbytes
