"""The torch.compile backend: ``torch.compile(model, backend="mtcompile", options={"activation_memory": "4GiB"})``.

Parameters, the accumulation of gradients and the optimizer stay as they are, on the device. mtcompile plans what the compiled
graphs themselves hold there: within the budget, it keeps activations, recomputes them, or lets them wait on the host. Graph
breaks, several graphs, inference and changing shapes (a plan per concrete size) work as with any backend.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mtcompile.capture.description import describe, device_of
from mtcompile.capture.specialize import Key, is_symbolic, numbers_among, size_key, specialize, with_numbers
from mtcompile.errors import BudgetError
from mtcompile.execution.compiled import LiveFrames
from mtcompile.execution.door import Door
from mtcompile.execution.memory.parameters import ParameterStore
from mtcompile.execution.placement import budget_error, conversions, random_reserve_nbytes
from mtcompile.execution.program import Program
from mtcompile.execution.session import Session
from mtcompile.machine.device import choose
from mtcompile.options import Options
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.joint.build import InputHomes
from mtcompile.passes.planning.problem import DoesNotFit
from mtcompile.runtime.devices.protocol import Device
from mtcompile.sizes import parse_bytes
from mtcompile.torch_private import noting_arguments_of_checkpoints

_OPTIONS = ("activation_memory", "offload", "kernels", "loss_chunks", "tiles")
noting_arguments_of_checkpoints()  # runs when torch.compile looks up the backend, before it captures anything
_backends: weakref.WeakValueDictionary[tuple[int, torch.device], Backend] = weakref.WeakValueDictionary()


class Backend(Door):
    """All graphs of one torch.compile call on one device, which share one budget. ``given``: the call's options object, kept
    alive because its id identifies this backend."""

    def __init__(self, given: Mapping[str, Any], device: Device) -> None:
        unknown = sorted(set(given) - set(_OPTIONS))
        if unknown:
            raise ValueError(f"expected options among {', '.join(_OPTIONS)}, found {', '.join(unknown)}")
        memory = parse_bytes(given.get("activation_memory"), "activation_memory")
        options = Options(memory=memory, **{name: given[name] for name in _OPTIONS[1:] if name in given})
        self.given, self.device, self.options = given, device, options
        self.frames = LiveFrames()
        self.session = Session(device, options, self, ParameterStore(device), self.frames)
        self.programs = 0

    def graph(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        """Returns the callable for one graph that Dynamo captured."""
        numbers = numbers_among(graph)
        if not numbers and not any(is_symbolic(value) for value in inputs):
            return self._program(graph, inputs)
        sizes: dict[Key, tuple[Program, list[int]]] = {}

        def call(*values: Any) -> Any:  # a graph for any size: each concrete size is planned and checked separately
            values = tuple(with_numbers(values, numbers))
            key = size_key(values)
            if key not in sizes:
                tensors = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
                sizes[key] = self._program(*specialize(graph, values)), tensors
            program, tensors = sizes[key]
            return program(*(values[i] for i in tensors))

        return call

    def _program(self, graph: fx.GraphModule, inputs: Any) -> Program:
        self.programs += 1
        return Program(self.session, describe(graph, inputs, lambda tensor: None, self.device.where, at_home=False))

    def report(self) -> dict[str, Any]:
        """Returns bytes: budget, measured and planned peak, and what stays allocated from step to step."""
        session = self.session
        return {
            "budget_device_bytes": session.options.memory,
            "peak_device_bytes": session.peak_device_bytes,
            "planned_peak_device_bytes": session.planned_device_bytes,
            "arena_device_bytes": session.arenas.nbytes("device"),
            "programs": self.programs,
        }

    # ------------------------------------------------------------------------------------------- the door to the session

    def input_homes(self, joint: fx.GraphModule) -> InputHomes:
        return InputHomes(all_on_device=True)

    def constraints(self, step: fx.GraphModule) -> tuple[Budgets, Mapping[str, str]]:
        memory = self.options.memory
        free = None if memory is None else memory - self.frames.nbytes()
        return Budgets(free, None, 0.0, self.options.offload, random_reserve_nbytes(step)), {}

    def needs_loss_head(self, joint: fx.GraphModule) -> bool:
        """Returns False for a graph without a loss, such as a piece between graph breaks."""
        return bool(joint.graph.find_nodes(op="call_function", target=torch.ops.aten.nll_loss_forward.default))

    def refusal(self, error: DoesNotFit) -> BudgetError:
        return budget_error(error, "activation_memory", self.options.memory or 0, self.frames.nbytes())

    def host_kernels(self, step: fx.GraphModule) -> Mapping[str, Any]:
        return conversions(step)


def mtcompile_backend(graph: fx.GraphModule, inputs: list[Any], *, options: Any = None, mode: str | None = None) -> Any:
    """A torch.compile backend. ``options``:

    activation_memory  bytes of device memory (``"4GiB"`` or a number) for everything the compiled graphs hold and create
                       there beside their inputs: saved activations, temporaries, outputs, and gradients until they are
                       returned; default: no limit
    offload            whether activations may wait in host memory (default True)
    kernels            ``"eager"``: the kernels of plain PyTorch, bit for bit; ``"exact"``: fused where that is shown to give
                       the same bits; ``"auto"`` (default): eager until that is measured on a GPU; ``"inductor"``: compiled ones
    loss_chunks, tiles  as in ``mtcompile.compile``

    Raises ValueError and TypeError for options that it cannot honour. The first call of a graph raises BudgetError if no
    plan fits.
    """
    if mode is not None:
        raise ValueError(f"expected no mode, found {mode!r}; pass options=")
    if options is None:
        options = {}
    where = device_of(graph, inputs)
    backend = _backends.get((id(options), where))
    if backend is None:
        backend = _backends[id(options), where] = Backend(options, choose(where))
    return backend.graph(graph, inputs)


def reports() -> list[dict[str, Any]]:
    """Returns one report for each torch.compile call of this backend that is still in use: bytes of its budget, of its measured
    and planned peaks and of its arena (which stays allocated from step to step), and its number of programs."""
    return [backend.report() for backend in _backends.values()]
