"""Registered passes, which users put into the pipeline with ``mtcompile.passes.register``: which errors are theirs, and how
caches tell them apart."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mtcompile.passes.step_graph import copy_graph


class PassFailed(Exception):
    """Raised if a registered pass raises, or if what it returns is no step graph or does not do what the step did. Its cause is
    the error that showed that."""


class Registered:
    """The handle of a registered pass. ``remove()`` takes the pass out; so does leaving a ``with`` block."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove

    def remove(self) -> None:
        """Takes the pass out of the pipeline, unless that was done. What has been planned with it stays as it is."""
        remove, self._remove = self._remove, lambda: None
        remove()

    def __enter__(self) -> Registered:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def name_of(transform: Callable[..., Any]) -> str:
    return str(getattr(transform, "__name__", None) or transform)


def names_of(passes: Sequence[Callable[..., Any]]) -> str:
    """The names of some passes, for a sentence."""
    return " and ".join(filter(None, (", ".join(map(name_of, passes[:-1])), *map(name_of, passes[-1:]))))


def applied(transform: Callable[..., fx.GraphModule], step: fx.GraphModule, plan: object) -> fx.GraphModule:
    """Returns what a registered pass makes of a step. Raises PassFailed."""
    step.meta.update({name: dict(value) for name, value in step.meta.items() if type(value) is dict})
    with blaming((transform,), "failed"), _leaving_kernels_alone(step):
        rewritten = transform(step, plan)
        if not isinstance(rewritten, fx.GraphModule):
            raise TypeError(f"expected it to return the step, an fx.GraphModule, found {type(rewritten).__name__}")
        rewritten.graph.lint()
    return rewritten


@contextlib.contextmanager
def _leaving_kernels_alone(step: fx.GraphModule) -> Iterator[None]:
    """Raises ValueError if kernels, which all plans of the step share, are changed inside; they are as before then."""
    kernels = [kernel for kernel in step.children() if isinstance(kernel, fx.GraphModule)]
    before = [(kernel, copy_graph(kernel.graph)) for kernel in kernels]
    try:
        yield
    finally:
        changed = False
        for kernel, graph in before:
            if vars(kernel).pop("forward", None) is not None or str(kernel.graph) != str(graph):
                kernel.graph, changed = graph, True
        if changed:
            raise ValueError("it changes a kernel in place, which other plans share; expected a copy of it for the region")


@contextlib.contextmanager
def blaming(passes: Sequence[Callable[..., Any]], what: str) -> Iterator[None]:
    """Raises PassFailed, which says ``what`` these registered passes did, for any error inside; if there are none, the error
    itself is raised."""
    try:
        yield
    except PassFailed:
        raise
    except Exception as error:
        if not passes:
            raise
        kind = "" if type(error).__module__.startswith("mtcompile.") else f"{type(error).__name__}: "
        raise PassFailed(
            f"the pass{'es' * (len(passes) > 1)} {names_of(passes)}, registered with mtcompile.passes.register, {what}: {kind}"
            f"{error}\n  correct {'it' if len(passes) == 1 else 'them'}, or take {'it' if len(passes) == 1 else 'one'} out "
            "with the handle's remove(); MT_DEBUG=3 prints the step after each pass"
        ) from error


class NotKnown(Exception):
    """Raised for a pass that depends on a value that no text describes."""


def key_of(value: Any, known: tuple[Any, ...] = ()) -> str:
    """Returns a text that is equal for registered passes that do the same. It is made of their compiled code, of what they
    call in their own package, and of the values that they use. ``known``: functions and classes around it. Raises NotKnown."""

    def key(*parts: Any) -> str:
        return f"({', '.join(key_of(part, known) for part in parts)})"

    if value is None or value is ... or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return key(*value)
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(key_of, value)))}}}"
    if isinstance(value, Mapping):
        return key(*value.items())
    if isinstance(value, types.CodeType):
        return key(value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_consts)
    if isinstance(value, types.MethodType):
        return key(value.__func__, value.__self__)
    if isinstance(value, functools.partial):
        return key(value.func, value.args, value.keywords)
    if isinstance(value, (types.ModuleType, property, classmethod, staticmethod)):
        return key(getattr(value, "fget", None) or getattr(value, "__func__", None) or value.__name__)
    if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        if type(value).__module__.partition(".")[0] in (*sys.stdlib_module_names, "torch") or not hasattr(value, "__dict__"):
            raise NotKnown(f"{type(value).__name__}")
        return key(type(value), vars(value))
    name = f"{value.__module__}.{value.__qualname__}"
    if value in known or (known and _package(value) != _package(known[0])) or isinstance(value, types.BuiltinFunctionType):
        return name
    known = (*known, value)
    if isinstance(value, type):
        own = {name: part for name, part in vars(value).items() if not name.startswith("__") or callable(part)}
        return name + key(value.__bases__, own)
    used = {name: value.__globals__[name] for name in sorted(_globals(value.__code__)) if name in value.__globals__}
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    return name + key(value.__code__, value.__defaults__, value.__kwdefaults__, cells, used)


def _package(value: Any) -> str:
    return str(value.__module__).partition(".")[0]


def _globals(code: types.CodeType) -> set[str]:
    """Returns the names of the globals that a function reads, and functions in it."""
    inside = [names for part in code.co_consts if isinstance(part, types.CodeType) for names in _globals(part)]
    return {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}.union(inside)
