"""Measures kernels and operations by running them once on inputs with their layouts: bytes of workspace, strides of results."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtcompile.capture.refusals import first_line
from mtcompile.errors import CaptureError, device_ended, ends_device
from mtcompile.machine.device import allocator_peak
from mtcompile.passes.analysis.memory import body_lives, output_nbytes, workspace_nbytes
from mtcompile.passes.generators import generator_state, replay, rng_preserved, save_rng
from mtcompile.passes.joint.strides import Observe
from mtcompile.passes.step_graph import (
    body_outputs,
    is_check,
    is_random,
    is_view,
    iter_tensors,
    placeholders,
    storage_nbytes,
)
from mtcompile.runtime.devices.arena import layout_of
from mtcompile.runtime.schedule import aligned
from mtcompile.torch_private import pytree

Call = Callable[..., Any]
_PARTS = (1, 2, 4, 8, 16, 64)  # into which the rows of an operation without room are divided


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one run of a kernel. ``workspace``: bytes of device memory allocated beside results. ``larger``: the
    positions of results that hold more bytes than declared. ``unreleased``: bytes still held after the results are gone.
    ``note``: why it was not measured in one piece, for a reader; else empty."""

    workspace: int
    larger: tuple[int, ...] = ()
    unreleased: int = 0
    note: str = ""


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
            del results
    except CaptureError:
        raise
    except torch.OutOfMemoryError:
        has_room, inputs = False, []  # what the error's frames hold is to be free
    except Exception as error:
        if ends_device(error):
            raise device_ended(f"kernel {kernel.meta.get('name', '')}, while it was measured", first_line(error)) from error
        return Measured(workspace_nbytes(kernel) + _scratch_nbytes(kernel) + _value_dependent_nbytes(kernel))
    if not has_room:
        return _by_operation(kernel, device)
    larger = tuple(i for i, (one, other) in enumerate(zip(actual, declared, strict=True)) if one > other)
    if peak.nbytes is None:
        return Measured(workspace_nbytes(kernel), larger)
    return Measured(aligned(max(0, peak.nbytes - output_nbytes(kernel))) + _value_dependent_nbytes(kernel), larger, peak.kept)


