"""Wholeness: whether a model's weights and its optimizer's state are those of one step.

An error or an interrupt among updates leaves some parameters updated and others not, and one within a load leaves some loaded
and others not. Such a model refuses to go on until ``load_state_dict`` of both the model and its optimizer has put it right.

    optimizer.step()                  pre-hook: notes versions │ updates │ post-hook: the step has ended
    load_state_dict                   pre-hook: notes versions │ copies  │ post-hook: it is whole
    model(x), state_dict, load, ...   what has begun, not ended and is not running: equal versions, or refused
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile import torch_private
from mtcompile.errors import StepError
from mtcompile.references import weakly, with_hooks

Versions = Mapping[int, tuple[Any, ...]]
_UPDATING: Versions = {0: ()}  # equal to no others: updates have begun


@dataclass(slots=True)
class _Load:
    """A ``load_state_dict`` that has begun. ``versions``: before it; ``errors``: what a module's collects, and raises at its
    end; ``ended``: it got to its end, ``partly`` if it lacked some of the model, as strict=False allows."""

    versions: Any
    errors: list[str]
    ended: bool = False
    partly: bool = False

    def left_a_mixture(self, versions: Any) -> bool:
        whole = self.ended and not (self.partly and self.errors)
        return not whole and versions != self.versions


class Wholeness:
    """A watch: is one model whole? ``drain``: waits for updates that run behind a forward. ``steps``: how many have ended.
    ``saved_in``: the folder of its last checkpoint. ``around``: hooks to call before and after the updates of a step that is
    watched."""

    around: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def __init__(self, model: nn.Module, drain: Callable[[], None]) -> None:
        self.drain = drain
        self.steps = 0
        self.saved_in = ""
        self._broken: dict[str, str] = {}  # model, optimizer -> why it has to be loaded again
        self._saved_step: int | None = None
        self._model = weakref.ref(model)
        self._state_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
        self._loads: weakref.WeakKeyDictionary[Any, _Load] = (
            weakref.WeakKeyDictionary()
        )  # of the model and of optimizers: the last
        # Of each optimizer that has been bound: the versions when its step began, None while there is none.
        self._begun: weakref.WeakKeyDictionary[torch.optim.Optimizer, Versions | None] = weakref.WeakKeyDictionary()
        model.register_load_state_dict_pre_hook(weakly(self._before_loading_model))
        self._model_hook: Any = model.register_load_state_dict_post_hook(weakly(self._model_loaded))
        model.register_state_dict_pre_hook(weakly(self._before_saving))

    def bind(self, optimizer: torch.optim.Optimizer) -> bool:
        """Takes an optimizer whose state belongs to the model's. Tells whether it is a new one."""
        if not isinstance(optimizer, torch.optim.Optimizer) or (optimizer := with_hooks(optimizer)) in self._begun:
            return False
        self._begun[optimizer] = None
        self._loaded("optimizer")  # its state begins anew
        optimizer.register_state_dict_pre_hook(weakly(self._before_saving))
        optimizer.register_load_state_dict_pre_hook(weakly(self._before_loading_state))
        self._state_hooks[optimizer] = optimizer.register_load_state_dict_post_hook(weakly(self._state_loaded))
        return True

    def watch(self, optimizer: torch.optim.Optimizer, masters: bool) -> None:
        """Watches the optimizer's ``step()`` from now on. ``masters``: their updates, which are the step's, say when they
        begin."""
        optimizer = with_hooks(optimizer)
        optimizer.register_step_pre_hook(weakly(self._before_masters if masters else self._step_begins))
        if self.around is not None:
            optimizer.register_step_pre_hook(self.around[0])
            torch_private.move_hook(optimizer.register_step_post_hook(self.around[1]), last=False)
        # First, since a hook of the user's may call the model.
        torch_private.move_hook(optimizer.register_step_post_hook(weakly(self._step_ended)), last=False)

    def spoil(self, why: str) -> None:
        """Refuses to go on, from now until a checkpoint is loaded."""
        self._broken = {"model": why, "optimizer": why}

    def check(self) -> None:
        """Raises StepError for a model that is between two steps."""
        self._notice()
        if self._broken:
            saved = "none was taken" if self._saved_step is None else f"the last was taken after step {self._saved_step}"
            saved = f"the last is {self.saved_in}" if self.saved_in else saved
            raise StepError(
                f"{next(iter(self._broken.values()))}. Load a checkpoint into the model and its "
                f"optimizer (load_state_dict of both; {saved}) before going on"
            )

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Surrounds a load of the model and its optimizer. If an error or an interrupt ends it after something has changed, the
        model refuses to go on."""
        before = self._versions()
        try:
            yield
        except BaseException:
            if self._versions() != before:
                self.spoil("a load ended before all of the checkpoint was loaded")
            raise

    def _versions(self) -> list[Any]:
        owners: list[Any] = [self._model(), *self._begun]
        return [_versions_of_owner(owner) for owner in owners if owner is not None]

    def updating(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that updates begin, of a step that ends with the optimizer's own."""
        self._begun[optimizer] = _UPDATING

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that the optimizer's step has ended, also where torch.compile has traced it."""
        if optimizer in self._begun:
            self._begun[optimizer] = None

    def _notice(self) -> None:
        """Notices a step that was left among its updates, and a load that was left before its end."""
        for owner, load in list(self._loads.items()):
            if not _is_loading(owner, load):
                del self._loads[owner]
                if load.left_a_mixture(_versions_of_owner(owner)):
                    part = "optimizer" if isinstance(owner, torch.optim.Optimizer) else "model"
                    self._broken[part] = f"load_state_dict of the {part} ended before all of it was loaded"
        for optimizer, versions in list(self._begun.items()):
            if versions is None or is_running(optimizer):
                continue
            self._begun[optimizer] = None
            if has_changed(versions, versions_of(optimizer)):
                self.spoil("optimizer.step() ended among its updates: some parameters may have been updated, others not")

    # ------------------------------------------------------------------------------ hooks of the model and the optimizer

    def _before_saving(self, *_: Any) -> None:
        self.drain()
        self.check()
        self._saved_step = self.steps

    def _before_loading_model(self, model: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        self._before_loading(model, self._model_hook, rest[-1])

    def _before_loading_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        self._before_loading(optimizer, self._state_hooks[optimizer], [])

    def _before_loading(self, owner: Any, hook: Any, errors: list[str]) -> None:
        self.drain()
        self._notice()
        torch_private.move_hook(hook, last=True)  # others change what was loaded
        self._loads[owner] = _Load(_versions_of_owner(owner), errors)

    def _loaded(self, part: str) -> None:
        self._broken.pop(part, None)

    def _model_loaded(self, model: nn.Module, incompatible: Any) -> None:
        load = self._loads[model]
        load.ended, load.partly = not load.errors, bool(incompatible.missing_keys)
        if load.ended and not load.partly:
            self._loaded("model")

    def _state_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self._loads[optimizer].ended = True
        self._loaded("optimizer")

    def _before_masters(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.check()

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a step that torch.compile traces is not watched
            return None
        if self._begun[optimizer] is not None and is_running(optimizer):  # a step that calls the step of its base class
            return None
        self.check()
        self._begun[optimizer] = versions_of(optimizer)
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._watched(optimizer, args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._watched(optimizer, kwargs["closure"])}
        return None

    def _watched(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a closure that ends the watch if it raises before anything has changed: what changes later is no step's."""

        @functools.wraps(closure)
        def watched() -> Any:
            try:
                return closure()
            except BaseException:
                if (versions := self._begun[optimizer]) is not None and not has_changed(versions, versions_of(optimizer)):
                    self._begun[optimizer] = None
                raise

        return watched

    def _step_ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling() and not is_running(optimizer):
            self._begun[optimizer] = None
            self.steps += 1


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yields the parameters of an optimizer, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def versions_of(optimizer: torch.optim.Optimizer) -> Versions:
    """Returns, by the id of each parameter, what tells whether a step has changed it or its state: versions, and numbers."""
    versions = dict[int, tuple[Any, ...]]()
    state = optimizer.state
    for parameter in parameters_of(optimizer):
        own: list[Any] = [_version(parameter)]
        for value in state.get(parameter, {}).values():
            if isinstance(value, Tensor):
                own.append(_version(value))
            elif isinstance(value, int | float):
                own.append(value)
        versions[id(parameter)] = tuple(own)
    return versions


def _versions_of_owner(owner: Any) -> Any:
    """Returns what tells whether a load has changed a model, or an optimizer."""
    if isinstance(owner, torch.optim.Optimizer):
        return id(owner.state), id(owner.param_groups), versions_of(owner)
    tensors = (*nn.Module.named_parameters(owner), *nn.Module.named_buffers(owner))
    return {name: (id(tensor), _version(tensor)) for name, tensor in tensors}


def _is_loading(owner: Any, load: _Load) -> bool:
    """Tells whether a ``load_state_dict`` that has begun is among the callers."""
    return any(
        frame.f_code.co_name == "load_state_dict"
        and (frame.f_locals.get("self") is owner or frame.f_locals.get("error_msgs") is load.errors)
        for frame in callers()
    )


def callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # a tensor of torch.inference_mode has none
        return 0


def has_changed(before: Versions, after: Versions) -> bool:
    """Tells whether anything has changed. New state has not, as long as nothing was added to it."""
    if before.keys() != after.keys():
        return True
    zeros = (0,) * max((len(own) for own in after.values()), default=0)
    return any(own != before[key] and own != (before[key] + zeros)[: len(own)] for key, own in after.items())


def is_running(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether the optimizer's ``step`` is among the callers: that of a subclass, or one that calls its closure."""
    return any(frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer for frame in callers())


def is_being_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether the constructor of Accelerate's shell around the optimizer is among the callers."""
    constructors = (frame.f_locals for frame in callers() if frame.f_code.co_name == "__init__")
    shells = (each for each in constructors if type(each.get("self")).__name__ == "AcceleratedOptimizer")
    return any(each.get("optimizer") is optimizer for each in shells)
