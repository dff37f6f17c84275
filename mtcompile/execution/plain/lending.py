"""Lending: while a forward runs, each parameter that it reads is a copy on the device, fetched before it is needed."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mtcompile import torch_private
from mtcompile.runtime.devices.arena import span_nbytes
from mtcompile.runtime.devices.fetching import Fetcher
from mtcompile.runtime.schedule import ALIGNMENT
from mtcompile.torch_private import shares_storage

_MOST_READS = 1 << 16  # of one call that are remembered


class LentParameter(nn.Parameter):
    """A copy of a parameter. ``was_opened``: its ``.data`` has been asked for, by which it may have been changed unnoticed."""

    was_opened = False

    @property
    def data(self) -> torch.Tensor:
        self.was_opened = True
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self.was_opened = True
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]


class _LendingDict(dict[str, Any]):
    """The ``_parameters`` or ``_buffers`` of a module, whose values are read as their copies."""

    def __init__(self, tensors: Mapping[str, Any], lend: Callable[[Any], Any]) -> None:
        super().__init__(tensors)
        self._lend = lend

    def __getitem__(self, name: str) -> Any:
        return self._lend(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._lend(super().get(name, default))

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        return ((name, self._lend(value)) for name, value in super().items())

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        return (self._lend(value) for value in super().values())


@dataclass(slots=True, eq=False)
class _Copy:
    """A tensor that is lent. ``ticket``: None once its bytes are there. ``version``: of the copy before anything changed it."""

    home: torch.Tensor
    lent: torch.Tensor
    nbytes: int
    ticket: Any
    version: int
    was_read: bool = False

    @property
    def is_done(self) -> bool:
        """True if it has been read, and nobody holds it or a view of it any more, who might still change it."""
        return self.was_read and sys.getrefcount(self.lent) == 2 and not shares_storage(self.lent)

    @property
    def may_have_changed(self) -> bool:
        return self.lent._version != self.version or getattr(self.lent, "was_opened", False)


class Lending:
    """What is lent during one call. ``homes``: the tensors to lend. ``expected``: the order in which they will be read, as far
    as that is known. ``room``: the most bytes that copies may have; one more than fits is lent all the same, since who reads it
    cannot go on without it. ``reads``: the order in which they were read."""

    def __init__(self, homes: Sequence[torch.Tensor], expected: Sequence[int], fetcher: Fetcher, room: int) -> None:
        self.homes = {id(home): home for home in homes}
        self.expected = [each for each in expected if each in self.homes]
        self.fetcher, self.room = fetcher, room
        self.reads: list[int] = []
        self.nbytes = self.most_nbytes = self.fetched_nbytes = 0
        self._copies: OrderedDict[int, _Copy] = OrderedDict()  # by the home's id; those read last at the end
        self._next = self._ahead = 0  # places in ``expected``: from there on nothing has been read, nothing been fetched

    def lend(self, value: Any) -> Any:
        """Returns the copy of a tensor that is to be lent, and any other value itself."""
        key = id(value)
        if key not in self.homes:
            return value
        if self.reads and self.reads[-1] == key and (last := self._copies.get(key)) is not None:
            return last.lent
        if len(self.reads) < _MOST_READS:
            self.reads.append(key)
        copy = self._copies.get(key) or self._fetch(key)
        if copy.ticket is not None:
            self.fetcher.await_copy(copy.ticket)
            copy.ticket = None
        copy.was_read = True
        self._copies.move_to_end(key)
        self._advance(key)
        lent = copy.lent  # is not done as long as it is held here
        self._fetch_ahead()
        return lent

    def _advance(self, key: int) -> None:
        with contextlib.suppress(ValueError):  # it was not expected any more
            self._next = self.expected.index(key, self._next) + 1

    def _fetch_ahead(self) -> None:
        self._ahead = max(self._ahead, self._next)
        while self._ahead < len(self.expected):
            key = self.expected[self._ahead]
            if (copy := self._copies.get(key)) is not None:
                copy.was_read = False  # it is needed again
            elif self._make_room(_nbytes(self.homes[key])):
                self._fetch(key)
            else:
                return
            self._ahead += 1

    def _fetch(self, key: int) -> _Copy:
        home = self.homes[key]
        nbytes = _nbytes(home)
        self._make_room(nbytes, unread=True)
        lent, ticket = self.fetcher.fetch(home.detach())
        if isinstance(home, nn.Parameter):
            with torch_private.lasting():
                lent = LentParameter(lent, home.requires_grad)
        copy = self._copies[key] = _Copy(home, lent, nbytes, ticket, lent._version)
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
            if self._copies[key].is_done:
                self._let_go(key)
        for key in reversed(list(self._copies)) if unread else ():
            if self.nbytes + nbytes <= self.room:
                return True
            if not self._copies[key].was_read:
                self._let_go(key)
        return self.nbytes + nbytes <= self.room

    def _let_go(self, key: int) -> None:
        copy = self._copies.pop(key)
        self.nbytes -= copy.nbytes
        if copy.ticket is not None:  # its memory is written to
            self.fetcher.await_copy(copy.ticket)
        if copy.may_have_changed:
            _write_back(copy)

    def end(self) -> None:
        """Lets go of all copies, those included that are still to come. What the call has changed goes home."""
        self.fetcher.close()
        for copy in self._copies.values():
            copy.ticket = None
        while self._copies:
            self._let_go(next(iter(self._copies)))


def _write_back(copy: _Copy) -> None:
    home, values = copy.home, torch.Tensor.detach(copy.lent)
    with torch_private.lasting(), torch.no_grad():
        if values.shape == home.shape and values.dtype == home.dtype:
            home.copy_(values)
        else:
            home.data = values.to(home.device)


def _nbytes(tensor: torch.Tensor) -> int:
    return -(-span_nbytes(tensor) // ALIGNMENT) * ALIGNMENT


@contextlib.contextmanager
def lending(model: nn.Module, lent: Lending, keeping: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the modules of ``model`` read the copies that ``lent`` gives. ``keeping``: modules that hold their parameters in
    other places too, and compute with them there (recurrent layers): these parameters become their copies while they run."""
    replaced: list[tuple[dict[str, Any], str, dict[str, Any], _LendingDict]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lent.end)
        stack.callback(_give_back, replaced)
        for module in keeping:
            swap = _Swap(lent)
            stack.callback(swap.leave)
            stack.callback(module.register_forward_pre_hook(swap.enter).remove)
            stack.callback(module.register_forward_hook(swap.leave, always_call=True).remove)
        for module in model.modules():
            state = module.__dict__
            for name in ("_parameters", "_buffers"):
                tensors = state.get(name)
                if tensors and any(id(tensor) in lent.homes for tensor in tensors.values()):
                    state[name] = reading = _LendingDict(tensors, lent.lend)
                    replaced.append((state, name, tensors, reading))
        yield


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


class _Swap:
    """Gives the parameters of a module the values of their copies while it runs."""

    def __init__(self, lent: Lending) -> None:
        self._lent = lent
        self._own: list[tuple[nn.Parameter, torch.Tensor, int]] = []

    def enter(self, module: nn.Module, *_: Any) -> None:
        parameters = [
            p for p in (*dict.values(module._parameters), *_others(module)) if _holds(p) and id(p) in self._lent.homes
        ]
        for parameter in {id(p): p for p in parameters}.values():
            copy, own = self._lent.lend(parameter), parameter.data
            with torch_private.lasting():
                parameter.data = torch.Tensor.detach(copy)
            self._own.append((parameter, own, parameter._version))

    def leave(self, *_: Any) -> None:
        while self._own:
            parameter, own, version = self._own.pop()
            with torch_private.lasting(), torch.no_grad():
                if parameter._version != version:
                    own.copy_(parameter.data)
                parameter.data = own
