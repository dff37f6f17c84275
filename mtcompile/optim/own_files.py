"""Tensors in files of their own, mapped into memory: weights that the host has no room for, from when they are loaded until the
first step gives them a home. The system writes them to the disk, and drops them from memory as it needs.

A file has no name, and its space is free again when nothing holds its tensor.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch

from mtcompile.runtime.devices.arena import layout_of, part, span_nbytes
from mtcompile.runtime.disk import file as files
from mtcompile.runtime.disk.errors import DiskError
from mtcompile.runtime.disk.requests import whole_blocks


class _Mapping(mmap.mmap):
    """All of one file. ``folder``: where it is."""

    folder: Path


_mappings = weakref.WeakValueDictionary[int, _Mapping]()  # by the address of the tensor


def in_own_file(values: torch.Tensor, folder: Path) -> torch.Tensor:
    """Returns a copy of a host tensor, of the same strides, on disk. Raises DiskError, and DiskFull if it has no room."""
    if values.numel() == 0:
        return values
    nbytes, file = whole_blocks(span_nbytes(values)), files.opened(folder)
    try:
        files.reserve(file, nbytes)
        mapping = _Mapping(file.cached, nbytes)
        own = part(torch.frombuffer(mapping, dtype=torch.uint8), 0, layout_of(values))
        own.copy_(values)
        mapping.flush()
        mapping.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(file.cached, 0, 0, os.POSIX_FADV_DONTNEED)  # none of it stays in the page cache
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(error.errno, f"disk={folder}: {nbytes} bytes could not be written: {error.strerror}") from error
    finally:
        file.close()
    mapping.folder = folder
    _mappings[own.data_ptr()] = mapping
    return own


def beside(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns ``values`` where ``like`` is: in a file of their own, in the same folder, or as they are."""
    mapping = None if is_in_own_file(values) else _mappings.get(like.data_ptr())
    return values if mapping is None else in_own_file(values, mapping.folder)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy in memory of a tensor in a file of its own; any other tensor as it is."""
    return tensor.clone(memory_format=torch.preserve_format) if is_in_own_file(tensor) else tensor


def is_in_own_file(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor is what ``in_own_file`` returned, or a view of all of it."""
    return tensor.data_ptr() in _mappings


def own_files_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes on disk of those tensors that are in files of their own."""
    mappings = {address: _mappings.get(address) for address in {tensor.data_ptr() for tensor in tensors}}
    return sum(len(mapping) for mapping in mappings.values() if mapping is not None)
