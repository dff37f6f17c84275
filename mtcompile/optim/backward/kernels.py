"""The kernels of a backward with updates: gradient norms, the clipping factor, and the updates of a region's parameters.

Each kernel takes the running backward, the names of the parameters, and the tensors of its instruction; it returns the tensors
that the instruction writes.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mtcompile.errors import StepError
from mtcompile.optim.backward.finite import DeviceFlags
from mtcompile.optim.disk_state import REMAINDER, DiskState, OnDisk, Staged
from mtcompile.optim.master_weights import Copy, Fetched, Masters
from mtcompile.optim.update_options import UpdateOptions
from mtcompile.optim.written_update import Row, count_step, norm_in_fp32
from mtcompile.passes.step_graph import Fragment, fetch_state, gradient_norms, gradient_scale, update
from mtcompile.runtime.optim import host_kernels
from mtcompile.torch_private import Clipping, gradient_norm, total_norm


class Shares(Protocol):
    """Parameters of which this process updates a share. ``nonfinite``: by the name of each whose gradient it has in that share
    alone, whether any process has found there what is not finite."""

    nonfinite: Mapping[str, bool]

    @property
    def names(self) -> Collection[str]:
        """The names of the parameters."""

    def update(self, backward: Backward, grads: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """Updates this process's share of the parameters that have these gradients."""


