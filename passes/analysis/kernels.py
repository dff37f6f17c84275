"""Kernels: the bodies that regions call. Identical bodies are one kernel, found by a key over everything that matters."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from mtcompile.passes.generators import save_rng
from mtcompile.passes.lazy_graph import LazyGraphModule
from mtcompile.passes.step_graph import body_outputs, iter_tensors, must_run, writes

Kernels = dict[str, fx.GraphModule]  # key -> kernel; one registry for a step graph and all rewritten copies of it


@dataclass(frozen=True, slots=True)
class Shared:
    """The common part of step graphs that have most kernels in common. ``memo``: what is known of the ``kernels``. ``bodies``:
    kernels, and which of their results they clone, by what they are made from. ``rewritten``: joint graphs by form. ``built``:
    a joint graph, the homes of its inputs, and the step graph built of both."""

    kernels: Kernels = field(default_factory=dict)
    memo: dict[Hashable, Any] = field(default_factory=dict)
    bodies: dict[Hashable, tuple[fx.GraphModule, list[bool]]] = field(default_factory=dict)
    rewritten: dict[Any, Any] = field(default_factory=dict)
    built: list[tuple[fx.GraphModule, object, fx.GraphModule]] = field(default_factory=list)

    def keep_only(self, *steps: fx.GraphModule) -> None:
        """Forgets kernels of other steps, and all that would be found out again."""
        names = {name for step in steps for name in step._modules}
        for key in [key for key, kernel in self.kernels.items() if kernel.meta["name"] not in names]:
            del self.kernels[key]
        self.memo.clear()
        self.bodies.clear()
        self.rewritten.clear()
        self.built.clear()


def kernel_key(body: fx.Graph) -> str:
    """Text that is equal for two bodies exactly when they compute the same: operations with their overloads, arguments
    and keyword arguments by position, literals, shapes, dtypes and strides of everything made or taken. It is compared
    as text, so two bodies never share a kernel by an accident of hashing. Tensors are never literals: constants are
    inputs."""
    order = {node: position for position, node in enumerate(body.nodes)}
    rows = []
    for node in body.nodes:
        if node.op == "call_function":
            target = str(node.target) if hasattr(node.target, "_schema") else f"{node.target.__module__}.{node.target.__name__}"
        else:
            target = ""
        operands = map_arg((node.args, node.kwargs), lambda operand: Operand(order[operand]))
        values = [(tuple(v.shape), str(v.dtype), tuple(v.stride())) for v in iter_tensors(node)]
        rows.append(f"{node.op} {target} {operands!r} {values}")
    return "\n".join(rows)


class Operand:
    """Stands for an operand in an operation's arguments, and prints as %3: by its number, not by what it is called."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"%{self.number}"


def install(owner: torch.nn.Module, kernels: Kernels, body: fx.Graph) -> str:
    """The submodule name of the kernel for ``body``; made on first sight."""
    key = kernel_key(body)
    if key not in kernels:
        name = f"k_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        kernels[key] = LazyGraphModule(torch.nn.Module(), body, class_name=name)
        kernels[key].meta.update(key=key, name=name)
    return attach(owner, kernels[key])


def attach(owner: torch.nn.Module, kernel: fx.GraphModule) -> str:
    """Makes a kernel callable from ``owner``; returns its submodule name."""
    name = str(kernel.meta["name"])
    known: Any = owner._modules.get(name)
    if known is None:
        owner.add_module(name, kernel)
    elif known.meta["key"] != kernel.meta["key"]:
        raise AssertionError(f"expected one kernel of the name {name}, found two")
    return name


def drop_dead(body: fx.Graph) -> None:
    """Drops operations whose results nothing reads; those that must run stay. As fx does, without its check of the graph.
    Raises ValueError for one that changes an operand in place: the change may be used though nothing reads the result."""
    for node in reversed(body.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not must_run(node):
            if writes(node):
                raise ValueError(f"expected operations that change nothing in place, found {node.format_node()}")
            body.erase_node(node)


def saved_states(body: fx.GraphModule) -> dict[str, int]:
    """The name of each ``save_rng`` node among the outputs of a body -> its position there."""
    return {node.name: i for i, node in enumerate(body_outputs(body)) if node.target is save_rng}


def copy_meta(node: fx.Node, keys: tuple[str, ...] = ("val", "rng_state", "rng_device")) -> dict[str, Any]:
    return {key: node.meta[key] for key in keys if key in node.meta}
