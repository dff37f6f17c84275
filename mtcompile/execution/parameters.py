"""Where a model's parameters and gradients live between steps: one slab per block, views for the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mtcompile.passes.step_graph import span_nbytes
from mtcompile.runtime.devices.arena import Layout, layout_of, part, view
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import placed
from mtcompile.torch_private import storage_holders


@dataclass(slots=True)
class Place:
    """One parameter at home: where its bytes are, and the pointer its tensor must have."""

    parameter: torch.nn.Parameter
    layout: Layout
    offset: int
    pointer: int


class Home:
    """Slabs of parameters by block. ``tiers``: block -> home tier, decided by the model's first program. ``moved``: called
    with a parameter that has gone to another device, for what follows it; ``replaced``: with a parameter whose ``.data`` was
    replaced, and the values it was replaced by."""

    def __init__(
        self,
        device: Device,
        moved: Callable[[torch.nn.Parameter], None],
        replaced: Callable[[torch.nn.Parameter, torch.Tensor], None],
    ) -> None:
        self.device, self.moved, self.replaced = device, moved, replaced
        self.blocks: dict[str, str] = {}  # parameter -> block
        self.tiers: dict[str, str] = {}
        self.slabs: dict[str, torch.Tensor] = {}
        self.places: dict[str, Place] = {}
        self.version = 0
        self._gradients: list[tuple[torch.Tensor, int]] = []  # slab, holders when only this list holds it

    def adopt(self, blocks: Mapping[str, str], parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Give every named parameter that has no home yet a place in its block's slab, and move it there."""
        new: dict[str, list[str]] = {}
        for name, block in blocks.items():
            if name not in self.places and name in parameters:
                key = block if block not in self.slabs else f"{block}+{len(self.slabs)}"
                new.setdefault(key, []).append(name)
        for key, names in new.items():
            layouts = {name: layout_of(parameters[name].data) for name in names}
            offsets, total = {}, 0
            for name in names:
                offsets[name] = total
                total += placed(span_nbytes(parameters[name].data))
            self.slabs[key] = self._slab(key, total)
            for name in names:
                self.blocks[name] = key
                self._place(name, parameters[name], layouts[name], offsets[name])

    def arrange(self) -> None:
        """Every slab goes where its tier says."""
        for key, slab in list(self.slabs.items()):
            new = self._slab(key, slab.numel()) if slab.device != self._where(key) else None
            if new is not None:
                self.slabs[key] = new
                for name, block in self.blocks.items():
                    if block == key:
                        place = self.places[name]
                        self._place(name, place.parameter, place.layout, place.offset)

    def _where(self, key: str) -> torch.device:
        return self.device.where if self.tiers.get(key) == "device" else torch.device("cpu")

    def _slab(self, key: str, nbytes: int) -> torch.Tensor:
        return self.device.arena("host" if self._where(key).type == "cpu" else "device", nbytes)  # type: ignore[no-any-return]

    def _place(self, name: str, parameter: torch.nn.Parameter, layout: Layout, offset: int) -> None:
        slab = self.slabs[self.blocks[name]]
        at_home = (part if slab.device.type == "cpu" else view)(slab, offset, layout)
        at_home.copy_(parameter.data)
        grad = parameter.grad
        if grad is not None and grad.device != at_home.device:
            parameter.grad = None  # a gradient is where its parameter is
        before, parameter.data = parameter.device, at_home
        if before != at_home.device:
            if grad is not None:
                parameter.grad = grad.to(at_home.device)
            self.moved(parameter)
        self.places[name] = Place(parameter, layout, offset, at_home.data_ptr())

    def settle(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Notice a replaced ``p.data`` or a replaced Parameter: its values move into the slab."""
        place = self.places[name]
        if place.parameter is parameter and parameter.data_ptr() == place.pointer:
            return
        if place.parameter is not parameter and place.parameter.data_ptr() == place.pointer:
            place.parameter.data = place.parameter.data.clone()  # the replaced one keeps its values, on its own
        values = parameter.data
        self._place(name, parameter, place.layout, place.offset)
        self.replaced(parameter, values)

    def nbytes(self) -> int:
        return sum(slab.numel() for slab in self.slabs.values())

    def gradient_slab(self, nbytes: int) -> torch.Tensor:
        """A slab of at least that size that nobody else holds; reused once the old gradients are gone."""
        for old, alone in self._gradients:
            if old.numel() >= nbytes and storage_holders(old) <= alone:
                return old
        self._gradients = [(s, alone) for s, alone in self._gradients if storage_holders(s) > alone]
        slab: torch.Tensor = self.device.arena("host", nbytes)
        self._gradients.append((slab, storage_holders(slab)))
        return slab

    def gradient_nbytes(self) -> int:
        return sum(slab.numel() for slab, _ in self._gradients)
