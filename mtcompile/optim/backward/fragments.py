"""Updates of parameters in fragments: the rows of one as their gradient arrives, with the bits of an update of all of it.

The parameter, its state in the optimizer and its master are whole; each update sees rows of them. What is counted once for a
parameter, such as its steps, changes with the last of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.optim.backward.kernels import Backward, update_plain
from mtcompile.optim.disk_state import Staged
from mtcompile.optim.master_weights import Master, Masters
from mtcompile.optim.written_update import flat
from mtcompile.passes.step_graph import Fragment


@dataclass(slots=True)
class _Begun:
    """A parameter of which some rows have been updated. ``entry``: its state as the last rows leave it; ``apply``: the written
    formula of its master, if it has one."""

    entry: dict[str, Any] = field(default_factory=dict)
    apply: Callable[[Staged, Tensor], None] | None = None
    rows: int = 0


class FragmentUpdates:
    """The updates of fragments in one backward. ``parts``: the fragments of its step, by name."""

    def __init__(self, parts: Mapping[str, Fragment]) -> None:
        self.parts = parts
        self._begun: dict[str, _Begun] = {}

    def update(self, backward: Backward, grads: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """Updates the rows of fragments that have these gradients."""
        for name, grad in grads.items():
            part = self.parts[name]
            parameter = backward.parameters[part.parameter]
            begun = self._begun.setdefault(part.parameter, _Begun())
            master = None if backward.masters is None else backward.masters.by_parameter.get(id(parameter))
            if backward.masters is not None and master is not None:
                _update_master(backward, backward.masters, begun, (part, master, grad))
            else:
                _update_rows(backward, begun, part, grad, factor)
            begun.rows += part.end - part.start
            if begun.rows == len(parameter):
                backward.optimizer.state[parameter].update(begun.entry)
                if backward.masters is not None:
                    backward.masters.wrote(parameter)
                del self._begun[part.parameter]


def _update_rows(backward: Backward, begun: _Begun, part: Fragment, grad: Tensor, factor: Tensor | None) -> None:
    """Steps the optimizer over rows of a parameter and of its state, which are made where there are none yet."""
    parameter = backward.parameters[part.parameter]
    values = parameter.detach()[part.start : part.end]
    known = backward.optimizer.state.get(parameter) or {}
    state = {
        key: value if not isinstance(value, Tensor) else _rows(value, part) if _is_whole(value, parameter) else value.clone()
        for key, value in known.items()
    }
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
    parameter, optimizer = master.parameter, backward.optimizer
    if begun.apply is None:
        group = backward.groups[id(parameter)][1]
        backward.allocated_state |= not optimizer.state.get(parameter)
        begun.apply = masters.staged_update(optimizer, parameter, group, 1.0, _HOST)
    tensors = {k: v for k, v in optimizer.state[parameter].items() if isinstance(v, Tensor) and _is_whole(v, parameter)}
    state = {key: flat(_rows(value, part)) for key, value in tensors.items()}
    values, remainder = flat(_rows(parameter.detach(), part)), flat(_rows(master.remainder, part))
    begun.apply(Staged(part.parameter, parameter, 0, values.numel(), values, remainder, state), grad)


class _HostMemory:
    """Ordinary memory for optimizer state."""

    def new_zeros(self, name: str, key: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)


_HOST = _HostMemory()


def _is_whole(value: Tensor, parameter: nn.Parameter) -> bool:
    return value.shape == parameter.shape


def _rows(value: Tensor, part: Fragment) -> Tensor:
    return value[part.start : part.end]
