"""``mtcompile bench``: one model's training steps on this machine, plain and compiled in turn, timed."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from mtcompile.capture.refusals import first_line
from mtcompile.forecast.request import tokens_of
from mtcompile.machine.device import allocator_peak
from mtcompile.machine.timing import waiter
from mtcompile.models.loading import model_named
from mtcompile.parity.reference import CompiledSide, PlainSide
from mtcompile.parity.workload import TrainingSetup, prepare_workload
from mtcompile.passes.planning.problem import Progress
from mtcompile.runtime.schedule import gib

_WARMUPS = 2


@dataclass(frozen=True, slots=True)
class SideFigures:
    """One side's figures. ``step_s``: the median of ``steps_s``, seconds; ``peak_device_bytes``: None if another profiler is
    running."""

    step_s: float
    steps_s: tuple[float, ...]
    tokens_per_s: float
    peak_device_bytes: int | None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Both sides' figures; ratios are compiled over plain. ``plain`` is None if it did not fit, and ``why`` says so then.
    ``tokens``: per step; ``start_s``: seconds to capture and plan."""

    model: str
    device: str
    threads: int
    tokens: int
    memory_bytes: int
    resident_bytes: int | None
    start_s: float
    compiled: SideFigures
    peak_host_bytes: int
    plain: SideFigures | None
    why: str
    time_ratio: float | None
    peak_ratio: float | None

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.tokens:,} tokens a step on {self.device}, {self.threads} threads"]
        for name, figures in (("plain", self.plain), ("compiled", self.compiled)):
            if figures is not None:
                peak = "not measured" if figures.peak_device_bytes is None else gib(figures.peak_device_bytes)
                speed = f"{figures.step_s * 1e3:,.1f} ms a step  {figures.tokens_per_s:,.0f} tokens/s"
                lines.append(f"  {name:8}  {speed}  device peak {peak}")
        host = f"host peak {gib(self.peak_host_bytes)}"
        lines.append(f"  compiled within {gib(self.memory_bytes)}; {host}; {self.start_s:.1f} s to capture and plan")
        if self.plain is None:
            lines.append(f"  plain did not fit: {self.why}")
        elif self.time_ratio is not None:
            peaks = "" if self.peak_ratio is None else f" and {self.peak_ratio:.2f} of its device memory"
            lines.append(f"  compiled takes {self.time_ratio:.2f} of plain's time{peaks}")
        return "\n".join(lines)


def benchmark(model: str, setup: TrainingSetup, steps: int, progress: Progress) -> Benchmark:
    """Times ``steps`` steps of each side in turn, after two warm-up steps. Raises what ``verify`` raises."""
    workload, where = prepare_workload(setup, model_named(model), None, progress), setup.device.where
    started = time.perf_counter()
    compiled = CompiledSide(setup, workload)
    _step_seconds(compiled)
    start_s = time.perf_counter() - started
    plain, why = None, ""
    try:
        plain = PlainSide(setup, workload, [parameter.device for parameter in compiled.model.parameters()])
        _step_seconds(plain)
    except torch.OutOfMemoryError as error:
        plain, why = None, first_line(error)
    sides: dict[str, CompiledSide | PlainSide] = {"compiled": compiled, **({"plain": plain} if plain else {})}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(_WARMUPS - 1 + steps):
        for name, side in sides.items():
            progress(f"{name} step", step, _WARMUPS - 1 + steps)
            times[name].append(_step_seconds(side))
    tokens = tokens_of(workload.data)
    report = compiled.model.memory_report()
    ours = _figures(times["compiled"][-steps:], tokens, report["peak_device_bytes"])
    reference = _figures(times["plain"][-steps:], tokens, _peak_bytes(plain)) if plain else None
    return Benchmark(
        model=model,
        device=str(where) if where.type != "cpu" else "cpu, an emulated device",
        threads=torch.get_num_threads(),
        tokens=tokens,
        memory_bytes=compiled.limit,
        resident_bytes=workload.resident_bytes,
        start_s=max(0.0, start_s - ours.step_s),
        compiled=ours,
        peak_host_bytes=report["peak_host_bytes"],
        plain=reference,
        why=why,
        time_ratio=ours.step_s / reference.step_s if reference else None,
        peak_ratio=_ratio(ours.peak_device_bytes, reference.peak_device_bytes) if reference else None,
    )


def _step_seconds(side: CompiledSide | PlainSide) -> float:
    """Runs a whole step. Returns its seconds, the device's work included."""
    wait = waiter(side.setup.device.where)
    wait()
    started = time.perf_counter()
    side.forward_backward()
    side.step()
    wait()
    return time.perf_counter() - started


def _figures(seconds: list[float], tokens: int, peak: int | None) -> SideFigures:
    median = statistics.median(seconds)
    return SideFigures(median, tuple(seconds), tokens / median, peak)


def _peak_bytes(plain: PlainSide) -> int | None:
    """Runs one more step. Returns the device bytes of parameters, buffers and optimizer state, and what the step allocated."""
    where = plain.where
    state_bytes = sum(p.nbytes for p in (*plain.model.parameters(), *plain.model.buffers()))
    states = (value for entry in plain.optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor))
    state_bytes += sum(value.nbytes for value in states if value.device.type == where.type)
    with allocator_peak(where) as peak:
        plain.forward_backward()
        plain.step()
    return None if peak.nbytes is None else state_bytes + peak.nbytes


def _ratio(one: int | None, other: int | None) -> float | None:
    return one / other if one is not None and other else None