def _by_operation(kernel: fx.GraphModule, device: torch.device) -> Measured:
    """Measures a kernel that has no room as a whole: each operation alone, beside what is alive there by shapes. One that has
    no room either is measured with fewer rows and scaled."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    scratches, most = dict[str, tuple[int, int]](), 1
    needed = 0
    for node, live in zip(kernel.graph.nodes, body_lives(kernel.graph), strict=False):
        if node.op != "call_function" or is_view(node) or is_check(node) or node.target in (operator.getitem, save_rng, replay):
            needed = max(needed, live)
            continue
        operands = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: tuple(map(str, map(layout_of, iter_tensors(n)))))
        key = f"{node.target} {operands}"
        if key not in scratches:
            scratches[key] = _alone(node, device)
        scratch, parts = scratches[key]
        needed, most = max(needed, live + scratch), max(most, parts)
    note = "operation by operation" + (f", some of them at 1/{most} of their rows, scaled" if most > 1 else "")
    workspace = aligned(max(0, needed - output_nbytes(kernel))) + _value_dependent_nbytes(kernel)
    return Measured(workspace, note=note)


def _alone(node: fx.Node, device: torch.device) -> tuple[int, int]:
    """Returns the bytes that one operation allocates beside its results, and into how many parts its rows were divided to
    measure them; a bound by shapes where even a small part has no room."""
    rows = max((v.shape[0] for n in node.all_input_nodes for v in iter_tensors(n) if v.dim()), default=0)
    target: Any = node.target
    for parts in _PARTS:
        if parts > max(1, rows) or not _runs_on(device, node):
            break

        def part(operand: fx.Node, parts: int = parts) -> Any:
            val = operand.meta["val"]
            if parts == 1 or not isinstance(val, torch.Tensor) or not val.dim() or val.shape[0] != rows:
                return example(operand, device)
            return _zeros(val, device, -(-rows // parts))

        operands: Any = None  # those of the last try are gone before the next
        try:
            operands = fx.node.map_arg((node.args, dict(node.kwargs)), part)
            with rng_preserved(str(device)), torch.no_grad(), allocator_peak(device) as peak:
                results = target(*operands[0], **operands[1])
                tensors = [each for each in pytree.tree_leaves(results) if isinstance(each, torch.Tensor)]
                made = sum(aligned(tensor.untyped_storage().nbytes()) for tensor in tensors)
                del results, tensors
            if peak.nbytes is not None:
                return parts * max(0, peak.nbytes - made), parts
            break
        except torch.OutOfMemoryError:
            continue
        except Exception as error:
            if ends_device(error):
                raise device_ended(f"{_operation(node)}, while it was measured", first_line(error)) from error
            break
    return _around_nbytes(node), 1


def on_zeros(kernel: fx.GraphModule, device: torch.device) -> Call:
    """Returns a function that runs a kernel's body to measure it: each operation sees zeros, whatever those before it made.

    So an index is never out of range. Checks are left out. An operation that refuses zeros is stood in for by its declared
    results and a generous workspace."""
    return lambda *inputs: _OnZeros(kernel, device).run(*inputs)


class _OnZeros(fx.Interpreter):
    def __init__(self, kernel: fx.GraphModule, device: torch.device) -> None:
        super().__init__(kernel)
        self.device = device

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or is_view(n) or n.target in (operator.getitem, save_rng, replay):
            return super().run_node(n)
        if is_check(n):
            return None
        custom = not str(n.target).startswith(("aten.", "prims."))
        before = generator_state(str(self.device)) if custom else None
        try:
            if not _runs_on(self.device, n):
                raise ValueError("zeros")
            result = super().run_node(n)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return _stand_in(n, self.device)
        if before is not None and not is_random(n) and not torch.equal(before, generator_state(str(self.device))):
            raise CaptureError(
                f"{_operation(n)} draws random numbers and does not say so, so what is computed again would draw others\n"
                "  expected the tag torch.Tag.nondeterministic_seeded on an operation that changes none of its arguments"
            )
        _compare_shapes(n, result)
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                value.zero_()
        return result


def _compare_shapes(node: fx.Node, result: Any) -> None:
    """Raises CaptureError if an operation returns other shapes than it declares, for which memory is planned."""
    for val, value in zip(pytree.tree_leaves(node.meta["val"]), pytree.tree_leaves(result), strict=False):
        if isinstance(value, torch.Tensor) and isinstance(val, torch.Tensor) and value.shape != val.shape:
            raise CaptureError(
                f"{_operation(node)} returns a tensor of shape {tuple(value.shape)} and declares one of {tuple(val.shape)}\n"
                "  expected the shape that it declares; give it inputs with a batch dimension"
            )


def _operation(node: fx.Node) -> str:
    inner = next((argument for argument in node.args if hasattr(argument, "_schema")), node.target)
    return str(inner)


def _stand_in(node: fx.Node, device: torch.device) -> Any:
    """Returns zeros in place of what an operation would return, after having taken as much memory as it may take."""
    scratch = torch.empty(_around_nbytes(node), dtype=torch.uint8, device=device)
    vals = node.meta["val"]
    results = [v if v is None else _zeros(v, device) for v in (vals if isinstance(vals, (tuple, list)) else [vals])]
    del scratch
    return tuple(results) if isinstance(vals, (tuple, list)) else results[0]


def _operands_nbytes(node: fx.Node) -> int:
    """Returns the bytes of an operation's operands and results."""
    return sum(aligned(storage_nbytes(v)) for around in (node, *node.all_input_nodes) for v in iter_tensors(around))


def _around_nbytes(node: fx.Node) -> int:
    """Returns a bound on what an operation allocates inside: a copy of each operand and result in another order, and as much
    to work in."""
    return 2 * _operands_nbytes(node)


