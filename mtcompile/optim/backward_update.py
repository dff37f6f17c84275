"""``update="backward"``: the optimizer's arithmetic on each region's parameters as its gradients arrive.

The user's optimizer keeps its class, groups, state, hooks and schedulers. What it would do to a parameter in ``step()`` is
done here to a few of them at a time, by a stand-in that shares its state; ``p.grad`` stays None, so that its own ``step()``
then finds nothing to do. That call still ends a step: hyper-parameters are read when a backward begins, and a second
backward without it raises, since gradients that were meant to be added up would have been used one by one.

A fault after the first update leaves a model of two steps. It refuses to go on until both ``load_state_dict`` have put it
right.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from mtcompile import torch_private
from mtcompile.errors import StepError
from mtcompile.optim.master_weights import Masters
from mtcompile.passes.plan import Updates
from mtcompile.passes.step_graph import calls, gradient_norms, gradient_scale, is_update, update

NONFINITE = ("stop", "skip", "continue")
_SCALED = 256.0  # a loss that is multiplied by a power of two from here on is taken to come from a GradScaler
# Their update of a parameter reads nothing of another one.
_BY_PARAMETER = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """``compile``'s, checked."""

    max_grad_norm: float | None = None
    run_ahead: bool = False
    nonfinite: str = "stop"

    @property
    def held(self) -> bool:
        """Whether all gradients are needed before any update."""
        return self.max_grad_norm is not None or self.nonfinite == "skip"


