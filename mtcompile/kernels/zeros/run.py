"""Runs kernels and operations on zeros with the layouts of their inputs."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from mtcompile.errors import CaptureError
from mtcompile.kernels.zeros.bounds import around_nbytes
from mtcompile.passes.generators import generator_state, replay, rng_preserved, save_rng
from mtcompile.passes.step_graph import is_check, is_random, is_view, iter_tensors, placeholders
from mtcompile.torch_private import pytree

Call = Callable[..., Any]


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
        try:
            if not runs_on(self.device, n):
                raise ValueError("zeros")
            with refusing_draws(n, self.device):
                result = super().run_node(n)
        except (torch.OutOfMemoryError, CaptureError):
            raise
        except Exception:
            return _stand_in(n, self.device)
        compare_shapes(n, result)
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                value.zero_()
        return result


@contextlib.contextmanager
def refusing_draws(node: fx.Node, device: torch.device) -> Iterator[None]:
    """Runs an operation inside. Raises CaptureError if it is a custom one that draws random numbers and does not say so."""
    custom = not str(node.target).startswith(("aten.", "prims."))
    before = generator_state(str(device)) if custom else None
    yield
    if before is not None and not is_random(node) and not torch.equal(before, generator_state(str(device))):
        raise CaptureError(
            f"{operation_name(node)} draws random numbers and does not say so, so what is computed again would draw others\n"
            "  expected the tag torch.Tag.nondeterministic_seeded on an operation that changes none of its arguments"
        )


def compare_shapes(node: fx.Node, result: Any) -> None:
    """Raises CaptureError if an operation returns other shapes than it declares, for which memory is planned."""
    for val, value in zip(pytree.tree_leaves(node.meta["val"]), pytree.tree_leaves(result), strict=False):
        if isinstance(value, torch.Tensor) and isinstance(val, torch.Tensor) and value.shape != val.shape:
            raise CaptureError(
                f"{operation_name(node)} returns a tensor of shape {tuple(value.shape)}, declares one of {tuple(val.shape)}\n"
                "  expected the shape that it declares; give it inputs with a batch dimension"
            )


def operation_name(node: fx.Node) -> str:
    inner = next((argument for argument in node.args if hasattr(argument, "_schema")), node.target)
    return str(inner)


def _stand_in(node: fx.Node, device: torch.device) -> Any:
    """Returns zeros in place of what an operation would return, after having taken as much memory as it may take."""
    scratch = torch.empty(around_nbytes(node), dtype=torch.uint8, device=device)
    vals = node.meta["val"]
    results = [v if v is None else zeros_of(v, device) for v in (vals if isinstance(vals, (tuple, list)) else [vals])]
    del scratch
    return tuple(results) if isinstance(vals, (tuple, list)) else results[0]


def runs_on(device: torch.device, node: fx.Node) -> bool:
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


def example_inputs(kernel: fx.GraphModule, device: torch.device) -> list[torch.Tensor]:
    """Makes inputs with the kernel's layouts, valid whatever it does with them."""
    return [example(node, device) for node in placeholders(kernel.graph)]


def example(node: fx.Node, device: torch.device) -> torch.Tensor:
    """Makes zeros with the node's layout (valid as indices), or a generator's state if that is what the node stands for."""
    if any(user.target is replay and user.args[0] is node for user in node.users):
        return generator_state(str(device))
    return zeros_of(node.meta["val"], torch.device("cpu") if _read_by_the_host(node) else device)


def zeros_of(val: torch.Tensor, device: torch.device, rows: int | None = None) -> torch.Tensor:
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
