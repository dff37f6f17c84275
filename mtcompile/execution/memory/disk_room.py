"""The room on disk for what a plan may put there, and what may go there now."""

from __future__ import annotations

from collections.abc import Mapping

from mtcompile.execution.compiled import LiveFrames
from mtcompile.execution.memory.parameters import ParameterStore
from mtcompile.options import DiskBudget
from mtcompile.runtime.disk.file import free_nbytes


def room_nbytes(disk: DiskBudget, parameters: ParameterStore, frames: LiveFrames) -> int:
    """Returns the bytes that may be on disk: as asked for, or fewer if there is no room, less those of waiting forwards."""
    taken = 0 if parameters.disk is None else parameters.disk.all_reserved_nbytes
    return min(disk.nbytes, taken + free_nbytes(disk.folder)) - frames.disk_nbytes()


def movable(fixed: Mapping[str, str], parameters: ParameterStore, frames: LiveFrames) -> tuple[str, ...]:
    """Returns the homes on the host that may go to disk now."""
    evicted = frames.waiting() if frames.leaving else ()
    passing = [tensor for frame in evicted for tensor in frame.memory.tensors.values()]
    return tuple(h for h in sorted(fixed) if fixed[h] == "host" and parameters.may_go_to_disk(h, passing))
