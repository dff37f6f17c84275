"""The torch.compile door: ``torch.compile(model, backend="mtcompile", options={"activation_memory": "4GiB"})``.

Parameters, their gradients' accumulation and the optimizer stay as they are, on the device; what the compiled graphs
themselves hold there is planned: activations are kept, computed again or wait on the host, within the budget. Graph
breaks, several graphs, inference and changing shapes (a plan per concrete size) work as with any backend.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mtcompile.capture.description import describe, device_of
from mtcompile.capture.specialize import Key, is_symbolic, size_key, specialize
from mtcompile.errors import BudgetError
from mtcompile.execution.program import Program
from mtcompile.execution.runner import Compiled, Tangents
from mtcompile.execution.session import Engine, check_options
from mtcompile.machine.device import choose
from mtcompile.options import parse_bytes
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.step_graph import placeholders
from mtcompile.runtime.devices.protocol import Device

_OPTIONS = ("activation_memory", "offload", "kernels", "loss_chunks")
_doors: weakref.WeakValueDictionary[tuple[int, torch.device], Door] = weakref.WeakValueDictionary()


class Door(Engine):
    """All graphs of one torch.compile call on one device: they share one budget."""

    def __init__(self, options: Mapping[str, Any], device: Device) -> None:
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise ValueError(f"expected options among {', '.join(_OPTIONS)}, found {', '.join(unknown)}")
        if not isinstance(options.get("offload", True), bool):
            raise TypeError(f"expected offload to be True or False, found {options['offload']!r}")
        kernels, loss_chunks = options.get("kernels", "eager"), options.get("loss_chunks", 1)
        check_options(kernels, loss_chunks)
        knobs = {"device": "activation_memory", "host": ""}
        super().__init__(device, parse_bytes(options.get("activation_memory")), None, knobs, kernels, loss_chunks)
        self.options = options  # held, so that its identity stays this door's
        self.offload: bool = options.get("offload", True)
        self.programs = 0

    def graph(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        """The callable for one graph of Dynamo's."""
        if not any(is_symbolic(value) for value in inputs):
            return self._program(graph, inputs)
        sizes: dict[Key, tuple[Program, list[int]]] = {}

        def call(*values: Any) -> Any:  # a graph for any size: each concrete size is planned and checked on its own
            key = size_key(values)
            if key not in sizes:
                tensors = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
                sizes[key] = self._program(*specialize(graph, values)), tensors
            program, tensors = sizes[key]
            return program(*(values[i] for i in tensors))

        return call

    def _program(self, graph: fx.GraphModule, inputs: Any) -> Program:
        self.programs += 1
        return Program(self, describe(graph, inputs, lambda tensor: None, self.device.where, at_home=False))

    def needs_loss_head(self, joint: fx.GraphModule) -> bool:
        """A piece between graph breaks may have no loss."""
        return bool(joint.graph.find_nodes(op="call_function", target=torch.ops.aten.nll_loss_forward.default))

    def place(self, step: fx.GraphModule) -> None:
        step.meta["homes"] = {}
        for node in placeholders(step.graph):
            node.meta["tier"] = "device"

    def constraints(self, step: fx.GraphModule, reserved: int) -> tuple[Budgets, dict[str, str] | None]:
        return Budgets(self.available(reserved), None, 0.0, self.offload, self.reserve(step)), None

    def compile(self, program: Program, tangents: Tangents) -> Compiled:
        try:
            return super().compile(program, tangents)
        except BudgetError:
            waiting = self.alive()
            if not waiting:
                raise
            for frame in waiting:  # earlier graphs of this step: their forward will run again before their backward
                frame.evict()
            return super().compile(program, tangents)

    def report(self) -> dict[str, Any]:
        return {
            "budget_device_bytes": self.memory,
            "peak_device_bytes": self.peak_device_bytes,
            "planned_peak_device_bytes": self.last.schedule.peak_nbytes["device"] if self.last else 0,
            "arena_device_bytes": self._arenas["device"].numel() if "device" in self._arenas else 0,
            "programs": self.programs,
        }


def mtcompile_backend(graph: fx.GraphModule, inputs: list[Any], *, options: Any = None, mode: str | None = None) -> Any:
    """A torch.compile backend. ``options``:

    activation_memory  bytes of device memory for everything the compiled graphs hold and make there beside their inputs:
                       saved activations, temporaries, outputs, and gradients until they are returned; such as
                       ``"4GiB"`` or a number; default no limit
    offload            whether activations may wait in host memory (default True)
    kernels            ``"eager"`` (default): the kernels of plain PyTorch, bit for bit; ``"inductor"``: compiled ones
    loss_chunks        as in ``mtcompile.compile``

    Raises ValueError and TypeError for options that cannot be honoured, and BudgetError, at the first call of a graph,
    when no plan fits.
    """
    if mode is not None:
        raise ValueError(f"expected no mode, found {mode!r}; pass options=")
    if options is None:
        options = {}
    where = device_of(graph, inputs)
    door = _doors.get((id(options), where))
    if door is None:
        door = _doors[id(options), where] = Door(options, choose(where))
    return door.graph(graph, inputs)


def reports() -> list[dict[str, Any]]:
    """For each torch.compile call of this backend still in use: budget, measured and planned peak in bytes, how much of
    it stays allocated from step to step (the arena), programs."""
    return [door.report() for door in _doors.values()]
