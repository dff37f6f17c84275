"""The weights of a host that lie there once, with their optimizer state: each of its ranks updates a share of every parameter.

    rank 0   [ update │        │        ]        ranks read any part of a parameter;
    rank 1   [        │ update │        ]        in an update, each writes its share,
    rank 2   [        │        │ update ]        and after it all wait for all

In a backward, an update may begin as soon as its gradients have been combined: every rank of the host has then fetched the old
version for the last time (``check_reads`` proves it of each schedule). All shares are written once all ranks have met after the
backward. In ``optimizer.step()``, ranks meet before the updates and after them (``stepping``).

Of several hosts, each has the weights, and of their state what its ranks update: shares are then those of all ranks, in their
order, and an all-gather brings what other hosts have updated. Or each has a part of the weights, too: memory holds NaN in place
of the others, and a gather behind each read makes them whole (``parts``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.distributed.homes.gathering import PartsOnHosts, WholeLater
from mtcompile.distributed.homes.shared_memory import free_pages
from mtcompile.errors import StepError
from mtcompile.optim.backward.kernels import Backward, update_plain
from mtcompile.optim.disk_state import REMAINDER, Staged
from mtcompile.optim.master_weights import MASTER, Master, Masters
from mtcompile.optim.state_sizes import STATES
from mtcompile.optim.training_state import numbered
from mtcompile.optim.written_update import count_step, flat
from mtcompile.passes.analysis.state import share_length
from mtcompile.runtime.devices.arena import Layout, part
from mtcompile.runtime.optim.operands import joined
from mtcompile.runtime.schedule import placed

_STATES = sorted({*(name for names in STATES.values() for name in names), "max_exp_avg_sq"})


def state_places(parameters: Mapping[str, nn.Parameter], masters: bool) -> tuple[dict[tuple[str, str], int], int]:
    """Returns where each tensor of optimizer state may lie in the memory for it, by parameter and name, and how large that is.
    There is room for all states that an elementwise optimizer may have: memory that nobody writes to takes nothing."""
    offsets, end = dict[tuple[str, str], int](), 0
    for name, parameter in parameters.items():
        for key in (*_STATES, *((REMAINDER,) if masters else ())):
            offsets[name, key] = end
            end += placed(parameter.numel() * max(4, parameter.element_size()))
    return offsets, end


def is_dense(parameter: Tensor) -> bool:
    """Tells whether a parameter's elements lie in memory without gaps, each at a place of its own."""
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()


