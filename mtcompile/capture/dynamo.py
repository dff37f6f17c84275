"""Dynamo's front end: a function captured whole, with static shapes, its guards kept and checked at every call.

Dynamo is entered by the public door, ``torch.compile(fn, backend=...)``: it keeps the guards, replays Python side effects,
rebuilds pytree outputs and makes a new graph when a guard fails. What reaches the backend is its graph with parameters and
buffers lifted to inputs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch._dynamo.exc import TorchDynamoException

from mtcompile.capture import masks
from mtcompile.errors import CaptureError, MtcompileError
from mtcompile.runtime.schedule import aligned
from mtcompile.torch_private import pytree

_CPU = torch.device("cpu")
_RECOMPILE_LIMIT = 512  # signatures of one model; Dynamo's own default of 8 is for functions, not for training runs


def front_end(fn: Callable[..., Any], backend: Callable[..., Any], device: torch.device = _CPU) -> Callable[..., Any]:
    """``fn`` captured whole (no graph breaks), with static shapes; ``backend(graph_module, inputs)`` compiles a graph.
    Parameters may be at home on the host while inputs are on ``device``.

    Raises CaptureError with the user's own source line where ``fn`` cannot be captured.
    """
    without_packed = True

    def checked(graph: fx.GraphModule, inputs: Any) -> Any:
        if without_packed:
            masks.check_positions(graph.graph)
        return backend(graph, inputs)

    compiled = torch.compile(fn, backend=checked, fullgraph=True, dynamic=False)
    # Floats and ints of the call become constants of the graph (guarded), so that nothing in it is symbolic.
    settings = torch._dynamo.config.patch(
        specialize_float=True,
        automatic_dynamic_shapes=False,
        skip_nnmodule_hook_guards=False,  # a hook that comes or goes is another computation
        recompile_limit=_RECOMPILE_LIMIT,
        accumulated_recompile_limit=8 * _RECOMPILE_LIMIT,
    )
    devices = mixing_devices(device)
    torch._dynamo.config.ignore_logging_functions = _Functions(
        {*set.__iter__(torch._dynamo.config.ignore_logging_functions), *_logging_functions()}
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal without_packed
        try:
            with settings, devices, masks.without_packed() if without_packed else contextlib.nullcontext():
                return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", None) or error.__cause__ or error
            if isinstance(cause, masks.Packed):
                without_packed = False
                return call(*args, **kwargs)
            if isinstance(cause, MtcompileError):
                raise cause from None
            raise CaptureError(_capture_message(error)) from error

    return call


def mixing_devices(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """While tracing, an operation of host and device operands is the device's: at home is not where it computes."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch._functorch.config.patch(fake_tensor_prefer_device_type=device.type)  # type: ignore[no-any-return]


def sent(values: Any, device: torch.device) -> tuple[Any, int]:
    """A call's arguments with every tensor of the host on ``device``, and the bytes that are there for it."""
    nbytes = 0

    def there(value: Any) -> Any:
        nonlocal nbytes
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or value.device.type != "cpu":
            return value
        nbytes += aligned(max(value.untyped_storage().nbytes(), value.numel() * value.element_size()))
        return value.to(device)  # waits: the caller may write the next batch over it

    return pytree.tree_map(there, values), nbytes


def micro_batches(call: Any, count: int) -> Iterator[Any]:
    """A call's arguments for each of ``count`` micro-batches: tensors with the batch in front are cut into views, all else is
    passed to each. Raises ValueError where the batch cannot be told, or be cut into equal parts."""
    leaves, spec = pytree.tree_flatten(call)
    tensors = [t for t in leaves if isinstance(t, torch.Tensor) and not isinstance(t, torch.nn.Parameter) and t.dim()]
    sizes = sorted({tensor.shape[0] for tensor in tensors} - {1})
    if len(sizes) != 1:
        found = ", ".join(map(str, sizes)) or "none above 1"
        raise ValueError(
            f"accumulate={count}: expected tensors with one batch size in front, found {found}; give those that belong to the "
            "whole batch a first dimension of 1"
        )
    batch = sizes[0]
    if batch % count:
        near = f"{batch // count * count} or " if batch > count else ""
        near += str((batch // count + 1) * count)
        raise ValueError(f"accumulate={count}: expected a batch of a multiple of it, found {batch}; try {near}")
    split = {id(tensor) for tensor in tensors if tensor.shape[0] == batch}
    rows = batch // count
    for start in range(0, batch, rows):
        cut = [leaf[start : start + rows] if id(leaf) in split else leaf for leaf in leaves]
        yield pytree.tree_unflatten(cut, spec)


class _Functions(set[Any]):
    """Some versions of torch sort the members of this setting for their log, which functions cannot be: they see names."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(repr(member) for member in set.__iter__(self)))


def _logging_functions() -> set[Any]:
    """Functions that only log: harmless to leave out of a graph (Transformers' models call them in forward)."""
    found: set[Any] = set()
    with contextlib.suppress(ImportError, AttributeError):
        from transformers.utils import logging

        logger = logging.get_logger("transformers")
        found |= {type(logger).warning_once, type(logger).warning, type(logger).info, type(logger).debug}
    return found


def _capture_message(error: BaseException) -> str:
    """The reason and the user's line out of Dynamo's report."""
    text = str(error)
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(\S[^\n]*)', text)
    own = [f for f in frames if "/torch/" not in f[0]] or frames
    where = f"\n  at {own[-1][0]}:{own[-1][1]} in {own[-1][2]}: {own[-1][3]}" if own else ""
    tip = (
        "expected a forward without data-dependent Python control flow or unsupported calls; "
        "try torch.where / a tensor operation at that line, or compile the submodules that do not contain it"
    )
    if "backwards hooks" in reason:
        tip = "remove the module's backward hooks; those on parameters and outputs (tensor.register_hook) work"
    return f"the model's forward could not be captured as one graph: {reason}{where}\n  {tip}"
