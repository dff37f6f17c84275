"""A graph module that writes its Python code when it is first called: of a large model, most graphs are only read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


class LazyGraphModule(fx.GraphModule):
    """An ``fx.GraphModule`` whose code is written at its first call, or when ``code`` is read."""

    def recompile(self) -> None:  # type: ignore[override]  # torch returns the code, and uses it for nothing
        """Forgets the code."""
        type(self).forward = LazyGraphModule.forward  # torch makes a class for each graph module

    def write_code(self) -> None:
        """Writes the code of the graph as it is, if there is none."""
        if type(self).forward is LazyGraphModule.forward:
            super().recompile()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the graph."""
        self.write_code()
        return type(self).forward(self, *args, **kwargs)

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        self.write_code()
        return super().code

    def __str__(self) -> str:
        self.write_code()
        return super().__str__()


def lazy(module: fx.GraphModule) -> LazyGraphModule:
    """Returns a module with the same graph, submodules and ``meta``."""
    same = LazyGraphModule(module, module.graph, class_name=type(module).__name__)
    same.meta = module.meta
    return same


def forward_of(module: fx.GraphModule) -> Callable[..., Any]:
    """Returns what computes the graph of a module, without the hooks that a call looks for."""
    if isinstance(module, LazyGraphModule):
        module.write_code()
    return module.forward