class InFragments(Protocol):
    """Parameters that are updated in fragments. ``parts``: the fragments, by name."""

    parts: Mapping[str, Fragment]

    def update(self, backward: Backward, grads: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """Updates the fragments that have these gradients."""


_NOTHING, _OTHERS = "nothing was changed", "other weights have been updated"


@dataclass(slots=True)
class Backward:
    """One backward with updates: what it started from, then what has happened in it.

    ``number``: of the step, from 1. ``parameters``: those of the optimizer, in the model's order. ``trained``: those among them
    that have a gradient, and are updated. ``groups``: by a parameter's
    id, the index of its group in the optimizer and the group's options as they were at the start. ``threads``: of the caller,
    whatever thread the backward runs in. ``disk``: of parameters that are there; ``shares``: of those that lie once for all
    ranks of the host; ``fragments``: of those that are updated in fragments. ``coming``: the parameters and fragments that the
    host updates after those of its current update, in order. ``has_updated``: whether anything but what is on disk has
    changed. ``entries``: of parameters on disk whose updates have begun, their entries in the optimizer before;
    ``carried_nbytes``: of the disk, then. ``clipping``: for a loop that clips; ``notes_norms``: whether it wants norms of
    gradients whose updates do not need them. ``sums``: by the names of parameters, of gradients of backwards before this one in
    its step; ``added``: the parameters and fragments whose gradients are in them now. ``fetched``: by names,
    parameters at home on the host that have come to the device for their update. ``flags``: of the device, where it runs behind
    its threads; ``flagged``: of parameters whose updates there read them, their entries in the optimizer before.
    """

    number: int
    options: UpdateOptions
    optimizer: torch.optim.Optimizer
    masters: Masters | None
    parameters: dict[str, nn.Parameter]
    groups: dict[int, tuple[int, Mapping[str, Any]]]
    threads: int
    grad_norm: float | None = None
    trained: Mapping[str, nn.Parameter] = field(default_factory=dict)
    has_updated: bool = False
    skips: bool = False
    warned: bool = False
    allocated_state: bool = False
    disk: DiskState | None = None
    shares: Shares | None = None
    fragments: InFragments | None = None
    coming: Sequence[str] = ()
    entries: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    clipping: Clipping = field(default_factory=Clipping)
    notes_norms: bool = False
    carried_nbytes: int = 0
    fetched: dict[tuple[str, ...], list[Fetched]] = field(default_factory=dict)
    flags: DeviceFlags | None = None
    flagged: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)

    def stop_if_refused(self, wait: bool = False) -> None:
        """Raises StepError for a loss, or a gradient on the device, whose flag is at home and says that it may not be used; or
        warns, as asked. ``wait``: for all flags."""
        if (flags := self.flags) is None:
            return
        if wait:
            flags.wait()
        flags.check_losses()
        if (wait or self.options.nonfinite == "stop") and (name := flags.first()) is not None:
            self._note_updated(flags.outcome()[0])
            _stop_or_warn(self, name)

    def _note_updated(self, changed: bool) -> None:
        if changed:  # not |=, beside threads that set it
            self.has_updated = True

    def end_flags(self) -> None:
        """Notes whether updates on the device have changed anything, once all that was issued there has run."""
        if self.flags is not None:
            try:
                self.flags.wait()
                changed, forbidden = self.flags.outcome()
                self._note_updated(changed)
                unchanged = [self.parameters[name] for name in forbidden]
                self._put_back({parameter: self.flagged[parameter] for parameter in unchanged if parameter in self.flagged})
            except RuntimeError:  # the device has failed
                self._note_updated(bool(self.flagged))
            self.flags.end()
            self.flags = None

    def begin_on_disk(self, disk: DiskState, parameter: nn.Parameter) -> None:
        """Notes that an update of a parameter on disk begins."""
        if not self.entries:
            self.carried_nbytes = disk.store.carried_nbytes
        self.entries.setdefault(parameter, entry_of(self.optimizer.state.get(parameter) or {}))

    def undo(self) -> bool:
        """Puts entries in the optimizer back if nothing has been changed but these. Tells whether that is so. No write is under
        way."""
        carried = self.disk is not None and self.entries and self.disk.store.carried_nbytes != self.carried_nbytes
        self.end_flags()
        if self.has_updated or carried:
            return False
        self._put_back(self.flagged | self.entries)
        self.entries.clear()
        self.flagged.clear()
        return True

    def _put_back(self, entries: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        for parameter, entry in entries.items():
            if entry:
                self.optimizer.state[parameter].clear()
                self.optimizer.state[parameter].update(entry)
            else:
                self.optimizer.state.pop(parameter, None)


def summed(backward: Backward, names: Sequence[str], grads: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of a whole step: each is added to those of backwards before, in place, once."""
    parts = {} if backward.fragments is None else backward.fragments.parts
    whole = []
    for name, grad in zip(names, grads, strict=True):
        part = parts.get(name)
        held = backward.sums.get(name if part is None else part.parameter)
        if held is not None:
            held = held if part is None else held[part.start : part.end]
            if name not in backward.added:
                held.add_(grad)
                backward.added.add(name)
        whole.append(grad if held is None else held)
    return whole


def entry_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter's entry in an optimizer as it is now: what is counted, such as steps, is a copy."""
    return {key: value.clone() if isinstance(value, Tensor) and not value.dim() else value for key, value in state.items()}


def _norms(backward: Backward, names: tuple[str, ...], *grads: Tensor) -> tuple[Tensor]:
    """Each gradient's norm as torch.nn.utils.clip_grad_norm_ has it, except that it is fp32 where there are fp32 masters."""
    return (_norms_of(backward, summed(backward, names, grads)),)


def _norms_of(backward: Backward, grads: Sequence[Tensor]) -> Tensor:
    result = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    norm = gradient_norm if backward.masters is None else norm_in_fp32
    return torch.stack([norm(g).to(result) for g in grads])


def _clip_factor(backward: Backward, names: tuple[str, ...], *norms: Tensor) -> tuple[Tensor]:
    """``max_grad_norm`` over the norm of all gradients, at most 1; summed in the order of the model's parameters, as torch's
    clip_grad_norm_ does it where there are no fp32 masters."""
    limit = backward.options.max_grad_norm
    joined = torch.cat(norms)
    by_name = dict(zip(names, joined, strict=True))
    wide = backward.masters is not None
    parameters = {name: p.detach() for name, p in backward.parameters.items() if name in by_name}
    own = {name: by_name[name] if wide else by_name[name].to(p.dtype) for name, p in parameters.items()}
    if wide:
        total = torch.linalg.vector_norm(torch.stack([*own.values()]))
    else:
        total = total_norm([*own.values()], [*parameters.values()]).cpu()
    backward.grad_norm = float(total)
    values = dict(zip(names, joined.tolist(), strict=True))  # all at once: a device is waited for
    backward.clipping.norms.update({name: (values[name], norm.dtype, norm.device) for name, norm in own.items()})
    if not math.isfinite(backward.grad_norm):
        first = next((name for name in names if not math.isfinite(float(by_name[name]))), names[0])
        _handle_nonfinite(backward, first, _NOTHING)
    backward.clipping.skips = backward.skips
    if limit is None:
        return (joined.new_ones(()),)
    factor = (limit / (total + 1e-6)).clamp(max=1.0).to(joined.dtype)
    backward.clipping.factor = float(factor)
    return (factor,)


def _note_norms(backward: Backward, names: tuple[str, ...], grads: Sequence[Tensor]) -> None:
    """Notes the norms of gradients that are about to be used; that of fragments, of their parameter. Only numbers: tensors
    would take up memory until the step."""
    noted, parts = backward.clipping.norms, {} if backward.fragments is None else backward.fragments.parts
    for name, norm in zip(names, _norms_of(backward, grads).cpu(), strict=True):
        whole = parts[name].parameter if name in parts else name
        if whole in noted:
            norm = torch.linalg.vector_norm(torch.stack([norm.new_tensor(noted[whole][0]), norm]))
        dtype = norm.dtype if backward.masters is not None else backward.parameters[whole].dtype
        noted[whole] = float(norm.to(dtype)), dtype, norm.device


def _handle_nonfinite(backward: Backward, name: str, changed: str) -> None:
    """Stop, skip or go on as asked. ``name``: the first parameter that was found whose gradient is not finite: the host
    and the device look at theirs side by side."""
    nonfinite = backward.options.nonfinite
    if nonfinite == "stop":
        raise StepError(
            f"the gradient of {name} is not finite, the first that was found; {changed}. Lower the learning rate or clip "
            '(max_grad_norm=), or pass nonfinite="skip" or "continue"'
        )
    backward.skips = nonfinite == "skip"
    if not backward.warned:
        backward.warned = True
        effect = "this step's update is skipped" if backward.skips else "it goes on, as asked"
        warnings.warn(f"step {backward.number}: the gradient of {name} is not finite; {effect}", stacklevel=2)


def _update(backward: Backward, names: tuple[str, ...], *values: Tensor) -> Sequence[Tensor]:
    """Update the parameters ``names``. ``values``: the parameters, their gradients and, with clipping, the factor. No parameter
    is changed before all of these gradients are known to be finite, or are to be used as they are."""
    count = len(names)
    parameters, grads, factors = values[:count], list(values[count : 2 * count]), values[2 * count :]
    if backward.skips:
        return parameters
    grads = summed(backward, names, grads)
    if backward.notes_norms and not backward.options.needs_all_gradients:
        _note_norms(backward, names, grads)
    factor = factors[0] if factors and backward.options.max_grad_norm is not None else None
    masters, checked, flags = backward.masters, not backward.options.needs_all_gradients, backward.flags
    fragments = {} if backward.fragments is None else backward.fragments.parts
    wholes = [name for name in names if name not in fragments]
    parts: list[tuple[list[str], Callable[..., None]]] = []  # of parameters that are not at home, and what updates them
    if (disk := backward.disk) is not None:
        there = [name for name in wholes if disk.holds(backward.parameters[name])]
        parts.append((there, functools.partial(_update_on_disk, backward, disk)))
    if (shares := backward.shares) is not None:
        parts.append(([name for name in wholes if name in shares.names], functools.partial(shares.update, backward)))
    if backward.fragments is not None:
        cut = [name for name in names if name in fragments]
        parts.append((cut, functools.partial(backward.fragments.update, backward)))
    at_home = [name for name in names if not any(name in part for part, _ in parts)]
    by_kernel = masters is not None and all(id(backward.parameters[name]) in masters.by_parameter for name in at_home)
    by_flags = flags is not None and len(at_home) == count and not any(tensor.device.type == "cpu" for tensor in values)
    goes_on = backward.options.nonfinite == "continue"
    if flags is not None and by_flags and (by_kernel or goes_on or _reads_flags(backward)):
        _update_by_flags(backward, flags, dict(zip(names, grads, strict=True)), factor)
        return parameters
    if masters is not None and by_kernel and len(at_home) == count:
        _update_masters(backward, masters, dict(zip(names, grads, strict=True)), factor, checked)
        return parameters
    position = _first_nonfinite(backward, names, grads) if checked else None
    backward.stop_if_refused()
    if position is not None:
        _stop_or_warn(backward, names[position])
    addresses: set[int] = set()
    for index, grad in enumerate(grads):  # two parameters may have one gradient, which is scaled in place
        if grad.data_ptr() in addresses:
            grads[index] = grad.clone()
        addresses.add(grad.data_ptr())
    by_name = dict(zip(names, grads, strict=True))
    for part, update_there in parts:
        if part:
            update_there({name: by_name[name] for name in part}, factor)
    remaining = {name: by_name[name] for name in at_home}
    if masters is not None and by_kernel and remaining:
        _update_masters(backward, masters, remaining, factor, checked=False)
    elif remaining:
        backward.has_updated = True
        update_plain(backward, remaining, factor)
    return parameters


def _reads_flags(backward: Backward) -> bool:
    """Tells whether the optimizer's own step on a device reads a flag there, and changes nothing if it is set."""
    fused = all(options.get("fused") for _, options in backward.groups.values())
    return fused and type(backward.optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def _update_by_flags(backward: Backward, flags: DeviceFlags, grads: Mapping[str, Tensor], factor: Tensor | None) -> None:
    """Updates parameters on the device, which changes nothing where flags there forbid it."""
    parameters, state = [backward.parameters[name] for name in grads], backward.optimizer.state
    found = flags.found
    if backward.masters is None and not _reads_flags(backward):  # it goes on after any gradient, but not after any loss
        flags.wait(began=True)
        flags.check_losses()
        found = None
    if backward.options.needs_all_gradients:  # all is known
        backward.has_updated = True
    else:
        flags.look_at([*grads], [*grads.values()])
    for parameter in parameters:
        backward.flagged.setdefault(parameter, entry_of(state.get(parameter) or {}))
    try:
        if backward.masters is None:
            update_plain(backward, grads, factor, found=found)
        else:
            backward.masters.update(backward.optimizer, _rows(backward, grads), _number(backward, factor), found=found)
            backward.allocated_state |= any(
                not backward.flagged[parameter] and state.get(parameter) for parameter in parameters
            )
    except BaseException:
        backward.has_updated = True
        raise


def _rows(backward: Backward, grads: Mapping[str, Tensor]) -> list[Row]:
    parameters = map(backward.parameters.__getitem__, grads)
    return [(p, grad, backward.groups[id(p)][1]) for p, grad in zip(parameters, grads.values(), strict=True)]


def _number(backward: Backward, factor: Tensor | None) -> float:
    """The factor of all gradients, which the host has worked out: one that has gone to the device is not read there."""
    if factor is None or factor.device.type == "cpu":
        return 1.0 if factor is None else float(factor)
    assert backward.clipping.factor is not None
    return backward.clipping.factor


def _first_nonfinite(backward: Backward, names: Sequence[str], grads: Sequence[Tensor]) -> int | None:
    """Returns the position of the first gradient that is not finite, on whatever rank; None if all are."""
    told: Mapping[str, bool] = {} if backward.shares is None else backward.shares.nonfinite
    if not told:
        return host_kernels.nonfinite(grads)
    for position, (name, grad) in enumerate(zip(names, grads, strict=True)):
        if told[name] if name in told else host_kernels.nonfinite([grad]) is not None:
            return position
    return None


def _stop_or_warn(backward: Backward, name: str) -> None:
    """Handle a gradient that is not finite, found before the parameters of its region were changed."""
    has_begun = backward.has_updated or backward.entries
    _handle_nonfinite(backward, name, _OTHERS if has_begun else _NOTHING)


def tell_what_changed(error: BaseException) -> None:
    """Corrects an error of a queue that knew of no update, as there were some on another one until the backward ended."""
    error.args = tuple(each.replace(_NOTHING, _OTHERS) if isinstance(each, str) else each for each in error.args)


def _update_on_disk(backward: Backward, disk: DiskState, grads: Mapping[str, Tensor], factor: Tensor | None) -> None:
    """Update parameters on disk, each while it is in host memory. Until one is written, nothing has changed for good."""
    optimizer, masters = backward.optimizer, backward.masters
    scale = 1.0 if factor is None else float(factor)
    states, written = [], dict[str, Callable[[Staged, Tensor], None]]()
    for name in grads:
        parameter = backward.parameters[name]
        backward.begin_on_disk(disk, parameter)
        master = None if masters is None else masters.by_parameter.get(id(parameter))
        backward.allocated_state |= not optimizer.state.get(parameter)
        if masters is not None and master is not None:
            group = backward.groups[id(parameter)][1]
            if not disk.holds(master.remainder):  # of a parameter that was frozen when it went to disk
                master.remainder = disk.write_home(name, REMAINDER, master.remainder)
            written[name] = masters.staged_update(optimizer, parameter, group, scale, disk)
        states.append(OnDisk(name, parameter, optimizer.state[parameter], None if master is None else master.remainder))

    def change(staged: Staged) -> None:
        if staged.name in written:
            if not staged.start:  # the first piece
                count_step(optimizer, staged.parameter)
            written[staged.name](staged, grads[staged.name])
        else:
            update_plain(backward, {staged.name: grads[staged.name]}, factor, staged)

    disk.update(states, change, coming_on_disk(backward, disk, backward.coming))


def coming_on_disk(backward: Backward, disk: DiskState, names: Iterable[str]) -> Iterator[OnDisk]:
    """Yields those of parameters and fragments that will be updated on disk, as far as their state there has been made."""
    parts = {} if backward.fragments is None else backward.fragments.parts
    for name in names:
        part = parts.get(name)
        parameter = backward.parameters[name if part is None else part.parameter]
        if not disk.holds(parameter):
            continue
        master = None if backward.masters is None else backward.masters.by_parameter.get(id(parameter))
        entry = backward.optimizer.state.get(parameter) or {}
        if master is not None and not (entry and disk.holds(master.remainder)):
            return
        first, stop = (0, None) if part is None else elements_of(part, parameter)
        remainder = None if master is None else master.remainder
        yield OnDisk(name if part is None else part.parameter, parameter, entry, remainder, first, stop)


def elements_of(part: Fragment, parameter: Tensor) -> tuple[int, int]:
    """Returns where the elements of a fragment start and end in the memory of its parameter."""
    count = parameter.numel() // len(parameter)
    return part.start * count, part.end * count


def _update_masters(
    backward: Backward, masters: Masters, grads: Mapping[str, Tensor], factor: Tensor | None, checked: bool
) -> None:
    """Update parameters with masters by one kernel, which looks for values that are not finite first, if ``checked``."""
    scale, rows = _number(backward, factor), _rows(backward, grads)
    _update_by_kernel(backward, list(grads), lambda checks: masters.update(backward.optimizer, rows, scale, checks), checked)


def _update_by_kernel(backward: Backward, names: Sequence[str], run: Callable[[bool], int | None], checked: bool) -> None:
    """Updates parameters with masters by one call. ``run``: looks for values that are not finite first, if it is told to, and
    returns the position of a gradient that has one."""
    parameters = [backward.parameters[name] for name in names]
    stateless = [parameter for parameter in parameters if not backward.optimizer.state.get(parameter)]
    try:
        position = run(checked)
    except BaseException:
        backward.has_updated = True
        raise
    if position is not None:  # nothing of these was changed
        _stop_or_warn(backward, names[position])
    backward.has_updated = True
    if position is not None:
        run(False)
    backward.allocated_state |= any(backward.optimizer.state.get(parameter) for parameter in stateless)


def _fetch_state(backward: Backward, names: tuple[str, ...], copy: Copy, values: Sequence[Tensor], rooms: list[Tensor]) -> None:
    """Brings parameters at home on the host to the device, with all that their updates read and write, into the one room."""
    assert backward.masters is not None
    if not backward.skips:
        parameters = [backward.parameters[name] for name in names]
        rows = [(parameter, backward.groups[id(parameter)][1]) for parameter in parameters]
        backward.fetched[names] = backward.masters.fetched(backward.optimizer, rows, rooms[0], copy)


def update_streamed(
    backward: Backward, names: tuple[str, ...], copy: Copy, values: Sequence[Tensor], versions: list[Tensor]
) -> None:
    """Updates on the device what ``_fetch_state`` has brought there, and takes it home again. ``values``: as of ``_update``,
    and that room."""
    masters, fetched = backward.masters, backward.fetched.pop(names, None)
    if backward.skips or fetched is None or masters is None:
        return
    if backward.flags is not None:
        backward.flags.wait(began=True)
        backward.stop_if_refused()
    grads, factors = summed(backward, names, values[len(names) : 2 * len(names)]), values[2 * len(names) : -1]
    if backward.notes_norms and not backward.options.needs_all_gradients:
        _note_norms(backward, names, grads)
    scale = _number(backward, factors[0]) if factors and backward.options.max_grad_norm is not None else 1.0

    def run(checked: bool) -> int | None:
        return masters.update_fetched(backward.optimizer, fetched, grads, scale, checked, copy)

    _update_by_kernel(backward, names, run, not backward.options.needs_all_gradients)


def update_plain(
    backward: Backward,
    grads: Mapping[str, Tensor],
    factor: Tensor | None,
    staged: Staged | None = None,
    found: Tensor | None = None,
) -> None:
    """Step an optimizer of the same class over stand-ins that share the parameters' memory, version counters and state; or over
    one that is ``staged``. ``found``: as a GradScaler tells it to a fused one, which then changes nothing if it is 1."""
    optimizer = backward.optimizer
    groups: dict[int, dict[str, Any]] = {}
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    entered = [p for p in map(backward.parameters.__getitem__, grads) if p not in optimizer.state]
    for name, grad in grads.items():
        parameter = backward.parameters[name]
        index, options = backward.groups[id(parameter)]
        stand_in = parameter.detach() if staged is None else staged.values
        stand_in.grad = grad if factor is None else grad.mul_(factor)
        groups.setdefault(index, {**options, "params": []})["params"].append(stand_in)
        state[stand_in] = optimizer.state[parameter] if staged is None else staged.state
    stateless = [entry for entry in state.values() if not entry]
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__, param_groups=list(groups.values()), state=state)
    twin.__dict__.update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    if found is not None:
        twin.__dict__.update(found_inf=found)
    type(optimizer).step(twin)
    backward.allocated_state |= any(stateless)
    for parameter in entered:  # SGD without momentum keeps none
        if not optimizer.state.get(parameter, True):
            del optimizer.state[parameter]


# By the operation of the step graph.
KERNELS: dict[Any, Callable[..., Any]] = {
    update: _update,
    fetch_state: _fetch_state,
    gradient_norms: _norms,
    gradient_scale: _clip_factor,
}
