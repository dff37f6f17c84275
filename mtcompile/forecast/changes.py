"""Estimates what would make a step that fits faster, by how long the queues of its plan work, without another plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from mtcompile.capture.refusals import in_micro_batches
from mtcompile.errors import CaptureError
from mtcompile.kernels.chains.split import chains_of
from mtcompile.passes.analysis.state import Budgets, trained_nbytes
from mtcompile.passes.joint.batch.joining import Micro, joining_of
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.problem import Planned, PlanningProblem
from mtcompile.runtime.schedule import PHASES, Instruction, Schedule
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us, takes_time, time_of
from mtcompile.runtime.usage import held_between_phases

LEAST_GAIN = 0.03  # more tokens a second: estimates tell no less
_BUSY = 0.95  # of the step: more of a batch gains nothing then
_OF_WEIGHTS = ("param", "grad", "state", "buffer")  # roles of what is copied once, however many micro-batches there are
_LOST = 1.03  # times what the busiest queue does: steps do not keep it busy all the time


class Change(NamedTuple):
    """A changed step. ``what``: as a user asks for it; ``step_time_us``: about what it takes. ``times``: how many times as many
    tokens it has."""

    what: str
    step_time_us: float
    times: int = 1

    def gain(self, step_time_us: float) -> float:
        """Returns by what share the tokens per second rise, of a step that takes so long now."""
        return self.times * step_time_us / self.step_time_us - 1

    def told(self, step_time_us: float) -> str:
        return f"{self.gain(step_time_us):>+6.0%}  {time_of(self.step_time_us) + ' a step':>15}  {self.what}"


class Setting(NamedTuple):
    """A planned step, and which changes it allows. ``may_update``: whether its updates may run in the backward;
    ``may_fuse``: whether its kernels are eager; ``may_accumulate``: whether twice as many micro-batches make a batch twice as
    large."""

    candidates: Candidates
    planned: Planned
    budgets: Budgets
    accumulate: int
    may_update: bool
    may_fuse: bool
    may_accumulate: Callable[[], bool]


def changes(setting: Setting) -> Iterator[Change]:
    """Yields the changes that may gain something."""
    planned, budgets, problem = setting.planned, setting.budgets, setting.candidates.problem
    work, updates = work_of(problem, planned), budgets.updates
    if updates is None and setting.may_update and any(trained_nbytes(planned.step).values()):
        yield Change('update="backward"', work.step_time_us("backward"))
        yield Change('update="backward" with run_ahead=True', work.step_time_us("run ahead"))
    elif updates is not None and not updates.run_ahead:
        yield Change("run_ahead=True", work.step_time_us("run ahead"))
    if setting.may_fuse:
        fused = work.with_less_compute(_fused_us(problem, planned))
        yield Change('kernels="exact" (not yet measured on a GPU)', fused.step_time_us(work.updates))
    if work.computes < _BUSY and setting.may_accumulate():
        fewer = " (half as many updates for the same tokens)" if work.on_host_us + work.on_device_us else ""
        what = f"twice the batch with accumulate={2 * setting.accumulate}{fewer}"
        beside = held_between_phases(planned.schedule)  # what the second of two micro-batches keeps for its backward
        us = work.step_time_us(work.updates, 2) + _worth_us(setting.candidates, budgets, beside)
        yield Change(what, us, 2)


def can_be_joined(joint: fx.GraphModule, micro: Micro) -> bool:
    """Tells whether the results of micro-batches of a captured step can be put together. Marks the graph, as ``joining_of``."""
    try:
        with in_micro_batches(micro):
            joining_of(joint, micro)
    except CaptureError:
        return False
    return True


def _fused_us(problem: PlanningProblem, planned: Planned) -> dict[str, float]:
    """Returns phase -> µs of the memory traffic that exact kernels leave out. Launches that they save are not counted."""
    bodies, less = dict(planned.step.named_children()), dict[str, float]()
    phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for instruction in planned.schedule.instructions:
        if isinstance(body := bodies.get(instruction.kernel or ""), fx.GraphModule):
            if instruction.kernel not in less:
                saved = sum(chain.saved_nbytes for chain in chains_of(body, lambda node: False))
                less[instruction.kernel] = saved / problem.machine.memory_gbps / 1e3
            phases[instruction.phase] += less[instruction.kernel]
    return phases


def _worth_us(candidates: Candidates, budgets: Budgets, nbytes: Mapping[str, int]) -> float:
    """Returns by how many µs the bound of a step rises with so many bytes less of each tier; infinite if no plan fits then."""
    limits = budgets.device, budgets.host
    device, host = (n if n is None else n - nbytes.get(tier, 0) for tier, n in zip(("device", "host"), limits, strict=True))
    return candidates.bound_us(device, host) - candidates.bound_us(*limits)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a planned step's queues, in µs. ``spans_us``: phase -> how long it takes, as if updates took no time;
    ``once`` and ``each``: (phase, queue) -> what is done once, however many micro-batches there are, and for each.
    ``updates``: "step", "backward" or "run ahead"; ``update_us``: how much longer they make the step; ``on_host_us``,
    ``on_device_us``: what they take there by themselves. ``shared_us``: phase -> what its copies take of the host's memory:
    once, and for each micro-batch. ``computes``: the share of the step in which the device computes."""

    spans_us: Mapping[str, float]
    once: Mapping[tuple[str, str], float]
    each: Mapping[tuple[str, str], float]
    updates: str
    update_us: float
    on_host_us: float
    on_device_us: float
    shared_us: Mapping[str, Sequence[float]]
    computes: float = 0.0

    def with_less_compute(self, less_us: Mapping[str, float]) -> Work:
        """Returns the work with so many µs of computation less in each phase."""
        each = dict(self.each)
        for phase, us in less_us.items():
            each[phase, "compute"] = max(0.0, self.each[phase, "compute"] - us)
        shorter = replace(self, each=defaultdict(float, each))
        return replace(shorter, spans_us={phase: self._span_us(phase, 1, shorter) for phase in PHASES})

    def step_time_us(self, updates: str, times: int = 1) -> float:
        """Returns about the µs of the step with other ``updates`` and ``times`` as many micro-batches: each phase is longer as
        its busiest queue is."""
        forward, backward = (self._span_us(phase, times) for phase in PHASES)
        if updates == "step":
            return forward + backward + self.update_us
        if self.updates == "step":
            backward += self.on_device_us
        phases = PHASES if updates == "run ahead" else PHASES[1:]
        shared_us = sum(once + times * each for once, each in (self.shared_us[phase] for phase in phases))
        host_us = _LOST * (self.on_host_us + shared_us)
        return max(forward + backward, host_us) if updates == "run ahead" else forward + max(backward, host_us)

    def _span_us(self, phase: str, times: int, other: Work | None = None) -> float:
        """Returns how long a phase takes with ``times`` as many micro-batches, or with the work of another step."""
        busiest_us, changed_us = self._busiest_us(phase, 1), (other or self)._busiest_us(phase, times)
        return self.spans_us[phase] * (changed_us / busiest_us if busiest_us else 1.0)

    def _busiest_us(self, phase: str, count: int) -> float:
        queues = {queue for when, queue in (*self.once, *self.each) if when == phase}
        return max((self.once[phase, queue] + count * self.each[phase, queue] for queue in queues), default=0.0)


