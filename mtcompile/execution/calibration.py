"""``model.calibrate()`` stores how long kernels and copies took in the steps that a model has run, for later plans.

It runs nothing: it reads the records that every step leaves. A digest identifies a kernel, and its bytes identify a copy. On a
GPU only steps under MT_TRACE=1 count, since other records say when work was issued.
"""

from __future__ import annotations

import statistics
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from mtcompile import cache, knobs
from mtcompile.cache import Times
from mtcompile.errors import StepError
from mtcompile.execution.compiled import CompiledStep, retimed
from mtcompile.execution.runner import PhaseRun
from mtcompile.machine.presets import machine_of
from mtcompile.options import Options
from mtcompile.passes.analysis.cost import Machine, Measured, formula_us, kernel_digest
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import Instruction, Phase, way_of
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import Record, Trace, span_us

KEPT_PHASES = 16  # the most recent forwards and backwards
_LATENCY_US = 50.0  # a copy that is shorter by formula shows the cost of starting one, not the rate
TimedPhase = tuple[CompiledStep, Phase, list[Record]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of ``calibrate``. ``kernels``, ``copies``: how many different ones were measured now. ``scale``: queue ->
    measured time over formula, from all that is known of the machine. Microseconds of forward and backward of the program that
    last trained: ``predicted_us`` by its plan, ``fitted_us`` with the measured times, ``measured_us`` (median).
    ``remembered``: whether later plans will find these times."""

    machine: str
    kernels: int
    copies: int
    scale: Mapping[str, float]
    predicted_us: float
    fitted_us: float
    measured_us: float
    remembered: bool

    def __str__(self) -> str:
        factors = ", ".join(f"{queue} {factor:.2f}" for queue, factor in self.scale.items())
        where = "later plans count on it" if self.remembered else "kept nowhere, as MT_CACHE=0 asks"
        return (
            f"calibrated {self.machine} by {self.kernels} kernels and {self.copies} sizes of copies; measured over formula: "
            f"{factors}\nstep {self.predicted_us / 1e3:.2f} ms predicted, {self.fitted_us / 1e3:.2f} ms with these times, "
            f"{self.measured_us / 1e3:.2f} ms measured; {where}"
        )


def as_measured(machine: Machine, times: Times | None) -> Machine:
    """Returns ``machine`` with its measured times; unchanged if there are none."""
    if not times:
        return machine
    kernels = {digest: us for digest, (us, _) in times.get("compute", {}).items()}
    scale = {}
    for queue, pairs in times.items():
        telling = [(us, formula) for us, formula in pairs.values() if queue == "compute" or formula >= _LATENCY_US]
        took, formula = sum(us for us, _ in telling), sum(formula for _, formula in telling)
        if took > 0 and formula > 0:
            scale[queue] = took / formula
    return replace(machine, name=f"{machine.name}, calibrated", measured=Measured(kernels, scale))


def speeds(device: Device, options: Options) -> Machine:
    """Returns the machine by its throttle, doctor or preset, without the times of kernels."""
    if options.throttle is not None:
        return replace(options.throttle, name=f"{options.throttle.name}, emulated", fuses=options.fuses)
    return machine_of(device.where, options.fuses, device.staging is not None)


def known_machine(device: Device, options: Options) -> Machine:
    """Returns the machine as plans assume it: with measured times, unless it is throttled or MT_MEASURED=0."""
    machine = speeds(device, options)
    if options.throttle is not None or not knobs.measured():
        return machine
    return as_measured(machine, cache.read_times(_key(device, options)))


class Calibrator:
    """Keeps the times of a session's last phases, and turns them into measured speeds."""

    def __init__(self, device: Device, options: Options) -> None:
        self.device, self.options = device, options
        self.phases: deque[TimedPhase] = deque(maxlen=KEPT_PHASES)

    def phase_ran(self, run: PhaseRun) -> None:
        """Keeps a phase if its records say when instructions ran and no memory measurement slowed it down."""
        if not run.frame.measured and run.exact:
            self.phases.append((run.frame.compiled, run.phase, run.records))

    def calibrate(self, last: CompiledStep | None) -> Calibration:
        """Stores medians over the last phases, beside the times already known. ``last``: the program that last trained. Raises
        StepError if no step counts."""
        if self.options.throttle is not None:
            raise StepError("calibrate: this model keeps to the speeds given as throttle=; compile it without, to measure")
        if not self.phases or last is None:
            raise StepError(
                "calibrate: expected at least two training steps before it, of which the first does not count (nor those "
                "under MT_CHECK=1, nor on a GPU those without MT_TRACE=1)"
            )
        key, machine = _key(self.device, self.options), speeds(self.device, self.options)
        measured_now = medians(self.phases, machine)
        times = dict(cache.read_times(key) or {})
        for queue, pairs in measured_now.items():
            times[queue] = {**times.get(queue, {}), **pairs}
        remembered = cache.write_times(key, times)
        measured = as_measured(machine, times)
        assert measured.measured is not None
        return Calibration(
            machine.name,
            len(measured_now.get("compute", {})),
            sum(len(pairs) for queue, pairs in measured_now.items() if queue != "compute"),
            measured.measured.scale,
            last.plan.step_time_us,
            _predicted_us(last, measured),
            _measured_us(self.phases, last),
            remembered,
        )


def _key(device: Device, options: Options) -> str:
    return cache.times_key(speeds(device, options).name, device.where.type, options.kernels)


def medians(timed: Iterable[TimedPhase], speeds: Machine) -> Times:
    """Returns queue, or ``direct`` (see ``way_of``) -> kernel digest or bytes of a copy -> microseconds (measured median, by
    formula)."""
    took: dict[str, dict[str, list[float]]] = {}
    formula: dict[str, dict[str, float]] = {}
    for compiled, _, records in timed:
        for record in records:
            instruction = compiled.schedule.instructions[record.index]
            if instruction.work in ("update", "convert", "collective") or instruction.ends or instruction.rows:
                continue
            way = way_of(instruction, compiled.schedule.buffers)
            if instruction.op == "copy":
                subject, us = str(instruction.nbytes), speeds.copy_us(instruction.nbytes, way)
            else:
                kernel = _kernel(compiled, instruction)
                subject, us = kernel_digest(kernel), formula_us(kernel, speeds)
            took.setdefault(way, {}).setdefault(subject, []).append(record.end_us - record.start_us)
            formula.setdefault(way, {})[subject] = us
    return {
        queue: {subject: (statistics.median(us), formula[queue][subject]) for subject, us in subjects.items()}
        for queue, subjects in took.items()
    }


def _kernel(compiled: CompiledStep, instruction: Instruction) -> fx.GraphModule:
    return compiled.step.get_submodule(instruction.kernel)  # type: ignore[return-value]


def _predicted_us(compiled: CompiledStep, machine: Machine) -> float:
    """Predicts the step time of the same schedule on another machine, as the planner would."""
    instructions = list(retimed(compiled, machine))
    copied = sum(i.nbytes for i in instructions if i.op == "copy")
    trace = simulate(replace(compiled.schedule, instructions=tuple(instructions)))
    return span_us(trace) + machine.contention_us(copied)


def _measured_us(timed: Iterable[TimedPhase], compiled: CompiledStep) -> float:
    """Returns the measured step time of a program: the sum of the medians of its phases."""
    spans: dict[Phase, list[float]] = {}
    for other, phase, records in timed:
        if other is compiled:
            spans.setdefault(phase, []).append(span_us(Trace(tuple(records), "measured")))
    return sum(statistics.median(us) for us in spans.values())


def warn_not_pinned(machine: Machine) -> None:
    """Warns that copies are slow, as ``machine`` has them, because host memory could not be pinned."""
    warnings.warn(
        "host memory could not be pinned (expected room under the limit on locked memory, ulimit -l; under WSL about "
        "1 GiB is all there is): copies go through a small pinned ring, and the plan counts on "
        f"{machine.h2d_gbps:.0f} GB/s. Raise the limit for full speed; results are the same",
        stacklevel=3,
    )
