"""The step graph's vocabulary: one ``fx.GraphModule`` per training step, a node per region call or memory operation.

Nodes
  placeholder            a value that exists before the step: param, buffer, input, constant, tangent
  call_module            a *region*: a call to a shared kernel (a submodule holding an ATen graph); returns a tuple
  getitem                one value of a call
  prefetch(*xs)          host -> device, the identity on bits
  prefetch_slices(*xs, e)  host -> device, the slices of each that have rows, which end at e (``analysis/slices``)
  prefetch_rows(x, *is)  host -> device, the rows of x that the indices is name, one behind the other (``cuts/rows``)
  offload(*xs)           device -> host, the identity on bits
  offload_rows(x, *is, rows=n)  device -> host, such rows of a gradient of n rows, which is zero in all others
  read, write(*xs)       disk -> host, and back, the identity on bits
  convert(*xs, casts=c)  on the host, each value cast by its _to_copy keywords
  update(*xs, count=n)   n parameters, their n gradients, and a scale or nothing -> the parameters' next versions
  fetch_state(*xs, nbytes=b)  host -> device, n parameters with all that their update reads and writes, as b bytes; the last
                         operand of an update on the device of what is at home on the host, which takes it home again
  gradient_norms(*xs)    gradients -> (the norm of each), and gradient_scale(*norms) -> (the factor of all gradients)
  all_reduce, broadcast(*xs)  on the host, each gradient's mean over all ranks; each value as the first rank has it
  reduce_scatter(*xs)    on the host, each gradient's mean over all ranks, of which a rank has those elements that it updates
  all_gather(*xs)        on the host, updated parameters with the elements that other hosts have updated; parts of them, whole
  output                 (buffer mutations..., outputs..., gradients...)

``node.meta`` of every value (placeholder or getitem): ``val`` (a fake tensor), ``nbytes``, ``role``, ``tier``; ``origin``, its
name before any rewrite, which its copies, casts and what is made again have too; ``module_path`` where a module made it; of
parameters of which each host has a part, ``part``; of those of which only rows are there, ``held``, a fake tensor of these.
Of every call: ``phase`` and ``block`` (the index of the forward block it belongs to); of updates and what they are scaled by,
``tier`` too, where they run; conversions run on the host. ``recomputes``: of a region of the backward, the forward blocks that
it computes again.
``step.meta``: ``inputs`` (InputSpec per placeholder), ``outputs`` (OutputSpec per output), ``constants`` (tensors),
``blocks`` (their names), ``device`` (where its kernels run, as torch names it), ``homes`` (parameter -> home block) and
``sliced`` (the parameters that are fetched by slices), ``rows`` (those of which only rows are there), ``ranks`` (how many train
together, on ``hosts``) and ``updated`` (the parameters that a backward updates, if not all); ``build`` alone writes them.
``kernels`` and ``memo`` (kernels by body, and by what rewrites made them for) are shared with all rewritten copies.
``fx.Interpreter(step).run(*inputs)`` is the reference execution, in which an update returns the gradients it is given.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from mtcompile.passes.inputs import Fragment as Fragment
from mtcompile.passes.inputs import InputSpec as InputSpec
from mtcompile.passes.inputs import OutputSpec as OutputSpec
from mtcompile.passes.inputs import Places as Places
from mtcompile.passes.lazy_graph import LazyGraphModule
from mtcompile.runtime.devices.arena import span_nbytes as span_nbytes
from mtcompile.runtime.devices.rows import named_rows
from mtcompile.runtime.schedule import Tier, gib


def prefetch(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies from host to device, or from disk straight to it; dtype, strides and bytes stay the same."""
    return values


