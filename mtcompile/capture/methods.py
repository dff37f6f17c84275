"""The methods that captures have traced, by the classes that have them: Dynamo does not guard that they stay the same."""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

_Method = tuple[type, str, Any, types.CodeType]  # of this class, under this name: what it is, and what it runs


class TracedMethods:
    """Remembers what classes were when a model's forward was captured: those of its modules, and others whose methods were
    traced."""

    def __init__(self) -> None:
        self._methods: list[_Method] = []
        self._known: set[tuple[type, types.CodeType]] = set()

    def note(self, traced: Collection[types.CodeType], modules: Iterable[nn.Module]) -> None:
        """Takes the code that a capture has traced in a call of ``modules``."""
        classes = {type(module) for module in modules} | _classes_of(traced)
        for cls in classes:
            for name in dir(cls):
                method = getattr(cls, name, None)
                code = _code_of(method)
                if code is not None and code in traced and (cls, code) not in self._known:
                    self._known.add((cls, code))
                    self._methods.append((cls, name, method, code))

    def changed(self) -> bool:
        """Tells whether a class has another method now; forgets all methods then."""
        for cls, name, method, code in self._methods:
            if getattr(cls, name, None) is not method or _code_of(method) is not code:
                self._methods.clear()
                self._known.clear()
                return True
        return False


def _code_of(method: Any) -> types.CodeType | None:
    if isinstance(method, property):
        method = method.fget
    return method.__code__ if isinstance(method, types.FunctionType) else None


def _classes_of(traced: Iterable[types.CodeType]) -> set[type]:
    """The classes that functions name as theirs, among what their files define."""
    files = {getattr(module, "__file__", None): module for module in tuple(sys.modules.values())}
    classes = set()
    for code in traced:
        found: Any = files.get(code.co_filename)
        *owners, _ = getattr(code, "co_qualname", code.co_name).split(".")  # since Python 3.11
        for owner in owners:
            found = getattr(found, owner, None)
        if isinstance(found, type):
            classes.add(found)
    return classes