class HostShares:
    """The homes of one model's parameters that the ranks of a host share. ``memory``: shared, for their optimizer state, which
    lies there at ``offsets``. ``me``: this rank's place among those that update shares: ``here`` on each of ``hosts``, of which
    each has the state of its ranks' shares alone; the pages of all others take nothing."""

    def __init__(self, memory: Tensor, offsets: Mapping[tuple[str, str], int], me: int, here: int, hosts: int) -> None:
        self._memory, self._offsets, self._me, self.here, self.hosts = memory, offsets, me, here, hosts
        self.nonfinite: Mapping[str, bool] = {}
        self.elsewhere: PartsOnHosts | None = None  # the way to the state of other hosts' shares
        self.saving = False  # the first rank writes a checkpoint, and other hosts serve it
        self.names: set[str] = set()  # of the parameters
        self.parts: dict[str, nn.Parameter] = {}  # those of which this host has a part
        self._homes: dict[tuple[str, str], Tensor] = {}
        self._written: list[nn.Parameter] = []
        self._versions: dict[str, tuple[nn.Parameter, int]] = {}
        self._last_keys: dict[int, str] = {}  # of a part in the state_dict that was asked for last, by the parameter's id

    def nbytes(self) -> dict[str, int]:
        """Returns the bytes of optimizer state and of masters that lie here, once for the host."""
        masters = sum(self._nbytes_here(home) for (_, key), home in self._homes.items() if key == REMAINDER)
        return {"optimizer": sum(map(self._nbytes_here, self._homes.values())) - masters, "masters": masters}

    def nbytes_of_all(self) -> dict[str, int]:
        """Returns the same bytes with those that other hosts have."""
        masters = sum(home.nbytes for (_, key), home in self._homes.items() if key == REMAINDER)
        return {"optimizer": sum(home.nbytes for home in self._homes.values()) - masters, "masters": masters}

    def nbytes_elsewhere(self) -> int:
        """Returns the bytes of weights that other hosts alone have."""
        return sum(end - start for parameter in self.parts.values() for start, end in self.elsewhere_in(parameter))

    def _nbytes_here(self, home: Tensor) -> int:
        return self.part_nbytes(home, home.nbytes)

    def part_nbytes(self, like: Tensor, nbytes: int) -> int:
        """Returns this host's part of ``nbytes`` of a parameter's state."""
        own = self.part_of_host(like, self._me // self.here if self.hosts > 1 else 0)
        length: int = own.stop - own.start
        return -(-nbytes * length // max(1, like.numel()))

    def part_of_host(self, like: Tensor, host: int) -> slice:
        """Returns the elements, in their order in memory, that the ranks of a host update."""
        each = self.here * share_length(like.numel(), self.here * self.hosts)
        return slice(min(host * each, like.numel()), min((host + 1) * each, like.numel()))

    # ------------------------------------------------------------------------------------------------------- an update

    def update(self, backward: Backward, grads: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """Updates this rank's share of the parameters that have these gradients. Raises StepError for an optimizer's state that
        is not of the parameter's size."""
        optimizer = backward.optimizer
        backward.has_updated = True
        for name, grad in grads.items():
            parameter = backward.parameters[name]
            masters = backward.masters
            master = None if masters is None else masters.by_parameter.get(id(parameter))
            entry = optimizer.state[parameter]
            backward.allocated_state |= not entry
            own = self._share(parameter)
            if grad.shape != (min(parameter.numel(), share_length(parameter.numel(), self.here * self.hosts)),):
                grad = flat(grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad))[own]
            grad = grad[: own.stop - own.start]  # of these elements alone, as a reduce-scatter leaves it
            self._move_in(name, parameter, entry, master)
            if masters is not None and master is not None:
                scale = 1.0 if factor is None else float(factor)
                group = backward.groups[id(parameter)][1]
                change = masters.staged_update(optimizer, parameter, group, scale, self)
                count_step(optimizer, parameter)
                if own.start < own.stop:
                    change(self._staged(name, parameter, entry, master), grad)
            else:
                staged = self._staged(name, parameter, entry, None)
                update_plain(backward, {name: grad}, factor, staged)
                for key, value in staged.state.items():
                    entry[key] = self._at_home(name, key, parameter, value) if (name, key) in self._offsets else value
            self._written.append(parameter)
            self._versions[name] = parameter, -1

    def _share(self, parameter: Tensor) -> slice:
        """Returns the elements, in their order in memory, that this rank updates."""
        each = share_length(parameter.numel(), self.here * self.hosts)
        return slice(min(self._me * each, parameter.numel()), min((self._me + 1) * each, parameter.numel()))

    def _staged(self, name: str, parameter: nn.Parameter, entry: Mapping[str, Any], master: Master | None) -> Staged:
        own = self._share(parameter)
        values, remainder = flat(parameter.detach())[own], None if master is None else flat(master.remainder)[own]
        state = {key: flat(value)[own] if (name, key) in self._offsets else value for key, value in entry.items()}
        return Staged(name, parameter, own.start, own.stop, values, remainder, state)

    def _move_in(self, name: str, parameter: nn.Parameter, entry: dict[str, Any], master: Master | None) -> None:
        """Puts state that a rank has for itself, such as after load_state_dict, where all of the host have it."""
        self.check_state(name, parameter, entry)
        for key, value in entry.items():
            if isinstance(value, Tensor) and (name, key) in self._offsets and value is not self._homes.get((name, key)):
                like = value if value.stride() == parameter.stride() else _like(parameter, value.dtype).copy_(value)
                entry[key] = self._at_home(name, key, parameter, flat(like)[self._share(parameter)])
        if master is not None and master.remainder is not self._homes.get((name, REMAINDER)):
            values = flat(master.remainder)[self._share(parameter)]
            master.remainder = self._at_home(name, REMAINDER, parameter, values)

    def check_state(self, name: str, parameter: nn.Parameter, entry: Mapping[str, Any]) -> None:
        """Raises StepError for state of a parameter that is not of its size."""
        for key, value in entry.items():
            if isinstance(value, Tensor) and (name, key) in self._offsets and value.shape != parameter.shape:
                raise StepError(f"{name}: expected optimizer state {key} of {tuple(parameter.shape)}, found {value.shape}")

    def _at_home(self, name: str, key: str, like: Tensor, values: Tensor) -> Tensor:
        """Returns the home of a state, with this rank's share of its values there."""
        home = self._home(name, key, like, values.dtype)
        own = flat(home)[self._share(like)]
        if own.data_ptr() != values.data_ptr():
            own.copy_(values)
        return home

    def new_zeros(self, name: str, key: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the home of a state of an fp32 master, with zeros in this rank's share. ``Masters`` asks for it."""
        home = self._home(name, key, like, dtype)
        flat(home)[self._share(like)].zero_()
        return home

    def _home(self, name: str, key: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        home = self._homes.get((name, key))
        if home is None or home.dtype != dtype:
            layout = Layout(dtype, tuple(like.shape), tuple(like.stride()))
            home = self._homes[name, key] = part(self._memory, self._offsets[name, key], layout)
        return home

    # -------------------------------------------------------------------------------------------------- between updates

    def updated(self, masters: Masters | None) -> None:
        """Takes note that all ranks have written their shares."""
        for parameter in self._written:
            if masters is not None:
                masters.wrote(parameter)
        self._written = []
        self._versions = {name: (parameter, parameter._version) for name, (parameter, _) in self._versions.items()}

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Takes the values that these parameters have now as those of all ranks: new homes, or after a load."""
        self._versions |= {name: (p, p._version) for name, p in parameters.items() if name in self.names}

    def check(self) -> None:
        """Raises StepError if this rank has written to a parameter by itself that other ranks of the host read."""
        for name, (parameter, version) in self._versions.items():
            if parameter._version != version and (self.here > 1 or name in self.parts):
                raise StepError(
                    f"{name} was written to between two steps, and lies once for all ranks of the host, so that a write of one "
                    "rank changes it for all, and writes of several add up. Load the weights again (load_state_dict on all "
                    "ranks), and write before the first step; MT_RANKS_SHARE=0 gives each rank weights of its own"
                )

    def give_back(self, entries: Sequence[dict[str, Any]], masters: Masters | None) -> None:
        """Gives optimizer state and remainders memory of their own on this rank."""
        homes = {id(home) for home in self._homes.values()}
        for entry in entries:
            for key, value in entry.items():
                if id(value) in homes:
                    entry[key] = self.whole(value)
        for master in masters or ():
            if id(master.remainder) in homes:
                master.remainder = self.whole(master.remainder)
        self._homes.clear()

    def forget_state(self, entries: Sequence[dict[str, Any]]) -> None:
        """Drops optimizer state of which other hosts have parts that this rank cannot get any longer."""
        homes = {id(home) for home in self._homes.values()}
        for entry in entries:
            if any(id(value) in homes for value in entry.values()):
                entry.clear()
        self._homes.clear()

    # ------------------------------------------------------------------------------- state of which other hosts have parts

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns a copy with the parts of all hosts, where a tensor is a home; all ranks call it. Any other as it is."""
        if not any(tensor is home for home in (*self._homes.values(), *self.parts.values())):
            return tensor
        if self.elsewhere is None:
            return tensor.clone(memory_format=torch.preserve_format)
        return self.elsewhere.whole(tensor.detach(), self._parts_of(tensor))

    def whole_weights(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Puts whole tensors in place of this host's parts into a state_dict of a module, which all ranks ask for; for a
        checkpoint that is written piece by piece, what reads them. Tied weights stay one tensor."""
        own = {id(parameter) for parameter in self.parts.values()}
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in own or prefix + name not in state:
                continue
            key, last = prefix + name, self._last_keys.get(id(parameter), "")
            tied = last != key and last in state
            state[key] = state[last] if tied else self._read(parameter, self._numbers(), None)
            self._last_keys[id(parameter)] = key

    def whole_state_dict(
        self, masters: Mapping[int, Master], optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Puts whole tensors in place of this host's parts into a state_dict, which all ranks ask for; for a checkpoint that is
        written piece by piece, what reads them. ``masters``: by a parameter's id."""
        numbers, entries = self._numbers(), dict(state["state"])
        for index, parameter in numbered(optimizer, state):
            entry, master = entries.get(index, {}), masters.get(id(parameter))
            parts = {key: value for key, value in entry.items() if id(value) in numbers}
            if master is not None and id(master.remainder) in numbers:
                parts[MASTER] = master.remainder
            if parts:
                whole = {key: self._read(home, numbers, parameter if key == MASTER else None) for key, home in parts.items()}
                entries[index] = {**entry, **whole}
        self.release_others()
        return {**state, "state": entries}

    def _read(self, home: Tensor, numbers: Mapping[int, int], high: Tensor | None) -> Tensor | WholeLater:
        """Returns a whole tensor, or what will read it. ``high``: the parameter of a remainder, with which it is joined."""
        if not self.saving:
            whole = self.whole(home)
            return whole if high is None else joined(self.whole(high).detach(), whole)
        return WholeLater(home.detach(), self._reading(home, numbers), None if high is None else self._reading(high, numbers))

    def _reading(self, tensor: Tensor, numbers: Mapping[int, int]) -> Callable[[int, int], Tensor]:
        """Returns a function that reads elements of a tensor, from one to another, in their order in memory."""
        if (number := numbers.get(id(tensor))) is None:
            return lambda start, stop: flat(tensor.detach())[start:stop]
        assert self.elsewhere is not None
        return functools.partial(self.elsewhere.read, number, tensor.detach(), self._parts_of(tensor))

    def _numbers(self) -> dict[int, int]:
        """Returns the place of each tensor, by its id, among those that ``serve`` sends."""
        return {id(tensor): number for number, tensor in enumerate(self._served())}

    def serve(self) -> None:
        """Sends the first rank this host's parts of what it saves."""
        if self.elsewhere is not None:
            self.elsewhere.serve([(home.detach(), self._parts_of(home)) for home in self._served()])

    def _served(self) -> list[Tensor]:
        """Returns what hosts have parts of, in an order that is that of all ranks."""
        return [*(self._homes[key] for key in sorted(self._homes)), *(self.parts[name] for name in sorted(self.parts))]

    def _parts_of(self, home: Tensor) -> Callable[[int], slice]:
        return functools.partial(self.part_of_host, home)

    def own_parts(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this host's elements of those of some parameters that it has a part of."""
        host = self._me // self.here
        return {n: flat(p.detach())[self.part_of_host(p, host)] for n, p in parameters.items() if n in self.parts}

    def elsewhere_in(self, like: Tensor, offset: int = 0) -> list[tuple[int, int]]:
        """Returns the bytes of a tensor, ``offset`` from where they are counted, that are other hosts'."""
        own, width = self.part_of_host(like, self._me // self.here), like.element_size()
        ranges = (offset, offset + own.start * width), (offset + own.stop * width, offset + like.numel() * width)
        return [(start, end) for start, end in ranges if start < end]

    def release_others(self) -> None:
        """Frees the pages that values of other hosts' parts have taken, as a load writes whole tensors."""
        for home in self._homes.values() if self.elsewhere is not None else ():
            for start, end in self.elsewhere_in(home, home.data_ptr()):
                free_pages(start, end)


def _like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