def prefetch_slices(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies from host to device the slices along the first dimension that have rows: slice i those from ``ends[i - 1]`` to
    ``ends[i]``, where ``ends`` is the last operand. What the other slices hold is undefined; here, NaN."""
    *sliced, ends = values
    used = ends.diff(prepend=ends.new_zeros(1)) != 0
    return tuple(torch.where(used.view(-1, *[1] * (value.dim() - 1)), value, torch.nan) for value in sliced)


def prefetch_rows(value: torch.Tensor, *indices: torch.Tensor, held: int) -> tuple[torch.Tensor]:
    """Copies from host to device the rows that ``indices`` name, in order, to the first of ``held`` rows. What the others hold
    is undefined; here, NaN."""
    named, rows = named_rows(indices, len(value)), value.new_full((held, *value.shape[1:]), torch.nan)
    rows[: len(named)] = value[named]
    return (rows,)


def offload_rows(value: torch.Tensor, *indices: torch.Tensor, rows: int) -> tuple[torch.Tensor]:
    """Copies from device to host the first rows of a gradient, to those of its ``rows`` that ``indices`` name. The others
    become zeros."""
    named, whole = named_rows(indices, rows), value.new_zeros((rows, *value.shape[1:]))
    whole[named] = value[: len(named)]
    return (whole,)


def offload(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies from device to host; dtype, strides and bytes stay the same."""
    return values


def read(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies from disk to host; dtype, strides and bytes stay the same."""
    return values


def write(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies from host to disk; dtype, strides and bytes stay the same."""
    return values


def convert(*values: torch.Tensor, casts: tuple[Mapping[str, Any], ...]) -> tuple[torch.Tensor, ...]:
    """Casts on the host, by the keywords of the captured _to_copy, which may name the device."""
    return tuple(torch.ops.aten._to_copy.default(v, dtype=cast["dtype"]) for v, cast in zip(values, casts, strict=True))


def update(*values: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Updates ``count`` parameters as the optimizer does; in the reference execution, returns their gradients."""
    return values[count : 2 * count]


def fetch_state(*values: torch.Tensor, nbytes: int) -> tuple[torch.Tensor]:
    """Copies parameters, their masters and their state to the device; in the reference execution, nothing."""
    return (torch.empty(0, dtype=torch.uint8),)


def gradient_norms(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The norm of each gradient: fp32 [len(values)]."""
    return (torch.stack([torch.linalg.vector_norm(value).float() for value in values]),)


def gradient_scale(*norms: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The factor of all gradients: fp32 []; 1 in the reference execution."""
    return (torch.ones(()),)


def all_reduce(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The mean of each value over all ranks, summed in their order; of one rank, the value itself."""
    return values


def broadcast(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each value as the first rank has it; of one rank, the value itself."""
    return values


def reduce_scatter(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns what ``all_reduce`` does in the elements that this rank updates; the others are undefined. Of one rank, the value
    itself."""
    return values


def all_gather(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each parameter with all elements as the ranks that update them have them; of one rank, the parameter itself."""
    return values


# ------------------------------------------------------------------------------------------------ operations in bodies


def restride(x: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """A copy of ``x`` with the given strides: a gradient is stored as its parameter is."""
    return torch.empty_strided(size, stride, dtype=x.dtype, device=x.device).copy_(x)


def is_random(node: fx.Node) -> bool:
    """True for an operation that advances a generator (a replayed one does not; attention without dropout does not)."""
    if node.op != "call_function" or not _may_be_random(node.target):
        return False
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return given != 0.0
    return True


@functools.cache
def _may_be_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_check(node: fx.Node) -> bool:
    """True for an operation that returns nothing: it checks its operands, and raises."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and not schema.returns


def writes(node: fx.Node) -> bool:
    """True for an operation that changes an operand in place."""
    return node.op == "call_function" and bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def must_run(node: fx.Node) -> bool:
    """True for an operation that a run needs even if nothing reads its results."""
    return is_random(node) or is_check(node)


_SEEDS = ("philox_seed", "philox_offset", "rng_state", "unused")  # results of attention, by the names in its schema


def is_seed(node: fx.Node) -> bool:
    """True for what attention says of the random numbers it drew: for some kernels it is in host memory whatever its
    declaration says, so it is passed on as it is, and neither copied nor made again."""
    if node.target is not operator.getitem:
        return False
    call: Any = node.args[0]
    position: Any = node.args[1]
    returns = getattr(getattr(call.target, "_schema", None), "returns", ())
    return position < len(returns) and returns[position].name in _SEEDS


def has_random(step: fx.GraphModule) -> bool:
    """Says whether any kernel of a step graph advances a generator."""
    return any(is_random(node) for kernel in step.children() for node in kernel.graph.nodes)


_VIEWS_IN_SECRET = (  # they alias their operand although their schema does not say so
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
)


def is_view(node: fx.Node) -> bool:
    """True when the operation returns an alias of one of its operands (by its schema), or picks one such alias."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(source := node.args[0], fx.Node) and is_view(source)
    return _returns_alias(node.target)


@functools.cache
def _returns_alias(target: Any) -> bool:
    if target in _VIEWS_IN_SECRET:
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


# ------------------------------------------------------------------------------------------------------ sizes of values


def iter_tensors(node: fx.Node) -> Iterator[torch.Tensor]:  # that an operation returns, as traced
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        yield val
    elif isinstance(val, (tuple, list)):
        yield from (v for v in val if isinstance(v, torch.Tensor))


def storage_nbytes(val: torch.Tensor) -> int:
    return int(val.untyped_storage().nbytes())


def describe(val: Any) -> str:
    """A tensor's dtype and shape, as in f32[2, 16], and its strides where it is not contiguous."""
    if not isinstance(val, torch.Tensor):
        return ""
    dtype = str(val.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i").replace("bool", "b8")
    strides = "" if val.is_contiguous() else f" strides {list(val.stride())}"
    return f"{dtype}{list(val.shape)}{strides}"


# ------------------------------------------------------------------------------------------------------ reading a graph


def is_region(node: fx.Node) -> bool:
    return node.op == "call_module"


def is_move(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in TIER_OF_MOVE


def moved(call: fx.Node) -> tuple[Any, ...]:
    """Returns the operands that a move moves: all but where the rows of slices end, and what names rows."""
    if call.target in MOVES_OF_ROWS:
        return tuple(call.args[:1])
    return tuple(call.args[:-1] if call.target is prefetch_slices else call.args)


def is_update(node: fx.Node) -> bool:
    """True for an update, and for what fetches its state or makes its scale."""
    return node.op == "call_function" and node.target in (update, fetch_state, gradient_norms, gradient_scale)


def streamed_state(call: fx.Node) -> fx.Node | None:
    """Returns the state that came to the device for an update there of what is at home on the host; None for other updates."""
    last: Any = call.args[-1]
    streams = call.target is update and last.target is operator.getitem and last.args[0].target is fetch_state
    return last if streams else None


def scales_of(call: fx.Node) -> tuple[Any, ...]:
    """Returns what scales the gradients of an update: one value, or nothing."""
    count: Any = call.kwargs["count"]
    return tuple(call.args[2 * count : -1 if streamed_state(call) is not None else None])


def is_collective(node: fx.Node) -> bool:
    """True for a call in which all ranks take part."""
    return node.op == "call_function" and node.target in COLLECTIVES


def gathers_parts(node: fx.Node) -> bool:
    """True for an all-gather of parameters of which each host has a part at home."""
    return node.target is all_gather and node.args[0].op == "placeholder"


def is_convert(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is convert


MOVES_OF_ROWS: dict[Any, Tier] = {prefetch_rows: "device", offload_rows: "host"}  # where a move puts what it moves
_OTHER_MOVES: dict[Any, Tier] = {prefetch: "device", prefetch_slices: "device", offload: "host", read: "host", write: "disk"}
TIER_OF_MOVE = _OTHER_MOVES | MOVES_OF_ROWS
COLLECTIVES = (all_reduce, broadcast, reduce_scatter, all_gather)
_CALLS = frozenset({*TIER_OF_MOVE, convert, update, fetch_state, gradient_norms, gradient_scale, *COLLECTIVES})


def ranks_of(step: fx.GraphModule) -> int:  # how many run it together
    return int(step.meta.get("ranks", 1))


def recomputes(node: fx.Node) -> tuple[int, ...]:
    """The forward blocks of which a call computes something again."""
    return tuple(node.meta.get("recomputes", ()))


def calls(step: fx.GraphModule) -> list[fx.Node]:
    """The regions, moves, conversions, updates and collectives, in order."""
    return [n for n in step.graph.nodes if n.op == "call_module" or (n.op == "call_function" and n.target in _CALLS)]


def regions(step: fx.GraphModule) -> list[fx.Node]:
    return [node for node in step.graph.nodes if is_region(node)]


def results(node: fx.Node) -> list[fx.Node]:
    """The getitem nodes of a call, by position."""
    return sorted((user for user in node.users if user.target is operator.getitem), key=lambda user: user.args[1])


def kernel_of(step: fx.GraphModule, region: fx.Node) -> fx.GraphModule:
    return step.get_submodule(str(region.target))


def body_outputs(body: fx.GraphModule) -> list[fx.Node]:
    return list(body.graph.output_node().args[0])


def step_outputs(step: fx.GraphModule) -> list[fx.Node]:
    return list(step.graph.output_node().args[0])


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def inputs_of(graph: fx.GraphModule) -> list[tuple[InputSpec, fx.Node]]:
    """The placeholders of a joint or step graph, each with what its tensor is."""
    return list(zip(graph.meta["inputs"], placeholders(graph.graph), strict=True))


def param_homes_by_node(step: fx.GraphModule) -> dict[str, str]:
    """The home of each parameter that a step reads, by the name of its placeholder."""
    homes = step.meta["homes"]
    return {node.name: homes[spec.name] for spec, node in inputs_of(step) if spec.role == "param" and spec.name in homes}


def updated_names(step: fx.GraphModule) -> frozenset[str]:
    """The names of the parameters that are updated if a backward updates any."""
    params, wanted = (spec.name for spec in step.meta["inputs"] if spec.role == "param"), step.meta.get("updated")
    return frozenset(name for name in params if wanted is None or name in wanted)


def fragments_of(graph: fx.GraphModule) -> dict[str, Fragment]:
    """The fragments among the inputs of a joint or step graph, by name."""
    return {spec.name: spec.fragment for spec in graph.meta["inputs"] if spec.fragment is not None}


def outputs_of(graph: fx.GraphModule) -> list[tuple[OutputSpec, fx.Node]]:
    """The results of a joint or step graph, each with what it means."""
    return list(zip(graph.meta["outputs"], step_outputs(graph), strict=True))


def source(value: fx.Node) -> fx.Node:
    """The value that ``value`` is a copy of: through prefetches and offloads back to where it was made."""
    while value.target is operator.getitem and is_move(value.args[0]):
        call, position = value.args
        value = call.args[position]
    return value


# ------------------------------------------------------------------------------------------------------ copying a graph


def new_node(graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str) -> fx.Node:
    """Creates a node as ``Graph.create_node`` does, but does not look for symbolic numbers: that takes longer than the rest."""
    node = graph.create_node(op, target, name=name)
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with nodes of its own, of the same names."""
    copied = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = new_node(copied, node.op, node.target, args, kwargs, node.name)
        env[node].meta = dict(node.meta)
    return copied


def copy_step(step: fx.GraphModule) -> fx.GraphModule:
    """A copy with a graph of its own and the same kernels."""
    graph = copy_graph(step.graph)
    kernels = {str(node.target): kernel_of(step, node) for node in graph.nodes if is_region(node)}
    copied = LazyGraphModule(kernels, graph, class_name="Step")
    copied.meta.update(step.meta)
    return copied


# ------------------------------------------------------------------------------------------------------------- printing


def listing(step: fx.GraphModule) -> str:
    """The step graph as text for a reader: a line per call, with sizes and tiers of what it makes."""
    lines = []
    for spec, node in inputs_of(step):
        lines.append(f"{node.name}: {describe(node.meta['val'])}  [{node.meta['tier']} {spec.role} {spec.name}]")
    for node in calls(step):
        outputs = ", ".join(f"{item.name}: {describe(item.meta['val'])} {gib(item.meta['nbytes'])}" for item in results(node))
        operands = ", ".join(str(arg) for arg in node.args)
        name = node.name if is_region(node) else getattr(node.target, "__name__", str(node.target))
        kernel = f" = {node.target}" if is_region(node) else ""
        lines.append(f"{node.meta['phase'][:3]} {name}{kernel}({operands}) -> {outputs or '()'}")
    lines += [f"return {result.kind} {result.name}: {value}" for result, value in outputs_of(step)]
    return "\n".join(lines)
