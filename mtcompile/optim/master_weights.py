"""Split state (``precision="bf16-master32"``): bf16 parameters to compute with, exact fp32 masters to update.

The module's parameters are bf16. Beside each is a 16-bit remainder: the two are the master's 32 bits (``operands.split``).
The user's optimizer keeps its classes, groups, hooks and schedulers. Before its own step runs, the parameters that have
masters are updated here in fp32 and their gradients hidden from it; afterwards they are shown again.

What is written to a parameter between two steps (its version counter moved) becomes its master, and so does a new ``.data``.
A write into ``p.data`` moves no counter: a checksum catches it under MT_CHECK=1.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mtcompile import knobs
from mtcompile.errors import StepError
from mtcompile.optim.disk_state import Homes, Staged
from mtcompile.optim.own_files import beside
from mtcompile.optim.precision import Precision
from mtcompile.optim.state_sizes import STATES
from mtcompile.optim.training_state import numbered
from mtcompile.optim.wholeness import is_being_wrapped
from mtcompile.optim.written_update import (
    Row,
    class_name,
    count_step,
    flat,
    grad_scaling,
    prepared_update,
    states_of,
    written_update,
)
from mtcompile.references import weakly
from mtcompile.runtime.devices.arena import layout_of, view, zeros_like
from mtcompile.runtime.optim import device_kernels, host_kernels
from mtcompile.runtime.optim.operands import Operands, joined, split
from mtcompile.runtime.schedule import aligned
from mtcompile.torch_private import UsedGradient

MASTER = "master"  # its key in an optimizer's state_dict, beside exp_avg and the like
_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")


@dataclass(slots=True)
class Master:
    """The fp32 master of one parameter. ``remainder``: int16, strided as the parameter. ``version``: the parameter's when the
    two planes were last written together, and its ``checksum`` then (None unless MT_CHECK=1)."""

    name: str
    parameter: nn.Parameter
    remainder: Tensor
    version: int
    checksum: int | None


@dataclass(frozen=True, slots=True)
class JoinedLater:
    """The fp32 values of a parameter that is split, for a file that is written piece by piece: all of them together would take
    4 bytes per parameter of host memory."""

    high: Tensor
    remainder: Tensor
    dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.high.shape

    @property
    def nbytes(self) -> int:
        return self.high.numel() * self.dtype.itemsize

    def values(self) -> Tensor:
        return joined(self.high, self.remainder)

    def pieces(self, count: int) -> Iterator[Tensor]:
        """Yields the values in row-major order, ``count`` at a time."""
        high, remainder = self.high.reshape(-1), self.remainder.reshape(-1)
        yield from itertools.starmap(joined, zip(high.split(count), remainder.split(count), strict=True))


@dataclass(frozen=True, slots=True)
class Fetched:
    """A parameter whose update runs on the device while its home is the host. ``at_home``, ``there``: its weight, remainder and
    states, flat, in both places; ``new``: the states among them that it has for the first time."""

    parameter: nn.Parameter
    group: Mapping[str, Any]
    at_home: tuple[Tensor, ...]
    there: tuple[Tensor, ...]
    new: Mapping[str, Tensor]


Copy = Callable[[Sequence[tuple[Tensor, Tensor]], bool], None]  # of pairs of a target and a source, to the device or from it


class Masters:
    """The masters of one model's floating-point parameters that are trained. Frozen ones become bf16 and have none, until they
    are trained; ``_frozen``: their names by id, and whether their bf16 values are exact. ``join``: makes the values that an
    optimizer's ``state_dict`` holds; ``whole``: a remainder with the parts that other hosts have."""

    join: Callable[[Tensor, Tensor], Tensor | JoinedLater] = staticmethod(joined)
    whole: Callable[[Tensor], Tensor] = staticmethod(torch.detach)

    def __init__(self, model: nn.Module) -> None:
        self.by_parameter: dict[int, Master] = {}
        self._frozen: dict[int, tuple[str, nn.Parameter, bool]] = {}
        self._loaded_values: Mapping[str, Any] = {}
        self._bound: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._hidden_gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.updating: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None  # called before a step's first update
        self.spared = 0  # threads that updates leave to others
        self.reachable: Callable[[int], Tensor] | None = None  # host memory that a device's copies reach fast
        self.adopt(model, (parameter for parameter in model.parameters() if not nn.parameter.is_lazy(parameter)))
        model.register_load_state_dict_pre_hook(weakly(self._before_loading))
        model.register_load_state_dict_post_hook(weakly(self._after_loading))

    def adopt(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        """Makes masters of those parameters of ``model``, and bf16 parameters of them."""
        adopted = {id(parameter) for parameter in parameters}
        for name, parameter in model.named_parameters():
            if id(parameter) in adopted and parameter.is_floating_point():
                self._adopt(name, parameter)

    def _adopt(self, name: str, parameter: nn.Parameter) -> None:
        _check_dense(name, parameter)
        if not parameter.requires_grad and parameter.dtype == torch.bfloat16:
            self._frozen[id(parameter)] = name, parameter, True
            return
        high, remainder = split(parameter.detach().float())
        high, remainder = beside(parameter.data, high), beside(parameter.data, remainder)
        parameter.grad = None
        parameter.data = high
        if not parameter.requires_grad:
            self._frozen[id(parameter)] = name, parameter, not remainder.any()
            return
        self.by_parameter[id(parameter)] = Master(name, parameter, remainder, parameter._version, _checksum(parameter))

    def trained(self) -> set[int]:
        """Returns the parameters, by id, that have masters or get them in their next update."""
        return self.by_parameter.keys() | {key for key, (_, parameter, _) in self._frozen.items() if parameter.requires_grad}

    def __iter__(self) -> Iterator[Master]:
        return iter(self.by_parameter.values())

    def tensors(self) -> dict[str, Tensor]:
        """The fp32 masters by name, joined from their two planes."""
        for master in self:
            self._notice_writes(master)
        return {m.name: joined(self.whole(m.parameter).detach(), self.whole(m.remainder)) for m in self}

    def set(self, master: Master, value: Tensor) -> None:
        """Make ``value`` the master, exactly where it is fp32."""
        parameter = master.parameter
        high, low = split(value.detach().to(parameter.device, torch.float32).reshape(parameter.shape))
        with torch.no_grad():
            parameter.copy_(high)
            master.remainder.copy_(low)
        self._remember_version(master)

    def replace(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Make ``values``, by which a parameter's ``.data`` was replaced, its master."""
        if (master := self.by_parameter.get(id(parameter))) is not None:
            self.set(master, values)

    def moved(self, parameter: nn.Parameter) -> None:
        """Send the remainder where its parameter went."""
        if (master := self.by_parameter.get(id(parameter))) is not None:
            master.remainder = master.remainder.to(parameter.device)
            master.version = parameter._version

    def widen(self, accumulating: Iterable[Tensor]) -> None:
        """Turn gradients that are about to be added to into fp32, so that sums of many are not rounded to bf16."""
        for tensor in accumulating:
            master = self.by_parameter.get(id(tensor))
            if master is not None and master.parameter.grad is not None and master.parameter.grad.dtype == torch.bfloat16:
                master.parameter.grad_dtype = None  # any
                master.parameter.grad = master.parameter.grad.float()

    def may_be_on(self, device: torch.device, optimizer: torch.optim.Optimizer | None) -> bool:
        """True where the update on ``device`` has the bits of the host's, so that masters may be at home there. Adam has no
        kernel for a GPU."""
        if device.type == "cpu":
            return True
        has_kernel = optimizer is not None and class_name(optimizer) in ("AdamW", "SGD")
        return has_kernel and device_kernels.proven(device)

    def take_any(self) -> None:
        """Let gradients be of any dtype from the start, so also fp32."""
        for master in self:
            master.parameter.grad_dtype = None

    def nbytes(self) -> int:
        return sum(m.remainder.nbytes for m in self)

    # ------------------------------------------------------------------------------------------- writes to parameters

    def _notice_writes(self, master: Master) -> None:
        """Make a parameter that somebody wrote to its own master. Raises StepError for a write through ``.data``."""
        parameter = master.parameter
        if parameter._version != master.version:
            master.remainder.zero_()
            self._remember_version(master)
        elif master.checksum is not None and master.checksum != _checksum(parameter):
            raise StepError(
                f"{master.name}: its bf16 values were changed through .data, which its fp32 master cannot notice; write to the "
                "parameter itself under torch.no_grad()"
            )

    def wrote(self, parameter: nn.Parameter) -> None:
        """Takes note that a parameter on disk and its remainder have been written together."""
        if (master := self.by_parameter.get(id(parameter))) is not None:
            self._remember_version(master)

    def _remember_version(self, master: Master) -> None:
        master.version, master.checksum = master.parameter._version, _checksum(master.parameter)

    # --------------------------------------------------------------------------------------- loading the model's state

    def _before_loading(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        self._loaded_values = {name.removeprefix(prefix): value for name, value in state.items()}

    def _after_loading(self, module: nn.Module, keys: Any) -> None:
        """Make fp32 values that were loaded the masters, exactly, though the parameters are bf16."""
        values, self._loaded_values = self._loaded_values, {}
        for master in self:
            value = values.get(master.name)
            if isinstance(value, Tensor) and value.dtype == torch.float32 and value.shape == master.parameter.shape:
                self.set(master, value)

    # ------------------------------------------------------------------------------------------------------- the update

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Update through this optimizer from now on. Raises TypeError for a class whose arithmetic is not known here, and
        StepError for state that was made or loaded before, in bf16: what it was in fp32 is lost."""
        class_name(optimizer)
        if optimizer in self._bound:  # two hooks would update twice
            return
        for master in self:
            state = optimizer.state.get(master.parameter, {})
            if rounded := [key for key, value in state.items() if isinstance(value, Tensor) and value.dtype == torch.bfloat16]:
                raise StepError(
                    f"expected an optimizer that is bound before its first step and before load_state_dict, found {rounded[0]} "
                    f"of {master.name} in bf16, without its fp32 values. Call model.bind(optimizer) right after it is made"
                )
        self._bound.add(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda opt, args, kwargs: self._show_gradients())
        optimizer.register_state_dict_post_hook(self._with_masters)
        loading: dict[str, Mapping[str, Any]] = {}
        optimizer.register_load_state_dict_pre_hook(lambda opt, state: loading.update(state=state))
        optimizer.register_load_state_dict_pre_hook(lambda opt, state: without_masters(state))
        optimizer.register_load_state_dict_post_hook(lambda opt: self._load(opt, loading.pop("state")))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Update the masters before the optimizer's own step. A closure computes the gradients, so it is called here, and the
        optimizer's step gets its loss."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._step(optimizer)
            return None
        with torch.enable_grad():
            loss = closure()
        self._step(optimizer)
        return (args[0],), {**kwargs, "closure": lambda: loss}

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update every parameter that has a master and a gradient. Everything is checked before anything is written."""
        if any(parameter.grad is not None for parameter, _ in self._hidden_gradients):
            self._hidden_gradients = []  # of a step that failed, before another backward
        self._show_gradients()
        pairs = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        own = self.by_parameter.keys() | self._frozen.keys()
        gradients = ((p, p.grad, group) for p, group in pairs if not isinstance(p.grad, UsedGradient))
        rows = [(p, gradient, group) for p, gradient, group in gradients if gradient is not None and id(p) in own]
        self.check(optimizer, (parameter for parameter, _, _ in rows))
        scale, skip = grad_scaling(optimizer)
        if rows and not skip:
            self.updating(optimizer)
        for parameter, grad, group in rows:
            if not skip:
                self.update(optimizer, [(parameter, grad, group)], scale)
            self._hidden_gradients.append((parameter, grad))
            parameter.grad = None

    def check(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Raise StepError for options and writes that an update of these parameters cannot honour. Nothing has changed then."""
        for group in optimizer.param_groups:
            if refused := [option for option in _REFUSED if group.get(option)]:
                expected = f"expected {class_name(optimizer)} without {', '.join(refused)}"
                raise StepError(f"{expected} where parameters have fp32 masters; leave it out")
        for parameter in parameters:
            if parameter.requires_grad:
                self._unfreeze(parameter)
            if (master := self.by_parameter.get(id(parameter))) is not None:
                self._notice_writes(master)

    def _unfreeze(self, parameter: nn.Parameter) -> None:
        """Makes a master of a parameter that was frozen when the model was compiled. Raises StepError if it would not be
        exact."""
        name, _, exact = self._frozen.get(id(parameter), ("", parameter, True))
        if not exact:
            raise StepError(
                f"{name} was frozen when the model was compiled, and is bf16 without an fp32 master since then; expected "
                "requires_grad_(True) before mtcompile.compile for what will be trained"
            )
        if self._frozen.pop(id(parameter), None) is not None:
            remainder = zeros_like(parameter, torch.int16)
            self.by_parameter[id(parameter)] = Master(name, parameter, remainder, parameter._version, _checksum(parameter))

    def _show_gradients(self) -> None:
        """Give parameters the gradients back that the optimizer's own step was not to see."""
        for parameter, grad in self._hidden_gradients:
            parameter.grad = grad
        self._hidden_gradients = []

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        rows: Sequence[Row],
        scale: float,
        checked: bool = False,
        found: Tensor | None = None,
    ) -> int | None:
        """Updates parameters, after ``check``; ``scale``: the factor of gradients. ``checked``: returns the position of the
        first one whose gradient is not finite, if there is one, and then has changed nothing; None otherwise. ``found``: of
        parameters on a device, as of ``device_kernels.apply_all``."""
        remainders = (self.by_parameter[id(parameter)].remainder for parameter, _, _ in rows)
        prepared = [prepared_update(optimizer, row, rest, scale) for row, rest in zip(rows, remainders, strict=True)]
        tasks = [(update, operands) for update, operands, _ in prepared]
        if all(parameter.device.type == "cpu" for parameter, _, _ in rows):
            if (position := host_kernels.apply_all(tasks, checked, spared=self.spared)) is not None:
                return position
        else:
            if checked and (position := host_kernels.nonfinite([operands.grad for _, operands in tasks])) is not None:
                return position
            device_kernels.apply_all(tasks, found)
        for (parameter, _, _), (_, _, new) in zip(rows, prepared, strict=True):
            self._has_updated(optimizer, parameter, new)
        return None

    def _has_updated(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, new: Mapping[str, Tensor]) -> None:
        optimizer.state[parameter].update(new)
        count_step(optimizer, parameter)
        self._remember_version(self.by_parameter[id(parameter)])

    def fetched(
        self,
        optimizer: torch.optim.Optimizer,
        rows: Iterable[tuple[nn.Parameter, Mapping[str, Any]]],
        state: Tensor,
        copy: Copy,
    ) -> list[Fetched]:
        """Copies parameters, each with the options of its group, and all that their updates read and write into ``state``,
        bytes on the device."""
        parameters, end = list[Fetched](), 0
        for parameter, group in rows:
            states, new = states_of(optimizer, parameter, group)
            beside = [self.by_parameter[id(parameter)].remainder, *states]
            for tensor in beside:
                self._reach(tensor)
            at_home = tuple(map(flat, (parameter.detach(), *beside)))
            there = list[Tensor]()
            for plane in at_home:
                there.append(state[end : end + plane.nbytes].view(plane.dtype))
                end += aligned(plane.nbytes)
            parameters.append(Fetched(parameter, group, at_home, tuple(there), new))
        copy([pair for each in parameters for pair in zip(each.there, each.at_home, strict=True)], True)
        return parameters

    def _reach(self, tensor: Tensor) -> None:
        """Moves state to host memory that copies of the device reach fast, once. Not again where the driver refuses that."""
        if self.reachable is not None and not tensor.is_pinned():
            memory = self.reachable(tensor.nbytes)
            self.reachable = self.reachable if memory.is_pinned() else None
            tensor.data = view(memory, 0, layout_of(tensor)).copy_(tensor)

    def update_fetched(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Fetched],
        grads: Sequence[Tensor],
        scale: float,
        checked: bool,
        copy: Copy,
    ) -> int | None:
        """Updates parameters where ``fetched`` has brought them, and takes them home again; else as ``update``."""
        if checked and (position := host_kernels.nonfinite(grads)) is not None:
            return position
        tasks = []
        for each, grad in zip(parameters, grads, strict=True):
            weight, remainder, *states = each.there
            update = written_update(optimizer, each.parameter, each.group, scale)
            tasks.append((update, Operands(weight, flat(grad.detach()), tuple(states), remainder)))
        kernels = host_kernels if grads[0].device.type == "cpu" else device_kernels
        kernels.apply_all(tasks)
        copy([pair for each in parameters for pair in zip(each.at_home, each.there, strict=True)], False)
        if knobs.check() and grads[0].device.type != "cpu":  # checksums read what has come home
            torch.cuda.current_stream(grads[0].device).synchronize()
        for each in parameters:
            increment_version(each.at_home)
            self._has_updated(optimizer, each.parameter, each.new)
        return None

    def staged_update(
        self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: Mapping[str, Any], scale: float, homes: Homes
    ) -> Callable[[Staged, Tensor], None]:
        """Returns what updates pieces of one parameter that is at home elsewhere, given each and the gradient of the parameter,
        or of the piece alone. Its step is to be counted up before the first."""
        name, state = self.by_parameter[id(parameter)].name, optimizer.state[parameter]
        keys = STATES[class_name(optimizer)] if group.get("momentum", 1) else ()
        update = written_update(optimizer, parameter, group, scale)
        count_step(optimizer, parameter, 0)
        for key in [key for key in keys if state.get(key) is None]:
            state[key] = homes.new_zeros(name, key, parameter, torch.float32)

        def apply(staged: Staged, grad: Tensor) -> None:
            assert staged.remainder is not None
            if grad.shape != staged.values.shape:
                whole = grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)
                grad = flat(whole)[staged.start : staged.stop]
            states = tuple(staged.state[key] for key in keys) or (torch.empty(staged.values.numel()),)
            host_kernels.apply(update, Operands(staged.values, grad.detach(), states, staged.remainder))

        return apply

    # ------------------------------------------------------------------------------------------ the optimizer's state_dict

    @contextlib.contextmanager
    def joining_later(self) -> Iterator[None]:
        """Lets ``state_dict`` hold masters as ``JoinedLater``."""
        self.join = JoinedLater
        try:
            yield
        finally:
            self.join = joined

    def _with_masters(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Put each master beside its parameter's state."""
        entries = dict(state["state"])
        if not entries and is_being_wrapped(optimizer):  # by a library that loads this again, by way of the device
            return state
        for index, parameter in numbered(optimizer, state):
            if (master := self.by_parameter.get(id(parameter))) is not None:
                self._notice_writes(master)
                entries[index] = {**entries.get(index, {}), MASTER: self.join(parameter.detach(), master.remainder)}
        return {**state, "state": entries}

    def _load(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Put the fp32 values back that were loaded: torch casts them to the parameter's dtype. Gradients of a step
        that failed before belong to what was."""
        self._hidden_gradients = []
        for index, parameter in numbered(optimizer, state):
            master, saved = self.by_parameter.get(id(parameter)), state["state"].get(index, {})
            if master is None:
                continue
            for name, value in saved.items():
                if name not in ("step", MASTER) and isinstance(value, Tensor) and value.shape == parameter.shape:
                    whole = value.dtype == torch.float32 and value.stride() == parameter.stride()
                    values = value if whole else torch.empty_like(parameter, dtype=torch.float32).copy_(value)
                    optimizer.state[parameter][name] = values
            if isinstance(value := saved.get(MASTER), Tensor):
                self.set(master, value)


def without_masters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state_dict as torch reads it. A parameter without steps has none of its own: torch would look for its step."""
    own = {index: {k: v for k, v in entry.items() if k != MASTER} for index, entry in state["state"].items()}
    return {**state, "state": {index: entry for index, entry in own.items() if entry}}


def _check_dense(name: str, parameter: Tensor) -> None:
    """Raise ValueError for a parameter with gaps between its elements."""
    if not torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        raise ValueError(f"expected parameters without gaps in memory, found {name} with strides {parameter.stride()}")


def _checksum(parameter: Tensor) -> int | None:
    """A checksum of the bits under MT_CHECK=1, else None. It is made on the host, where it takes none of a budget."""
    return zlib.crc32(flat(parameter.detach()).view(torch.uint8).cpu().numpy().data) if knobs.check() else None


def cast(model: nn.Module, precision: Precision) -> Masters | None:
    """Give the parameters the dtype of ``precision``; buffers stay as they are. Returns the masters, where there are any."""
    if precision.split:
        return Masters(model)
    if precision.weights is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = beside(parameter.data, parameter.data.to(precision.weights))
    return None
