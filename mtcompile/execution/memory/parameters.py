"""The homes of a model's parameters and gradients between steps: one slab per block, with the parameters as views into it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from mtcompile import knobs
from mtcompile.errors import StepError
from mtcompile.execution.memory.ahead import PinnedAhead, surely_at_home
from mtcompile.execution.memory.host_room import host_arena
from mtcompile.passes.step_graph import span_nbytes
from mtcompile.runtime.devices.arena import Layout, layout_of, part, view
from mtcompile.runtime.devices.joining import Slabs
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.disk.direct import DirectReader
from mtcompile.runtime.disk.requests import whole_blocks
from mtcompile.runtime.disk.store import DiskStore
from mtcompile.runtime.pages import give_back
from mtcompile.runtime.schedule import placed
from mtcompile.torch_private import on_device, shares_storage, storage_holders, storage_id

_MOST_KEPT = 64 << 20  # bytes of freed memory that need not go back to the system


@dataclass(slots=True)
class ParameterPlace:
    """One parameter's place. ``home``: its bytes in its block's slab, ``offset`` bytes from the start; None for a parameter
    that has stayed in the user's memory from the start. ``pointer``: the address of its data, at home or in the user's memory.
    ``version``: of a parameter on disk, its version counter when its checksums were taken.
    """

    parameter: torch.nn.Parameter
    block: str
    home: torch.Tensor | None
    offset: int
    pointer: int
    name: str = ""
    version: int = -1


@dataclass(slots=True)
class Slab:
    """The memory of one block's parameters. ``tier``: where it should be; the next ``adopt`` moves it there. ``common``: other
    processes have the parameters there too; ``together``: and see what this one writes; ``parts``: other hosts have parts."""

    tier: str
    memory: torch.Tensor
    common: bool = False
    together: bool = False
    parts: bool = False


Fill = Callable[[torch.Tensor], None]


class ParameterStore:
    """The homes of one model's parameters.

    A parameter moves into its block's slab only if nothing else holds its memory. If other tensors share it (weights tied by
    storage, buffers that are views, backups of ``p.data``), it stays where it is, on the host: they go on seeing each other.

    ``moved``: called with a parameter that has moved to another device, so that its state can follow. ``to_disk``: the same of
    disk. ``replaced``: called with a parameter whose ``.data`` was replaced, and with its new values. ``version``: counts
    decisions that invalidate earlier plans. ``provisional``: True while the homes are those of a model that no program has been
    planned for. ``residents_may_leave``: True while a plan is made that decides anew which blocks on the device stay there.
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
        self.provisional = self.residents_may_leave = False
        self.disk: DiskStore | None = None
        self.direct: DirectReader | None = None  # what reads the disk straight to the device
        self.direct_works: bool | None = None  # None: not tried
        self.ahead = PinnedAhead(device)
        self.to_disk: Callable[[str, torch.nn.Parameter], None] = lambda name, parameter: None
        # Makes the slab of a block at home on the host that processes have in common, with what a function writes to it; None:
        # this process has the block for itself.
        self.common: Callable[[Mapping[str, torch.nn.Parameter], int, Fill], Slab | None] = lambda block, nbytes, fill: None
        self._gradients: list[tuple[torch.Tensor, int]] = []  # slab, and its number of holders when only this list holds it

    @property
    def tiers(self) -> dict[str, str]:
        """The home tier of each block."""
        return {block: slab.tier for block, slab in self.slabs.items()}

    @property
    def settled_tiers(self) -> dict[str, str]:
        """The home tier of each block that is not a plan's to decide."""
        return {block: tier for block, tier in self.tiers.items() if tier != "device" or not self.residents_may_leave}

    def blocks(self) -> dict[str, str]:
        """Returns parameter -> home block."""
        return {name: place.block for name, place in self.places.items()}

    def unread_nbytes(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        homes: Collection[str],
        optimizer: torch.optim.Optimizer | None,
    ) -> int:
        """Returns the host bytes of the parameters that a step does not read, with their gradients and state. ``homes``: the
        names of those that it reads."""
        total = 0
        for name, parameter in parameters.items():
            place = self.places.get(name)
            if name not in homes and (place is None or self.slabs[place.block].tier == "host"):
                entry = {} if optimizer is None else optimizer.state.get(parameter, {})
                held = (parameter, parameter.grad, *entry.values())
                total += sum(each.nbytes for each in held if isinstance(each, torch.Tensor) and each.device.type == "cpu")
        return total

    def pin_ahead(
        self, blocks: Mapping[str, str], parameters: Mapping[str, torch.nn.Parameter], device_nbytes: int | None, most: int
    ) -> None:
        """Starts to pin as much memory as every plan will have for blocks at home on the host, up to ``most`` bytes."""
        sizes = [offsets_in_slab(names, parameters, "host")[1] for names in self._without_home(blocks, parameters).values()]
        self.ahead.begin(surely_at_home(sizes, device_nbytes, most))

    def adopt(self, blocks: Mapping[str, str], tiers: Mapping[str, str], parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Moves every named parameter without a home into its block's slab, and every slab to its tier."""
        self._let_leave(tiers)
        kept = 0  # bytes that the C library may keep of what parameters had
        for wanted, names in self._without_home(blocks, parameters).items():
            # A block that already has a slab gets another one, on the host: the first program did not plan for it.
            block, tier = (wanted, tiers[wanted]) if wanted not in self.slabs else (f"{wanted}+{len(self.slabs)}", "host")
            offsets, nbytes = offsets_in_slab(names, parameters, tier)
            slab = None
            if tier == "host" and nbytes > 0:
                fill = functools.partial(_write_all, offsets, parameters)
                slab = self.common({name: parameters[name] for name in names}, nbytes, fill)
            filled = slab is not None
            self.slabs[block] = Slab(tier, self._memory(tier, nbytes)) if slab is None else slab
            for name in names:
                parameter = parameters[name]
                self.places[name] = ParameterPlace(parameter, block, None, 0, parameter.data_ptr(), name)
                if name in offsets:
                    self._give_home(self.places[name], layout_of(parameter.data), offsets[name])
                    self._move_in(self.places[name], filled)
            kept += nbytes
            if kept > _MOST_KEPT:
                give_back()
                kept = 0
        for block, slab in self.slabs.items():
            if slab.tier == "host" and tiers.get(block) == "disk":
                self._send_to_disk(block, slab)
        self._arrange()

    def _let_leave(self, tiers: Mapping[str, str]) -> None:
        """Decides that the blocks on the device that may leave it do so, but for those that ``tiers`` has there."""
        for block in self.slabs.keys() - self.settled_tiers.keys():
            if tiers.get(block) != "device":
                self.slabs[block].tier, self.version = "host", self.version + 1
        self.residents_may_leave = False

    def may_go_to_disk(self, block: str, passing: Iterable[torch.Tensor]) -> bool:
        """Tells whether a block at home on the host may move: whether all of it is there, and nobody else sees its memory.
        ``passing``: tensors that will be gone when it moves."""
        places = [place for place in self.places.values() if place.block == block]
        if not places or not all(_is_at(place.parameter, place.home) for place in places):
            return False
        storage = storage_id(places[0].parameter)
        return not self._held_elsewhere(places[0], sum(storage_id(tensor) == storage for tensor in passing))

    def _send_to_disk(self, block: str, slab: Slab) -> None:
        """Moves a block from the host to disk. Steps that are compiled already would still count it on the host. After a
        DiskError, what has not moved is where it was, and all of it counts as on the host."""
        places = [(place, place.home) for place in self.places.values() if place.block == block and place.home is not None]
        offsets = [0, *itertools.accumulate(whole_blocks(span_nbytes(home)) for _, home in places)]
        memory = self._memory("disk", offsets[-1])
        slab.tier, slab.memory, self.version = "disk", memory, self.version + 1
        for (place, home), offset in zip(places, offsets, strict=False):
            earlier = place.offset
            self._give_home(place, layout_of(home), offset)
            try:
                self._move_in(place)
            except BaseException:
                slab.tier, place.home, place.offset = "host", home, earlier
                raise

    @property
    def has_residents(self) -> bool:
        return any(slab.tier == "device" for slab in self.slabs.values())

    def tiers_at_home(self) -> dict[int, str]:
        """Returns the ids of the parameters that are at home -> their home's tier. The store holds their memory too."""
        at_home = (place for place in self.places.values() if _is_at(place.parameter, place.home))
        return {id(place.parameter): self.slabs[place.block].tier for place in at_home}

    def resident_nbytes(self) -> int:
        """Returns the bytes of all slabs on the device."""
        return sum(slab.memory.numel() for slab in self.slabs.values() if slab.tier == "device")

    def forget(self, blocks: Iterable[str] | None = None) -> None:
        """Gives the parameters of ``blocks``, or of all, memory of their own on the host again, for a program that decides
        anew. A block keeps its home if somebody else sees its memory: they go on seeing each other."""
        for block in list(self.slabs if blocks is None else blocks):
            places = {name: place for name, place in self.places.items() if place.block == block}
            if any(self._held_elsewhere(place) for place in places.values()):
                continue
            for name, place in places.items():
                if _is_at(place.parameter, place.home):
                    values = place.parameter.data
                    own = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype)
                    self._point(place.parameter, own.copy_(values))
                del self.places[name]
            del self.slabs[block]
            self.version += 1
        self.provisional = False

    def separate_frozen(self) -> None:
        """Takes frozen parameters that lie with others that train out of their homes on the host, and these too."""
        mixed: dict[str, set[bool]] = {}
        for place in self.places.values():
            mixed.setdefault(place.block, set()).add(place.parameter.requires_grad)
        self.forget([block for block, kinds in mixed.items() if len(kinds) > 1 and self.slabs[block].tier == "host"])

    def release(self) -> None:
        """Lets go of all memory. Parameters keep what they have there."""
        self.places.clear()
        self.slabs.clear()
        self._gradients.clear()
        self.disk = self.direct = None
        self.version += 1

    def send_home(self) -> None:
        """Moves every slab on the device to the host."""
        self.residents_may_leave = True
        self.adopt({}, {}, {})

    def _arrange(self) -> None:
        for block, slab in self.slabs.items():
            if slab.memory.device == self._where(slab.tier):
                continue
            slab.memory = self._memory(slab.tier, slab.memory.numel())
            for place in self.places.values():
                if place.block == block and (home := place.home) is not None:
                    at_home = place.pointer == home.data_ptr()
                    self._give_home(place, layout_of(home), place.offset)
                    if at_home:
                        self._move_in(place)

    def _where(self, tier: str) -> torch.device:
        return self.device.where if tier == "device" else torch.device("cpu")

    def _memory(self, tier: str, nbytes: int) -> torch.Tensor:
        if tier == "disk":
            assert self.disk is not None, "whoever plans for a disk opens its store"
            return torch.frombuffer(self.disk.map(nbytes), dtype=torch.uint8)
        if self._where(tier).type != "cpu":
            return self.device.arena("device", nbytes)  # type: ignore[no-any-return]
        if (pinned := self.ahead.take(nbytes)) is not None:
            return pinned
        return host_arena(self.device, nbytes, "the weights of a block", 'pass disk="/path:SIZE"')

    def _without_home(self, blocks: Mapping[str, str], parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, list[str]]:
        """Returns the parameters that have no home yet, by the block where they will."""
        names: dict[str, list[str]] = {}
        for name, block in blocks.items():
            if name not in self.places and name in parameters:
                names.setdefault(block, []).append(name)
        return names

    def _give_home(self, place: ParameterPlace, layout: Layout, offset: int) -> None:
        memory = self.slabs[place.block].memory
        place.home = (part if memory.device.type == "cpu" else view)(memory, offset, layout)
        place.offset = offset

    def _move_in(self, place: ParameterPlace, filled: bool = False) -> None:
        """Moves a parameter's values home. ``filled``: they are there."""
        parameter, home = place.parameter, place.home
        assert home is not None
        if self.slabs[place.block].tier == "disk" and self.disk is not None:
            values = parameter.data.cpu()
            self.disk.write([(values.data_ptr(), home.data_ptr(), span_nbytes(values), place.name)])
            place.version = parameter._version
        elif not filled:
            home.copy_(parameter.data)
        self._point(parameter, home)
        place.pointer = home.data_ptr()
        if self.slabs[place.block].tier == "disk":
            self.to_disk(place.name, parameter)

    def _point(self, parameter: torch.nn.Parameter, memory: torch.Tensor) -> None:
        """Lets a parameter be the values that ``memory`` has."""
        grad = parameter.grad
        if grad is not None and grad.device != memory.device:
            parameter.grad = None  # a gradient must be on its parameter's device; put back below
        before, parameter.data = parameter.device, memory
        if before != memory.device:
            if grad is not None:
                parameter.grad = on_device(grad, memory)
            self.moved(parameter)

    def restore(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Takes a replaced ``p.data`` or a replaced Parameter: its values move home, unless another tensor shares its memory or
        that of the home. Then the parameter stays in the memory that the user gave it."""
        place = self.places.get(name)
        if place is None:
            return
        if place.parameter is parameter and parameter.data_ptr() == place.pointer:
            self._note_writes(place)
            return
        if self.slabs[place.block].together:
            raise StepError(
                f"{name} was replaced by another tensor, and lies once for all ranks of the host; expected the same one. Load "
                "the values with load_state_dict on all ranks; MT_RANKS_SHARE=0 gives each rank weights of its own"
            )
        values, earlier, place.parameter = parameter.data, place.parameter, parameter
        wanted = self._where(self.slabs[place.block].tier)
        back = _is_at(parameter, place.home)
        if not back and self._may_move_in(place, earlier):
            self._move_in(place)
        elif back or values.device == wanted:
            place.pointer = parameter.data_ptr()
        else:
            raise StepError(
                f"{name} was replaced by a tensor on {values.device} that other tensors share; expected one on {wanted}, "
                "where the plan keeps it. Copy the values instead: p.data.copy_(values)"
            )
        self.replaced(parameter, values)

    def wrote(self, name: str) -> None:
        """Takes note that a parameter on disk has been written with its checksums."""
        self.places[name].version = self.places[name].parameter._version

    def _note_writes(self, place: ParameterPlace) -> None:
        """Takes the checksum of a parameter on disk that the user has written to since the last look."""
        disk, version = self.disk, place.parameter._version
        if disk is not None and version != place.version and knobs.disk_verified() and disk.place_of(place.pointer) is not None:
            disk.note(place.pointer, span_nbytes(place.parameter.data), place.name)
            place.version = version

    def _may_move_in(self, place: ParameterPlace, earlier: torch.nn.Parameter) -> bool:
        if place.home is None or shares_storage(place.parameter, 2) or layout_of(place.parameter.data) != layout_of(place.home):
            return False
        if earlier is not place.parameter and _is_at(earlier, place.home):
            if self._held_elsewhere(place, 1):
                return False
            earlier.data = earlier.data.clone()  # the old Parameter keeps its values, in its own memory
        return not self._held_elsewhere(place)

    def held_elsewhere(self, tier: str) -> bool:
        """Tells whether a tensor of the user's shares memory with a home in that tier."""
        places = [place for place in self.places.values() if self.slabs[place.block].tier == tier]
        return any(self._held_elsewhere(place) for place in places)

    def _held_elsewhere(self, place: ParameterPlace, others: int = 0) -> bool:
        """Tells whether a tensor beside the slab, its homes, the parameters at these, and ``others``, shares memory with the
        home of ``place``. A parameter that was tied to another one's home is such a tensor."""
        if place.home is None:
            return False
        tensors = [self.slabs[place.block].memory]
        for each in self.places.values():
            if each.block == place.block and each.home is not None:
                tensors += [each.home, each.parameter] if _is_at(each.parameter, each.home) else [each.home]
        storage = storage_id(place.home)
        return shares_storage(place.home, others + sum(storage_id(tensor) == storage for tensor in tensors))

    def memories(self) -> Slabs:
        """Returns the slabs on the host, by address."""
        return Slabs(slab.memory for slab in self.slabs.values() if slab.tier == "host" and slab.memory.device.type == "cpu")

    def gradient_slab(self, nbytes: int) -> torch.Tensor:
        """Returns a slab of at least that size that nothing else holds. A slab is reused once its gradients are gone."""
        for slab, own_holders in self._gradients:
            if slab.numel() >= nbytes and storage_holders(slab) <= own_holders:
                return slab
        self._gradients = [(s, own_holders) for s, own_holders in self._gradients if storage_holders(s) > own_holders]
        memory = host_arena(self.device, nbytes, "gradients", 'pass update="backward", which holds none')
        self._gradients.append((memory, storage_holders(memory)))
        return memory


def offsets_in_slab(
    names: Iterable[str], parameters: Mapping[str, torch.nn.Parameter], tier: str
) -> tuple[dict[str, int], int]:
    """Returns where the parameters of a block lie in its slab, and the slab's bytes. What shares memory stays out of it."""
    offsets, nbytes = dict[str, int](), 0
    for name in names:
        if not shares_storage(parameters[name]):
            offsets[name], span = nbytes, span_nbytes(parameters[name].data)
            nbytes += whole_blocks(span) if tier == "disk" else placed(span)
    return offsets, nbytes


def _write_all(offsets: Mapping[str, int], parameters: Mapping[str, torch.nn.Parameter], memory: torch.Tensor) -> None:
    """Writes the values of parameters to memory, each so many bytes from its start."""
    for name, offset in offsets.items():
        values = parameters[name].data
        part(memory, offset, layout_of(values)).copy_(values)


def _is_at(parameter: torch.Tensor, home: torch.Tensor | None) -> bool:
    return home is not None and parameter.data_ptr() == home.data_ptr()
