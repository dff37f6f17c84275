"""Speeds of machines, as plans assume them: presets of known machines, by the name torch gives them, and this machine's as
measured."""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mtcompile import cache, knobs, progress
from mtcompile.cached.files import own_text
from mtcompile.errors import did_you_mean, nearest_file
from mtcompile.machine import bandwidth
from mtcompile.machine.cards import difference, scaled
from mtcompile.machine.compute import tf32_in_use
from mtcompile.machine.device import choose
from mtcompile.machine.known import CARDS, Card, check_machine
from mtcompile.machine.measure import MeasuredMachine, identity, measure
from mtcompile.machine.timing import QUICK
from mtcompile.passes.analysis.cost import Machine
from mtcompile.reading import FEW_NBYTES, parsed_json, read_text

_SUSTAINED = 0.8  # of these peaks; an estimate


def _preset(card: Card) -> Machine:
    memory, h2d, d2h = card.gbps
    read, write, terabytes, rated = card.drive
    machine = Machine(card.name, card.flops, memory, h2d, d2h, host_gbps=card.host, device_nbytes=card.gigabytes * 10**9)
    fp32, fp64 = (_SUSTAINED * 1e12 * peak for peak in card.wide)
    # By the data sheets of all of these cards, TF32 has half the peak of bf16.
    machine = replace(machine, fp32_flops=fp32, tf32_flops=card.flops / 2, fp64_flops=fp64, tf32_convolutions=True)
    machine = replace(machine, disk_read_gbps=read, disk_write_gbps=write)
    machine = replace(machine, disk_nbytes=terabytes * 10**12, disk_rated_nbytes=rated * 10**12)
    return replace(machine, host_nbytes=card.ram * 10**9, watts=card.watts)


PRESETS = {name: _preset(card) for name, card in CARDS.items()}
# Part of torch's name -> preset, as "RTX 4090" and "H200"; of several in a name ("GH200"), the longest counts.
_PRESET_OF = {name.partition("-")[0].upper().replace("RTX", "RTX "): name for name in PRESETS}
_FLOPS_PER_UNIT, _FP32_PER_UNIT = 1.5e12, 1.5e11  # of a multiprocessor of an unknown device, as on the A100
_STAGED_GBPS = 6.0  # of copies through pageable memory: one thread copies into the ring; an estimate


def machine_of(where: torch.device, fuses: bool, staged: bool) -> Machine:
    """Returns the machine that plans for a device assume: as measured last, by ``mtcompile doctor`` or because it is another
    card than its preset's, else by its preset; always by its preset with MT_MEASURED=0. ``fuses``: kernels are Inductor's;
    ``staged``: host memory could not be pinned, so copies go through a ring of pinned chunks."""
    machine = _measured_before(where) if knobs.measured() else None
    if machine is not None:
        machine = replace(machine, name=f"{machine.name}, measured by doctor")
    else:
        machine = Machine() if where.type == "cpu" else _accelerator(where)
    machine = as_torch_multiplies(machine)
    if staged:
        machine = replace(
            machine,
            name=f"{machine.name}, host memory not pinned",
            h2d_gbps=min(machine.h2d_gbps, _STAGED_GBPS),
            d2h_gbps=min(machine.d2h_gbps, _STAGED_GBPS),
        )
    return replace(machine, fuses=fuses)


def _accelerator(where: torch.device) -> Machine:
    properties: Any = torch.get_device_module(where).get_device_properties(where)
    name = str(properties.name)
    if parts := [part for part in _PRESET_OF if part in name]:
        preset = PRESETS[_PRESET_OF[max(parts, key=len)]]
        other = difference(properties, preset)
        return _on_this_host(where, preset) if not other else _other_card(where, preset, other)
    units = int(getattr(properties, "multi_processor_count", 1))
    fp32, tf32 = _FP32_PER_UNIT * units, _FLOPS_PER_UNIT * units / 2
    return Machine(name, _FLOPS_PER_UNIT * units, 20.0 * units, 25.0, 25.0, fp32_flops=fp32, tf32_flops=tf32)


def _on_this_host(where: torch.device, preset: Machine) -> Machine:
    """The preset, with the speed of updates on this host, in a step. It is measured once, in a few seconds: of two hosts
    with the same card, one may be twice as fast, as servers rent out parts of themselves. Ranks go by the preset: they
    share a host, and must plan alike."""
    if not knobs.measured() or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return preset
    host = f"host, in a step | {identity(where)}"
    if (known := _remembered(host)) is None:
        try:
            with progress.doing("measuring the host's memory"):
                known = replace(preset, host_gbps=_host_gbps(where))
        except (RuntimeError, MemoryError, OSError):  # no room
            return preset
        cache.write_machine(host, to_json(known))
    return replace(preset, host_gbps=known.host_gbps, name=f"{preset.name}, host memory measured")


@functools.cache
def _host_gbps(where: torch.device) -> float:
    """The speed in a step that this process measured, for where no cache remembers it."""
    alone = bandwidth.adamw_gbps(QUICK)
    with bandwidth.copying(choose(where), QUICK):
        return float(f"{bandwidth.in_a_step(alone, bandwidth.adamw_gbps(QUICK)):.2g}")