def update_options(update: str, max_grad_norm: float | None, run_ahead: bool, nonfinite: str) -> UpdateOptions | None:
    """None for ``update="step"``. Raises ValueError."""
    if update not in ("step", "backward"):
        raise ValueError(f"expected update to be step or backward, found {update!r}")
    if nonfinite not in NONFINITE:
        raise ValueError(f"expected nonfinite to be one of {', '.join(NONFINITE)}, found {nonfinite!r}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"expected max_grad_norm above 0, found {max_grad_norm!r}")
    options = UpdateOptions(max_grad_norm, run_ahead, nonfinite)
    if update == "backward":
        return options
    if options != UpdateOptions():
        what = "max_grad_norm, run_ahead and nonfinite"
        raise ValueError(f'expected {what} with update="backward" only; with update="step" clip before optimizer.step()')
    return None


@dataclass
class _Now:
    """One backward's: groups as they were when it began, by parameter; ``threads`` of the caller."""

    groups: dict[int, tuple[int, Mapping[str, Any]]]
    parameters: dict[str, nn.Parameter]
    threads: int
    begun: bool = False
    skip: bool = False
    made_state: bool = False
    told: bool = False


class UpdatesInBackward:
    """Of one model. ``drain``: waits for the updates that run behind a forward."""

    def __init__(self, model: nn.Module, options: UpdateOptions, masters: Masters | None, drain: Callable[[], None]) -> None:
        self.options, self.masters, self._drain = options, masters, drain
        self.model = weakref.ref(model)
        self.optimizer: torch.optim.Optimizer | None = None
        self.grad_norm: float | None = None
        self.steps = 0
        self._stepped = True
        self._broken: dict[str, str] = {}  # what has to be loaded again -> why
        self._saved: int | None = None
        self._now = _Now({}, {}, 1)
        self._threads = torch.get_num_threads()
        model.register_load_state_dict_pre_hook(lambda *_: drain())
        model.register_load_state_dict_post_hook(lambda *_: self._loaded("model"))
        model.register_state_dict_pre_hook(lambda *_: self._before_saving())

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises TypeError for a class that looks at several parameters at once, or that is not torch's."""
        if not any(type(optimizer) is getattr(torch.optim, name, None) for name in _BY_PARAMETER):
            raise TypeError(
                f'expected one of torch.optim.{", ".join(_BY_PARAMETER)} with update="backward", found '
                f'{type(optimizer).__name__}: its update may need all gradients at once. Use update="step"'
            )
        self.optimizer = optimizer
        optimizer.register_step_pre_hook(lambda stepped, *_: self._step_called(stepped))
        optimizer.register_step_post_hook(lambda *_: self._step_done())  # of a closure's backward, which came in between
        optimizer.register_state_dict_pre_hook(lambda *_: self._before_saving())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self._drain())
        optimizer.register_load_state_dict_post_hook(lambda *_: self._loaded("optimizer"))
        model = self.model()
        torch_private.refuse_clipping(() if model is None else model.parameters(), _CLIPPING)

    # ---------------------------------------------------------------------------------------------------- for the plan

    def key(self) -> Any:
        """Changes where ``names`` may."""
        if self.optimizer is None:
            return None
        return frozenset(id(parameter) for group in self.optimizer.param_groups for parameter in group["params"])

    def names(self) -> frozenset[str]:
        """Of the parameters that the optimizer updates. Raises StepError without one."""
        return frozenset(self._parameters())

    def _parameters(self) -> dict[str, nn.Parameter]:
        optimizer, model = self.optimizer, self.model()
        if optimizer is None or model is None:
            raise StepError('update="backward" needs an optimizer: pass optimizer= to compile, or call model.bind(optimizer)')
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return {name: p for name, p in nn.Module.named_parameters(model) if id(p) in mine}  # the model's own waits for updates

    def planned(self, state_copies: float) -> Updates:
        """C works in place, torch's single updates need up to three temporaries of the parameters' size."""
        workspace = 1.0 if self.masters is not None else 3.0
        return Updates(state_copies, workspace, self.options.held, self.options.run_ahead)

    def kernels(self, step: fx.GraphModule) -> dict[str, Callable[..., Sequence[Tensor]]]:
        """What the update instructions of a schedule call."""
        by_target = {update: self._update, gradient_norms: self._norms, gradient_scale: self._scale}
        return {
            node.name: functools.partial(self._run, by_target[node.target], node.meta["names"])  # type: ignore[index]
            for node in calls(step)
            if is_update(node)
        }

    # -------------------------------------------------------------------------------------------------- of one backward

    def before_forward(self) -> None:
        """In the caller's thread, whose settings count; a backward may run in another. Raises as ``check``."""
        self._threads = torch.get_num_threads()
        self.check()

    def check(self) -> None:
        """Raises StepError for a model that a fault left between two steps."""
        if self._broken:
            saved = "none was taken" if self._saved is None else f"the last was taken after step {self._saved}"
            raise StepError(
                f"{next(iter(self._broken.values()))}: some parameters have been updated and others not. Load a checkpoint "
                f"into the model and its optimizer (load_state_dict of both; {saved}) before going on"
            )

    def begin(
        self,
        planned: frozenset[str] | None,
        outputs: Sequence[Tensor | None],
        tangents: Sequence[Tensor | None],
        accumulates: bool,
    ) -> None:
        """Before a backward: everything is checked while nothing has changed. ``planned``: the names when the forward ran;
        ``outputs``: those that are still there; ``accumulates``: this is a call of backward(). Raises StepError."""
        self.check()
        parameters = self._parameters()
        if parameters.keys() != planned:
            raise StepError("the optimizer's parameters are others than when this forward ran; run the forward again")
        optimizer = self.optimizer
        assert optimizer is not None
        if not self._stepped:
            raise StepError(
                'a second backward before optimizer.step(): with update="backward" the first one has updated the parameters. '
                "Call optimizer.step() after each backward; to add up gradients, pass accumulate=k to compile"
            )
        if not accumulates:
            raise StepError(
                'torch.autograd.grad was called; with update="backward" gradients are used as they arrive. Call backward()'
            )
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                raise StepError(f'{name} has a gradient already; with update="backward" there are none. Set it to None first')
            if parameter._backward_hooks or torch_private.accumulation_hooks(parameter):
                raise StepError(f'{name} has a gradient hook, which update="backward" would not call; remove it')
        self._check_loss(outputs, tangents)
        groups: dict[int, tuple[int, Mapping[str, Any]]] = {}
        for index, group in enumerate(optimizer.param_groups):
            kept = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            groups |= {id(parameter): (index, kept) for parameter in group["params"]}
        if self.masters is not None:
            self.masters.check(optimizer, parameters.values())
        self._now = _Now(groups, parameters, self._threads)

    def _check_loss(self, outputs: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> None:
        for output, tangent in zip(outputs, tangents, strict=True):
            if tangent is None or tangent.numel() != 1:
                continue
            factor = abs(float(tangent))
            if factor >= _SCALED and math.frexp(factor)[0] == 0.5:
                raise StepError(
                    f'the loss was multiplied by {factor:g}, as a GradScaler does; with update="backward" gradients are used '
                    'as they arrive. Leave the scaler out, which bf16 and fp32 do not need, or use update="step"'
                )
            if self.options.nonfinite == "stop" and output is not None and not bool(torch.isfinite(output).all()):
                raise StepError(
                    f"the loss is {float(output)}; nothing was changed. Skip this batch (del loss), or pass "
                    'nonfinite="skip" or "continue"'
                )

    def ended(self) -> None:
        """All updates are done, or under way."""
        self._stepped = False
        self.steps += 1

    def failed(self) -> None:
        """The backward has; what may have been updated makes the model unusable."""
        if self._now.begun:
            why = f"step {self.steps + 1} failed among its updates"
            self._broken = {"model": why, "optimizer": why}

    @property
    def made_state(self) -> bool:
        """Whether the last backward allocated optimizer state, which later ones find there."""
        return self._now.made_state

    # ------------------------------------------------------------------------------------------------------ the kernels

    def _run(self, kernel: Callable[..., Sequence[Tensor]], names: tuple[str, ...], *values: Tensor) -> Sequence[Tensor]:
        """In whichever thread, as the caller of backward would run it."""
        if torch.get_num_threads() != self._now.threads:
            torch.set_num_threads(self._now.threads)
        try:
            with torch.no_grad():
                return kernel(names, *values)
        except BaseException:
            self.failed()
            raise

    def _norms(self, names: tuple[str, ...], *grads: Tensor) -> tuple[Tensor]:
        """As torch.nn.utils.clip_grad_norm_, but that of a parameter with an fp32 master is fp32."""
        kept = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
        return (torch.stack([torch.linalg.vector_norm(g, dtype=self._norm_dtype(g)).to(kept) for g in grads]),)

    def _norm_dtype(self, grad: Tensor) -> torch.dtype:
        return torch.float32 if self.masters is not None else grad.dtype

    def _scale(self, names: tuple[str, ...], *norms: Tensor) -> tuple[Tensor]:
        """``max_grad_norm`` over the norm of all, at most 1; summed in the order of the model's parameters."""
        now, most = self._now, self.options.max_grad_norm
        joined = torch.cat(norms)
        by_name = dict(zip(names, joined, strict=True))
        ordered = [by_name[name].to(self._norm_dtype(p)) for name, p in now.parameters.items() if name in by_name]
        total = torch.linalg.vector_norm(torch.stack(ordered))
        self.grad_norm = float(total)
        if not math.isfinite(self.grad_norm):
            first = next((name for name in names if not math.isfinite(float(by_name[name]))), names[0])
            self._not_finite(first, "nothing was changed")
        if most is None:
            return (joined.new_ones(()),)
        return ((most / (total + 1e-6)).clamp(max=1.0).to(joined.dtype),)

    def _not_finite(self, name: str, changed: str) -> None:
        """``name``: of the first parameter whose gradient is not finite."""
        if self.options.nonfinite == "stop":
            raise StepError(
                f"the gradient of {name} is not finite, the first in the backward; {changed}. Lower the learning rate or clip "
                '(max_grad_norm=), or pass nonfinite="skip" or "continue"'
            )
        self._now.skip = self.options.nonfinite == "skip"
        if not self._now.told:
            self._now.told = True
            done = "this step's update is skipped" if self._now.skip else "it goes on, as asked"
            warnings.warn(f"step {self.steps + 1}: the gradient of {name} is not finite; {done}", stacklevel=2)

    def _update(self, names: tuple[str, ...], *values: Tensor) -> Sequence[Tensor]:
        now, count = self._now, len(names)
        params, grads, scale = values[:count], list(values[count : 2 * count]), values[2 * count :]
        if now.skip:
            return params
        if not self.options.held:
            for name, grad in zip(names, grads, strict=True):
                if not bool(torch.isfinite(grad).all()):
                    self._not_finite(name, "nothing was changed" if not now.begun else "regions behind it have been updated")
        now.begun = True
        seen: set[int] = set()
        for place, grad in enumerate(grads):  # two parameters may have one gradient, which is scaled in place
            if grad.data_ptr() in seen:
                grads[place] = grad.clone()
            seen.add(grad.data_ptr())
        factor = scale[0] if scale and self.options.max_grad_norm is not None else None
        if self.masters is not None and all(id(now.parameters[name]) in self.masters.by_parameter for name in names):
            self._update_masters(names, grads, factor)
        else:
            self._update_plain(names, grads, factor)
        return params

    def _update_masters(self, names: tuple[str, ...], grads: Sequence[Tensor], factor: Tensor | None) -> None:
        assert self.masters is not None and self.optimizer is not None
        scale = 1.0 if factor is None else float(factor)
        for name, grad in zip(names, grads, strict=True):
            parameter = self._now.parameters[name]
            self._now.made_state |= not self.optimizer.state.get(parameter)
            self.masters.update(self.optimizer, parameter, grad, self._now.groups[id(parameter)][1], scale)

    def _update_plain(self, names: tuple[str, ...], grads: Sequence[Tensor], factor: Tensor | None) -> None:
        """By an optimizer of the same class over stand-ins that share the parameters' memory, version counters and state."""
        assert self.optimizer is not None
        groups: dict[int, dict[str, Any]] = {}
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for name, grad in zip(names, grads, strict=True):
            parameter = self._now.parameters[name]
            index, options = self._now.groups[id(parameter)]
            stand_in = parameter.detach()
            stand_in.grad = grad if factor is None else grad.mul_(factor)
            groups.setdefault(index, {**options, "params": []})["params"].append(stand_in)
            state[stand_in] = self.optimizer.state[parameter]
            self._now.made_state |= not state[stand_in]
        twin = object.__new__(type(self.optimizer))
        twin.__dict__.update(self.optimizer.__dict__, param_groups=list(groups.values()), state=state)
        twin.__dict__.update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
        type(self.optimizer).step(twin)

    # ---------------------------------------------------------------------------------------------------- what is heard

    def _step_called(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises StepError where the step that was made in the backward is not the one that is asked for now."""
        waiting, self._stepped = not self._stepped, True
        if not waiting or optimizer is not self.optimizer:
            return
        for name, parameter in self._now.parameters.items():
            if parameter.grad is not None:
                raise StepError(
                    f'{name} has a gradient that came from outside the model\'s call; with update="backward" it was updated '
                    "before, without that one. Compute all that is trained in the model's forward (a penalty on weights too), "
                    'or use update="step"'
                )
        for group in optimizer.param_groups:
            used = next((self._now.groups[id(p)][1] for p in group["params"] if id(p) in self._now.groups), {})
            if changed := [key for key, value in used.items() if key in group and not _alike(value, group[key])]:
                made = ", ".join(f"{key}={used[key]}" for key in changed)
                raise StepError(
                    f'{", ".join(changed)} of the optimizer changed between backward() and step(); with update="backward" '
                    f"this step was made with {made}. Change it before backward() or after step()"
                )

    def _step_done(self) -> None:
        self._stepped = True

    def _before_saving(self) -> None:
        self._drain()
        self.check()
        self._saved = self.steps

    def _loaded(self, what: str) -> None:
        self._broken.pop(what, None)


def _alike(one: Any, other: Any) -> bool:
    """Two values of an option; tensors among them, alone or in a tuple, by their values."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other))) if isinstance(one, Tensor) else bool(one == other)


_CLIPPING = (
    'clipping by hand finds no gradients with update="backward": they are used as they arrive. Pass max_grad_norm= to compile '
    'for clip_grad_norm_; for clip_grad_value_ use update="step"'
)


@contextlib.contextmanager
def failing(updates: UpdatesInBackward | None) -> Iterator[None]:
    """What is raised inside a backward marks what it may have left half done."""
    try:
        yield
    except BaseException:
        if updates is not None:
            updates.failed()
        raise
