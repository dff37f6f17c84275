"""``mtcompile doctor``: this machine's speeds, what they mean for training, and what would kill a run here."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import mtcompile
from mtcompile import knobs
from mtcompile.capture.refusals import first_line
from mtcompile.machine.limits import Limit, limits
from mtcompile.machine.measure import measure, name_of
from mtcompile.machine.presets import remember, scratch_folder, to_json
from mtcompile.machine.system_files import driver_version
from mtcompile.machine.timing import FULL, QUICK, Measurement
from mtcompile.passes.analysis.cost import Machine
from mtcompile.reading import installed_version
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.optim.host_kernels import library, which
from mtcompile.sizes import three_digits

_COLORS = {"ok": "green", "watch": "yellow", "bad": "red"}


@dataclass(frozen=True, slots=True)
class Part:
    """An optional part. ``found``: its version or path, empty if it is missing; ``brings``: what it is good for."""

    name: str
    found: str
    brings: str


@dataclass(frozen=True, slots=True)
class Report:
    """The doctor's findings. ``machine``: None if measuring failed, which is then one of the limits. ``file``: the machine file
    that ``machine="this"`` reads. ``knobs``: name -> (value or None, meaning) of every variable that mtcompile reads.
    ``commands``: what to type next."""

    machine: Machine | None
    measurements: tuple[Measurement, ...]
    hints: tuple[str, ...]
    limits: tuple[Limit, ...]
    versions: Mapping[str, str]
    parts: tuple[Part, ...]
    knobs: Mapping[str, tuple[str | None, str]]
    file: str
    commands: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        return any(limit.level == "bad" for limit in self.limits)

    def to_json(self, indent: int | None = None) -> str:
        """Returns one object with every field, and ``bad``."""
        variables = {name: {"value": value, "meaning": meaning} for name, (value, meaning) in self.knobs.items()}
        return json.dumps(asdict(self) | {"knobs": variables, "bad": self.bad}, indent=indent)


def examine(device: Device, quick: bool = False, progress: Callable[[str], object] = lambda text: None) -> Report:
    """Looks at the limits, measures the machine and remembers it. ``progress`` is called with what takes time."""
    rows = limits(device) + unknown_variables()
    effort = QUICK if quick or psutil.virtual_memory().available < 4 * FULL.nbytes else FULL
    progress(f"measuring {name_of(device.where)}, some seconds ...")
    try:
        measured = measure(device, effort, scratch_folder())
    except (RuntimeError, MemoryError, OSError) as error:  # torch raises RuntimeError if memory is short
        step = "free memory on host and device, then mtcompile doctor --quick"
        rows += (Limit("measuring", "failed", None, "bad", first_line(error), step),)
        return Report(None, (), (), rows, versions(), parts(device), knobs.listed(), "", ("mtcompile doctor --quick",))
    file = remember(device.where, measured)
    machine, hints = measured.machine, hints_of(measured.machine)
    examined = machine, measured.measurements, hints, rows, versions(), parts(device), knobs.listed(), str(file or "")
    return Report(*examined, commands(rows, device, file))


def commands(limits: tuple[Limit, ...], device: Device, file: Path | None) -> tuple[str, ...]:
    """Returns what to type next, within the memory that is free here."""
    free = [limit.amount for limit in limits if limit.what in ("host memory", "control group's memory") and limit.amount]
    host = f" --host {max(1, min(free) * 9 // 10 >> 20)}MiB" if free else ""
    memory = " --memory 1GiB" if device.where.type == "cpu" else ""  # the emulated device has what it is given
    on = "" if device.where.type == "cpu" else f" --device {device.where}"
    plan = (f"mtcompile plan qwen2.5-3b --machine this{memory}{host}",) if file else ()
    return (f"mtcompile verify gpt-11m{on}", *plan, f"mtcompile train gpt-11m --memory 64MiB --steps 50{on}")


def unknown_variables() -> tuple[Limit, ...]:
    """Returns a row for each ``MT_`` variable that is set and that mtcompile does not know."""
    meaning, known = "mtcompile does not know this variable", ", ".join(knobs.listed())
    return tuple(
        Limit(name, "is set", None, "watch", meaning, f"set {meant}" if meant else f"one of {known}")
        for name, meant in knobs.unknown().items()
    )


def hints_of(machine: Machine) -> tuple[str, ...]:
    """Returns what the machine's ratios mean for training, with weights of 2 bytes and everything recomputed (8 FLOP per weight
    and token): each weight crosses twice a step, 4 bytes in all, and the host's AdamW moves 28 bytes for it."""
    streaming = ceil(machine.flops / (2 * machine.h2d_gbps * 1e9))
    update = ceil(3.5 * machine.flops / (machine.host_gbps * 1e9))
    return (
        f"from {streaming:,} tokens a step, streaming bf16 weights hides behind compute (T = F / 2 L)",
        f"from {update:,} tokens a step, AdamW on the host would hide behind compute (T = 3.5 F / B)",
    )


