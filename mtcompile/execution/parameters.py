"""The homes of a model's parameters and gradients between steps: one slab per block, with the parameters as views into it."""

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
class ParameterPlace:
    """One parameter's place at home: ``offset`` bytes into its block's slab. ``pointer``: the address of its data there."""

    parameter: torch.nn.Parameter
    block: str
    layout: Layout
    offset: int
    pointer: int


@dataclass(slots=True)
class Slab:
    """The memory of one block's parameters. ``tier``: where it should be; the next ``adopt`` moves it there."""

    tier: str
    memory: torch.Tensor


class ParameterStore:
    """The homes of one model's parameters.

    ``moved``: called with a parameter that has moved to another device, so that its state can follow. ``replaced``: called with
    a parameter whose ``.data`` was replaced, and with its new values. ``version``: counts decisions that invalidate earlier
    plans.
    """

    def __init__(
        self,
        device: Device,
        moved: Callable[[torch.nn.Parameter], None] = lambda parameter: None,
        replaced: Callable[[torch.nn.Parameter, torch.Tensor], None] = lambda parameter, values: None,
    ) -> None:
        self.device, self.moved, self.replaced = device, moved, replaced
        self.places: dict[str, ParameterPlace] = {}
        self.slabs: dict[str, Slab] = {}  # by block
        self.version = 0
        self._gradients: list[tuple[torch.Tensor, int]] = []  # slab, and its number of holders when only this list holds it

    @property
    def tiers(self) -> dict[str, str]:
        """The home tier of each block."""
        return {block: slab.tier for block, slab in self.slabs.items()}

    def blocks(self) -> dict[str, str]:
        """Returns parameter -> home block."""
        return {name: place.block for name, place in self.places.items()}

    def adopt(self, blocks: Mapping[str, str], tiers: Mapping[str, str], parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Moves every named parameter without a home into its block's slab, and every slab to its tier."""
        new: dict[str, list[str]] = {}
        for name, block in blocks.items():
            if name not in self.places and name in parameters:
                new.setdefault(block, []).append(name)
        for wanted, names in new.items():
            # A block that already has a slab gets another one, on the host: the first program did not plan for it.
            block, tier = (wanted, tiers[wanted]) if wanted not in self.slabs else (f"{wanted}+{len(self.slabs)}", "host")
            offsets, nbytes = {}, 0
            for name in names:
                offsets[name] = nbytes
                nbytes += placed(span_nbytes(parameters[name].data))
            self.slabs[block] = Slab(tier, self._memory(tier, nbytes))
            for name in names:
                self._place(name, parameters[name], block, layout_of(parameters[name].data), offsets[name])
        self._arrange()

    def send_home(self) -> None:
        """Decides that every slab belongs on the host; the next ``adopt`` moves them."""
        for slab in self.slabs.values():
            slab.tier = "host"
        self.version += 1

    def _arrange(self) -> None:
        for block, slab in self.slabs.items():
            if slab.memory.device == self._where(slab.tier):
                continue
            slab.memory = self._memory(slab.tier, slab.memory.numel())
            for name, place in list(self.places.items()):
                if place.block == block:
                    self._place(name, place.parameter, block, place.layout, place.offset)

    def _where(self, tier: str) -> torch.device:
        return self.device.where if tier == "device" else torch.device("cpu")

    def _memory(self, tier: str, nbytes: int) -> torch.Tensor:
        where = self._where(tier)
        return self.device.arena("host" if where.type == "cpu" else "device", nbytes)  # type: ignore[no-any-return]

    def _place(self, name: str, parameter: torch.nn.Parameter, block: str, layout: Layout, offset: int) -> None:
        memory = self.slabs[block].memory
        at_home = (part if memory.device.type == "cpu" else view)(memory, offset, layout)
        at_home.copy_(parameter.data)
        grad = parameter.grad
        if grad is not None and grad.device != at_home.device:
            parameter.grad = None  # a gradient must be on its parameter's device; put back below
        before, parameter.data = parameter.device, at_home
        if before != at_home.device:
            if grad is not None:
                parameter.grad = grad.to(at_home.device)
            self.moved(parameter)
        self.places[name] = ParameterPlace(parameter, block, layout, offset, at_home.data_ptr())

    def restore(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Moves the values of a replaced ``p.data`` or a replaced Parameter into the slab."""
        place = self.places.get(name)
        if place is None or (place.parameter is parameter and parameter.data_ptr() == place.pointer):
            return
        if place.parameter is not parameter and place.parameter.data_ptr() == place.pointer:
            place.parameter.data = place.parameter.data.clone()  # the old Parameter keeps its values, in its own memory
        values = parameter.data
        self._place(name, parameter, place.block, place.layout, place.offset)
        self.replaced(parameter, values)

    def gradient_slab(self, nbytes: int) -> torch.Tensor:
        """Returns a slab of at least that size that nothing else holds. A slab is reused once its gradients are gone."""
        for slab, own_holders in self._gradients:
            if slab.numel() >= nbytes and storage_holders(slab) <= own_holders:
                return slab
        self._gradients = [(s, own_holders) for s, own_holders in self._gradients if storage_holders(s) > own_holders]
        memory: torch.Tensor = self.device.arena("host", nbytes)
        self._gradients.append((memory, storage_holders(memory)))
        return memory