def work_of(problem: PlanningProblem, planned: Planned) -> Work:
    """Returns the work of a planned step."""
    plan, schedule, machine, updates = planned.plan, planned.schedule, problem.machine, problem.budgets.updates
    trace = simulate(schedule)
    ends_us = [r.end_us for r in trace.records if schedule.instructions[r.index].phase == PHASES[0]]
    forward_us = max(ends_us, default=0.0)
    once, each = defaultdict[tuple[str, str], float](float), defaultdict[tuple[str, str], float](float)
    shared: dict[str, list[float]] = {phase: [0.0, 0.0] for phase in PHASES}
    updates_us = defaultdict[str, float](float)
    for instruction in filter(takes_time, schedule.instructions):
        phase, queue, of_weights = instruction.phase, instruction.queue, _is_of_weights(schedule, instruction)
        if instruction.work == "update":
            updates_us[queue] += instruction.time_us
            continue
        (once if of_weights else each)[phase, queue] += instruction.time_us
        if queue in ("h2d", "d2h"):
            shared[phase][not of_weights] += instruction.nbytes / machine.host_gbps / 1e3
    trained = trained_nbytes(problem.step)
    on_device = sum(n for n, tier in zip(trained.values(), plan.tiers(trained), strict=True) if tier == "device")
    copies, checked = problem.budgets.state_copies, updates is not None and updates.checked
    return Work(
        {PHASES[0]: forward_us, PHASES[1]: plan.step_time_us - forward_us},
        once,
        each,
        "step" if updates is None else "run ahead" if updates.run_ahead else "backward",
        plan.update_us,
        max(machine.update_us(sum(trained.values()) - on_device, 0, copies, checked), updates_us["host"]),  # or for a disk
        machine.update_us(0, on_device, copies),
        shared,
        busy_us(trace).get("compute", 0.0) / plan.total_us,
    )


def _is_of_weights(schedule: Schedule, instruction: Instruction) -> bool:
    """Tells whether an instruction copies, casts, reads or writes weights or gradients."""
    roles = (schedule.buffers[name].role for name in (*instruction.reads, *instruction.writes))
    return instruction.queue != "compute" and all(role in _OF_WEIGHTS for role in roles)
