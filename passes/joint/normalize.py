"""Makes a captured joint graph regular: constants lifted, aliases gone, every output a value of its own, phases marked."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from mtcompile.passes.analysis.kernels import drop_dead
from mtcompile.passes.insert import add_restride
from mtcompile.passes.joint.strides import Observe, correct_strides
from mtcompile.passes.lazy_graph import lazy
from mtcompile.passes.step_graph import InputSpec, inputs_of, is_view, outputs_of, placeholders, span_nbytes

aten = torch.ops.aten
# Operations whose saved statistics have the dtype of their weight, and where that is among their arguments.
_BATCH_NORM = aten._native_batch_norm_legit_functional.default
_WEIGHT_OF_NORM = {
    _BATCH_NORM: 1,
    aten.native_layer_norm.default: 2,
    aten.native_group_norm.default: 1,
}
_UNINITIALIZED = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)


def normalize(joint: fx.GraphModule, observe: Observe | None = None) -> fx.GraphModule:
    """Changes the graph of ``joint`` and returns a module of it. ``observe`` gives the strides that the device's kernels make;
    without it, the traced ones are believed.

    Afterwards: no get_attr of a tensor (placeholders with role ``constant``), no detach or alias, no uninitialized
    memory, no output that is an input or another output (a clone instead), every parameter's gradient strided like its
    parameter, no dead node except random ones (dropping those would move the generator's stream) and checks, and
    ``meta['phase']`` on every node.
    Raises NotImplementedError naming a higher-order operator that cannot be cut (the capture turns it into an error
    with the user's line).
    """
    if observe is not None:
        correct_strides(joint.graph, observe)
    _lift_constants(joint)
    for node in list(joint.graph.nodes):
        if node.op == "call_function" and node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
        elif node.op == "call_function" and node.target is aten._conj.default and isinstance(node.args[0], complex):
            _replace_by_number(node, node.args[0].conjugate())  # the gradient of a product with a Python number conjugates it
    _fill_factories(joint.graph)
    _correct_copies(joint.graph)
    _correct_statistics(joint.graph)
    _correct_dropout(joint.graph)
    _read_in_backward(joint)
    _mark_phases(joint)
    _own_outputs(joint)
    drop_dead(joint.graph)
    joint.graph.lint()
    return lazy(joint)


def _replace_by_number(node: fx.Node, number: complex) -> None:
    """Lets every user of a node take a Python number instead."""
    for user in list(node.users):
        user.args = fx.node.map_arg(user.args, lambda operand: number if operand is node else operand)
    node.graph.erase_node(node)


def _lift_constants(joint: fx.GraphModule) -> None:
    """Turns every tensor that the graph holds into a placeholder with role ``constant``."""
    graph = joint.graph
    constants: dict[str, torch.Tensor] = {}
    inputs: list[InputSpec] = list(joint.meta["inputs"])
    last = placeholders(graph)[-1:]
    lifted: dict[str, fx.Node] = {}
    for node in list(graph.find_nodes(op="get_attr")):
        name = str(node.target)
        attribute: object = operator.attrgetter(name)(joint)
        if not isinstance(attribute, torch.Tensor):
            user = next(iter(node.users))
            raise NotImplementedError(f"the higher-order operator {user.target}, which carries a graph of its own")
        if name not in lifted:
            context = graph.inserting_after(last[-1]) if last else graph.inserting_before(next(iter(graph.nodes)))
            with context:
                lifted[name] = graph.placeholder(f"constant_{len(lifted)}")
            lifted[name].meta["val"] = node.meta.get("val", attribute)
            last = [lifted[name]]
            constants[lifted[name].name] = attribute.detach()
            inputs.append(InputSpec("constant", lifted[name].name, -1))
        node.replace_all_uses_with(lifted[name])
        graph.erase_node(node)
    joint.meta["inputs"] = tuple(inputs)
    joint.meta["constants"] = constants


def _fill_factories(graph: fx.Graph) -> None:
    """Makes zeros of uninitialized memory, which may hold other numbers when it is made again, or no valid index when a kernel
    is run to measure it."""
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target in _UNINITIALIZED]:
        val = node.meta["val"]
        contiguous = val.is_contiguous()
        size = tuple(val.shape) if contiguous else (span_nbytes(val) // val.element_size(),)
        with graph.inserting_before(node):
            zeros = graph.call_function(aten.full.default, (size, 0), {"dtype": val.dtype, "device": val.device})
            zeros.meta = {**node.meta, "val": val if contiguous else val.new_empty(size)}
            if not contiguous:
                zeros = graph.call_function(aten.as_strided.default, (zeros, tuple(val.shape), tuple(val.stride()), 0))
                zeros.meta = dict(node.meta)
        node.replace_all_uses_with(zeros)
        graph.erase_node(node)


def _correct_copies(graph: fx.Graph) -> None:
    """``x.copy_(y)`` is traced as copy(x, y), which makes y's values in a copy of all of x's storage: be that an arena. Only
    the values are wanted, with the dtype, size and strides of x."""
    for node in list(graph.find_nodes(op="call_function", target=aten.copy.default)):
        value, val = node.args[1], node.args[0].meta["val"]
        with graph.inserting_before(node):
            if value.meta["val"].dtype != val.dtype:
                value = graph.call_function(aten._to_copy.default, (value,), {"dtype": val.dtype})
                value.meta = {**node.meta, "val": torch.empty_like(node.args[1].meta["val"], dtype=val.dtype, device="meta")}
            copy = add_restride(graph, value, val)
        copy.meta = {**node.meta, **copy.meta}
        node.replace_all_uses_with(copy)
        graph.erase_node(node)


def _correct_statistics(graph: fx.Graph) -> None:
    """A norm of a half-precision input with float32 weights, or running statistics, saves float32 statistics on the CPU; the
    traced shapes say half precision. Batch norm leaves running statistics in their dtype; the traced shapes say float32."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _WEIGHT_OF_NORM:
            continue
        running = node.args[3] if node.target is _BATCH_NORM else None
        weight = node.args[_WEIGHT_OF_NORM[node.target]] or running
        dtypes = {1: weight, 2: weight} if weight is not None and weight.meta["val"].dtype == torch.float32 else {}
        dtypes |= {} if running is None else {3: running, 4: running}
        for item in node.users:
            if (like := dtypes.get(item.args[1])) is not None:
                item.meta["val"] = torch.empty_like(item.meta["val"], dtype=like.meta["val"].dtype, device="meta")


def _correct_dropout(graph: fx.Graph) -> None:
    """Makes dropout on the CPU round as plain PyTorch does, which multiplies by mask / (1 - p); traced dropout multiplies by
    mask and by 1 / (1 - p). The mask is what is saved in both."""
    drawn = [n for n in graph.nodes if n.op == "call_function" and n.target is aten.native_dropout.default]
    for node in drawn:
        x, p = node.args[0], node.args[1]
        val = x.meta["val"]
        if p == 1:
            _drop_all(graph, node, x)
            continue
        if val.device.type != "cpu" or _rounds_alike(p, val.dtype):
            continue
        items = {item.args[1]: item for item in node.users}
        if 1 not in items:
            with graph.inserting_after(node):
                items[1] = graph.call_function(operator.getitem, (node, 1))
            items[1].meta = {**node.meta, "val": node.meta["val"][1]}
        mask = items[1]
        if 0 in items:
            _multiply(graph, items[0], x, mask, p)
        for user in [u for u in mask.users if u.target is aten.native_dropout_backward.default]:
            _multiply(graph, user, user.args[0], mask, p)


def _drop_all(graph: fx.Graph, node: fx.Node, x: fx.Node) -> None:
    """Makes dropout of everything a product with zero, as plain PyTorch does. It draws no random numbers."""
    for item in list(node.users):
        with graph.inserting_before(node):
            if item.args[1] == 0:
                zeros = graph.call_function(aten.mul.Scalar, (x, 0.0))
            else:
                zeros = graph.call_function(aten.zeros_like.default, (x,), {"dtype": torch.bool})
        zeros.meta = dict(item.meta)
        item.replace_all_uses_with(zeros)
        graph.erase_node(item)
    graph.erase_node(node)


def _rounds_alike(p: float, dtype: torch.dtype) -> bool:
    """Says whether mask / (1 - p) and mask * (1 / (1 - p)) round to the same in this dtype."""
    if p >= 1 or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return True
    scale = 1 / (1 - p)
    quotient = torch.ones((), dtype=dtype, device="cpu").div_(1 - p)
    return float(quotient) == (float(torch.tensor(scale, dtype=dtype)) if dtype == torch.float32 else scale)


def _multiply(graph: fx.Graph, node: fx.Node, x: fx.Node, mask: fx.Node, p: float) -> None:
    """Replaces ``node`` by x * (mask / (1 - p)), after the mask and x."""
    dtype = node.meta["val"].dtype
    val = torch.empty_like(mask.meta["val"], dtype=dtype, device="meta")
    with graph.inserting_before((mask if node.args[0] is mask.args[0] else node).next):
        noise = graph.call_function(aten._to_copy.default, (mask,), {"dtype": dtype})
        divided = graph.call_function(aten.div.Tensor, (noise, 1 - p))
        product = graph.call_function(aten.mul.Tensor, (x, divided))
    noise.meta, divided.meta = {**node.meta, "val": val}, {**node.meta, "val": val}
    product.meta = dict(node.meta)
    node.replace_all_uses_with(product)
    graph.erase_node(node)


def _read_in_backward(joint: fx.GraphModule) -> None:
    """Gives an input that the backward changes a second placeholder, which the backward reads: what a plain run finds there
    when its backward begins need not be what its forward has found."""
    graph, inputs = joint.graph, list(joint.meta["inputs"])
    changed = {spec.index for spec, _ in outputs_of(joint) if spec.in_backward}
    found: dict[fx.Node, fx.Node] = {}  # what the forward reads, with views of it -> what the backward reads
    for spec, node in inputs_of(joint):
        if spec.index in changed and spec.role not in ("tangent", "constant"):
            with graph.inserting_after(placeholders(graph)[-1]):
                found[node] = graph.placeholder(f"{node.name}_in_backward")
            found[node].meta = {**node.meta, "partitioner_tag": "is_backward"}
            inputs.append(replace(spec, name=f"{spec.name} in backward", in_backward=True))

    def as_found(operand: fx.Node) -> fx.Node:
        if operand not in found and is_view(operand) and any(as_found(base) is not base for base in operand.all_input_nodes):
            with graph.inserting_before(reader):
                found[operand] = graph.node_copy(operand, as_found)
            found[operand].meta["partitioner_tag"] = "is_backward"
        return found.get(operand, operand)

    for reader in list(graph.nodes) if found else ():
        if reader.op == "call_function" and reader.meta.get("partitioner_tag") != "is_forward":
            reader.args, reader.kwargs = fx.node.map_arg((reader.args, reader.kwargs), as_found)
        elif reader.op == "output":
            of_backward = (spec.kind == "grad" or spec.in_backward for spec in joint.meta["outputs"])
            results = zip(reader.args[0], of_backward, strict=True)
            reader.args = (tuple(as_found(value) if late else value for value, late in results),)
    joint.meta["inputs"] = tuple(inputs)


def _mark_phases(joint: fx.GraphModule) -> None:
    """Marks as backward what torch tagged so and all that depends on it, on a tangent or on what the backward finds; the rest
    is forward."""
    in_backward = {node for spec, node in inputs_of(joint) if spec.in_backward}
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            late = node in in_backward or node.name.startswith("tangents_")
            node.meta["phase"] = "backward" if late else "forward"
        else:
            backward = node.meta.get("partitioner_tag") == "is_backward" or any(
                operand.meta["phase"] == "backward" for operand in node.all_input_nodes
            )
            node.meta["phase"] = "backward" if backward else "forward"


def _own_outputs(joint: fx.GraphModule) -> None:
    """Gives every output memory of its own, every gradient the strides of its parameter, and every new version those of the
    old."""
    graph, output = joint.graph, joint.graph.output_node()
    inputs = {spec.index: node for spec, node in inputs_of(joint) if spec.role not in ("constant", "tangent")}
    params = {spec.index for spec, _ in inputs_of(joint) if spec.role == "param"}
    seen: set[fx.Node] = set()
    outputs = []
    for spec, value in outputs_of(joint):
        phase = "backward" if spec.kind == "grad" or spec.in_backward else "forward"
        val = value.meta["val"]
        copy = None
        # Gradients of other inputs go on as a plain run makes them.
        as_input = spec.kind == "mutation" or (spec.kind == "grad" and spec.index in params)
        if as_input and val.stride() != inputs[spec.index].meta["val"].stride():
            with graph.inserting_before(output):
                copy = add_restride(graph, value, inputs[spec.index].meta["val"])
        elif (
            value.op == "placeholder"
            or value in seen
            or (spec.in_backward and value.meta["phase"] == "forward")
            or val.is_conj()
            or val.is_neg()  # what leaves is what memory holds
        ):
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (value,))
            copy.meta["val"] = torch.empty_like(val, device="meta")
        if copy is not None:
            if "seq_nr" in value.meta:
                copy.meta["seq_nr"] = value.meta["seq_nr"]
            copy.meta["phase"] = phase
            value = copy
        seen.add(value)
        outputs.append(value)
    output.args = (tuple(outputs),)
