"""Finds equal blocks in Dynamo's graph, and takes most of them out."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mtcompile.capture.description import Description, Tangents
from mtcompile.capture.outputs import changes_operand, storage_of
from mtcompile.capture.stamping.blocks import TRACED, Blocks, Place, Selection, references, selection_of, structure
from mtcompile.passes.lazy_graph import LazyGraphModule
from mtcompile.passes.step_graph import InputSpec
from mtcompile.torch_private import pytree, storage_id

_PERIODS = 16  # lengths of a block to try


@dataclass(frozen=True, slots=True)
class _Run:
    """Calls that look alike again and again. ``calls``: the graph without its inputs and outputs, of which ``count`` times
    ``length`` calls from ``start`` on are blocks."""

    calls: Sequence[fx.Node]
    start: int
    length: int
    count: int

    def block(self, number: int) -> Sequence[fx.Node]:
        at = self.start + number * self.length
        return self.calls[at : at + self.length]

    def columns(self) -> Iterator[tuple[int, Sequence[fx.Node]]]:
        """Yields (position, the calls of all blocks at that position)."""
        end = self.start + self.length * self.count
        for position in range(self.length):
            yield position, self.calls[self.start + position : end : self.length]


def shortened(
    description: Description, tangents: Tangents, path_of: Callable[[fx.Node], str]
) -> tuple[Description, Tangents, Blocks] | None:
    """Returns a description without most of the equal blocks, its tangents, and which blocks are left; None where no blocks are
    equal. ``path_of``: gives the path of the module that a call is in.

    Blocks are equal if each call does the same to the same operands: those that all blocks read, those that the block before
    made, and the inputs of the block itself; and if nothing but the next block reads what they make. Blocks may read different
    shared tensors without gradients, such as a full and a sliding-window mask: then one block of each kind is traced. The
    forward may return what each of them makes, such as keys and values, as long as no gradient arrives there.
    """
    graph = description.graph.graph
    specs = dict(zip(graph.find_nodes(op="placeholder"), description.inputs, strict=True))
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for run in _runs(calls, description.graph):
        returned = _returned(run, _outputs(graph))
        inputs, kinds = _inputs_of_blocks(run, specs, set(returned.values())) or (None, ())
        paths = _paths(run, description.graph, path_of) if inputs else None  # without inputs, no joint graph tells blocks apart
        if inputs and paths is not None and (selection := selection_of(kinds)) is not None:
            if tangents is not None and any(tangents[index] for index in returned):
                return None
            places = {index: returned.get(index, index) for index in range(len(description.computed))}
            left = [i for i, place in places.items() if isinstance(place, int) or not selection.removed(place[0])]
            less = None if tangents is None else tuple(tangents[index] for index in left)
            blocks = _described(selection, inputs, specs, paths)
            blocks = replace(
                blocks,
                outputs=tuple(name for name, _, _ in description.computed),
                returned={traced: _as_traced(places[index], selection) for traced, index in enumerate(left)},
                outputs_at={place: index for index, place in returned.items()},
            )
            return _without(run, selection, inputs, description, left), less, blocks
    return None


def _outputs(graph: fx.Graph) -> Sequence[fx.Node]:
    outputs: Any = graph.output_node().args[0]
    return tuple(outputs)


def _returned(run: _Run, outputs: Sequence[fx.Node]) -> dict[int, Place]:
    """Returns the place of each output, by its index, that all blocks return alike."""
    index = {node: position for position, node in enumerate(outputs)}
    columns = ((position, column) for position, column in run.columns() if index.keys() >= set(column))
    return {index[node]: (block, position) for position, column in columns for block, node in enumerate(column)}


def _as_traced(place: Place | int, selection: Selection) -> Place | int:
    return place if isinstance(place, int) else (selection.as_traced(place[0]), place[1])


def _runs(calls: Sequence[fx.Node], owner: fx.GraphModule) -> Iterator[_Run]:
    """Yields runs of calls, those first that save most."""
    numbers: dict[Hashable, int] = {}
    codes = [numbers.setdefault(_code(node, owner), len(numbers)) for node in calls]
    last, gaps = dict[int, int](), Counter[int]()
    for position, code in enumerate(codes):
        if code in last:
            gaps[position - last[code]] += 1
        last[code] = position
    runs = []
    for length, _ in gaps.most_common(_PERIODS):
        start = 0
        for position in range(len(codes) - length + 1):
            if position + length == len(codes) or codes[position] != codes[position + length]:
                count, spare = divmod(position - start, length)
                if (left_out := count + 1 - TRACED) > 0:
                    runs.append((left_out * length, -length, start, spare, count + 1))
                start = position + 1
    for _, shorter, start, spare, count in sorted(runs, reverse=True):
        for shift in range(spare + 1):
            yield _Run(calls, start + shift, -shorter, count)


def _code(node: fx.Node, owner: fx.GraphModule) -> Hashable:
    """Returns what is equal for two calls of the same operation with the same arguments and shapes."""
    value = shape_of(node.meta.get("example_value"))
    if (body := _body(node, owner)) is not None:
        index = {inner: position for position, inner in enumerate(body.graph.nodes)}
        return node.op, tuple((_code(inner, body), tuple(index[one] for one in references(inner))) for inner in index)
    if node.op == "get_attr":  # graphs number what they hold each on their own
        return node.op, id(operator.attrgetter(str(node.target))(owner))
    return node.op, node.target if node.op != "placeholder" else "", structure(node), value


def _body(node: fx.Node, owner: fx.GraphModule) -> fx.GraphModule | None:
    """Returns the graph that a node stands for, as under a checkpoint; None for other nodes."""
    attribute = operator.attrgetter(str(node.target))(owner) if node.op == "get_attr" else None
    return attribute if isinstance(attribute, fx.GraphModule) else None


def shape_of(value: Any) -> str:
    """Returns what tracing sees of a value, as text."""
    return repr([_shape_of_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(value)])


def _shape_of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    bits = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg()
    held = tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes() if _has_storage(tensor) else None
    return type(tensor).__name__, *tensor.shape, *held, tensor.dtype, tensor.device, tensor.layout, *bits, _known(tensor)


def _has_storage(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor has memory of its own; one that ``vmap`` maps over and a sparse one have not."""
    try:
        return tensor.untyped_storage() is not None
    except NotImplementedError:
        return False