def versions(root: Path = Path("/")) -> dict[str, str]:
    """Returns name -> version of the software on this machine."""
    software = {"mtcompile": mtcompile.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    software |= {name: version for name in ("triton", "transformers") if (version := installed_version(name))}
    if torch.version.cuda:
        software["CUDA runtime"] = torch.version.cuda
    if driver := driver_version(root):
        software["NVIDIA driver"] = driver
    return software


def parts(device: Device) -> tuple[Part, ...]:
    accelerator = "" if device.where.type == "cpu" else f"{name_of(device.where)} ({device.where})"
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "")
    return (
        Part("accelerator", accelerator, "real device memory; without one it is emulated in the host's"),
        Part("triton", installed_version("triton"), 'kernels="exact" or "inductor" on a GPU: pip install "mtcompile[triton]"'),
        Part(
            "C update kernels",
            which() if library() else "",
            "fast optimizer updates on the host: install gcc, then mtcompile again",
        ),
        Part("C++ compiler", compiler, 'kernels="exact" or "inductor" on the CPU: install g++'),
        Part("transformers", installed_version("transformers"), "mtcompile plan config.json: pip install transformers"),
    )


# ------------------------------------------------------------------------------------------------------------ for people


def show(report: Report, console: Console) -> None:
    """Prints the report as tables."""
    about = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(Text(f"{report.machine.name if report.machine else 'this machine'}: {about}"))
    if report.measurements:
        table = _table("measured", "", "what it means")
        for row in report.measurements:
            table.add_row(row.what, _values(row), row.meaning)
        console.print(table)
    for hint in report.hints:
        console.print(Text(hint))
    table = _table("limit", "found", "", "what it means, and what to do")
    for limit in report.limits:
        advice = Text(limit.meaning) + (Text(f"\n-> {limit.step}", style="bold") if limit.step else Text())
        table.add_row(limit.what, limit.found, Text(limit.level, style=_COLORS[limit.level]), advice)
    console.print(table)
    table = _table("part", "found", "what it brings")
    for part in report.parts:
        table.add_row(part.name, part.found or Text("missing", style="yellow"), part.brings)
    console.print(table)
    for name, (value, meaning) in report.knobs.items():
        if value is not None:
            console.print(Text(f"{name}={value} is set: {meaning}"))
    if report.file:
        console.print(
            Text(f"remembered in {report.file}: compile plans with it, and so does mtcompile plan MODEL --machine this")
        )
    if report.bad:
        console.print(Text("first do what the rows marked bad say, then type again: mtcompile doctor", style="bold"))
        return
    console.print(Text("what to type next:", style="bold"))
    for command in report.commands:
        console.print(Text(f"  {command}"), soft_wrap=True)


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _values(row: Measurement) -> str:
    """Formats a row's values, one line per size or kind."""
    return "\n".join(f"{name}: {three_digits(value)} {row.unit}" for name, value in row.values.items())


def save(report: Report, path: Path) -> None:
    """Writes the machine file that ``--machine`` takes. Raises ValueError."""
    if report.machine is None:
        raise ValueError("expected a machine that could be measured, found none: see the limits")
    try:
        path.write_text(to_json(report.machine))
    except OSError as error:
        raise ValueError(f"expected a file that can be written, found {path}: {error.strerror}") from None
