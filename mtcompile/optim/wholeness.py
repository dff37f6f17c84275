"""Wholeness: whether a model's weights and its optimizer's state are those of one step.

An error or an interrupt among updates leaves some parameters updated and others not. Such a model refuses to go on until
``load_state_dict`` of both the model and its optimizer has put it right.

    optimizer.step()                  pre-hook: notes versions │ updates │ post-hook: the step has ended
    model(x), state_dict, load, ...   a step that has begun, not ended and is not running: equal versions, or refused
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile import torch_private
from mtcompile.errors import StepError
from mtcompile.references import weakly, with_hooks

Versions = Mapping[int, tuple[Any, ...]]
_UPDATING: Versions = {0: ()}  # equal to no others: updates have begun


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
        # Of each optimizer that has been bound: the versions when its step began, None while there is none.
        self._begun: weakref.WeakKeyDictionary[torch.optim.Optimizer, Versions | None] = weakref.WeakKeyDictionary()
        model.register_load_state_dict_pre_hook(weakly(self._before_loading))
        model.register_load_state_dict_post_hook(weakly(self._model_loaded))
        model.register_state_dict_pre_hook(weakly(self._before_saving))

    def bind(self, optimizer: torch.optim.Optimizer) -> bool:
        """Takes an optimizer whose state belongs to the model's. Tells whether it is a new one."""
        if not isinstance(optimizer, torch.optim.Optimizer) or (optimizer := with_hooks(optimizer)) in self._begun:
            return False
        self._begun[optimizer] = None
        self._loaded("optimizer")  # its state begins anew
        optimizer.register_state_dict_pre_hook(weakly(self._before_saving))
        optimizer.register_load_state_dict_pre_hook(weakly(self._before_loading))
        optimizer.register_load_state_dict_post_hook(weakly(self._state_loaded))
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

    def updating(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that updates begin, of a step that ends with the optimizer's own."""
        self._begun[optimizer] = _UPDATING

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that the optimizer's step has ended, also where torch.compile has traced it."""
        if optimizer in self._begun:
            self._begun[optimizer] = None

    def _notice(self) -> None:
        """Notices a step that was left among its updates."""
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

    def _before_loading(self, *_: Any) -> None:
        self.drain()
        self._notice()

    def _loaded(self, part: str) -> None:
        self._broken.pop(part, None)

    def _model_loaded(self, model: nn.Module, incompatible: Any) -> None:
        if not incompatible.missing_keys:  # as strict=False allows
            self._loaded("model")

    def _state_loaded(self, optimizer: torch.optim.Optimizer) -> None:
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
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
