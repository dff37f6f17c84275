"""Bounds by shapes on what operations allocate inside, for those that zeros do not tell of."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from mtcompile.passes.step_graph import is_view, iter_tensors, storage_nbytes
from mtcompile.runtime.schedule import aligned


def _operands_nbytes(node: fx.Node) -> int:
    """Returns the bytes of an operation's operands and results."""
    return sum(aligned(storage_nbytes(v)) for around in (node, *node.all_input_nodes) for v in iter_tensors(around))


def around_nbytes(node: fx.Node) -> int:
    """Returns a bound on what an operation allocates inside: a copy of each operand and result in another order, and as much
    to work in."""
    return 2 * _operands_nbytes(node)


def scratch_nbytes(kernel: fx.GraphModule) -> int:
    """Returns a bound on what any one operation of a kernel allocates inside."""
    return max((around_nbytes(n) for n in kernel.graph.nodes if n.op == "call_function" and not is_view(n)), default=0)


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


def value_dependent_nbytes(kernel: fx.GraphModule) -> int:
    """Returns extra bytes for operations whose buffers depend on their input values, which example inputs do not show."""
    return sum(
        nbytes(node)
        for node in kernel.graph.nodes
        for name, nbytes in _VALUE_DEPENDENT.items()
        if node.op == "call_function" and name in str(node.target)
    )
