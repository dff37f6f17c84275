"""Updates of parameters in fragments: the rows of one as their gradient arrives, with the bits of an update of all of it.

The parameter, its state in the optimizer and its master are whole; each update sees rows of them. What is counted once for a
parameter, such as its steps, changes with the last of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.optim.backward.kernels import Backward, coming_on_disk, elements_of, entry_of, update_plain
from mtcompile.optim.disk_state import REMAINDER, DiskState, Homes, OnDisk, Staged
from mtcompile.optim.master_weights import Master, Masters
from mtcompile.optim.written_update import count_step, flat
from mtcompile.passes.step_graph import Fragment
from mtcompile.runtime.devices.arena import zeros_like


@dataclass(slots=True)
class _Begun:
    """A parameter of which some rows have been updated. ``entry``: its state as the last rows leave it; ``apply``: the written
    formula of its master, if it has one; ``counted``: whether its step has been."""

    entry: dict[str, Any] = field(default_factory=dict)
    apply: Callable[[Staged, Tensor], None] | None = None
    counted: bool = False
    rows: int = 0


class FragmentUpdates:
    """The updates of fragments in one backward. ``parts``: the fragments of its step, by name."""

    def __init__(self, parts: Mapping[str, Fragment]) -> None:
        self.parts = parts
        self._begun: dict[str, _Begun] = {}

    def update(self, backward: Backward, grads: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """Updates the rows of fragments that have these gradients."""
        names = [*grads, *backward.coming]
        for place, (name, grad) in enumerate(grads.items(), 1):
            part = self.parts[name]
            parameter = backward.parameters[part.parameter]
            begun = self._begun.setdefault(part.parameter, _Begun())
            begun.rows += part.end - part.start
            ends = begun.rows == len(parameter)
            master = None if backward.masters is None else backward.masters.by_parameter.get(id(parameter))
            on_disk = backward.disk is not None and backward.disk.holds(parameter)
            backward.has_updated |= not on_disk
            if backward.disk is not None and on_disk:
                backward.begin_on_disk(backward.disk, parameter)
                coming = coming_on_disk(backward, backward.disk, names[place:])
                _update_on_disk(backward, backward.disk, begun, (part, master, grad), factor, ends, coming)
            elif backward.masters is not None and master is not None:
                _update_master(backward, backward.masters, begun, (part, master, grad))
            else:
                _update_rows(backward, begun, part, grad, factor)
            if ends:
                if begun.entry:
                    backward.optimizer.state[parameter].update(begun.entry)
                if backward.masters is not None and not on_disk:  # else when it has been written
                    backward.masters.wrote(parameter)
                del self._begun[part.parameter]


def _update_rows(backward: Backward, begun: _Begun, part: Fragment, grad: Tensor, factor: Tensor | None) -> None:
    """Steps the optimizer over rows of a parameter and of its state, which are made where there are none yet."""
    parameter = backward.parameters[part.parameter]
    values = parameter.detach()[part.start : part.end]
    known = backward.optimizer.state.get(parameter) or {}
    state = {key: _rows(value, part) if _is_whole(value, parameter) else value for key, value in entry_of(known).items()}
    staged = Staged(part.parameter, parameter, 0, values.numel(), values, None, state)
    update_plain(backward, {part.parameter: grad}, factor, staged)
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.shape != values.shape:
            begun.entry[key] = value
            continue
        if not isinstance(whole := known.get(key, begun.entry.get(key)), Tensor):
            whole = begun.entry[key] = torch.empty_like(parameter, dtype=value.dtype)
        rows = _rows(whole, part)
        if rows.data_ptr() != value.data_ptr():
            rows.copy_(value)


def _update_master(backward: Backward, masters: Masters, begun: _Begun, rows: tuple[Fragment, Master, Tensor]) -> None:
    """Updates rows of a parameter, of its remainder and of its fp32 state by the written formula."""
    part, master, grad = rows
    parameter = master.parameter
    apply = _written(backward, masters, begun, parameter, _HOST)
    tensors = {k: v for k, v in backward.optimizer.state[parameter].items() if _is_whole(v, parameter)}
    state = {key: flat(_rows(value, part)) for key, value in tensors.items()}
    values, remainder = flat(_rows(parameter.detach(), part)), flat(_rows(master.remainder, part))
    _count(backward, begun, parameter)
    apply(Staged(part.parameter, parameter, 0, values.numel(), values, remainder, state), grad)


def _update_on_disk(
    backward: Backward,
    disk: DiskState,
    begun: _Begun,
    rows: tuple[Fragment, Master | None, Tensor],
    factor: Tensor | None,
    ends: bool,
    coming: Iterator[OnDisk],
) -> None:
    """Updates rows of a parameter on disk, and of its state there, while they are in host memory. ``ends``: all others have
    been updated; ``coming``: what is updated next."""
    part, master, grad = rows
    parameter, grad = backward.parameters[part.parameter], flat(grad)
    if backward.masters is not None and master is not None:
        apply = _written(backward, backward.masters, begun, parameter, disk)
        if not disk.holds(master.remainder):  # of a parameter that was frozen when it went to disk
            master.remainder = disk.write_home(part.parameter, REMAINDER, master.remainder)
        entry: Any = backward.optimizer.state[parameter]
    else:
        entry = begun.entry = entry_of(backward.optimizer.state.get(parameter) or {})
    first, stop = elements_of(part, parameter)

    def change(staged: Staged) -> None:
        if master is not None:
            _count(backward, begun, parameter)
            apply(staged, grad[staged.start - first : staged.stop - first])
        else:
            update_plain(backward, {part.parameter: grad}, factor, staged)

    remainder = None if master is None else master.remainder
    state = OnDisk(part.parameter, parameter, entry, remainder, first, stop, ends)
    disk.update([state], change, coming)


def _written(
    backward: Backward, masters: Masters, begun: _Begun, parameter: nn.Parameter, homes: Homes
) -> Callable[[Staged, Tensor], None]:
    """Returns the written formula of a parameter. ``homes``: of new state."""
    if begun.apply is None:
        backward.allocated_state |= not backward.optimizer.state.get(parameter)
        group = backward.groups[id(parameter)][1]
        begun.apply = masters.staged_update(backward.optimizer, parameter, group, 1.0, homes)
    return begun.apply


def _count(backward: Backward, begun: _Begun, parameter: nn.Parameter) -> None:
    """Counts the step of a parameter up before its first rows are updated by the written formula."""
    if not begun.counted:
        count_step(backward.optimizer, parameter)
        begun.counted = True


class _HostMemory:
    """Ordinary memory for optimizer state."""

    def new_zeros(self, name: str, key: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        return zeros_like(like, dtype)


_HOST = _HostMemory()


def _is_whole(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _rows(value: Tensor, part: Fragment) -> Tensor:
    return value[part.start : part.end]
