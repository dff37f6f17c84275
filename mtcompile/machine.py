"""How fast a device is, as plans assume it: published figures of the machines we know, by the name torch gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mtcompile.passes.cost import Machine

# Sustained bf16 FLOP/s, device memory and link in GB/s; the link per direction.
PRESETS = {
    "h200-sxm": Machine("h200-sxm", 6.0e14, 4300.0, 50.0, 50.0),
    "gh200": Machine("gh200", 6.0e14, 3700.0, 377.0, 297.0),
    "h100-sxm": Machine("h100-sxm", 6.0e14, 3000.0, 50.0, 50.0),
    "b200": Machine("b200", 1.4e15, 7000.0, 50.0, 50.0),
    "a100-pcie": Machine("a100-pcie", 2.0e14, 1800.0, 25.0, 25.0),
    "rtx3090": Machine("rtx3090", 5.5e13, 850.0, 25.0, 25.0),
    "rtx4090": Machine("rtx4090", 1.3e14, 920.0, 25.0, 25.0),
    "rtx5090": Machine("rtx5090", 1.6e14, 1600.0, 50.0, 50.0),
}
_NAMED = (  # part of torch's name -> preset; the first that fits
    ("GH200", "gh200"),
    ("H200", "h200-sxm"),
    ("H100", "h100-sxm"),
    ("B200", "b200"),
    ("A100", "a100-pcie"),
    ("RTX 3090", "rtx3090"),
    ("RTX 4090", "rtx4090"),
    ("RTX 5090", "rtx5090"),
)
_FLOPS_PER_UNIT = 1.5e12  # of a device nobody has named: a multiprocessor's, as of the A100
_STAGED_GBPS = 6.0  # through pageable memory: one thread's copy into the ring, an estimate


def machine_of(where: torch.device, fuses: bool, staged: bool) -> Machine:
    """``staged``: copies go through a ring of pinned chunks, since host memory could not be pinned."""
    machine = Machine() if where.type == "cpu" else _accelerator(where)
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
    for part, preset in _NAMED:
        if part in name:
            return PRESETS[preset]
    units = int(getattr(properties, "multi_processor_count", 1))
    return Machine(name, _FLOPS_PER_UNIT * units, 20.0 * units, 25.0, 25.0)
