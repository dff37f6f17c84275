"""Measures kernels and operations by running them once on inputs with their layouts: bytes of workspace, strides of results."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtcompile import torch_private
from mtcompile.cached.remembered import Remembered
from mtcompile.capture.refusals import first_line
from mtcompile.errors import CaptureError, device_ended, ends_device
from mtcompile.kernels.zeros.bounds import around_nbytes, scratch_nbytes, value_dependent_nbytes
from mtcompile.kernels.zeros.run import (
    Call,
    compare_shapes,
    example,
    example_inputs,
    operation_name,
    refusing_draws,
    runs_on,
    zeros_of,
)
from mtcompile.machine.device import allocator_peak
from mtcompile.passes.analysis.memory import body_lives, made_nbytes, output_nbytes, workspace_nbytes
from mtcompile.passes.generators import replay, rng_preserved, save_rng
from mtcompile.passes.joint.strides import Observe
from mtcompile.passes.step_graph import (
    body_outputs,
    is_check,
    is_seed,
    is_view,
    iter_tensors,
    storage_nbytes,
)
from mtcompile.runtime.devices.arena import layout_of
from mtcompile.runtime.schedule import aligned
from mtcompile.torch_private import pytree

_PARTS = (1, 2, 4, 8, 16, 64)  # into which the rows of an operation without room are divided


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one run of a kernel. ``workspace``: bytes of device memory allocated beside results. ``foreign``: the
    positions of results that hold more bytes than declared, or share memory with an operand or an earlier result.
    ``unreleased``: bytes still held after the results are gone. ``note``: why it was not measured in one piece, for a reader;
    else empty. ``estimated``: it could not be measured now."""

    workspace: int
    foreign: tuple[int, ...] = ()
    unreleased: int = 0
    note: str = ""
    estimated: bool = False


def measure(kernel: fx.GraphModule, call: Call, device: torch.device) -> Measured:
    """Measures a kernel by the allocator's own events around one run of ``call`` on example inputs; operation by operation on
    a GPU without room for all of it. Estimates it from shapes if another profiler is active, or if the run fails otherwise.
    Raises MtcompileError if the run has ended the use of the GPU."""
    declared = [aligned(storage_nbytes(node.meta["val"])) for node in body_outputs(kernel)]
    has_room = True
    try:
        inputs = example_inputs(kernel, device)
        with rng_preserved(str(device)), torch.no_grad(), allocator_peak(device) as peak:
            results = call(*inputs)
            actual = [tensor.untyped_storage().nbytes() for tensor in results]
            shared = shared_positions(inputs, results)
            del results
    except CaptureError:
        raise
    except torch.OutOfMemoryError:
        has_room, inputs = False, []  # what the error's frames hold is to be free
    except Exception as error:
        if ends_device(error):
            raise device_ended(f"kernel {kernel.meta.get('name', '')}, while it was measured", first_line(error)) from error
        by_shapes = workspace_nbytes(kernel) + scratch_nbytes(kernel) + value_dependent_nbytes(kernel)
        return Measured(by_shapes, estimated=True)
    if not has_room:
        return _by_operation(kernel, device)
    seeds = {i for i, node in enumerate(body_outputs(kernel)) if is_seed(node)}
    larger = {i for i, (one, other) in enumerate(zip(actual, declared, strict=True)) if one > other}
    foreign = tuple(sorted(larger | (shared - seeds)))
    if peak.nbytes is None:
        return Measured(workspace_nbytes(kernel), foreign, estimated=True)
    return Measured(aligned(max(0, peak.nbytes - output_nbytes(kernel))) + value_dependent_nbytes(kernel), foreign, peak.kept)


