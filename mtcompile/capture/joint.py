"""Traces a described graph to its joint (forward and backward) ATen graph."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from mtcompile import torch_private
from mtcompile.capture.description import Description, Tangents, autocast_state
from mtcompile.capture.effects import changed_after_forward, changing_in_backward, drop_tokens, take_changes
from mtcompile.capture.outputs import changes_operand, fake_of, storage_of
from mtcompile.capture.refusals import in_micro_batches, not_compiled, place_of, refuse
from mtcompile.capture.stamping.repeats import shortened
from mtcompile.capture.stamping.segments import Unlike
from mtcompile.capture.stamping.stamp import named, stamped
from mtcompile.errors import CaptureError, shows_part
from mtcompile.passes.analysis.storages import inputs_read_by_place
from mtcompile.passes.generators import rng_preserved
from mtcompile.passes.joint.batch.compared import Rows, compared
from mtcompile.passes.joint.batch.joining import Micro, check_whole, rows_of
from mtcompile.passes.joint.strides import Observe
from mtcompile.passes.step_graph import InputSpec, OutputSpec, is_random
from mtcompile.runtime.devices.arena import fills_storage, overlaps, span_nbytes
from mtcompile.torch_private import pytree
from mtcompile.torch_private.plain_strides import plain_strides, reserve_always
from mtcompile.torch_private.plain_torch import plain_kernels


def joint_graph(description: Description, tangents: Tangents, observe: Observe | None = None) -> fx.GraphModule:
    """The ATen graph of one program, in the form ``passes.normalize`` takes. ``observe`` gives the strides that the device's
    kernels make; without it, torch's shape functions are believed.

    No backward is traced for outputs without a gradient. Of equal blocks only some are traced, if the others are provably
    copies of those. Raises CaptureError.
    """
    return _stamped_or_whole(description, tangents, observe, [])


def _stamped_or_whole(
    description: Description, tangents: Tangents, observe: Observe | None, failures: list[Unlike], outermost: bool = True
) -> fx.GraphModule:
    """Traces some of the blocks that are most alike, and of what is left then some of those, and so on. ``failures``: where
    that did not work; after two of them, all is traced."""
    if (some := shortened(description, tangents, _module_path_of)) is not None:
        less, left, blocks = some
        try:
            return stamped(_stamped_or_whole(less, left, observe, failures, False), blocks)
        except Unlike as failure:
            failures.append(failure)
            if len(failures) > 1 and not outermost:
                raise
    return named(_traced_whole(description, tangents, observe))


def _traced_whole(description: Description, tangents: Tangents, observe: Observe | None) -> fx.GraphModule:
    strides = {index: given for index, given in enumerate(tangents or ()) if isinstance(given, tuple)}
    with _tracing(description, tangents) as (stack, graph, fakes):
        try:
            with plain_kernels(), plain_strides(observe, torch_private.differentiates(graph)):
                joint = torch_private.export_joint(stack, graph, fakes, strides)
        except CaptureError as error:
            refuse(CaptureError(str(error).partition("\n\nWhile executing")[0]), error)  # what fx adds
        except Exception as error:
            why = _refused_change(description)
            refuse(CaptureError(why) if why else not_compiled(error, "the backward of this model could not be traced"), error)
    reserve_always(joint.graph)
    drop_tokens(joint)
    _check_storages(joint, fakes, description)
    return _annotate(joint, description)


def compare_with_whole(
    joint: fx.GraphModule, micro: Micro, one: Description, whole: Description, trace_whole: Callable[[], fx.GraphModule]
) -> None:
    """Notes in ``joint``, of one micro-batch, which of its numbers depend on how many rows there are: those that differ in the
    graph of the whole batch. Raises CaptureError where the forward, or how its results are made of rows, differs in another
    way."""
    with in_micro_batches(micro):
        joint.meta["numbers"] = compared(one.graph, whole.graph, Rows(rows_of(joint, micro), micro.count))
        joint_of_whole = trace_whole()
        joint_of_whole.meta["numbers"] = joint.meta["numbers"].of_whole()
        check_whole(joint, joint_of_whole, micro)


def trace_settings(device: torch.device) -> tuple[Any, ...]:
    """The settings that decide, beside the graph itself, which operations a trace for ``device`` consists of, as far as torch's
    key does not hold them."""
    return (
        autocast_state(device),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch_private.kernel_choices(device),
        torch.backends.cpu.get_cpu_capability(),
    )


@contextlib.contextmanager
def _tracing(
    description: Description, tangents: Tangents
) -> Iterator[tuple[contextlib.ExitStack, fx.GraphModule, tuple[torch.Tensor, ...]]]:
    """Enters the settings that a program is traced under; yields their stack, the graph to trace, and its fake inputs."""
    graph = fx.GraphModule(description.graph, _with_detached(description.graph.graph, tangents))
    fakes = tuple(fake_of(node) for node in description.graph.graph.find_nodes(op="placeholder"))
    fake_mode = torch_private.fake_mode_of(fakes)
    with contextlib.ExitStack() as stack:
        if description.at_home and description.device.type != "cpu":
            fakes = tuple(_on_device(fake, fake_mode, description.device) for fake in fakes)
            stack.enter_context(torch_private.mixing_devices(description.device))
            stack.enter_context(description.device)  # factories that name no device
        stack.enter_context(torch_private.tracing_joint(fake_mode, description.backward_autocast))
        stack.enter_context(torch.set_grad_enabled(tangents is not None))
        stack.enter_context(rng_preserved("cpu"))
        stack.enter_context(rng_preserved(str(description.device)))
        for device, enabled, dtype in description.autocast:  # a retrace happens in a backward, outside the user's autocast
            if enabled != torch.is_autocast_enabled(device) or enabled:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield stack, graph, fakes


def _on_device(fake: torch.Tensor, mode: Any, device: torch.device) -> torch.Tensor:
    """A fake tensor like ``fake`` on ``device``."""
    with mode:
        moved = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device)
    return moved.requires_grad_(fake.requires_grad)


def _with_detached(graph: fx.Graph, tangents: Tangents) -> fx.Graph:
    """A copy of ``graph`` whose outputs without a tangent are detached, each with storage of its own: where they are made, so
    that what a block returns is made in that block, unless they are changed after that."""
    copied = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    copied.graph_copy(graph, env)
    results = []
    seen = {storage_of(node) for node in graph.find_nodes(op="placeholder")}
    for position, value in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type]
        node = env[value]
        storage = storage_of(value)
        if storage in seen:  # of an input or an earlier result: give this one its own
            node = copied.call_method("clone", (node,))
        seen.add(storage)
        if tangents is not None and tangents[position] is False:
            as_made = node is env[value] and node.op != "placeholder" and not fake_of(value)._version
            with copied.inserting_after(node) if as_made else contextlib.nullcontext():
                node = copied.call_method("detach", (node,))
        results.append(node)
    copied.output(tuple(results))
    return copied


def _annotate(joint: fx.GraphModule, description: Description) -> fx.GraphModule:
    """Replace torch's descriptors by InputSpec and OutputSpec, so that no pass knows them."""
    inputs, computed = description.inputs, description.computed
    specs = []
    changes = take_changes(joint)
    described_inputs: dict[int, fx.Node] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        kind = type(desc).__name__
        if kind == "PlainAOTInput":
            specs.append(inputs[desc.idx])
            described_inputs[desc.idx] = node
        elif kind == "TangentAOTInput" and type(desc.output).__name__ == "PlainAOTOutput":
            specs.append(InputSpec("tangent", f"grad of {computed[desc.output.idx][0]}", desc.output.idx))
        else:
            raise CaptureError(_refused_input(desc, description))
    results, described = [], []
    output = joint.graph.output_node()
    for value, desc in zip(
        pytree.tree_leaves(output.args[0], is_leaf=_is_none), pytree.tree_leaves(output.meta["desc"]), strict=True
    ):
        if value is None:
            continue
        kind = type(desc).__name__
        if kind == "PlainAOTOutput":
            spec = OutputSpec("output", desc.idx, computed[desc.idx][0])
        elif kind == "GradAOTOutput" and type(desc.grad_of).__name__ == "PlainAOTInput":
            spec = OutputSpec("grad", desc.grad_of.idx, inputs[desc.grad_of.idx].name)
            if any("sparse" in str(node.target) for node in (value, *value.all_input_nodes)):
                raise CaptureError(
                    f"the gradient of {spec.name} is sparse; expected dense gradients, which have a place at home: "
                    "leave sparse=True out of the embedding"
                )
        elif kind == "InputMutationAOTOutput" and type(desc.mutated_input).__name__ == "PlainAOTInput":
            spec = OutputSpec("mutation", desc.mutated_input.idx, inputs[desc.mutated_input.idx].name)
            if inputs[spec.index].role == "param" or inputs[spec.index].differentiable:
                raise CaptureError(_changed_in_place(description, spec.index))
            if overlaps(value.meta["val"]) or overlaps(described_inputs[spec.index].meta["val"]):
                raise CaptureError(
                    f"forward changes {spec.name} in place, of which several elements are one place in memory (as after "
                    "expand), which torch refuses too; pass a copy (clone)"
                )
        else:
            raise CaptureError(f"the traced graph returns {desc.expr()}, which is not supported")
        if spec.kind != "grad" and changed_after_forward(joint, value):
            raise CaptureError(_changed_after_forward(description, spec, value))
        results.append(value)
        described.append(spec)
    for changed, value in changes.items():
        spec = _new_version(description, changed, value)
        position = sum(other.kind == "mutation" and other.index < spec.index for other in described)  # in the inputs' order
        results.insert(position, value)
        described.insert(position, spec)
    output.args = (tuple(results),)
    told = tuple(dict.fromkeys(f"{_module_path(q.module) or 'the model'} at {q.place}" for q in description.told))
    joint.meta.update(inputs=tuple(specs), outputs=tuple(described), device=str(description.device))
    joint.meta.update(told=told, unordered=description.unordered, is_part=description.is_part)  # for exceptions()
    for node in joint.graph.nodes:
        _check_generator(node, description.device)
        if path := _module_path_of(node):
            node.meta["module_path"] = path
    return joint


