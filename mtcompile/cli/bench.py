"""``mtcompile bench``: one model on this machine, plain and compiled side by side."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtcompile.cli.common import Kernels, Precisions, Update, progress

if TYPE_CHECKING:
    from mtcompile.parity.reference import Asked, Compiled, Plain
    from mtcompile.passes.planning.problem import Progress

_WARMUPS = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """``step_s``: median seconds of ``steps_s``; ``peak_device_bytes``: None where another profiler runs."""

    step_s: float
    steps_s: tuple[float, ...]
    tokens_per_s: float
    peak_device_bytes: int | None


@dataclass(frozen=True, slots=True)
class Bench:
    """``plain``: None where it did not fit, and ``why`` then. Ratios are compiled over plain."""

    model: str
    device: str
    threads: int
    tokens: int
    memory_bytes: int
    resident_bytes: int | None
    start_s: float
    compiled: Measured
    peak_host_bytes: int
    plain: Measured | None
    why: str
    time_ratio: float | None
    peak_ratio: float | None

    def __str__(self) -> str:
        from mtcompile.runtime.schedule import gib

        lines = [f"{self.model}: {self.tokens:,} tokens a step on {self.device}, {self.threads} threads"]
        for name, side in (("plain", self.plain), ("compiled", self.compiled)):
            if side is not None:
                peak = "not measured" if side.peak_device_bytes is None else gib(side.peak_device_bytes)
                speed = f"{side.step_s * 1e3:,.1f} ms a step  {side.tokens_per_s:,.0f} tokens/s"
                lines.append(f"  {name:8}  {speed}  device peak {peak}")
        host = f"host peak {gib(self.peak_host_bytes)}"
        lines.append(f"  compiled within {gib(self.memory_bytes)}; {host}; {self.start_s:.1f} s to capture and plan")
        if self.plain is None:
            lines.append(f"  plain did not fit: {self.why}")
        elif self.time_ratio is not None:
            peaks = "" if self.peak_ratio is None else f", {self.peak_ratio:.2f} of its device memory"
            lines.append(f"  compiled takes {self.time_ratio:.2f} of plain's time{peaks}")
        return "\n".join(lines)


def bench(
    model: Annotated[str, typer.Argument(help="a built-in shape (gpt-11m), a Hugging Face config.json or file.py:factory")],
    memory: Annotated[str, typer.Option(help="device bytes for the compiled one: 16GiB (default: half of all resident)")] = "",
    batch: Annotated[int, typer.Option(min=1, help="sequences per step")] = 2,
    seq: Annotated[int, typer.Option(min=1, help="tokens per sequence")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="measured steps of each, in turn, after two more")] = 5,
    precision: Annotated[Precisions, typer.Option(help="of weights and optimizer state; model: as it says")] = Precisions.model,
    update: Annotated[Update, typer.Option(help="after the backward, or as gradients arrive")] = Update.step,
    max_grad_norm: Annotated[float | None, typer.Option(help="clip the gradients to this norm, in both")] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="micro-batches that the batch is run as")] = 1,
    kernels: Annotated[Kernels, typer.Option(help="inductor: compiled kernels, within rounding")] = Kernels.eager,
    device: Annotated[str, typer.Option(help="cuda:1, cpu, ... (default: the GPU if there is one)")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Measure training steps of a model on this machine, plain and compiled in turn.

    Whole steps: forward, backward, clipping and AdamW. Medians; what others run meanwhile is in them. On the emulated device
    the copies take the time of copies in host memory. Both are held at once.

    \b
    Example:
      mtcompile bench gpt-11m --batch 4 --memory 100MiB

    Exit code 0: measured; 2: something asked for is wrong; 3: the compiled one does not fit; 1: a step failed.
    """
    from mtcompile.machine.device import choose
    from mtcompile.optim.precision import precision_named
    from mtcompile.options import parse_bytes
    from mtcompile.parity.reference import Asked

    options: Any = (parse_bytes(memory or None), batch, seq, update.value, max_grad_norm, accumulate, kernels.value)
    asked = Asked(choose(device or None), precision_named(precision.value), *options)
    with progress("measuring") as tell:
        found = measured(model, asked, steps, tell)
    print(json.dumps(asdict(found), indent=1) if as_json else found)


def measured(model: str, asked: Asked, steps: int, tell: Progress) -> Bench:
    """Raises what ``verify`` does."""
    import torch

    from mtcompile.forecast.request import tokens_of
    from mtcompile.models.loading import model_named
    from mtcompile.parity.reference import Compiled, Plain, subject

    what, where = subject(asked, model_named(model), None, tell), asked.device.where
    started = time.perf_counter()
    compiled = Compiled(asked, what)
    _timed(compiled, where)
    start_s = time.perf_counter() - started
    plain, why = None, ""
    times: dict[str, list[float]] = {"plain": [], "compiled": []}
    try:
        plain = Plain(asked, what, [parameter.device for parameter in compiled.model.parameters()])
        _timed(plain, where)
    except torch.OutOfMemoryError as error:
        plain, why = None, str(error).splitlines()[0]
    sides: Mapping[str, Compiled | Plain] = {"compiled": compiled, **({"plain": plain} if plain else {})}
    for step in range(_WARMUPS - 1 + steps):
        for name, side in sides.items():
            tell(f"{name} step", step, _WARMUPS - 1 + steps)
            times[name].append(_timed(side, where))
    tokens = tokens_of(what.data)
    report = compiled.model.memory_report()
    found = {"compiled": _figures(times["compiled"][-steps:], tokens, report["peak_device_bytes"])}
    if plain is not None:
        found["plain"] = _figures(times["plain"][-steps:], tokens, _peak(plain, where))
    ours, theirs = found["compiled"], found.get("plain")
    return Bench(
        model=model,
        device=str(where) if where.type != "cpu" else "cpu, an emulated device",
        threads=torch.get_num_threads(),
        tokens=tokens,
        memory_bytes=compiled.limit,
        resident_bytes=what.resident_bytes,
        start_s=max(0.0, start_s - ours.step_s),
        compiled=ours,
        peak_host_bytes=report["peak_host_bytes"],
        plain=theirs,
        why=why,
        time_ratio=ours.step_s / theirs.step_s if theirs else None,
        peak_ratio=_ratio(ours.peak_device_bytes, theirs.peak_device_bytes) if theirs else None,
    )


def _timed(side: Compiled | Plain, where: Any) -> float:
    """Seconds of a whole step."""
    import torch

    wait = (lambda: None) if where.type == "cpu" else torch.get_device_module(where).synchronize
    wait()
    started = time.perf_counter()
    side.forward_backward()
    side.step()
    wait()
    return time.perf_counter() - started


def _figures(seconds: list[float], tokens: int, peak: int | None) -> Measured:
    median = statistics.median(seconds)
    return Measured(median, tuple(seconds), tokens / median, peak)


def _peak(plain: Plain, where: Any) -> int | None:
    """Of one more step: what is held, gradients aside, and what the allocator gave beside it."""
    from mtcompile.machine.device import allocator_peak

    held = sum(p.numel() * p.element_size() for p in (*plain.model.parameters(), *plain.model.buffers()))
    states = (value for entry in plain.optimizer.state.values() for value in entry.values() if hasattr(value, "element_size"))
    held += sum(value.numel() * value.element_size() for value in states if value.device.type == where.type)
    with allocator_peak(where) as peak:
        plain.forward_backward()
        plain.step()
    return None if peak.nbytes is None else held + peak.nbytes


def _ratio(one: int | None, other: int | None) -> float | None:
    return one / other if one is not None and other else None
