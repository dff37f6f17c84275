"""The weights of a host that lie there once, with their optimizer state: each of its ranks updates a share of every parameter.

    rank 0   [ update │        │        ]        ranks read any part of a parameter;
    rank 1   [        │ update │        ]        in an update, each writes its share,
    rank 2   [        │        │ update ]        and after the backward all wait for all

An update may begin as soon as its gradients have been combined: every rank of the host has then fetched the old version for
the last time (``check_reads`` proves it of each schedule). All shares are written once all ranks have met after the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.errors import StepError
from mtcompile.optim.backward_kernels import Backward, update_plain
from mtcompile.optim.disk_state import REMAINDER, Staged
from mtcompile.optim.master_weights import Master, Masters
from mtcompile.optim.state_sizes import STATES
from mtcompile.optim.written_update import flat
from mtcompile.runtime.devices.arena import Layout, part
from mtcompile.runtime.schedule import placed

_STATES = sorted({*(name for names in STATES.values() for name in names), "max_exp_avg_sq"})
_ELEMENTS = 64  # shares begin at multiples, so that vectorised kernels see the same elements together as without shares


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
    lies there at ``offsets``. ``me``: this rank's place among ``count`` of the host."""

    def __init__(self, memory: Tensor, offsets: Mapping[tuple[str, str], int], me: int, count: int) -> None:
        self._memory, self._offsets, self._me, self._count = memory, offsets, me, count
        self._slabs: list[Tensor] = []
        self._homes: dict[tuple[str, str], Tensor] = {}
        self._written: list[nn.Parameter] = []
        self._versions: dict[str, tuple[nn.Parameter, int]] = {}

    def add(self, slab: Tensor) -> None:
        """Takes memory that all ranks of the host have weights in, and write to."""
        self._slabs.append(slab)

    def holds(self, tensor: Tensor) -> bool:
        """Tells whether a parameter lies in such memory."""
        start = tensor.data_ptr()
        return any(slab.data_ptr() <= start < slab.data_ptr() + slab.numel() for slab in self._slabs)

    def nbytes(self) -> dict[str, int]:
        """Returns the bytes of optimizer state and of masters that lie here, once for the host."""
        masters = sum(home.nbytes for (_, key), home in self._homes.items() if key == REMAINDER)
        return {"optimizer": sum(home.nbytes for home in self._homes.values()) - masters, "masters": masters}

    # ------------------------------------------------------------------------------------------------------- an update

    def update(self, backward: Backward, grads: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """Updates this rank's share of the parameters that have these gradients. Raises StepError for an optimizer's state that
        is not of the parameter's size."""
        optimizer = backward.optimizer
        for name, grad in grads.items():
            parameter = backward.parameters[name]
            masters = backward.masters
            master = None if masters is None else masters.by_parameter.get(id(parameter))
            entry = optimizer.state[parameter]
            backward.allocated_state |= not entry
            own = self._share(parameter)
            grad = grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)
            self._move_in(name, parameter, entry, master)
            if masters is not None and master is not None:
                scale = 1.0 if factor is None else float(factor)
                group = backward.groups[id(parameter)][1]
                change = masters.staged_update(optimizer, parameter, group, scale, self)
                if own.start < own.stop:
                    change(self._staged(name, parameter, entry, master), grad)
            else:
                staged = self._staged(name, parameter, entry, None)
                update_plain(backward, {name: flat(grad)[own]}, factor, staged)
                for key, value in staged.state.items():
                    entry[key] = self._at_home(name, key, parameter, value) if (name, key) in self._offsets else value
            self._written.append(parameter)
            self._versions[name] = parameter, -1

    def _share(self, parameter: Tensor) -> slice:
        """Returns the elements, in their order in memory, that this rank updates."""
        each = -(-parameter.numel() // (self._count * _ELEMENTS)) * _ELEMENTS
        return slice(min(self._me * each, parameter.numel()), min((self._me + 1) * each, parameter.numel()))

    def _staged(self, name: str, parameter: nn.Parameter, entry: Mapping[str, Any], master: Master | None) -> Staged:
        own = self._share(parameter)
        values, remainder = flat(parameter.detach())[own], None if master is None else flat(master.remainder)[own]
        state = {key: flat(value)[own] if (name, key) in self._offsets else value for key, value in entry.items()}
        return Staged(name, parameter, own.start, own.stop, values, remainder, state)

    def _move_in(self, name: str, parameter: nn.Parameter, entry: dict[str, Any], master: Master | None) -> None:
        """Puts state that a rank has for itself, such as after load_state_dict, where all of the host have it."""
        for key, value in entry.items():
            if isinstance(value, Tensor) and (name, key) in self._offsets and value is not self._homes.get((name, key)):
                if value.shape != parameter.shape:
                    raise StepError(f"{name}: expected optimizer state {key} of {tuple(parameter.shape)}, found {value.shape}")
                like = value if value.stride() == parameter.stride() else _like(parameter, value.dtype).copy_(value)
                entry[key] = self._at_home(name, key, parameter, flat(like)[self._share(parameter)])
        if master is not None and master.remainder is not self._homes.get((name, REMAINDER)):
            values = flat(master.remainder)[self._share(parameter)]
            master.remainder = self._at_home(name, REMAINDER, parameter, values)

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
        self._versions |= {name: (p, p._version) for name, p in parameters.items() if self.holds(p)}

    def check(self) -> None:
        """Raises StepError if this rank has written to a parameter by itself."""
        for name, (parameter, version) in self._versions.items():
            if parameter._version != version:
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
                    entry[key] = value.clone(memory_format=torch.preserve_format)
        for master in masters or ():
            if id(master.remainder) in homes:
                master.remainder = master.remainder.clone(memory_format=torch.preserve_format)
        self._homes.clear()


def _like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