def _new_version(description: Description, changed: fx.Node, value: fx.Node) -> OutputSpec:
    """Describes a value that the backward writes to an input. Raises CaptureError where no step can write it back."""
    desc = changed.meta["desc"]
    if type(desc).__name__ != "PlainAOTInput":
        raise CaptureError(
            f"a backward changes, in place, a gradient that arrives at what forward returns{place_of([value])}\n  expected a "
            "new tensor, as in gradient = gradient * 2: others may read the one that arrives"
        )
    spec, fakes = description.inputs[desc.idx], [fake_of(n) for n in description.graph.graph.find_nodes(op="placeholder")]
    fake = fakes[desc.idx]
    line = place_of([*changing_in_backward(description.graph, {torch_private.storage_id(fake)}), value])
    if spec.role == "param" or spec.differentiable:
        what = _described(spec) if spec.role == "param" else f"{spec.name}, which needs a gradient,"
        raise CaptureError(
            f"the backward changes {what} in place{line}\n  expected a backward to change only buffers, and other tensors "
            "that need no gradient: change it after backward, under torch.no_grad()"
        )
    if overlaps(fake):
        raise CaptureError(
            f"the backward changes {spec.name} in place, of which several elements are one place in memory (as after expand); "
            f"torch refuses this too{line}\n  pass a copy (clone)"
        )
    for other, tensor in zip(description.inputs, fakes, strict=True):
        if tensor is not fake and _share_bytes(tensor, fake):
            raise CaptureError(
                f"the backward changes {spec.name} in place, which shares memory with {other.name}{line}\n  expected memory of "
                "its own for each tensor that the backward changes: register or pass a copy (clone)"
            )
    return OutputSpec("mutation", desc.idx, spec.name, in_backward=True)