def _known(tensor: torch.Tensor) -> Any:
    """Returns what a tensor holds where tracing knows it, which makes numbers of such tensors; else None."""
    constant: torch.Tensor | None = getattr(tensor, "constant", None)
    return None if constant is None else constant.tolist()


# ---------------------------------------------------------------------------------------------------------- proving equality


def _inputs_of_blocks(
    run: _Run, specs: Mapping[fx.Node, InputSpec], returned: Set[Place]
) -> tuple[dict[fx.Node, Place], list[tuple[fx.Node, ...]]] | None:
    """Returns the place of each input that belongs to one block, and for each block its operands that differ between blocks.
    Returns None where the blocks are not equal. ``returned``: the places of what all blocks return alike."""
    places: dict[fx.Node, Place] = {
        node: (block, position) for position, column in run.columns() for block, node in enumerate(column)
    }
    for position, column in run.columns():
        for which, operands in enumerate(zip(*map(references, column), strict=True)):
            if all(node.op == "placeholder" and node not in places for node in operands) and len(set(operands)) == run.count:
                if len({_signature(node, specs) for node in operands}) > 1:
                    return None
                places |= {node: (block, (position, which)) for block, node in enumerate(operands)}
    differing = list[tuple[fx.Node, ...]]()
    for _, column in run.columns():  # when all places are known: an input may be read before the block that it belongs to
        others = [each for each in zip(*map(references, column), strict=True) if not _repeats(each, places)]
        if not all(_differ_in_place(operands, places) for operands in others):
            return None
        differing += others
    if _views_go_on(run) or _share_memory(places, specs):
        return None
    for node, place in places.items():
        outside = (user for user in node.users if user not in places and (user.op != "output" or place not in returned))
        if 0 < place[0] < run.count - 1 and any(outside):
            return None
    kinds = list(zip(*differing, strict=True)) or [()] * run.count
    return {node: place for node, place in places.items() if node.op == "placeholder"}, kinds


def _differ_in_place(operands: Sequence[fx.Node], places: Mapping[fx.Node, Place]) -> bool:
    """Tells whether the same operand of all blocks is one of several tensors that look alike, take no gradient and do not
    change."""
    examples = [node.meta.get("example_value") for node in operands]
    values = [value for value in examples if isinstance(value, torch.Tensor)]
    if any(node in places for node in operands) or len(values) < len(operands):
        return False
    steady = not any(value.requires_grad or value.is_inference() or value._version for value in values)
    return steady and len(set(map(shape_of, values))) == 1


def _repeats(operands: Sequence[fx.Node], places: Mapping[fx.Node, Place]) -> bool:
    """Tells whether the same operand of all blocks is shared, or of the block itself, or of the block before."""
    if len(set(operands)) == 1:
        return operands[0] not in places
    first, *others = (
        (places[node][0] - block, places[node][1]) if node in places else None for block, node in enumerate(operands)
    )
    if len(set(others)) > 1 or others[0] is None:
        return False
    return first == others[0] if others[0][0] == 0 else first is None and others[0][0] == -1


