"""The room on disk for what a plan may put there, and what may go there now."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from mtcompile.execution.compiled import LiveFrames
from mtcompile.execution.memory.parameters import ParameterStore
from mtcompile.options import DiskBudget
from mtcompile.runtime.disk.file import free_nbytes
from mtcompile.torch_private import shares_storage


def room_nbytes(disk: DiskBudget, parameters: ParameterStore, frames: LiveFrames) -> int:
    """Returns the bytes that may be on disk: as asked for, or fewer if there is no room, less those of waiting forwards."""
    taken = 0 if parameters.disk is None else parameters.disk.all_reserved_nbytes
    return min(disk.nbytes, taken + free_nbytes(disk.folder)) - frames.disk_nbytes()


def movable(
    step: fx.GraphModule,
    fixed: Mapping[str, str],
    named: Mapping[str, nn.Parameter],
    parameters: ParameterStore,
    frames: LiveFrames,
) -> tuple[str, ...]:
    """Returns the homes on the host that may go to disk now: also those that have no place yet, which a step takes rows of or
    which are new beside others. ``named``: the model's parameters."""
    homes = step.meta["homes"]
    unplaced = homes if parameters.places else step.meta["rows"]
    new = {homes[n] for n in unplaced if n in homes and n not in parameters.places and not shares_storage(named[n])}
    evicted = frames.waiting() if frames.leaving else ()
    passing = [tensor for frame in evicted for tensor in frame.memory.tensors.values()]
    at_home = (home for home in sorted(fixed) if fixed[home] == "host")
    return tuple(home for home in at_home if home in new or parameters.may_go_to_disk(home, passing))