def _share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tells whether two tensors share a storage, and their ranges of bytes overlap."""
    if torch_private.storage_id(one) != torch_private.storage_id(other):
        return False
    start, begin = (tensor.storage_offset() * tensor.element_size() for tensor in (one, other))
    return start < begin + span_nbytes(other) and begin < start + span_nbytes(one)


def _changed_after_forward(description: Description, spec: OutputSpec, value: fx.Node) -> str:
    """Why a result of the forward that the backward changes is refused."""
    inputs, computed = description.graph.graph.find_nodes(op="placeholder"), description.graph.graph.output_node().args[0]
    changed: Any = computed[spec.index] if spec.kind == "output" else list(inputs)[spec.index]  # type: ignore[index]
    line = place_of([*changing_in_backward(description.graph, {storage_of(changed)}), value, *value.all_input_nodes])
    what = "returns or keeps" if spec.kind == "output" else "changes too"
    return (
        f"the backward changes {spec.name} in place, which forward {what}{line}\n  expected a backward to change only buffers "
        "and inputs that forward neither changes nor returns: use a separate buffer, or return a copy (clone)"
    )


def _check_generator(node: fx.Node, device: torch.device) -> None:
    """Raise CaptureError for random numbers of another device: the states of one generator are saved and replayed, the
    device's."""
    val = node.meta.get("val")
    if is_random(node) and isinstance(val, torch.Tensor) and val.device.type != device.type:
        raise CaptureError(
            f"{node.target} draws random numbers on {val.device}, expected on {device}, where the graph computes: "
            f"pass device= to it"
        )


