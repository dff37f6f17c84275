"""Operations of the second device: called, they return what they will compute into; streams compute it later, on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.device.second.streams import DEVICE, Stream

_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # of operations that a host waits for
_AT_ONCE = (torch.ops.aten.native_batch_norm.default,)  # which keeps other statistics on the CPU than is told beforehand
_KNOWN: dict[Any, Any] = {}  # what comes out of operations, by what goes in
_LIBRARIES: list[torch.library.Library] = []  # registered as long as they live


def register(name: str) -> None:
    """Makes the functions below those of the device called ``name`` (torch's name for it)."""
    key = name.upper()
    every = torch.library.Library("_", "IMPL")
    every.fallback(functools.partial(_launch, name), key)
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_copy_from", _copy_from, key)
    aten.impl("_copy_from_and_resize", _copy_from_and_resize, key)
    for named in ("convolution_overrideable", "convolution_backward_overrideable"):
        aten.impl(named, functools.partial(_launch, name, getattr(torch.ops.aten, named).default), key)
    _LIBRARIES.extend((every, aten))


def _launch(name: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation, on the current stream: at once where torch cannot tell beforehand what comes out of it, and where it draws
    random numbers, since the generator is the CPU's."""
    stream = DEVICE.current()
    fails = DEVICE.note("launch", str(op), stream)
    on_cpu, outputs = _computed_as(op), _outputs(op, args, kwargs)
    at_once = op in _AT_ONCE or torch.Tag.nondeterministic_seeded in op.tags
    results = None if at_once else _shapes(on_cpu, args, kwargs) if outputs else ()
    if results is not None:
        results = tuple(_empty(shape, output, name) for shape, output in zip(_several(results), outputs, strict=False))
    inputs = pytree.tree_map_only(Tensor, _at_launch, (args, kwargs))

    def compute() -> Any:
        if fails is not None:
            fails()
        given, named = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), inputs)
        return on_cpu(*given, **named)

    if results is None:
        if _READS & set(op.tags):
            DEVICE.blocks(str(op), stream)
        there = pytree.tree_map_only(Tensor, lambda t: t.to(name), stream.done(compute))
        results = tuple(there if output is None else output for there, output in zip(_several(there), outputs, strict=False))
    else:
        places = pytree.tree_map_only(Tensor, torch.ops.second_device.bytes, results)

        def run() -> None:
            for place, value in zip(pytree.tree_leaves(places), pytree.tree_leaves(_several(compute())), strict=True):
                if isinstance(value, Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)

        stream.put(run)
    return results[0] if len(op._schema.returns) == 1 else results if results else None


def _several(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else () if results is None else (results,)


def _outputs(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation returns, by its results; None for those that it makes."""
    values = {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)} | kwargs
    written = {str(a.alias_info.before_set): values.get(a.name) for a in op._schema.arguments if a.alias_info}
    return [written[str(r.alias_info.before_set)] if r.alias_info else None for r in op._schema.returns]


def _empty(shape: Any, output: Any, name: str) -> Any:
    """What is written: an argument, resized as ``out=`` is, or new memory."""
    if output is None:
        return pytree.tree_map_only(
            Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=name), shape
        )
    return output.resize_(shape.shape) if isinstance(output, Tensor) and output.shape != shape.shape else output


def _at_launch(tensor: Tensor) -> Tensor:
    """What a kernel reads and writes: the device's memory as it is then, and the host's as it is now."""
    return tensor.clone() if tensor.device.type == "cpu" else torch.ops.second_device.bytes(tensor)


def _shapes(op: Any, args: Any, kwargs: Any) -> Any:
    """What comes out of an operation, on the meta device; None if that depends on values, or is a number."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    key = (op, str(spec), *map(_metadata, leaves))
    if key not in _KNOWN:
        _KNOWN[key] = _new_shapes(op, args, kwargs)
    return _KNOWN[key]


def _metadata(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf))


def _new_shapes(op: Any, args: Any, kwargs: Any) -> Any:
    def meta(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    try:
        given, named = pytree.tree_map_only(Tensor, meta, (args, kwargs))
        given, named = pytree.tree_map_only(torch.device, lambda _: torch.device("meta"), (given, named))
        shapes = op(*given, **named)
    except (NotImplementedError, RuntimeError, TypeError):  # the CPU says what is wrong with it, if anything is
        return None
    leaves = pytree.tree_leaves(shapes)
    return shapes if all(leaf is None or (isinstance(leaf, Tensor) and leaf.device.type == "meta") for leaf in leaves) else None


def _computed_as(op: Any) -> Any:
    """What the CPU calls an operation that torch has a name of its own for on devices that it knows little of."""
    aten = torch.ops.aten
    if op is aten.convolution_overrideable.default:
        return aten.convolution.default
    if op is aten.convolution_backward_overrideable.default:
        return _convolution_backward
    return op


def _convolution_backward(dy: Tensor, x: Tensor, w: Tensor, *rest: Any, **named: Any) -> Any:
    *options, mask = [*rest, *named.values()]
    return torch.ops.aten.convolution_backward(dy, x, w, [w.shape[0]], *options, mask)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy, on the current stream. The host waits for one that it asks to wait for, and for pageable memory."""
    stream, onto_host = DEVICE.current(), target.device.type == "cpu"
    fails = DEVICE.note("copy", "to host" if onto_host else "to device", stream)
    host = target if onto_host else source if source.device.type == "cpu" else None
    later = host is None or (non_blocking and host.is_pinned())
    raw = torch.ops.second_device.bytes
    place, values = raw(target), source.clone() if host is source and not later else raw(source)

    def copy() -> None:
        if fails is not None:
            fails()
        place.copy_(values)

    stream.put(copy)
    if host is not None and (not non_blocking or (onto_host and not later)):  # no device waits for copies within it
        DEVICE.blocks("copy", stream)
        _finish(stream)
    return target


def _finish(stream: Stream) -> None:
    stream.drain()
    if DEVICE.error is not None:
        raise RuntimeError(str(DEVICE.error)) from DEVICE.error


def _copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    if target.shape != source.shape:
        target.resize_(source.shape)
    return _copy_from(source, target)
