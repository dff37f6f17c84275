"""Cuts a joint graph into regions: about one block of the model times one phase each.

Where to cut is taken from the module stack the capture recorded (a list of layers gives a region per layer); where
there is none, from the narrowest points of the liveness profile, then by size. Correctness never depends on it:
forward nodes keep their order and backward nodes go to the region of the block they differentiate, or to the first
later one where their operands exist.
"""

from __future__ import annotations

import itertools
import operator
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mtcompile.passes.step_graph import inputs_of, is_random, is_view, iter_tensors, span_nbytes
from mtcompile.runtime.schedule import PHASES

STARTS_BLOCK = "starts_block"  # in the meta of a forward call at which a rewrite wants a block to start
_MAX_PIECES = 16  # of a forward graph without layers; more gives smaller regions than their copies are worth
_MIN_PIECE_NODES = 6
_FEWEST_PIECES = 6
_FEW_LAYERS = 12  # of so few, or of one that is this much larger than most, the layers that it holds itself are layers
_LARGE_LAYER = 3
_NESTED = 0.8  # of the operations of a layer are in layers that it holds


def assign(
    graph: fx.Graph, starts: Collection[fx.Node] = (), parameters: Collection[fx.Node] | None = None
) -> tuple[Mapping[fx.Node, tuple[str, int]], tuple[str, ...]]:
    """The region (phase, block) of every call in a normalized joint graph, and the names of the blocks in forward order.
    ``starts``: forward calls at each of which a block starts. ``parameters``: where to cut is to depend on these inputs and on
    the operations alone, so that ranks with batches of other sizes have the same blocks; None: also on sizes of activations.

    Backward regions run in the opposite order of their blocks. A getitem belongs to the call it reads.
    """
    forward = [n for n in graph.nodes if n.op == "call_function" and n.meta["phase"] == "forward"]
    sizes = _Sizes() if parameters is None else _even_sizes(forward, parameters)
    segments = [piece for label, nodes in _segments(forward, sizes) for piece in _cut_at(label, nodes, starts)]
    if any(STARTS_BLOCK in node.meta for node in forward):
        segments = _joined_views(segments)
    region: dict[fx.Node, tuple[str, int]] = {}
    by_seq: dict[int, int] = {}
    by_path: dict[str, int] = {}
    for block, (_, nodes) in enumerate(segments):
        for node in nodes:
            region[node] = region[node.args[0]] if node.target is operator.getitem else ("forward", block)
            if "seq_nr" in node.meta:
                by_seq[node.meta["seq_nr"]] = block
            by_path[module_path(node)] = block
    _assign_backward(graph, region, by_seq, by_path, max(len(segments) - 1, 0))
    return region, _unique([name for name, _ in segments])


def cut_by(joint: fx.GraphModule, alike: bool) -> set[fx.Node] | None:
    """Returns the inputs by which ranks cut it ``alike``, whatever their batches; else None."""
    return {node for spec, node in inputs_of(joint) if spec.role == "param"} if alike else None


def _assign_backward(
    graph: fx.Graph, region: dict[fx.Node, tuple[str, int]], by_seq: Mapping[int, int], by_path: Mapping[str, int], last: int
) -> None:
    lowest_random = last  # random nodes keep their order, so that each sees the generator the plain run gives it
    for node in graph.nodes:
        if node.op != "call_function" or node.meta["phase"] != "backward":
            continue
        if node.target is operator.getitem:
            region[node] = region[node.args[0]]
            continue
        operands = [region[a] for a in node.all_input_nodes if a in region]
        ceiling = min((block for phase, block in operands if phase == "backward"), default=last)
        path = module_path(node)
        if "seq_nr" in node.meta and node.meta["seq_nr"] in by_seq:
            wanted = by_seq[node.meta["seq_nr"]]
        elif path and path in by_path:
            wanted = by_path[path]
        elif any(phase == "backward" for phase, _ in operands):
            wanted = ceiling
        else:
            wanted = max((block for _, block in operands), default=last)
        block = min(wanted, ceiling)
        if is_random(node):
            lowest_random = block = min(block, lowest_random)
        region[node] = ("backward", block)


def in_order(graph: fx.Graph, region: Mapping[fx.Node, tuple[str, int]]) -> list[tuple[tuple[str, int], list[fx.Node]]]:
    """The regions in execution order, each with its nodes in execution order."""
    groups: dict[tuple[str, int], list[fx.Node]] = {}
    for node in graph.nodes:
        if node in region:
            groups.setdefault(region[node], []).append(node)
    forward, backward = (sorted(rid for rid in groups if rid[0] == phase) for phase in PHASES)
    return [(rid, groups[rid]) for rid in (*forward, *reversed(backward))]