def _scratch_nbytes(kernel: fx.GraphModule) -> int:
    """Returns a bound on what any one operation of a kernel allocates inside."""
    return max((_around_nbytes(n) for n in kernel.graph.nodes if n.op == "call_function" and not is_view(n)), default=0)


def _runs_on(device: torch.device, node: fx.Node) -> bool:
    """Tells whether an operation can be given zeros on ``device``. On a GPU, a value that an operation refuses ends the use of
    the GPU by this process; so one that may look at values, since it takes integers or draws numbers, is run on the host
    first."""
    if device.type == "cpu" or not (is_random(node) or any(map(_is_integer, node.all_input_nodes))):
        return True
    cpu = torch.device("cpu")

    def on_host(value: Any) -> Any:
        if isinstance(value, fx.Node):
            val = value.meta["val"]
            return torch.zeros((), dtype=val.dtype).expand(val.shape)  # one element: only the values matter
        return cpu if isinstance(value, torch.device) else value

    args, kwargs = pytree.tree_map(on_host, (node.args, dict(node.kwargs)), is_leaf=lambda value: isinstance(value, fx.Node))
    target: Any = node.target
    try:
        with rng_preserved("cpu"), torch.no_grad():
            target(*args, **kwargs)
    except NotImplementedError:  # an operation of GPUs alone, such as attention's
        return True
    except Exception:
        return False
    return True


def looks_up_values(kernel: fx.GraphModule) -> bool:
    """Tells whether a kernel's operations may look at integers that it computes from its inputs, as an index: made of zeros,
    they may be out of range."""
    computed: set[fx.Node] = set()
    for node in kernel.graph.nodes:
        integers = [operand for operand in node.all_input_nodes if operand in computed and _is_integer(operand)]
        if (
            integers
            and not is_view(node)
            and torch.Tag.pointwise not in getattr(node.target, "tags", ())
            and node.op != "output"
        ):
            return True
        if any(operand in computed or operand.op == "placeholder" for operand in node.all_input_nodes):
            computed.add(node)
    return False


def _is_integer(node: fx.Node) -> bool:
    return any(not v.is_floating_point() and not v.is_complex() and v.dtype != torch.bool for v in iter_tensors(node))


def _ctc_nbytes(node: fx.Node) -> int:
    """Returns a bound on the two tables that CTC loss fills: (N, T, 2 * longest target + 1)."""
    log_probs, targets = (operand.meta["val"] for operand in node.args[:-2][-4:-2])  # type: ignore[union-attr]
    steps, batch, _ = log_probs.shape
    return 2 * aligned(batch * steps * (2 * targets.shape[-1] + 1) * log_probs.element_size())


