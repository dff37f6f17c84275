"""The door to a session: what differs between the two ways in, a compiled model and torch.compile's graphs."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import psutil
import torch

from mtcompile import knobs
from mtcompile.execution.compiled import CompiledStep, Frame
from mtcompile.execution.placement import RunnablePlacement
from mtcompile.machine.device import host_room
from mtcompile.options import Options
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.problem import Planned
from mtcompile.runtime.devices.caching import fits
from mtcompile.runtime.schedule import Phase, gib

_LESS = 0.95  # of a default budget, for the next try
_LEAST_SHARE = 0.6  # of what the allocator may reserve: no schedule was seen to need so much more than it requests


class Door(RunnablePlacement, Protocol):
    """The differences between the two ways into a session: a compiled model, and torch.compile's graphs. What is written out
    here suits parameters and gradients that are the caller's."""

    def plan_key(self) -> Hashable:
        """Returns a key of whatever else a plan depends on and may change between calls."""
        return None

    def waits_together(self) -> bool:
        """Tells whether forwards that wait at the same time need a plan under which all of them fit. Otherwise a forward that
        finds no room evicts the others, which run again before their backward."""
        return False

    options: Options
    alone: bool = True  # no other rank takes part in its steps
    ranks_here: int = 1  # processes of this host that train the model together; ``host=`` is for all of them
    host_beside: int = 0  # host bytes beside the step that was planned last: of parameters that it does not read
    planned_process_nbytes: int = 0  # resident in this process once the first plan has all its memory

    @property
    def effort(self) -> str:
        return self.options.effort

    def limit_host(self, plan: Plan) -> bool:
        state = sum(nbytes for name, nbytes in self.state_nbytes().items() if name != "gradients")  # which may be yet to come
        state += self.pinned_ahead_nbytes()
        held = min(state, psutil.Process().memory_info().rss) * self.ranks_here  # taken already, and counted by the plan
        needed = plan.peak_bytes.get("host", 0) * self.ranks_here
        limit, room = host_room() or ("", needed)
        if self.options.host is not None or needed <= room + held:
            return False
        there = f"{gib(room + held)} are there ({limit}, less a reserve, and what the model holds already)"
        warnings.warn(
            f"the fastest plan takes {gib(needed)} of host memory; {there}, so this is its host= from now on. Pass host= to "
            "choose it yourself",
            stacklevel=2,
        )
        self.options = replace(self.options, host=room + held)
        return True

    device_room: int | None = None  # what the allocator may reserve, where memory= was left to choose

    def limit_device(self, planned: Planned) -> bool:
        memory, room, schedule = self.options.memory, self.device_room, planned.schedule
        if memory is None or room is None or not self.alone:  # ranks plan alike
            return False
        lower = int(memory * _LESS)
        if lower < max(room * _LEAST_SHARE, planned.plan.minimum_device_bytes):
            return False
        if fits(schedule, room, expandable=not knobs.allocator_is_the_users()):
            return False
        self.options = replace(self.options, memory=lower)
        return True

    sent_nbytes: int = 0  # device bytes of the arguments that the current call has sent there

    def share_of(self, machine: Machine) -> Machine:
        """Returns the speeds that a plan may count on."""
        return machine

    def before_planning(self) -> None:
        """Called before a step is planned."""
        return

    def pinned_ahead_nbytes(self) -> int:
        """Returns the bytes that have been pinned for weights which have not moved there yet, and lets no more be pinned."""
        return 0

    def place_for_calls(self, tier: str) -> None:
        """Gives parameters a place of their own on ``tier`` before any training, if they may be there."""
        return

    def weights_nbytes(self) -> int:
        """Returns the bytes that all parameters take at home."""
        return 0

    def before_copy(self) -> None:
        """Raises StepError for a model whose weights a copy would not have."""
        return

    @property
    def in_parts(self) -> bool:
        """True where this process has parts of the weights alone, so that every forward must be planned."""
        return False

    def evaluation(self, compiled: CompiledStep) -> AbstractContextManager[None]:
        """Surrounds a forward without a backward."""
        return nullcontext()

    def training_call(self) -> AbstractContextManager[None]:
        """Surrounds a call that may train."""
        return nullcontext()

    def call(self) -> AbstractContextManager[None]:
        """Surrounds a call of the model. Raises StepError if it cannot be called now."""
        return nullcontext()

    def before_forward(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Raises StepError if a training forward with these inputs, by name, cannot start now."""
        return

    def before_backward(self, frame: Frame, keeps: bool) -> None:
        """Raises StepError if a backward of this forward that ``keeps`` the graph for another one cannot run."""
        return

    def backward(self, node: Any, frame: Frame, tangents: Sequence[torch.Tensor | None]) -> AbstractContextManager[None]:
        """Surrounds a backward. ``node``: its node in autograd's graph. Raises StepError if it cannot start."""
        return nullcontext()

    @property
    def sums(self) -> int:
        """What gradients of earlier backwards take that later ones add to, in sizes of the parameters, as far as is known."""
        return 0

    def note_sums(self, inputs: Iterable[torch.Tensor]) -> bool:
        """Tells whether a backward adds to gradients of its inputs. Then, ``sums`` is more than 0 from now on."""
        return False

    def gradients_nbytes(self) -> int:
        """Returns the bytes of gradients on the device now."""
        return 0

    def may_run_again(self) -> bool:
        """Tells whether a backward that has failed has changed nothing."""
        return True

    def phase(self, compiled: CompiledStep, phase: Phase) -> AbstractContextManager[None]:
        """Surrounds a phase of a step that trains, while its instructions run. Raises StepError if it cannot start."""
        return nullcontext()

    def before_accumulation(self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Called before autograd adds gradients to existing ones."""
        return

    def send_residents_home(self) -> None:
        """Sends parameters on the device to the host, where that may be done now."""
        return

    def backward_issued(self) -> None:
        """Called when all kernels of a backward have been issued. What it raises ends the backward."""
        return

    def updates_failed(self) -> None:
        """Called when updates that the last backward left to run have failed."""
        return

    def optimizer_state_was_made(self) -> bool:
        """Tells whether the last backward allocated optimizer state."""
        return False

    def state_nbytes(self) -> dict[str, int]:
        """Returns the current bytes of weights, masters, gradients and optimizer state, by name."""
        return {}

    def on_disk_nbytes(self) -> int:
        """Returns the bytes of these that are on disk."""
        return 0

    def disk_staging_nbytes(self) -> int:
        """Returns the host bytes that go with a disk."""
        return 0
