"""A device whose memory ends before the budget does, since others hold it: one retry on a smaller plan, then an error that says
who holds what."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from mtcompile.errors import BudgetError
from mtcompile.execution.compiled import LiveFrames
from mtcompile.execution.door import Door
from mtcompile.execution.memory.arenas import ArenaPool
from mtcompile.options import Options
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.executor import instruction_of
from mtcompile.runtime.schedule import HOST_QUEUES, gib


class Session(Protocol):
    """A session, as far as its memory goes."""

    device: Device
    options: Options
    frames: LiveFrames
    arenas: ArenaPool
    door: Door

    def held_nbytes(self) -> int:
        """Returns the device bytes that are held between phases."""


V = TypeVar("V")
_LESS = 0.9  # of the last budget, or of what the device turned out to have
_MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # of drivers, hosts and libraries


def with_retry(session: Session, run: Callable[[bool], V], may_run_again: Callable[[], bool] = lambda: True) -> V:
    """Returns what ``run(False)`` returns or, if the device runs out of memory in it, what ``run(True)`` returns with a smaller
    plan. Raises BudgetError if there is none, or if it runs out again. ``may_run_again``: tells whether nothing has changed."""
    try:
        return run(False)
    except Exception as error:
        if not _ran_out(error) or session.options.memory is None or not session.door.alone:
            raise  # the other ranks of a step do not run again
        where = _where(error)
        if not may_run_again():
            raise _told(session, where, session.options.memory, session.options.memory, changed=True) from error
        traceback.clear_frames(error.__traceback__)  # which hold what is to be freed
    before = session.options.memory - session.frames.lost_nbytes
    _give_way(session, min(before, _available_nbytes(session)) * _LESS)
    try:
        try:
            return _warned(session, where, before, run(True))
        except BudgetError as refused:
            smallest = refused.minimum_bytes - session.frames.lost_nbytes
            if not 0 < smallest < before:
                raise _told(session, where, before, refused.minimum_bytes) from None
        _give_way(session, smallest)
        return _warned(session, where, before, run(True))
    except BudgetError:
        raise
    except Exception as error:
        if not _ran_out(error):
            raise
        raise _told(session, _where(error), before, before) from None


def _warned(session: Session, where: str, before: int, result: V) -> V:
    now = (session.options.memory or 0) - session.frames.lost_nbytes
    warnings.warn(
        f"the device ran out of memory in {where}. The step has run with a smaller plan: from now on, plans take {gib(now)} at "
        f"most, in place of {gib(before)}. Pass memory={now}, or end what holds the rest:\n{_holders(session)}",
        stacklevel=2,
    )
    return result


def _told(session: Session, where: str, before: int, smallest: int, changed: bool = False) -> BudgetError:
    tried = "among updates" if changed else "and a smaller plan does not help; nothing was changed"
    return BudgetError(
        f"the device ran out of memory in {where}, {tried}. Expected {gib(before)} for this model, found\n{_holders(session)}\n"
        f"  end what holds the rest, or pass memory={int(before * _LESS)}, or a smaller batch",
        smallest,
    )


def _give_way(session: Session, budget: float) -> None:
    """Frees what can be, and leaves the rest of the budget to others from now on."""
    assert session.options.memory is not None
    session.frames.lost_nbytes = session.options.memory - int(budget)
    session.arenas.release_device()
    if (module := _module(session)) is not None:
        module.empty_cache()


def _ran_out(error: BaseException) -> bool:
    """Tells whether an allocation on the device has failed. A plan that is wrong about its kernel (LimitError) is no such
    thing."""
    failed = instruction_of(error)
    if failed is not None and failed[1].queue in HOST_QUEUES:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def _where(error: BaseException) -> str:
    """Returns the line of the schedule that an error comes from."""
    failed = instruction_of(error)
    if failed is None:
        return "an allocation between two instructions"
    index, instruction = failed
    what = instruction.label or instruction.kernel or ", ".join(instruction.writes)
    return f"instruction {index} of the plan ({instruction.phase}, {instruction.queue}: {instruction.op} {what})"


def _module(session: Session) -> Any:
    where = session.device.where
    return None if where.type == "cpu" else torch.get_device_module(where)


def _available_nbytes(session: Session) -> int:
    """Returns what the device has for this model: what it holds, and what is free."""
    module, where = _module(session), session.device.where
    if module is None:
        return session.options.memory or 0
    cached = module.memory_reserved(where) - module.memory_allocated(where)
    return int(session.held_nbytes() - session.frames.lost_nbytes + module.mem_get_info(where)[0] + cached)


def _holders(session: Session) -> str:
    """Returns a table of who holds the device's memory."""
    frames, where, module = session.frames, session.device.where, _module(session)
    waiting = frames.nbytes() - frames.lost_nbytes
    arena = session.arenas.nbytes("device")
    resident = session.held_nbytes() - arena - frames.nbytes()
    rows = {"this model's parameters that stay there": resident, "its arena": arena, "its forwards that wait": waiting}
    if module is not None:
        free, total = module.mem_get_info(where)
        allocated, reserved = module.memory_allocated(where), module.memory_reserved(where)
        rows["other tensors of this process"] = allocated - resident - arena - waiting
        rows["torch's cache"] = reserved - allocated
        rows["other processes and libraries"] = total - free - reserved
        rows["free"] = free
    return (
        "\n".join(f"  {gib(nbytes):>12}  {what}" for what, nbytes in rows.items() if nbytes > 0) or "  nothing of this model's"
    )
