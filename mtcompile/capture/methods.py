"""The methods that captures have traced, by the classes that have them: Dynamo does not guard that they stay the same."""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

_Method = tuple[type, str, Any, types.CodeType]  # its class, its name there, the method, and its code


class TracedMethods:
    """Remembers the methods that the captures of a model's forward have traced, to notice when one is replaced: methods of its
    modules, and of other classes."""

    def __init__(self) -> None:
        self._methods: list[_Method] = []
        self._known: set[tuple[type, types.CodeType]] = set()

    def note(self, traced: Collection[types.CodeType], modules: Iterable[nn.Module]) -> None:
        """Remembers the methods whose code a capture has traced, in a call of ``modules``."""
        classes = {type(module) for module in modules} | _classes_of(traced)
        for cls in classes:
            for name in dir(cls):
                method = getattr(cls, name, None)
                code = _code_of(method)
                if code is not None and code in traced and (cls, code) not in self._known:
                    self._known.add((cls, code))
                    self._methods.append((cls, name, method, code))

    def changed(self) -> bool:
        """Tells whether a remembered method has been replaced. If so, forgets all."""
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
    """The classes of these functions, by their qualified names, where a file defines the class at its top level or nested."""
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