def _other_card(where: torch.device, preset: Machine, why: str) -> Machine:
    """Measures a card that is not that of its preset, once: what is remembered serves from then on. By the preset's share where
    it cannot be measured, and with MT_MEASURED=0."""
    properties: Any = torch.get_device_module(where).get_device_properties(where)
    if not knobs.measured():
        return scaled(properties, preset)
    try:
        with progress.doing(f"measuring {properties.name}, which is no {preset.name}: {why}"):
            measured = measure(choose(where), QUICK, scratch_folder())
    except (RuntimeError, OSError):  # no room, on the card or on the host
        return scaled(properties, preset)
    remember(where, measured)
    return measured.machine


def as_torch_multiplies(machine: Machine) -> Machine:
    """Returns the machine with products and convolutions of fp32 in TF32 where torch is set to that now, in this process."""
    if not machine.tf32_flops:
        return machine
    products, convolutions = tf32_in_use()
    return replace(machine, tf32_products=products, tf32_convolutions=convolutions)


def named(machine: str | Machine) -> Machine:
    """Returns a preset by name, this machine for ``"this"``, or the machine in a JSON file with Machine's fields: those missing
    there are of the preset that it is ``like``, or else of the emulated device; with fp32 in TF32 as torch is set. A
    ``Machine`` is returned as it is. Raises ValueError."""
    return machine if isinstance(machine, Machine) else as_torch_multiplies(_named(machine))


def _named(machine: str) -> Machine:
    if machine in PRESETS:
        return PRESETS[machine]
    if machine == "this":
        return this()
    check_machine(machine)
    return _from_file(Path(machine))


def this() -> Machine:
    """Returns this machine as measured last, or else measures it, which takes seconds."""
    device = choose(None)
    if (known := _measured_before(device.where)) is not None:
        return known
    measured = measure(device, QUICK, scratch_folder())
    remember(device.where, measured)
    return measured.machine


def _measured_before(where: torch.device) -> Machine | None:
    """Reads the machine that ``remember`` wrote last; None if there is none or it cannot be read."""
    return _remembered(identity(where))


def _remembered(machine: str) -> Machine | None:
    path = cache.machine_path(machine)
    with suppress(ValueError):
        return _from_text(text, path) if path and (text := own_text(path)) else None
    return None


def remember(where: torch.device, measured: MeasuredMachine) -> Path | None:
    """Writes the file that ``this`` reads. Returns its path, or None if nothing could be written."""
    cache.write_machine(identity(where), to_json(measured.machine))
    path = cache.machine_path(identity(where))
    return path if path is not None and path.exists() else None


def scratch_folder() -> Path:
    """Returns the folder in which the disk is measured: the cache folder if there is one, else the current folder."""
    folder = Path(knobs.cache() or ".")
    return folder if folder.is_dir() else Path.cwd()


def to_json(machine: Machine) -> str:
    """Returns the text of a machine file."""
    data = asdict(replace(machine, measured=None))
    del data["measured"]
    return json.dumps(data, indent=1) + "\n"


def _from_file(path: Path) -> Machine:
    if not path.exists():
        raise ValueError(f"expected a machine file, found no such file: {path}{nearest_file(path)}")
    return _from_text(read_text(path, FEW_NBYTES), path)


_LEAST, _MOST = 1e-6, 1e21  # of a speed; far beyond any machine's, and times and sums of them are numbers
_UNKNOWN = ("fp32_flops", "tf32_flops", "fp64_flops", "update_gbps", "watts")  # may be 0: not known
_RANGES = {float: f"a number from {_LEAST:g} to {_MOST:g}", int: "a whole number from 0 to 2**62", bool: "true or false"}


def _sound(name: str, kind: type, value: Any) -> bool:
    if name in _UNKNOWN and value == 0:
        return True
    return _LEAST <= value <= _MOST if kind is float else 0 <= value <= 2**62 if kind is int else True


def _from_text(text: str, path: Path) -> Machine:
    try:
        data = parsed_json(text, "its text")
        like = data.pop("like", None) if isinstance(data, dict) else None
        if like is not None and like not in tuple(PRESETS):
            close = did_you_mean(str(like)[:80], PRESETS)
            raise ValueError(f"like: expected one of {', '.join(PRESETS)}, found {like!r:.80}{close}")
        kinds = {name: type(value) for name, value in asdict(Machine()).items() if name != "measured"}
        if not isinstance(data, dict) or set(data) - set(kinds):
            raise ValueError(f"expected an object with fields among {', '.join(kinds)}")
        for name, value in data.items():
            kind = float if kinds[name] is float and type(value) is int else type(value)
            if kind is not kinds[name] or not _sound(name, kind, value):
                raise ValueError(f"{name}: expected {_RANGES.get(kinds[name], kinds[name].__name__)}, found {value!r:.80}")
        return replace(PRESETS[like] if like else Machine(), **{"name": path.stem, **data})
    except ValueError as error:
        raise ValueError(f"machine file {path}: {error}") from None
