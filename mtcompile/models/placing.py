"""Where a model's weights go before there is a plan: to host memory, or to a disk if they do not fit there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mtcompile.errors import BudgetError
from mtcompile.machine.system_files import memory_rooms, smallest_room
from mtcompile.optim.own_files import in_own_file, is_in_own_file
from mtcompile.options import DiskBudget, parse_disk
from mtcompile.runtime.disk.file import free_nbytes
from mtcompile.runtime.disk.requests import whole_blocks
from mtcompile.runtime.schedule import gib
from mtcompile.sizes import parse_bytes

SMALL = 1 << 14  # bytes of tensors that stay in memory beside weights on disk


@dataclass(frozen=True, slots=True)
class Room:
    """The room for weights: ``host`` bytes of memory (None: what is free) and, if they are too few, a disk."""

    host: int | None
    disk: DiskBudget | None

    @staticmethod
    def of(host: int | str | None, disk: Any) -> Room:
        """Returns the room that ``compile`` is given by its options of these names. Raises ValueError."""
        return Room(parse_bytes(host, "host"), parse_disk(disk))


def home_for(what: str, sizes: Iterable[int], widest: int, dtype: torch.dtype | None, room: Room) -> Path | None:
    """Returns the folder on disk where weights of these bytes go; None for host memory, if they fit there with one tensor of
    ``widest`` bytes beside them. ``what``: is to be done with them, as errors say it. Raises BudgetError."""
    sizes = list(sizes)
    rooms, nbytes, needed = memory_rooms(), sum(sizes), sum(sizes) + widest
    if room.host is not None:
        rooms["in the budget host="] = room.host
    smallest = smallest_room(rooms)
    if smallest is None or needed <= smallest[1]:
        return None
    limit, free = smallest
    kind = "of several dtypes" if dtype is None else f"as {str(dtype).removeprefix('torch.')}"
    if room.disk is not None:
        _check_disk(what, sizes, widest, kind, room.disk, smallest)
        return room.disk.folder
    shortage = f"expected {gib(needed)} of host memory to {what} ({gib(nbytes)} of weights {kind}, and the largest tensor "
    half = nbytes // 2 + widest
    step = f"free {gib(needed - free)} more, or use a machine that has them"
    if limit.startswith("in the budget"):
        step = f'host="{-(-needed // 2**20)}MiB"'
    elif dtype == torch.float32 and half <= free:
        step = f'precision="bf16", which takes {gib(half)}'
    raise BudgetError(
        f"{shortage}beside them), found {gib(free)} {limit}. Nothing has begun. Try: {step}, or a disk: "
        'host="SIZE", disk="/path:SIZE"',
        needed,
    )


def _check_disk(what: str, sizes: list[int], widest: int, kind: str, disk: DiskBudget, smallest: tuple[str, int]) -> None:
    """Raises BudgetError if weights cannot go to the disk: what stays in memory has no room there, or they have none on it.
    ``kind``: of numbers; ``smallest``: what limits the memory, and the bytes of it."""
    limit, free = smallest
    if (least := 2 * widest + sum(size for size in sizes if size < SMALL)) > free:
        raise BudgetError(
            f"expected {gib(least)} of host memory to {what} with disk={disk.folder} (twice the largest tensor "
            f"{kind}, while it is converted), found {gib(free)} {limit}. Nothing has begun. Pass or free so much",
            least,
            "host",
        )
    on_disk, there = sum(map(whole_blocks, sizes)), min(disk.nbytes, free_nbytes(disk.folder))
    if on_disk > there:
        raise BudgetError(
            f"expected room for {gib(on_disk)} on disk={disk.folder} to {what} (weights {kind}), which host memory "
            f"has no room for, found {gib(there)}. Nothing has begun. Until the first step has moved them, weights are there "
            "beside what its plan puts there. Pass a larger size, or free space there",
            on_disk,
            "disk",
        )


@contextlib.contextmanager
def registered_parameters_on(folder: Path | None) -> Iterator[None]:
    """Puts parameters that modules get in this thread into files of their own in ``folder``; None: leaves them in memory."""
    thread = threading.get_ident()

    def place(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        placed = threading.get_ident() != thread or type(parameter) is not nn.Parameter or parameter.device.type != "cpu"
        if folder is None or placed or parameter.nbytes < SMALL or is_in_own_file(parameter):
            return None
        own = nn.Parameter(in_own_file(parameter.detach(), folder), requires_grad=parameter.requires_grad)
        own.__dict__.update(parameter.__dict__)  # such as what Transformers notes of initialized ones
        return own

    handle = register_module_parameter_registration_hook(place)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        handle.remove()


def with_values(module: nn.Module, values: Callable[[nn.Parameter], Tensor], folder: Path | None) -> nn.Module:
    """Gives parameters on "meta" the values that a function makes of each, in files of their own in ``folder`` (None: in
    memory). Returns the module."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter not in made:
                own = values(parameter)
                made[parameter] = nn.Parameter(own if folder is None or own.nbytes < SMALL else in_own_file(own, folder))
            setattr(part, name, made[parameter])
    return module
