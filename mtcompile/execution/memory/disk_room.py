"""The room on disk for what a plan may put there, and what may go there now."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from mtcompile import knobs
from mtcompile.errors import CaptureError
from mtcompile.execution.compiled import LiveFrames
from mtcompile.execution.memory.fragments import parameter_homes
from mtcompile.execution.memory.parameters import ParameterStore
from mtcompile.machine.device import host_room
from mtcompile.options import DiskBudget
from mtcompile.passes.analysis.state import is_trained
from mtcompile.passes.cuts.fragments.cut import homes_between
from mtcompile.passes.planning.problem import Planned
from mtcompile.passes.step_graph import fragments_of, inputs_of
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.disk import direct
from mtcompile.runtime.disk.file import free_nbytes
from mtcompile.runtime.disk.spares import Spare
from mtcompile.runtime.disk.store import DEPTH, DiskStore, piece_nbytes, staging_nbytes
from mtcompile.torch_private import shares_storage


def room_nbytes(disk: DiskBudget, parameters: ParameterStore, frames: LiveFrames, loaded: int) -> int:
    """Returns the bytes that may be on disk: as asked for, or fewer if there is no room, less those of waiting forwards.
    ``loaded``: bytes of weights that wait there for their first step."""
    taken = 0 if parameters.disk is None else parameters.disk.all_reserved_nbytes
    moved = 0 if parameters.disk is None else parameters.disk.moved_nbytes
    return min(disk.nbytes - loaded, taken + free_nbytes(disk.folder)) - moved - frames.disk_nbytes()


def held_nbytes(parameters: ParameterStore) -> int:
    """Returns the bytes of the parameters that are on disk now."""
    if (disk := parameters.disk) is None:
        return 0
    return sum(place.parameter.nbytes for place in parameters.places.values() if disk.place_of(place.pointer) is not None)


def limits(disk: DiskBudget, parameters: ParameterStore, frames: LiveFrames, model_nbytes: int, loaded: int) -> dict[str, Any]:
    """Returns the fields of budgets that the disk and the environment decide, for a model of that size. ``loaded``: see
    ``room_nbytes``."""
    return {
        "disk": room_nbytes(disk, parameters, frames, loaded),
        "disk_staging": staging_nbytes(model_nbytes),
        "disk_slowdown": knobs.disk_slowdown(),
        "disk_days": knobs.disk_days(),
        "disk_direct": _reads_directly(disk, parameters.device, parameters),
    }


def check_frozen(step: fx.GraphModule, fixed: Mapping[str, str]) -> None:
    """Raises CaptureError for a parameter that went to disk frozen, and is to train now. ``fixed``: the tiers of homes."""
    for spec, _ in inputs_of(step):
        if is_trained(spec) and fixed.get(step.meta["homes"].get(spec.name, "")) == "disk":
            raise CaptureError(
                f'{spec.name} is on disk, where only frozen weights can be without update="backward", and trains now. '
                "Freeze it again, or compile a new model with what trains set from the start"
            )


def _reads_directly(disk: DiskBudget, device: Device, parameters: ParameterStore) -> bool | None:
    """Returns whether fetches read weights on disk straight to the device, as MT_DISK_DIRECT says. Of itself, None, for
    whichever is faster, where kvikio can read a file there; else False."""
    knobs.kvikio_reads_at_once(DEPTH)
    asked = knobs.disk_direct()
    if asked is not None or device.where.type != "cuda" or importlib.util.find_spec("kvikio") is None:
        return bool(asked)
    if parameters.direct_works is None:
        folder = disk.folder if disk.folder.exists() else disk.folder.absolute().parent
        parameters.direct_works = direct.works(folder, device)
    return None if parameters.direct_works else False


def requests_nbytes(parameters: ParameterStore, model_nbytes: int) -> int:
    """Returns the bytes of a piece of the requests to the disk, for a model of that size."""
    return piece_nbytes(model_nbytes) if parameters.disk is None else parameters.disk.piece_nbytes


def opened_store(disk: DiskBudget, parameters: ParameterStore, model_nbytes: int, planned: Planned) -> DiskStore:
    """Returns the store of a model of that size, with room for what a plan keeps there. Raises DiskError."""
    if parameters.disk is None:
        parameters.disk = DiskStore(disk.folder, piece_nbytes(model_nbytes), summed=knobs.disk_verified())
        parameters.disk.spare_here(disk.nbytes)
        named = [] if disk.spare is None else [Spare(disk.spare, lambda: 0)]
        parameters.disk.spares.files += [*named, Spare(None, lambda: (host_room() or ("", 0))[1])]
    if planned.plan.disk_direct:
        direct_reader(parameters)
    nbytes = planned.schedule.resident_nbytes.get("disk", 0)  # activations have a file of their own
    parameters.disk.reserve(nbytes)
    if disk.spare is not None:
        parameters.disk.spares.files[-2].reserve(nbytes)
    return parameters.disk


def direct_reader(parameters: ParameterStore) -> direct.DirectReader:
    """Returns what reads the disk straight to the device. Raises DiskError."""
    if parameters.direct is None:
        assert parameters.disk is not None, "whoever plans for a disk opens its store"
        parameters.direct = parameters.device.direct(parameters.disk)
    return parameters.direct


def movable(
    step: fx.GraphModule,
    fixed: Mapping[str, str],
    named: Mapping[str, nn.Parameter],
    parameters: ParameterStore,
    frames: LiveFrames,
    begins: int,
) -> tuple[str, ...]:
    """Returns the homes on the host that may go to disk now: also those that have no place yet, which a step takes rows of, or
    takes in fragments, or which are new beside others. ``named``: the model's parameters; ``begins``: bytes, at
    multiples of which fragments on disk begin."""
    homes, torn = parameter_homes(step), homes_between(step, begins)
    apart = *step.meta["rows"], *(part.parameter for part in fragments_of(step).values())
    unplaced = homes if parameters.places else apart
    new = {homes[n] for n in unplaced if n in homes and n not in parameters.places and not shares_storage(named[n])}
    evicted = frames.waiting() if frames.leaving else ()
    passing = [tensor for frame in evicted for tensor in frame.memory.tensors.values()]
    at_home = (home for home in sorted(fixed) if fixed[home] == "host" and home not in torn)
    return tuple(home for home in at_home if home in new or parameters.may_go_to_disk(home, passing))