def _views_go_on(run: _Run) -> bool:
    """Tells whether more blocks than two have views of memory that is changed in place: a change is traced as one operation
    per view of a view, so it tells how many blocks there are."""
    seen = Counter[int]()
    for block in range(run.count):
        leaves = pytree.tree_leaves([node.meta.get("example_value") for node in run.block(block) if not changes_operand(node)])
        changed = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and (leaf.is_inference() or leaf._version))
        seen.update({storage_id(leaf) if _has_storage(leaf) else 0 for leaf in changed})
    return any(blocks > 2 for blocks in seen.values())


def _share_memory(places: Mapping[fx.Node, Place], inputs: Iterable[fx.Node]) -> bool:
    """Tells whether an input of a block is in the same memory as another input, as only the whole graph shows."""
    holders = Counter(map(storage_of, inputs))
    return any(node.op == "placeholder" and holders[storage_of(node)] > 1 for node in places)


def _signature(node: fx.Node, specs: Mapping[fx.Node, InputSpec]) -> tuple[Any, ...]:
    spec = specs[node]
    return spec.role, spec.differentiable, spec.tier, shape_of(node.meta.get("example_value"))


def _paths(run: _Run, owner: fx.GraphModule, path_of: Callable[[fx.Node], str]) -> dict[str, Place] | None:
    """Returns the place of every module path that belongs to one block; None where they do not repeat."""
    paths, shared = dict[str, Place](), set[str]()
    for position, column in run.columns():
        within = [_with_body(node, owner) for node in column]
        for inner, nodes in enumerate(zip(*within, strict=True)):
            names = list(map(path_of, nodes))
            if len(set(names)) == 1:
                shared.add(names[0])
                continue
            known = {(paths[path][0] - block, paths[path][1]) for block, path in enumerate(names) if path in paths}
            if len(known) > 1 or len(set(names)) < run.count:
                return None
            later, key = known.pop() if known else (0, (position, inner))
            paths |= {path: (block + later, key) for block, path in enumerate(names)}
    return None if shared & set(paths) else paths


def _with_body(node: fx.Node, owner: fx.GraphModule) -> list[fx.Node]:
    """Returns a node, and those of the graph that it stands for."""
    body = _body(node, owner)
    return [node] if body is None else [node, *(one for inner in body.graph.nodes for one in _with_body(inner, body))]


# -------------------------------------------------------------------------------------------------------------- shortening


def _without(
    run: _Run, selection: Selection, inputs: Mapping[fx.Node, Place], description: Description, outputs: Sequence[int]
) -> Description:
    """Returns a description without the blocks that are not traced: the next takes the place of the first of them.
    ``outputs``: the indices of those that are left."""
    gone = {node for block in range(run.count) if selection.removed(block) for node in run.block(block)}
    gone |= {node for node, (block, _) in inputs.items() if selection.removed(block)}
    before, last_kept = selection.first + selection.left_out - 1, selection.first - 1
    input_at = {place: node for node, place in inputs.items()}
    instead = dict(zip(run.block(before), run.block(last_kept), strict=True))
    instead |= {input_at[before, key]: input_at[last_kept, key] for block, key in inputs.values() if block == before}
    shorter, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in description.graph.graph.nodes:
        if node not in gone and node.op != "output":
            copies[node] = shorter.node_copy(node, lambda operand: copies[instead.get(operand, operand)])
    returned = _outputs(description.graph.graph)
    shorter.output(tuple(copies[returned[index]] for index in outputs)).meta = description.graph.graph.output_node().meta
    nodes = description.graph.graph.find_nodes(op="placeholder")
    left = [spec for node, spec in zip(nodes, description.inputs, strict=True) if node not in gone]
    specs = tuple(replace(spec, index=index) for index, spec in enumerate(left))
    computed = tuple(description.computed[index] for index in outputs)
    return replace(description, graph=LazyGraphModule(description.graph, shorter), inputs=specs, computed=computed)


def _described(
    selection: Selection, inputs: Mapping[fx.Node, Place], specs: Mapping[fx.Node, InputSpec], paths: Mapping[str, Place]
) -> Blocks:
    own, shared, inputs_at = dict[int, Place](), dict[int, int](), dict[Place, int]()
    traced = 0  # the index among traced inputs
    for node, spec in specs.items():
        if node in inputs:
            block, key = inputs[node]
            inputs_at[block, key] = spec.index
            if selection.removed(block):
                continue
            own[traced] = selection.as_traced(block), key
        else:
            shared[traced] = spec.index
        traced += 1
    # The last traced block before those left out may end in the module of the first of these.
    begins_before = {path: place for path, place in paths.items() if place[0] == selection.first}
    of_traced = begins_before | {
        path: (selection.as_traced(block), key) for path, (block, key) in paths.items() if not selection.removed(block)
    }
    paths_at = {place: path for path, place in paths.items()}
    return Blocks(selection, tuple(specs.values()), own, shared, inputs_at, of_traced, paths_at)
