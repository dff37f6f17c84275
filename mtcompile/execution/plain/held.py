"""Tensors that share memory: all of them are on the device for a whole call, and share memory there too."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import increment_version

from mtcompile.execution.plain.lending import LentParameter, has_changed, through_interrupts
from mtcompile.execution.unchanged import version_of
from mtcompile.runtime.devices.arena import layout_of, span_nbytes, view
from mtcompile.runtime.schedule import aligned
from mtcompile.torch_private import storage_id

_LARGEST_ELEMENT = 16  # bytes of a complex128


@dataclass(frozen=True, slots=True)
class _Extent:
    """The bytes of one storage that some tensors lie in, from ``start`` to ``end``. At ``start`` an element of any dtype may
    begin."""

    storage: torch.UntypedStorage
    start: int
    end: int


def held_nbytes(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the bytes that copies of tensors take, where those that share memory share it."""
    return sum(aligned(extent.end - extent.start) for extent in _extents(tensors).values())


@contextlib.contextmanager
def held_on(where: torch.device, tensors: Sequence[torch.Tensor], unseen: Collection[int]) -> Iterator[None]:
    """Gives tensors of the host their values on the device ``where``, and in the end the host's memory again, with what has
    changed. ``unseen``: ids of tensors that may change without a sign."""
    copies = _copied(where, tensors)
    owns: dict[int, tuple[torch.Tensor, int]] = {}

    def undo() -> None:
        for tensor in tensors:
            if (before := owns.get(id(tensor))) is not None:
                own, version = before
                changed = id(tensor) in unseen or has_changed(tensor, version, copies[id(tensor)].data_ptr())
                _return(tensor, own, changed)
                del owns[id(tensor)]

    try:
        for tensor in tensors:
            owns[id(tensor)] = tensor.data, tensor._version
            tensor.data = copies[id(tensor)]
            if type(tensor) is nn.Parameter:
                tensor.__class__ = LentParameter
        yield
    finally:
        through_interrupts(undo)


@contextlib.contextmanager
def buffers_on(where: torch.device, model: nn.Module) -> Iterator[None]:
    """Lets every buffer of the host be another tensor on the device ``where``, which graphs of autograd may save: they neither
    see where it is afterwards, nor what other steps write to it. Its values are copied back in the end. On the emulated device,
    where buffers are in place, does so for running statistics alone: kernels write them past the version counters of what is
    saved."""
    modules = [m for m in model.modules() if where.type != "cpu" or hasattr(m, "track_running_stats")]
    tensors = [b for m in modules for b in m._buffers.values() if b is not None and b.device.type == "cpu"]
    copies = _copied(where, tensors)
    versions = {key: version_of(copy) for key, copy in copies.items()}
    replaced: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []

    def undo() -> None:
        while replaced:
            buffers, name, buffer = replaced[-1]
            copy = copies[id(buffer)]
            _write_back(buffer, copy)  # it may have changed without a sign
            if version_of(copy) != versions[id(buffer)] and not buffer.is_inference():
                increment_version(buffer)
            if buffers.get(name) is copy:
                buffers[name] = buffer
            replaced.pop()

    try:
        for module in modules:
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and id(buffer) in copies:
                    replaced.append((module._buffers, name, buffer))
                    module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        through_interrupts(undo)


def _return(tensor: torch.Tensor, own: torch.Tensor, changed: bool) -> None:
    values = torch.Tensor.detach(tensor)
    if layout_of(values) != layout_of(own):  # the forward gave it other memory
        own = values.to(own.device)
    elif changed:
        _write_back(own, values)
    torch.Tensor.data.__set__(tensor, own)  # type: ignore[attr-defined]
    tensor.__dict__.pop("_mt_opened", None)
    if type(tensor) is LentParameter:
        tensor.__class__ = nn.Parameter  # type: ignore[assignment]


def _write_back(own: torch.Tensor, values: torch.Tensor) -> None:
    """Copies the bytes from the first to the last element: ``copy_`` refuses elements that share a place."""
    _bytes_of(own).copy_(_bytes_of(values))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    start, nbytes = tensor.storage_offset() * tensor.element_size(), span_nbytes(tensor)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), start, (nbytes,), (1,))


def _extents(tensors: Sequence[torch.Tensor]) -> Mapping[int, _Extent]:
    extents: dict[int, _Extent] = {}
    for tensor in tensors:
        start = int(tensor.storage_offset()) * tensor.element_size()
        end = start + span_nbytes(tensor)
        if (known := extents.get(storage_id(tensor))) is not None:
            start, end = min(start, known.start), max(end, known.end)
        extents[storage_id(tensor)] = _Extent(tensor.untyped_storage(), start - start % _LARGEST_ELEMENT, end)
    return extents


def _copied(where: torch.device, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Returns a copy of each tensor by its id."""
    copies: dict[int, torch.Tensor] = {}
    memories: dict[int, tuple[torch.Tensor, int]] = {}
    for key, extent in _extents(tensors).items():
        nbytes = extent.end - extent.start
        host = torch.empty(0, dtype=torch.uint8).set_(extent.storage, extent.start, (nbytes,), (1,))
        memories[key] = host.to(where, copy=True), extent.start
    for tensor in tensors:
        memory, start = memories[storage_id(tensor)]
        offset = int(tensor.storage_offset()) * tensor.element_size() - start
        copies[id(tensor)] = view(memory, offset, layout_of(tensor))
    return copies
