"""Split state (``precision="bf16-master32"``): bf16 parameters to compute with, exact fp32 masters to update.

The module's parameters are bf16. Beside each is a 16-bit remainder: the two are the master's 32 bits (``host_kernels.split``).
The user's optimizer keeps its classes, groups, hooks and schedulers; before its own step runs, the parameters that have
masters are updated here in fp32 and hidden from it, and shown again afterwards.

What is written to a parameter between two steps (its version counter moved), and what its ``.data`` is replaced by, becomes
its master. A write into ``p.data`` moves no counter: it is caught by a checksum under MT_CHECK=1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mtcompile import knobs
from mtcompile.errors import StepError
from mtcompile.optim.precision import Precision
from mtcompile.runtime.optim import device_kernels, host_kernels

MASTER = "master"  # its key in an optimizer's state_dict, beside exp_avg and the like
_STATES = {"AdamW": ("exp_avg", "exp_avg_sq"), "Adam": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}
_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")


@dataclass(slots=True)
class Master:
    """One parameter's: ``remainder`` int16 as the parameter lies; ``version`` of the parameter when the two were one, and its
    ``checksum`` then (None unless MT_CHECK=1)."""

    name: str
    parameter: nn.Parameter
    remainder: Tensor
    version: int
    checksum: int | None


class Masters:
    """Of one model's parameters, those that are floating point."""

    def __init__(self, model: nn.Module) -> None:
        self.by_parameter: dict[int, Master] = {}
        self._loading: Mapping[str, Any] = {}
        self._bound: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                self._adopt(name, parameter)
        model.register_load_state_dict_pre_hook(self._before_loading)
        model.register_load_state_dict_post_hook(self._after_loading)

    def _adopt(self, name: str, parameter: nn.Parameter) -> None:
        _dense(name, parameter)
        high, remainder = host_kernels.split(parameter.detach().float())
        parameter.grad = None
        parameter.data = high
        self.by_parameter[id(parameter)] = Master(name, parameter, remainder, parameter._version, _checksum(parameter))

    def __iter__(self) -> Iterator[Master]:
        return iter(self.by_parameter.values())

    def tensors(self) -> dict[str, Tensor]:
        """Name -> fp32 master, made of the two planes."""
        for master in self:
            self._notice_writes(master)
        return {m.name: host_kernels.joined(m.parameter.detach(), m.remainder) for m in self}

    def set(self, master: Master, value: Tensor) -> None:
        """Make an fp32 tensor its master, exactly."""
        high, low = host_kernels.split(
            value.detach().to(master.parameter.device, torch.float32).reshape(master.parameter.shape)
        )
        with torch.no_grad():
            master.parameter.copy_(high)
            master.remainder.copy_(low)
        self._settled(master)

    def replace(self, parameter: nn.Parameter, values: Tensor) -> None:
        """What a parameter's ``.data`` was replaced by becomes its master."""
        if (master := self.by_parameter.get(id(parameter))) is not None:
            self.set(master, values)

    def moved(self, parameter: nn.Parameter) -> None:
        """The remainder goes where its parameter went."""
        master = self.by_parameter.get(id(parameter))
        if master is not None:
            master.remainder = master.remainder.to(parameter.device)
            master.version = parameter._version

    def widen(self, accumulating: Iterable[Tensor]) -> None:
        """Gradients that are about to be added to become fp32, so that sums of many are not rounded to bf16."""
        for tensor in accumulating:
            master = self.by_parameter.get(id(tensor))
            if master is not None and master.parameter.grad is not None and master.parameter.grad.dtype == torch.bfloat16:
                master.parameter.grad_dtype = None  # any
                master.parameter.grad = master.parameter.grad.float()

    def may_be_on(self, where: torch.device, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether they may be at home there: the update has the same bits as on the host. Adam has no kernel for a GPU."""
        if where.type == "cpu":
            return True
        known = optimizer is not None and kind_of(optimizer) in ("AdamW", "SGD")
        return known and device_kernels.proven(where)

    def take_any(self) -> None:
        """Gradients may be fp32 from the start."""
        for master in self:
            master.parameter.grad_dtype = None

    def nbytes(self) -> int:
        return sum(m.remainder.numel() * m.remainder.element_size() for m in self)

    # -------------------------------------------------------------------------------------------------- what is noticed

    def _notice_writes(self, master: Master) -> None:
        """A parameter that somebody wrote to is its own master from then on."""
        parameter = master.parameter
        if parameter._version != master.version:
            master.remainder.zero_()
            self._settled(master)
        elif master.checksum is not None and master.checksum != _checksum(parameter):
            raise StepError(
                f"{master.name}: its bf16 values were changed through .data, which its fp32 master cannot notice; write to the "
                "parameter itself under torch.no_grad()"
            )

    def _settled(self, master: Master) -> None:
        master.version, master.checksum = master.parameter._version, _checksum(master.parameter)

    # --------------------------------------------------------------------------------------------- loading the model's

    def _before_loading(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        self._loading = {name.removeprefix(prefix): value for name, value in state.items()}

    def _after_loading(self, module: nn.Module, keys: Any) -> None:
        """What was loaded in fp32 is kept exactly, though the parameter is bf16."""
        loaded, self._loading = self._loading, {}
        for master in self:
            value = loaded.get(master.name)
            if isinstance(value, Tensor) and value.dtype == torch.float32 and value.shape == master.parameter.shape:
                self.set(master, value)

    # ------------------------------------------------------------------------------------------------------- the update

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Update through this optimizer from now on. Raises TypeError for a class whose arithmetic is not known here."""
        kind = kind_of(optimizer)
        if optimizer in self._bound:  # two hooks would update twice
            return
        self._bound.add(optimizer)
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: self._before_step(opt, kind, args, kwargs))
        optimizer.register_step_post_hook(lambda opt, args, kwargs: self._show())
        optimizer.register_state_dict_post_hook(self._with_masters)
        raw: list[Mapping[str, Any]] = []

        def before(opt: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            raw[:] = [state]

        def after(opt: torch.optim.Optimizer) -> None:
            self._load(opt, raw.pop())

        optimizer.register_load_state_dict_pre_hook(before)
        optimizer.register_load_state_dict_post_hook(after)

    def _before_step(self, optimizer: torch.optim.Optimizer, kind: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """A closure makes the gradients, so it is called now; the optimizer's step gets its loss."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._step(optimizer, kind)
            return None
        with torch.enable_grad():
            loss = closure()
        self._step(optimizer, kind)
        return (args[0],), {**kwargs, "closure": lambda: loss}

    def _step(self, optimizer: torch.optim.Optimizer, kind: str) -> None:
        """Update what has a master and a gradient. Everything is checked before anything is written."""
        self._show()  # of a step that failed
        work = [(p, p.grad, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        work = [row for row in work if id(row[0]) in self.by_parameter]
        self.check(optimizer, (parameter for parameter, _, _ in work))
        scale, skip = _scaling(optimizer)
        for parameter, grad, group in work:
            if not skip:
                self.update(optimizer, parameter, grad, group, scale)
            self._hidden.append((parameter, grad))
            parameter.grad = None

    def check(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Before these are updated, what can be known to fail. Raises StepError."""
        for group in optimizer.param_groups:
            if on := [option for option in _REFUSED if group.get(option)]:
                kind = kind_of(optimizer)
                raise StepError(f"expected {kind} without {', '.join(on)} where parameters have fp32 masters; leave it out")
        for parameter in parameters:
            if (master := self.by_parameter.get(id(parameter))) is not None:
                self._notice_writes(master)

    def _show(self) -> None:
        """The gradients that the optimizer's own step was not to see."""
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden = []

    def update(
        self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, grad: Tensor, group: Mapping[str, Any], scale: float
    ) -> None:
        """One parameter's, after ``check``. ``group``: its options; ``scale``: factor of the gradient."""
        kind, master, state = kind_of(optimizer), self.by_parameter[id(parameter)], optimizer.state[parameter]
        if kind != "SGD" and "step" not in state:
            state["step"] = torch.tensor(0.0)
        first = kind == "SGD" and state.get("momentum_buffer") is None
        kept = _STATES[kind] if kind != "SGD" or group["momentum"] else ()
        for name in kept:
            if state.get(name) is None:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
        grad = grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)
        weight, gradient, remainder = _flat(parameter.detach()), _flat(grad.detach()), _flat(master.remainder)
        states = [_flat(state[name]) for name in kept]
        by: Any = host_kernels if parameter.device.type == "cpu" else device_kernels
        options: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "scale": scale}
        if kind == "SGD":
            options |= {key: group[key] for key in ("momentum", "dampening", "nesterov")}
            buffer = states[0] if states else torch.empty(parameter.numel(), device=parameter.device)
            by.sgd(weight, gradient, buffer, remainder, first=first, **options)
        else:
            state["step"] += 1
            beta1, beta2 = (float(beta) for beta in group["betas"])
            options |= {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "step": int(state["step"])}
            update = by.adamw if kind == "AdamW" or group.get("decoupled_weight_decay") else host_kernels.adam
            m, v = states
            update(weight, gradient, m, v, remainder, **options)
        self._settled(master)

    # ------------------------------------------------------------------------------------------ the optimizer's state_dict

    def _with_masters(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Beside each parameter's state, its master."""
        named = {id(m.parameter): m for m in self}
        made = dict(state["state"])
        for index, parameter in _numbered(optimizer, state):
            if (master := named.get(id(parameter))) is not None:
                self._notice_writes(master)
                made[index] = {**made.get(index, {}), MASTER: host_kernels.joined(parameter.detach(), master.remainder)}
        return {**state, "state": made}

    def _load(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """torch casts what it loads to the parameter's dtype: the fp32 values themselves are put back."""
        for index, parameter in _numbered(optimizer, state):
            master, saved = self.by_parameter.get(id(parameter)), state["state"].get(index, {})
            if master is None:
                continue
            mine = optimizer.state[parameter]
            for name, value in saved.items():
                if name != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
                    like = torch.empty_like(parameter, dtype=torch.float32)
                    mine[name] = like.copy_(value)
            if isinstance(value := mine.pop(MASTER, None), Tensor):
                self.set(master, value)


def _scaling(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """What a GradScaler leaves to a fused optimizer: the factor of every gradient, and whether to skip the step."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return (1.0 if scale is None else 1.0 / float(scale)), found is not None and bool(found)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    for kind in _STATES:
        if type(optimizer) is getattr(torch.optim, kind):
            return kind
    raise TypeError(
        f'expected torch.optim.AdamW, Adam or SGD with precision="bf16-master32", found {type(optimizer).__name__}: only their '
        'arithmetic is done on fp32 masters. Use one of them, or precision="fp32"'
    )


def _numbered(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[Any, nn.Parameter]]:
    """A state_dict's number of each parameter."""
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        yield from zip(saved["params"], group["params"], strict=True)


def _dense(name: str, parameter: Tensor) -> None:
    if not torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        raise ValueError(f"expected parameters without gaps in memory, found {name} with strides {parameter.stride()}")


def _flat(tensor: Tensor) -> Tensor:
    """All elements in the order they lie in."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _checksum(parameter: Tensor) -> int | None:
    """Of the bits, under MT_CHECK=1."""
    if not knobs.check():
        return None
    bits = _flat(parameter.detach()).view(torch.int16).to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int((bits * places).sum())


def cast(model: nn.Module, precision: Precision) -> Masters | None:
    """Give the parameters the dtype of ``precision``; buffers stay as they are. The masters, where there are any."""
    if precision.split:
        return Masters(model)
    if precision.weights is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(precision.weights)
    return None
