"""Tells a card of a preset from others of the same name: slices (MIG), PCIe and NVL cards, smaller memories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mtcompile.passes.analysis.cost import Machine

# Multiprocessors of each preset's card, and the MHz that they run at most; 0 where makers differ. By data sheets.
_CARDS = {
    "h200-sxm": (132, 1980),
    "gh200": (132, 1980),
    "h100-sxm": (132, 1980),
    "b200": (148, 0),
    "a100-pcie": (108, 1410),
    "a6000": (84, 0),
    "rtx3090": (82, 0),
    "rtx4090": (128, 0),
    "rtx5090": (170, 0),
}
_KINDS = ("SXM", "PCIE", "NVL", "MIG", "LAPTOP", "MAX-Q")
_LESS = 0.93  # of clocks or memory: less is another card


def difference(properties: Any, preset: Machine) -> str:
    """Says in words why a card is another one than that of the preset its name leads to; "" if it is that one.

    ``properties``: torch's, of the card."""
    name, (units, megahertz) = str(properties.name).upper(), _CARDS[preset.name]
    kinds = [kind for kind in _KINDS if kind in name and not preset.name.endswith(kind.lower())]
    if kinds:
        return f"a card of kind {kinds[-1]}"
    if (found := _units(properties)) != units:
        return f"{found} multiprocessors, {units} expected"
    clock = int(getattr(properties, "clock_rate", 0)) // 1000  # torch gives kHz
    if 0 < clock < _LESS * megahertz:
        return f"a clock of {clock} MHz, {megahertz} expected"
    memory = int(getattr(properties, "total_memory", 0))
    if 0 < memory < 0.85 * preset.device_nbytes:  # what a driver takes is not missing
        return f"{memory / 1e9:.0f} GB of memory, {preset.device_nbytes / 1e9:.0f} expected"
    return ""


def scaled(properties: Any, preset: Machine) -> Machine:
    """Returns the preset by the share of its multiprocessors and memory that a card has, where it could not be measured."""
    units = min(1.0, _units(properties) / _CARDS[preset.name][0])
    memory = int(getattr(properties, "total_memory", 0)) or preset.device_nbytes
    share = min(1.0, memory / preset.device_nbytes)
    name = f"{properties.name}, {preset.name} at {units:.0%}"
    rate = preset.memory_gbps * min(share, units)
    flops, fp32, tf32, fp64 = (units * f for f in (preset.flops, preset.fp32_flops, preset.tf32_flops, preset.fp64_flops))
    of_this = replace(preset, flops=flops, fp32_flops=fp32, tf32_flops=tf32, fp64_flops=fp64)
    return replace(of_this, name=name, memory_gbps=rate, device_nbytes=memory)


def _units(properties: Any) -> int:
    return int(getattr(properties, "multi_processor_count", 0))
