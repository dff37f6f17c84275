"""The loop around a model with ``update="backward"``: what each of its events does, by what the last backward has left.

After a backward with updates, ``p.grad`` is a ``UsedGradient``. It takes the place that the gradient has in plain PyTorch, so
that all code is noticed which reads, scales, clips, replaces or clears it, or forgets to clear it.

    event                 nothing left        used, before step()            used, after step()
    ────────────────────────────────────────────────────────────────────────────────────────────────────────
    forward               runs                refused                        runs
    backward              updates             refused                        refused; updates once it is zeroed
    use of p.grad         none there          refused                        refused
    zero_grad()           nothing             spoils: see below              nothing is left
    weights, state change changes             spoils: see below              changes
    step()                as plain PyTorch    ends the step                  refused: it would update again
    step(closure)         step() at the end of the closure, by what that leaves
    bind(another)         binds               refused                        binds
    load_state_dict       loads               spoils until both are loaded   loads
    state_dict            saves               refused                        saves
    Ctrl-C                is raised           ends the step, is raised       is raised

If gradients are cleared or replaced before ``step()``, plain PyTorch does not use them, but the backward already has. If
weights or state are changed before ``step()``, plain PyTorch updates the changed ones, but the backward has updated the old
ones. This cannot be undone: the model is spoiled until a checkpoint is loaded. Everything else is refused before anything more
changes.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mtcompile import torch_private
from mtcompile.errors import StepError
from mtcompile.optim.wholeness import Versions, Wholeness, is_running, parameters_of, versions_of
from mtcompile.reading import HeldInterrupts
from mtcompile.references import weakly
from mtcompile.torch_private import UsedGradient

USED = 'update="backward" has used this gradient in the backward; nothing of it is left to read, scale, clip or add to. '
_IN_A_LOOP = (
    "Pass to compile: max_grad_norm= in place of clip_grad_norm_, accumulate=k to add up gradients, or "
    'update="step" for all else'
)
_IN_A_TRAINER = (
    "{} may clip once, after the last backward of a step, by the norm that its arguments say. For all else, pass "
    'update="step" to compile'
)

FAILED = "a backward failed while it added to this gradient, which is no whole sum; expected zero_grad() before anything else"

_FOLLOWED: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Loop]] = weakref.WeakKeyDictionary()


class Loop:
    """The state of the loop around one model. ``check_step``: raises StepError unless the optimizer's options are those that
    the last backward has used. ``stepped``: False from a backward with updates to the ``step()`` that ends it."""

    def __init__(self, wholeness: Wholeness, check_step: Callable[[torch.optim.Optimizer], None]) -> None:
        self.stepped = True
        self.interrupts = HeldInterrupts()  # from a backward's begin to the end of its step
        self._wholeness, self._check_step = wholeness, check_step
        self._used: Mapping[str, nn.Parameter] = {}  # whose gradients the last backward has used
        self._left: Versions | None = None  # of weights and state after it, if updates have ended
        self._writes: torch_private.DataWrites | None = None  # to the weights through ``.data``, from then to the step
        self._ordered = 0  # entries of the optimizer's state that are in plain PyTorch's order
        self._hidden: list[tuple[nn.Parameter, UsedGradient]] = []  # from the optimizer's own step, while it runs
        self._optimizer: torch.optim.Optimizer | None = None
        self._hooks: list[Any] = []  # of the optimizer, that before a step first
        self._clipping = torch_private.Clipping()  # of the last backward

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Follows this optimizer from now on. Raises StepError between a backward and its step, and for an optimizer that
        another model's loop follows."""
        if optimizer is self._optimizer:
            return
        other = following() if (following := _FOLLOWED.get(optimizer)) is not None else None
        if other is not None and other._optimizer is optimizer:
            raise StepError(
                'expected an optimizer of one model with update="backward", found that of another compiled model, too: one '
                "step() cannot end the backwards of both. Give each model an optimizer of its own, compile a module that holds "
                'both, or use update="step"'
            )
        if not self.stepped:
            raise StepError(
                "another optimizer was bound between backward() and optimizer.step(); the optimizer that this backward has "
                "used must end the step. Bind the other one after step()"
            )
        for hook in self._hooks:
            hook.remove()
        self._optimizer, _FOLLOWED[optimizer], self._ordered = optimizer, weakref.ref(self), 0
        after = optimizer.register_step_post_hook(weakly(self._after_step))
        torch_private.move_hook(after, last=False)  # hooks of the user's see the gradients again
        self._hooks = [
            optimizer.register_step_pre_hook(weakly(self._before_step)),
            after,
            optimizer.register_load_state_dict_pre_hook(weakly(self.before_loading)),
            optimizer.register_state_dict_pre_hook(weakly(self.before_saving)),
        ]

    def release(self) -> None:
        """Forgets the parameters."""
        self.interrupts.release()
        self._used, self._hidden, self._writes = {}, [], None

    # ------------------------------------------------------------------------------------------------- events of the model

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Surrounds a call of the model, which sees no gradients that have been used: a capture would look at them. Raises
        StepError between a backward and its step: in plain PyTorch, this call sees the weights before the step."""
        self.interrupts.release()  # of a step that nobody has ended
        self._check_stepped("the model was called", 'Call it after step(), or use update="step"')
        hidden = self._hide()
        try:
            yield
        finally:
            _show(hidden)

    def before_saving(self, *_: Any) -> None:
        """Raises StepError between a backward and its step, whose weights and state plain PyTorch would not save yet."""
        self._check_stepped("state_dict() was called", "Call it after step()")

    def _check_stepped(self, what: str, instead: str) -> None:
        if not self.stepped:
            self._check_untouched()
            raise StepError(
                f'{what} between backward() and optimizer.step(); with update="backward" the backward has already updated the '
                f"weights. {instead}"
            )

    def check_backward(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Raises StepError for a backward with updates of these parameters that adds to gradients which have been used."""
        if not self.stepped:
            self._check_untouched()
            raise StepError(
                'a second backward before optimizer.step(): with update="backward" the first one has updated the parameters. '
                "Call optimizer.step() after each backward; to add up gradients, pass accumulate=k to compile"
            )
        left = {name: (p, p.grad) for name, p in self._used.items() if isinstance(p.grad, UsedGradient)}
        followed = set(map(id, parameters_of(self._optimizer))) if left and self._optimizer is not None else set()
        for name, (parameter, gradient) in left.items():
            if id(parameter) not in followed:
                continue  # of a module that has been replaced, with its optimizer
            if not gradient.zeroed:
                raise StepError(
                    f"{name} still has the gradient of the step before, to which plain PyTorch would add; expected "
                    "optimizer.zero_grad() after each step, or before each backward"
                )
            if name not in trained:
                raise StepError(
                    f"{name} has a gradient of zeros from zero_grad(set_to_none=False), and this backward has none for it: "
                    "plain PyTorch would update it with zeros. Call zero_grad(), which sets gradients to None"
                )

    def used(self, trained: Mapping[str, nn.Parameter], ended: bool, clipping: torch_private.Clipping, trainer: str) -> None:
        """Notes a backward that has updated these parameters. ``ended``: False if updates still run. ``clipping``: what it has
        done for a loop that clips; ``trainer``: the name of the one whose loop that is, if any."""
        self._clipping = clipping
        why = USED + (_IN_A_TRAINER.format(trainer) if trainer else _IN_A_LOOP)
        for name, parameter in trained.items():
            parameter.grad = UsedGradient(parameter, why, name=name, clipping=clipping)
        self._used, self.stepped, self._left, self._writes = trained, False, None, None
        if ended:
            self.updated()
        if self._optimizer is not None and not is_running(self._optimizer):  # else torch is going through the hooks
            torch_private.move_hook(self._hooks[0], last=True)  # those of the user's run while the gradients are not hidden

    def failed(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Notes a backward that has updated nothing, but has added to gradients of backwards before: they are no sums now."""
        for parameter in trained.values():
            if parameter.grad is not None:
                parameter.grad = UsedGradient(parameter, FAILED)
        self._used, self._left, self._writes = trained, None, None

    def updated(self) -> None:
        """Notes that the updates of the last backward have ended, before anybody else changes what they have changed."""
        if self._optimizer is None:
            return
        with torch_private.process_lock:  # this look at the state does not wait for updates
            if len(self._optimizer.state) != self._ordered:
                _put_in_plain_order(self._optimizer)
                self._ordered = len(self._optimizer.state)
            if not self.stepped and self._left is None:
                self._left = versions_of(self._optimizer)
                self._writes = torch_private.DataWrites(self._used.values())

    def let_interrupt_through(self) -> None:
        """Raises a Ctrl-C that came among the updates of the backward, which have ended or are under way: its step then is the
        last one, as if ``step()`` and ``zero_grad()`` had been called."""
        try:
            self.interrupts.let_through()
        except BaseException:
            for parameter in self._used.values():
                parameter.grad = None
            self.stepped, self._used, self._writes = True, {}, None
            self.interrupts.release()
            raise

    def before_loading(self, *_: Any) -> None:
        """Notes that weights or state are loaded. Between a backward and its step, the one without the other is of no step."""
        if not self.stepped:
            self.stepped = True
            self._wholeness.spoil(
                "weights or optimizer state were loaded between backward() and optimizer.step(), and the backward had already "
                "updated both"
            )

    def _check_untouched(self) -> None:
        """Raises StepError, and spoils the model, if a gradient that has been used is no longer there."""
        for name, parameter in self._used.items():
            gradient = parameter.grad
            if isinstance(gradient, UsedGradient) and not gradient.zeroed:
                continue
            did = "cleared" if gradient is None or isinstance(gradient, UsedGradient) else "replaced"
            self._spoil(f"the gradient of {name} was {did}")
        if self._left is not None and self._optimizer is not None and versions_of(self._optimizer) != self._left:
            self._spoil("weights or optimizer state were changed")
        if (writes := self._writes) is not None and any(map(writes.change_of, self._used.values())):
            self._spoil("weights were changed through .data")

    def _spoil(self, why: str) -> None:
        self.stepped = True
        self._wholeness.spoil(
            f'{why} between backward() and optimizer.step(); with update="backward" that backward had already made the '
            "step, without this change"
        )
        self._wholeness.check()

    # --------------------------------------------------------------------------------------------- events of the optimizer

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is None:
            try:
                self._begin_step(optimizer)
            except BaseException:
                self.interrupts.release()
                raise
            return None

        @functools.wraps(closure)
        def then_step() -> Any:
            value = closure()
            self._begin_step(optimizer)
            return value

        return (args[0], then_step, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets the optimizer's own step find no gradients where the backward has used them. Raises StepError unless it is the
        step that ends the backward."""
        self._wholeness.check()
        if not self.stepped:
            self._check_untouched()
            if not torch_private.is_last_hook(self._hooks[0]):
                raise StepError(
                    "a hook of optimizer.step() was registered between backward() and step(), where it would find no "
                    'gradients: with update="backward" they have been used. Register it before backward()'
                )
            self._check_step(optimizer)
            if self._clipping.is_missing:
                raise StepError(
                    f"optimizer.step() was called and nobody clipped gradients, which this backward has scaled by "
                    f"{self._clipping.factor:.6g}. Expected {self._clipping.expected}. If nobody "
                    'should clip, set that limit to 0, or use update="step"'
                )
        elif left := [name for name, parameter in self._used.items() if isinstance(parameter.grad, UsedGradient)]:
            raise StepError(
                f"optimizer.step() was called without a backward since the last step or load, and {left[0]} still has a "
                "gradient, which plain PyTorch would use again. Expected zero_grad() and a backward before each step"
            )
        self._hidden = self._hide()

    def _after_step(self, *_: Any) -> None:
        _show(self._hidden)
        self._hidden, self.stepped = [], True
        self.interrupts.release()

    def _hide(self) -> list[tuple[nn.Parameter, UsedGradient]]:
        hidden = [(p, p.grad) for p in self._used.values() if isinstance(p.grad, UsedGradient)]
        for parameter, _ in hidden:
            parameter.grad = None
        return hidden


def _put_in_plain_order(optimizer: torch.optim.Optimizer) -> None:
    """Orders the entries of an optimizer's state as its own step would have made them: by its groups."""
    state: dict[Any, Any] = optimizer.state
    ordered = [parameter for parameter in parameters_of(optimizer) if parameter in state]
    if len(ordered) == len(state) and any(one is not other for one, other in zip(ordered, state, strict=True)):
        entries = [(parameter, state[parameter]) for parameter in ordered]
        state.clear()
        state.update(entries)


def _show(hidden: Iterable[tuple[nn.Parameter, UsedGradient]]) -> None:
    for parameter, gradient in hidden:
        if parameter.grad is None:
            parameter.grad = gradient.like(parameter)  # it may have moved to another device


def check_others(trained: Mapping[str, nn.Parameter], known: Collection[int], node: Any) -> None:
    """Raises StepError unless gradients of the running backward come to parameters that it updates from this node of autograd's
    graph alone, and go through the node to nothing else. ``known``: the ids of the model's and the optimizer's parameters."""
    names = {id(parameter): name for name, parameter in trained.items()}
    for leaf in torch_private.leaves_beside(node) or ():
        if (name := names.get(id(leaf))) is not None:
            raise StepError(
                f"this backward also gives {name} a gradient that came from outside the model's call, as from a penalty on "
                'weights or another call of the model; with update="backward" it would be updated without that one. Nothing '
                'was changed. Compute all that is trained in one forward, or use update="step"'
            )
    if any(id(leaf) not in known for leaf in torch_private.leaves_behind(node)):
        raise StepError(
            "gradients of this backward go on through the model's inputs, to a tensor or another model that the optimizer does "
            'not have, as for an adversarial example or a generator; with update="backward" it would update this model too. '
            "Nothing was changed. Detach the input. If only what is behind it is to be trained, freeze the model "
            '(model.requires_grad_(False)) before the forward. Or give all parameters to one optimizer, or use update="step"'
        )
