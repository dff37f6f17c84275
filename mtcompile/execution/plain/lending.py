"""Lending: while a forward runs, each parameter that it reads has its values on the device, fetched before they are needed."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from mtcompile import torch_private
from mtcompile.runtime.devices.arena import overlaps, span_nbytes
from mtcompile.runtime.devices.fetching import Fetcher
from mtcompile.runtime.schedule import aligned

V = TypeVar("V")
_MOST_READS = 1 << 16  # of one call that are remembered
_TRIES = 10  # to end a call, against interrupts


class LentParameter(nn.Parameter):
    """The class of a parameter while it is lent. Notes when its ``.data`` is asked for, by which it may be changed unseen."""

    @property
    def data(self) -> torch.Tensor:
        self.__dict__["_mt_opened"] = True
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.__dict__["_mt_opened"] = True
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(torch.Tensor.detach(self).clone(), self.requires_grad)
        return copied


class _LendingDict(dict[str, Any]):
    """The ``_parameters`` or ``_buffers`` of a module, whose values are lent when they are read."""

    def __init__(self, tensors: Mapping[str, Any], lend: Callable[[Any], Any]) -> None:
        super().__init__(tensors)
        self._lend_now = lend

    def _lend(self, value: Any) -> Any:
        return value if torch.compiler.is_dynamo_compiling() else self._lend_now(value)

    def __getitem__(self, name: str) -> Any:
        return self._lend(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._lend(super().get(name, default))

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((name, self._lend(value)) for name, value in super().items())

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self._lend(value) for value in super().values())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(dict.items(self)),)


@dataclass(slots=True, eq=False)
class _Copy:
    """The values of a tensor on the device. ``memory``: until they are read, when the tensor takes them. ``own``: the tensor's
    own values from then on. ``ticket``: None once the bytes are there. ``version``: of the tensor when it took them.
    ``pointer``: where they are."""

    nbytes: int
    ticket: Any
    memory: torch.Tensor | None
    own: torch.Tensor | None = None
    version: int = 0
    pointer: int = 0
    was_read: bool = False


class Lending:
    """The copies of one call. ``homes``: the tensors to lend. ``expected``: the order in which they will be read, as far
    as that is known. ``room``: the most bytes that copies may have; one more than fits is lent all the same, since who reads it
    cannot go on without it. ``unseen``: ids of tensors that may change without a sign. ``reads``: the order in which they were
    read. ``torn``: those whose values on the device somebody still holds."""

    def __init__(
        self,
        homes: Sequence[torch.Tensor],
        expected: Sequence[int],
        fetcher: Fetcher,
        room: int,
        unseen: Collection[int] = (),
    ) -> None:
        self.homes, self.unseen = {id(home): home for home in homes}, unseen
        self.expected = [each for each in expected if each in self.homes]
        self.fetcher, self.room = fetcher, room
        self.reads: list[int] = []
        self.torn: list[int] = []
        self.nbytes = self.most_nbytes = self.fetched_nbytes = 0
        self._copies: OrderedDict[int, _Copy] = OrderedDict()  # by the home's id; those read last at the end
        self._next = self._ahead = 0  # places in ``expected``: from there on nothing has been read, nothing been fetched
        self._holders: dict[int, int] = {}
        self._lock = threading.RLock()  # a forward may have threads

    def begin(self) -> None:
        """Counts who holds the tensors while nothing is lent."""
        self._holders = {key: sys.getrefcount(self.homes[key]) for key in self.homes}

    def lend(self, value: Any) -> Any:
        """Returns ``value``; if it is a tensor to be lent, with its values on the device."""
        key = id(value)
        if key not in self.homes:
            return value
        with self._lock:
            if self.reads and self.reads[-1] == key and (last := self._copies.get(key)) is not None and last.own is not None:
                return value
            if len(self.reads) < _MOST_READS:
                self.reads.append(key)
            with torch_private.plainly():
                copy = self._copies.get(key) or self._fetch(key)
                self._hand_out(key, copy)
                self._advance(key)
                self._fetch_ahead()
        return value

    def _hand_out(self, key: int, copy: _Copy) -> None:
        if copy.ticket is not None:
            self.fetcher.await_copy(copy.ticket)
            copy.ticket = None
        copy.was_read = True
        self._copies.move_to_end(key)
        if copy.own is None and copy.memory is not None:
            tensor = self.homes[key]
            copy.version, copy.pointer = tensor._version, copy.memory.data_ptr()
            copy.own = tensor.data
            tensor.data, copy.memory = copy.memory, None
            if type(tensor) is nn.Parameter:
                tensor.__class__ = LentParameter

    def _advance(self, key: int) -> None:
        with contextlib.suppress(ValueError):  # it was not expected any more
            self._next = self.expected.index(key, self._next) + 1

    def _fetch_ahead(self) -> None:
        self._ahead = max(self._ahead, self._next)
        while self._ahead < len(self.expected):
            key = self.expected[self._ahead]
            if (copy := self._copies.get(key)) is not None:
                copy.was_read = False  # it is needed again
            elif self._make_room(lent_nbytes(self.homes[key])):
                self._fetch(key)
            else:
                return
            self._ahead += 1

    def _fetch(self, key: int) -> _Copy:
        home = self.homes[key]
        nbytes = lent_nbytes(home)
        self._make_room(nbytes, unread=True)
        memory, ticket = self.fetcher.fetch(home.detach())
        copy = self._copies[key] = _Copy(nbytes, ticket, memory)
        self.nbytes += nbytes
        self.fetched_nbytes += nbytes
        self.most_nbytes = max(self.most_nbytes, self.nbytes)
        return copy

    def _make_room(self, nbytes: int, unread: bool = False) -> bool:
        """Lets go of copies that are done, the earliest first, until ``nbytes`` more fit; of ``unread`` ones only if that is
        not enough. Tells whether they fit."""
        for key in list(self._copies):
            if self.nbytes + nbytes <= self.room:
                return True
            if self._copies[key].was_read and self._is_free(key):
                self._let_go(key)
        for key in reversed(list(self._copies)) if unread else ():
            if self.nbytes + nbytes <= self.room:
                return True
            if not self._copies[key].was_read and self._is_free(key):
                self._let_go(key)
        return self.nbytes + nbytes <= self.room

    def _is_free(self, key: int) -> bool:
        """Tells whether nobody holds a tensor, or a view of it, since it was lent. Who does may still change it."""
        if self._copies[key].own is None:
            return True
        return sys.getrefcount(self.homes[key]) <= self._holders[key] and not torch_private.shares_storage(self.homes[key])

    def _let_go(self, key: int, for_good: bool = False) -> None:
        """Gives a tensor its own values back, with what the forward has changed. ``for_good``: if somebody else still sees the
        copy, and it is in host memory, the tensor keeps it: they go on sharing. May be interrupted and called again."""
        copy, tensor = self._copies[key], self.homes[key]
        if copy.ticket is not None:  # its memory is written to
            self.fetcher.await_copy(copy.ticket)
        if copy.own is not None:
            values = torch.Tensor.detach(tensor)
            changed = key in self.unseen or has_changed(tensor, copy.version, copy.pointer)
            fits = values.shape == copy.own.shape and values.dtype == copy.own.dtype
            is_seen = for_good and torch_private.shares_storage(tensor, 2)
            if is_seen and values.device != copy.own.device:
                self.torn.append(key)
            if not is_seen or values.device != copy.own.device:
                if changed and fits:
                    copy.own.copy_(values)
                torch.Tensor.data.__set__(tensor, copy.own if fits else values.to(copy.own.device))  # type: ignore[attr-defined]
            tensor.__dict__.pop("_mt_opened", None)
            if type(tensor) is LentParameter:
                tensor.__class__ = nn.Parameter  # type: ignore[assignment]
        self.nbytes -= copy.nbytes
        del self._copies[key]

    def end(self) -> None:
        """Lets go of all copies, those included that are still to come."""
        self.fetcher.close()
        with torch_private.plainly():
            for copy in self._copies.values():
                copy.ticket = None
            while self._copies:
                self._let_go(next(iter(self._copies)), for_good=True)


def is_lendable(tensor: torch.Tensor, holders: int) -> bool:
    """Tells whether a tensor's values may be those of a copy while they are read: whether only ``holders`` tensors have its
    memory."""
    return tensor.numel() > 0 and not torch_private.shares_storage(tensor, holders) and not overlaps(tensor)


def has_changed(tensor: torch.Tensor, version: int, pointer: int) -> bool:
    """Tells whether a tensor shows that its values were changed since it had that version and that address."""
    return tensor._version != version or tensor.data_ptr() != pointer or "_mt_opened" in tensor.__dict__


def changed_unseen(model: nn.Module) -> set[int]:
    """Returns the ids of the buffers that a forward may change without a sign: kernels of batch norms write running statistics
    past their version counters."""
    return {id(b) for m in model.modules() if m.training for b in m._buffers.values() if b is not None}


def lent_nbytes(tensor: torch.Tensor) -> int:
    """Returns the bytes that a copy of a tensor takes."""
    return aligned(span_nbytes(tensor))


def call_lending(function: Callable[[], V], model: nn.Module, lent: Lending, keeping: Sequence[nn.Module]) -> V:
    """Calls a function in which what the modules of ``model`` read is lent by ``lent``. ``keeping``: modules that hold their
    parameters in other places too, and read them there (recurrent layers): these are lent as long as they run."""
    holding = [_Holding(lent) for _ in keeping]
    hooks: list[Any] = []
    replaced: list[tuple[dict[str, Any], str, dict[str, Any], _LendingDict]] = []

    def undo() -> None:
        _give_back(replaced)
        for hook in hooks:
            hook.remove()
        for each in holding:
            each.leave()
        lent.end()

    try:
        for module, each in zip(keeping, holding, strict=True):
            hooks.append(module.register_forward_pre_hook(each.enter))
            hooks.append(module.register_forward_hook(each.leave, always_call=True))
        for module in model.modules():
            state = module.__dict__
            for name in () if isinstance(module, torch.jit.ScriptModule) else ("_parameters", "_buffers"):
                tensors = state.get(name)
                if tensors and any(id(tensor) in lent.homes for tensor in tensors.values()):
                    reading = _LendingDict(tensors, lent.lend)
                    replaced.append((state, name, tensors, reading))
                    state[name] = reading
        lent.begin()
        return function()
    finally:
        through_interrupts(undo)


def through_interrupts(function: Callable[[], None]) -> None:
    """Calls a function again if it is interrupted, and then raises the interrupt: half of it would leave another model."""
    interrupt: KeyboardInterrupt | None = None
    for _ in range(_TRIES):
        try:
            function()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _give_back(replaced: Sequence[tuple[dict[str, Any], str, dict[str, Any], _LendingDict]]) -> None:
    """Gives modules their own dictionaries again, with what the forward has put into them."""
    for state, name, tensors, reading in replaced:
        if state.get(name) is reading:
            state[name] = tensors
        present = dict(dict.items(reading))
        if present.keys() != tensors.keys() or any(tensors[key] is not value for key, value in present.items()):
            tensors.clear()
            tensors.update(present)


def keepers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that hold parameters elsewhere than in their ``_parameters``, such as recurrent layers."""
    return [module for module in model.modules() if any(_holds(value) for value in _others(module))]


def _others(module: nn.Module) -> Iterator[Any]:
    for name, value in module.__dict__.items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)


def _holds(value: Any) -> bool:
    return isinstance(value, nn.Parameter)


class _Holding:
    """Holds what a module reads elsewhere, so that it stays lent while the module runs."""

    def __init__(self, lent: Lending) -> None:
        self._lent = lent
        self._held: list[nn.Parameter] = []

    def enter(self, module: nn.Module, *_: Any) -> None:
        for value in (*dict.values(module._parameters), *_others(module)):
            if _holds(value):
                self._held.append(self._lent.lend(value))

    def leave(self, *_: Any) -> None:
        self._held.clear()