def _refused_input(desc: Any, description: Description) -> str:
    """Why a graph that takes such an input is refused."""
    mutated = getattr(getattr(desc, "output", None), "mutated_input", None)
    if (position := getattr(mutated, "idx", None)) is not None:
        return _changed_in_place(description, position)
    viewed = getattr(desc, "base_of", None)
    if (position := getattr(viewed, "idx", None)) is not None:
        return _changed_beside_another(description, position)
    return f"the traced graph takes {desc.expr()}, which is not supported (a tensor subclass)"


def _refused_change(description: Description) -> str | None:
    """Says why torch could not trace a graph, if the reason is a change of its inputs that no graph can make; else None."""
    nodes = description.graph.graph
    inputs = list(nodes.find_nodes(op="placeholder"))
    for node in nodes.nodes:
        if torch_private.gives_memory(node) and node.args[0] in inputs:
            spec = description.inputs[inputs.index(node.args[0])]
            return (
                f"forward gives {_described(spec)} other memory (.data = ...){place_of([node, *node.all_input_nodes[1:]])}\n"
                "  expected parameters to be changed outside forward, under torch.no_grad(), and buffers to be changed in "
                "place (buffer.copy_(...)) or assigned (self.buffer = ...)"
            )
    storages = [storage_of(node) for node in inputs]
    shared = [position for position, storage in enumerate(storages) if storages.count(storage) > 1]
    named = sorted(shared, key=lambda position: description.inputs[position].role == "param")  # first those that may be copied
    changed = (position for position in named if any(map(changes_operand, _users_of_memory(description, position))))
    position = next(changed, None)
    return None if position is None else _changed_beside_another(description, position)


def _changed_beside_another(description: Description, position: int) -> str:
    return (
        f"{description.inputs[position].name} shares memory with another tensor that forward reads, and forward changes "
        f"one of them in place{_changing(description, position)}\n"
        "  expected memory of its own for each tensor that forward changes: pass or register a copy (clone)"
    )


def _described(spec: InputSpec) -> str:
    return f"the parameter {spec.name}" if spec.role == "param" else spec.name


def _changed_in_place(description: Description, position: int) -> str:
    spec = description.inputs[position]
    what = _described(spec) if spec.role == "param" else f"{spec.name}, which needs a gradient,"
    return (
        f"forward changes {what} in place (an embedding with max_norm= does){_changing(description, position)}\n"
        "  expected only buffers, and inputs that need no gradient, to be changed in place: do it outside forward, under "
        "torch.no_grad()"
    )


def _changing(description: Description, position: int) -> str:
    """The user's line that changes an input of the graph in place."""
    alike = _users_of_memory(description, position)
    return place_of([node for node in alike if changes_operand(node)] or alike)


def _users_of_memory(description: Description, position: int) -> list[fx.Node]:
    """The calls whose first operand shares the memory of an input of the graph."""
    nodes = list(description.graph.graph.nodes)
    storage = storage_of([node for node in nodes if node.op == "placeholder"][position])
    calls = [node for node in nodes if node.op in ("call_function", "call_method") and node.all_input_nodes]
    operands = [(node, node.all_input_nodes[0].meta.get("example_value")) for node in calls]
    return [node for node, value in operands if isinstance(value, torch.Tensor) and torch_private.storage_id(value) == storage]


def _check_storages(joint: fx.GraphModule, fakes: tuple[torch.Tensor, ...], description: Description) -> None:
    """Raise CaptureError where an operation could see what a parameter does not show of its storage: it moves without that.
    Inputs may differ from call to call, and are checked in each."""
    for node in inputs_read_by_place(joint.graph):
        position = getattr(node.meta["desc"], "idx", None)
        if position is not None and description.inputs[position].role == "param" and not fills_storage(fakes[position]):
            raise CaptureError(shows_part(description.inputs[position].name))


def _is_none(value: Any) -> bool:
    return value is None


def _module_path_of(node: fx.Node) -> str:
    """The path of the module that a node was traced in; "" outside of modules."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return _module_path(str(list(stack.values())[-1][0])) if stack else ""


def _module_path(path: str) -> str:
    """``layers.0.attention`` out of ``L['self'].__dict__['_modules']['layers'].0.attention``, also if a library has put another
    ``forward`` in place of a module's, whose path leads through that."""
    parts = [a or b or c for a, b, c in re.findall(r"\['?([^'\]]+)'?\]|\.?([A-Za-z_]\w*)|\.?(\d+)", path)]
    dotted = ".".join(p for p in parts[2:] if p not in ("__dict__", "_modules", "_orig_mod"))
    return re.sub(r"(^|\.)forward\.__func__\..*__self__\.", r"\1", dotted)