# -------------------------------------------------------------------------------------------------------- forward blocks


def _segments(nodes: list[fx.Node], sizes: _Sizes) -> list[tuple[str, list[fx.Node]]]:
    """Cuts forward nodes into contiguous runs of one block each: small ones merged, large ones without layers cut."""
    runs = _with_inner_layers(_runs(nodes), sizes)
    layers = [sizes.weight(run) for label, run in runs if label]
    if layers:
        runs = _merge_small(runs, statistics.median(layers) / 4, sizes)
        parts = -(-_FEWEST_PIECES // len(layers))
        if parts > 1:  # so few layers that one alone holds much of what the step holds
            target = int(statistics.median(layers) / parts)
            runs = [
                piece for label, run in runs for piece in (_cut_narrow(label, run, target, sizes) if label else [(label, run)])
            ]
        limit = 4 * max(layers)
    else:
        limit = max(1, sum(sizes.weight(run) for _, run in runs) // _MAX_PIECES)
    return [
        piece
        for label, run in runs
        for piece in (_cut_narrow(label, run, limit, sizes) if sizes.weight(run) > limit and not label else [(label, run)])
    ]


def _runs(nodes: list[fx.Node], depth: int = 1) -> list[tuple[str, list[fx.Node]]]:
    """Returns contiguous runs of one layer each. ``depth``: see ``block_label``."""
    runs: list[tuple[str, list[fx.Node]]] = []
    for node in nodes:
        label = block_label(module_path(node), depth)
        belongs = node.target is operator.getitem or (is_view(node) and STARTS_BLOCK not in node.meta)
        if runs and (runs[-1][0] == label or belongs):
            runs[-1][1].append(node)
        else:
            runs.append((label, [node]))
    return runs


def _with_inner_layers(runs: list[tuple[str, list[fx.Node]]], sizes: _Sizes) -> list[tuple[str, list[fx.Node]]]:
    """Returns runs in which the layers of stages, such as those of a convolutional network, stand for the stages: where there
    are few layers, or one is much larger than most, and nearly all of it is in layers of its own."""
    weights = [sizes.weight(run) if label else 0 for label, run in runs]
    layers = {label: weight for (label, _), weight in zip(runs, weights, strict=True) if label}
    limit = 0 if len(layers) < _FEW_LAYERS else _LARGE_LAYER * statistics.median(layers.values())
    inner = []
    for (label, run), weight in zip(runs, weights, strict=True):
        within = _runs(run, 2) if weight > limit else []
        of_layers = [len(nodes) for name, nodes in within if name != label]
        several = len(of_layers) > 1 and sum(of_layers) >= max(_NESTED * len(run), _MIN_PIECE_NODES * len(of_layers))
        inner += within if several else [(label, run)]
    return inner


def _merge_small(runs: list[tuple[str, list[fx.Node]]], least: float, sizes: _Sizes) -> list[tuple[str, list[fx.Node]]]:
    """Joins each run below ``least`` bytes to its neighbour (the next; the last one to the one before)."""
    merged: list[tuple[str, list[fx.Node]]] = []
    carried: list[fx.Node] = []
    for label, run in runs:
        run, carried = carried + run, []
        if sizes.weight(run) < least:
            carried = run
        else:
            merged.append((label, run))
    if carried:
        label, run = merged.pop() if merged else (runs[0][0], [])
        merged.append((label, run + carried))
    return merged


def _cut_narrow(label: str, run: list[fx.Node], target: int, sizes: _Sizes) -> list[tuple[str, list[fx.Node]]]:
    """Cuts a run into pieces of about ``target`` bytes, each ending where the fewest bytes cross."""
    crossing = _crossing_nbytes(run, sizes)
    pieces: list[list[fx.Node]] = []
    start, filled, best = 0, 0, -1
    for position, node in enumerate(run[:-1]):
        filled += _node_nbytes(node, sizes)
        if filled < target / 2 or position - start + 1 < _MIN_PIECE_NODES:
            continue
        if best < 0 or crossing[position] <= crossing[best]:
            best = position
        if filled >= target * 3 / 2:
            pieces.append(run[start : best + 1])
            filled = sum(_node_nbytes(n, sizes) for n in run[best + 1 : position + 1])
            start, best = best + 1, -1
    pieces.append(run[start:])
    return [(f"{label or 'part'}.{i}" if len(pieces) > 1 else label, piece) for i, piece in enumerate(pieces)]


def _cut_at(label: str, run: list[fx.Node], starts: Collection[fx.Node]) -> list[tuple[str, list[fx.Node]]]:
    """Cuts a run before each of ``starts``, and where a rewrite wants a block to start."""
    places = [at for at, node in enumerate(run) if at and (node in starts or STARTS_BLOCK in node.meta)]
    return [(label, run[first:last]) for first, last in itertools.pairwise((0, *places, len(run)))]


def _joined_views(segments: list[tuple[str, list[fx.Node]]]) -> list[tuple[str, list[fx.Node]]]:
    """Joins each segment that computes nothing to the one before: where pieces of blocks start blocks of their own, views lie
    between them."""
    joined = segments[:1]
    for label, nodes in segments[1:]:
        if all(is_view(node) or node.target is operator.getitem for node in nodes):
            joined[-1] = joined[-1][0], joined[-1][1] + nodes
        else:
            joined.append((label, nodes))
    return joined


def _crossing_nbytes(run: list[fx.Node], sizes: _Sizes) -> list[int]:
    """Bytes made in ``run`` and still needed by its forward nodes after each position; views count as their base."""
    index = {node: i for i, node in enumerate(run)}
    more = [0] * len(run)  # than after the position before
    for node, i in index.items():
        if is_view(node):
            continue
        last = max((index[u] for u in _users_through_views(node) if u in index), default=i)
        nbytes = sizes.own(node)
        more[i] += nbytes
        more[last] -= nbytes
    return list(itertools.accumulate(more))


def _users_through_views(node: fx.Node) -> list[fx.Node]:
    """Every reader of a node's memory: its users, and those of its views and items."""
    users = list(node.users)
    for user in users:
        if is_view(user) or user.target is operator.getitem:
            users.extend(user.users)
    return users


def _own_nbytes(node: fx.Node) -> int:
    return 0 if is_view(node) else sum(span_nbytes(val) for val in iter_tensors(node))


def _node_nbytes(node: fx.Node, sizes: _Sizes) -> int:
    inputs = (a for a in node.all_input_nodes if a.op == "placeholder" and "val" in a.meta and sizes.counts(a))
    return sizes.own(node) + sum(span_nbytes(a.meta["val"]) for a in inputs)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The bytes by which blocks are weighed. ``parameters``: the inputs that count; None: all. ``each``: what an operation
    makes; None: as its results have."""

    parameters: Collection[fx.Node] | None = None
    each: int | None = None

    def own(self, node: fx.Node) -> int:
        return _own_nbytes(node) if self.each is None or is_view(node) else self.each

    def read(self, nodes: Sequence[fx.Node]) -> int:
        read = {a for node in nodes for a in node.all_input_nodes if a.op == "placeholder"}
        return sum(span_nbytes(v) for a in read if self.counts(a) for v in iter_tensors(a))

    def counts(self, node: fx.Node) -> bool:
        return self.parameters is None or node in self.parameters

    def weight(self, run: Sequence[fx.Node]) -> int:
        return sum(map(self.own, run)) + self.read(run)


def _even_sizes(nodes: Sequence[fx.Node], parameters: Collection[fx.Node]) -> _Sizes:
    """Sizes that no batch changes: all operations together make as many bytes as there are of parameters."""
    operations = sum(not is_view(node) for node in nodes)
    return _Sizes(parameters, max(1, _Sizes(parameters).read(nodes) // max(1, operations)))


def module_path(node: fx.Node) -> str:
    return str(node.meta.get("module_path", ""))


def block_label(path: str, depth: int = 1) -> str:
    """The layer that a module path is in: ``model.layers.3`` of ``model.layers.3.mlp.up``, the first element of a list of
    modules on the way; else ''. ``depth``: with the elements of so many lists, as far as there are."""
    parts = path.split(".")
    ends = [i + 1 for i, part in enumerate(parts) if part.isdigit()][:depth]
    return ".".join(parts[: ends[-1]]) if ends else ""


def _unique(names: list[str]) -> tuple[str, ...]:
    """The names of the blocks, unnamed ones called after their place and repeated ones numbered."""
    counts: dict[str, int] = {}
    unique = []
    for position, name in enumerate(names):
        base = name or ("stem" if position == 0 else "head" if position == len(names) - 1 else "part")
        counts[base] = counts.get(base, -1) + 1
        unique.append(base if counts[base] == 0 else f"{base}_{counts[base]}")
    return tuple(unique)