def _grouped_nbytes(node: fx.Node) -> int:
    """Returns a bound on what one product of grouped_mm packs on the host, with all rows in its group: half-precision operands
    in tiles of 64, and an fp32 result (random shapes took up to 0.87 of it). Zeros as ends leave all groups empty."""
    one, other = (operand.meta["val"] for operand in node.args[:2])  # type: ignore[union-attr]
    if one.device.type != "cpu" or one.dtype.itemsize != 2:
        return 0
    rows, inner, columns = (-(-size // 64) * 64 for size in (one.shape[-2], one.shape[-1], other.shape[-1]))
    return int(2 * inner * (rows + columns) + 4 * rows * columns)


def _bags_nbytes(node: fx.Node) -> int:
    """Returns a bound on what sums over bags of rows, or their gradients, take: a row and four integers for each index and bag,
    with rows in fp32 or wider. The gradient of all rows also counts how often each was used."""
    operands = [val for operand in node.all_input_nodes for val in iter_tensors(operand)]
    indices = sum(val.numel() for val in operands if not val.is_floating_point())
    row_nbytes = max(val.shape[-1] * max(4, val.element_size()) for val in operands if val.is_floating_point())
    counted = sum(val.shape[0] for val in iter_tensors(node)) if "backward" in str(node.target) else 0
    return aligned(indices * (row_nbytes + 4 * 8)) + aligned(8 * counted)


# Operations whose buffers depend on their input values -> a bound on the bytes that these take.
_VALUE_DEPENDENT: dict[str, Callable[[fx.Node], int]] = {
    "_embedding_bag": _bags_nbytes,
    "nonzero_static": _operands_nbytes,
    "matrix_exp": lambda node: 16 * _operands_nbytes(node),
    "ctc_loss": _ctc_nbytes,
    "_grouped_mm": _grouped_nbytes,
}


def _value_dependent_nbytes(kernel: fx.GraphModule) -> int:
    """Returns extra bytes for operations whose buffers depend on their input values, which example inputs do not show."""
    return sum(
        nbytes(node)
        for node in kernel.graph.nodes
        for name, nbytes in _VALUE_DEPENDENT.items()
        if node.op == "call_function" and name in str(node.target)
    )


def strides_on(device: torch.device) -> Observe:
    """Returns a function that runs an operation once, on zeros with its operands' layouts, and returns its results' strides."""
    known: dict[str, list[tuple[int, ...] | None] | None] = {}

    def observe(node: fx.Node) -> list[tuple[int, ...] | None] | None:
        layouts = fx.node.map_arg((node.args, node.kwargs), lambda n: tuple(map(str, map(layout_of, iter_tensors(n)))))
        key = f"{node.target} {layouts}"
        if key not in known:
            known[key] = _result_strides(node, device)
        return known[key]

    return observe


def _result_strides(node: fx.Node, device: torch.device) -> list[tuple[int, ...] | None] | None:
    operands: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: example(n, device))
    target: Any = node.target
    if is_check(node) or not _runs_on(device, node):
        return None
    try:
        with rng_preserved(str(device)), torch.no_grad():
            result = target(*operands[0], **operands[1])
    except Exception as error:  # no room, or an operation that refuses zeros
        if ends_device(error):
            raise device_ended(f"{_operation(node)}, while it was traced", first_line(error)) from error
        return None
    results = result if isinstance(result, (tuple, list)) else [result]
    return [tuple(each.stride()) if isinstance(each, torch.Tensor) else None for each in results]


def example_inputs(kernel: fx.GraphModule, device: torch.device) -> list[torch.Tensor]:
    """Makes inputs with the kernel's layouts, valid whatever it does with them."""
    return [example(node, device) for node in placeholders(kernel.graph)]


def example(node: fx.Node, device: torch.device) -> torch.Tensor:
    """Makes zeros with the node's layout (valid as indices), or a generator's state if that is what the node stands for."""
    if any(user.target is replay and user.args[0] is node for user in node.users):
        return generator_state(str(device))
    return _zeros(node.meta["val"], torch.device("cpu") if _read_by_the_host(node) else device)


def _zeros(val: torch.Tensor, device: torch.device, rows: int | None = None) -> torch.Tensor:
    """Makes zeros with the layout of ``val``. ``rows``: in place of all of its first dimension."""
    shape = tuple(val.shape) if rows is None else (rows, *val.shape[1:])
    elements = sum((size - 1) * stride for size, stride in zip(shape, val.stride(), strict=True)) + 1 if 0 not in shape else 0
    return torch.zeros(elements, dtype=val.dtype, device=device).as_strided(shape, tuple(val.stride()))


def _read_by_the_host(node: fx.Node) -> bool:
    """Tells whether a node is the seed or offset of memory-efficient attention, whose backward reads them in host memory."""
    for user in node.users:
        if "efficient_attention_backward" in str(user.target):
            names = [argument.name for argument in user.target._schema.arguments]  # type: ignore[union-attr]
            if any(arg is node and names[i] in ("philox_seed", "philox_offset") for i, arg in enumerate(user.args)):
                return True
    return False


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides and no more bytes than they span."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