def shared_positions(operands: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> set[int]:
    """Returns the positions of results that share memory with an operand or an earlier result."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in operands if tensor.numel()}
    shared = set()
    for position, tensor in enumerate(results):
        if tensor.numel():
            pointer = tensor.untyped_storage().data_ptr()
            shared |= {position} if pointer in taken else set()
            taken.add(pointer)
    return shared


def _by_operation(kernel: fx.GraphModule, device: torch.device) -> Measured:
    """Measures a kernel that has no room as a whole: each operation alone, beside what is alive there by shapes. One that has
    no room either is measured with fewer rows and scaled."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    known: dict[str, Alone] = {}
    alone = {node: measured_alone(node, device, known) for node in allocating(kernel)}
    most = max((each.parts for each in known.values()), default=1)
    note = "operation by operation" + (f", some of them at 1/{most} of their rows, scaled" if most > 1 else "")
    return Measured(composed(kernel, alone), note=note, estimated=True)


@dataclass(frozen=True, slots=True)
class Alone:
    """Measurements of one operation. ``scratch``: the bytes that it allocates beside its results, scaled from one of ``parts``
    into which its rows were divided. ``as_declared``: False if its results hold more bytes than declared, or if nothing could
    be measured as another profiler is active. ``estimated``: it could not be measured whole now."""

    scratch: int
    parts: int = 1
    as_declared: bool = True
    estimated: bool = False


_operations = Remembered[Alone](100_000)


def composed(kernel: fx.GraphModule, alone: Mapping[fx.Node, Alone]) -> int:
    """Returns a kernel's workspace by what each of its operations takes ``alone`` and what is alive there by shapes: no less
    than when it runs, as far as its results hold what they declare, and hardly more."""
    lives = body_lives(kernel.graph, inside=lambda node: alone[node].scratch if node in alone else 0)
    return aligned(max(0, max(lives, default=0) - output_nbytes(kernel))) + value_dependent_nbytes(kernel)


def allocating(kernel: fx.GraphModule) -> list[fx.Node]:
    """Returns the operations of a kernel that may allocate memory beside their results."""
    few = operator.getitem, save_rng, replay
    nodes = [node for node in kernel.graph.nodes if node.op == "call_function" and node.target not in few]
    return [node for node in nodes if not is_view(node) and not is_check(node)]


def measured_alone(node: fx.Node, device: torch.device, known: dict[str, Alone]) -> Alone:
    """Measures an operation on operands of these layouts, once in a process. ``known``: what a model's plans have asked for."""
    if (key := alike(node)) not in known:
        remembered = setting_key(device, [node], key)
        if (alone := _operations.get(remembered)) is None:
            alone = _alone(node, device)
            _operations.put(None if alone.estimated else remembered, alone)
        known[key] = alone
    return known[key]


def setting_key(device: torch.device, nodes: Iterable[fx.Node], about: str) -> Hashable:
    """Returns a key of what operations allocate on a device under the present settings. ``about``: the text that tells these
    operations from others. None where they are a user's, or where the user has implemented some of torch's."""
    targets = {node.target for node in nodes if node.op == "call_function"}
    settings = torch_private.kernel_settings(device)
    if settings is None or None in map(torch_private.name_of_function, targets):
        return None
    return str(device), settings, hashlib.sha256(about.encode()).digest()


def alike(node: fx.Node) -> str:
    """A key that is equal for operations that allocate the same."""
    operands = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: tuple(map(str, map(layout_of, iter_tensors(n)))))
    return f"{node.target} {operands}"


def _alone(node: fx.Node, device: torch.device) -> Alone:
    """Measures one operation; where even a small part of its rows has no room, or it cannot run, a bound by shapes."""
    rows = max((v.shape[0] for n in node.all_input_nodes for v in iter_tensors(n) if v.dim()), default=0)
    target: Any = node.target
    for parts in _PARTS:
        if parts > max(1, rows) or not runs_on(device, node):
            break

        def part(operand: fx.Node, parts: int = parts) -> Any:
            val = operand.meta["val"]
            if parts == 1 or not isinstance(val, torch.Tensor) or not val.dim() or val.shape[0] != rows:
                return example(operand, device)
            return zeros_of(val, device, -(-rows // parts))

        operands: Any = None  # those of the last try are gone before the next
        try:
            operands = fx.node.map_arg((node.args, dict(node.kwargs)), part)
            with rng_preserved(str(device)), torch.no_grad(), allocator_peak(device) as peak:
                with refusing_draws(node, device):
                    results = target(*operands[0], **operands[1])
                if parts == 1:
                    compare_shapes(node, results)
                tensors = [each for each in pytree.tree_leaves(results) if isinstance(each, torch.Tensor)]
                results_nbytes = sum(aligned(tensor.untyped_storage().nbytes()) for tensor in tensors)
                del results, tensors
            if peak.nbytes is None:
                return Alone(around_nbytes(node), as_declared=False, estimated=True)
            as_declared = parts > 1 or results_nbytes <= made_nbytes(node)
            return Alone(parts * max(0, peak.nbytes - results_nbytes), parts, as_declared, estimated=parts > 1)
        except torch.OutOfMemoryError:
            continue
        except CaptureError:
            raise
        except Exception as error:
            if ends_device(error):
                raise device_ended(f"{operation_name(node)}, while it was measured", first_line(error)) from error
            break
    return Alone(around_nbytes(node), estimated=True)


def strides_on(device: torch.device) -> Observe:
    """Returns a function that runs an operation once, on zeros with its operands' layouts, and returns its results' strides."""
    known: dict[str, list[tuple[int, ...] | None] | None] = {}

    def observe(node: fx.Node) -> list[tuple[int, ...] | None] | None:
        if (key := alike(node)) not in known:
            known[key] = _result_strides(node, device)
        return known[key]

    return observe


def _result_strides(node: fx.Node, device: torch.device) -> list[tuple[int, ...] | None] | None:
    operands: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: example(n, device))
    target: Any = node.target
    if is_check(node) or not runs_on(device, node):
        return None
    try:
        with rng_preserved(str(device)), torch.no_grad():
            result = target(*operands[0], **operands[1])
    except Exception as error:  # no room, or an operation that refuses zeros
        if ends_device(error):
            raise device_ended(f"{operation_name(node)}, while it was traced", first_line(error)) from error
        return None
    results = result if isinstance(result, (tuple, list)) else [result]
    return [tuple(each.stride()) if isinstance(each, torch.Tensor) else None for each in results]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides and no more bytes than they span."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
