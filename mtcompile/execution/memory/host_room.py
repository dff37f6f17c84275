"""The room in host memory, asked for before an allocation: the kernel ends a process that takes more, without a message."""

from __future__ import annotations

from mtcompile.errors import BudgetError
from mtcompile.machine.system_files import memory_rooms, smallest_room
from mtcompile.runtime.schedule import gib

_UNASKED = 64 << 20  # bytes that are taken without a look at the system's files


def check_room(nbytes: int, what: str, way: str) -> None:
    """Raises BudgetError if the system has no room for ``nbytes`` more of host memory. ``what``: they are for; ``way``: the
    smallest thing to do. Takes less than a millisecond."""
    smallest = smallest_room(memory_rooms()) if nbytes > _UNASKED else None
    if smallest is not None and nbytes > smallest[1]:
        limit, room = smallest
        raise BudgetError(
            f"expected {gib(nbytes)} of host memory for {what}, found {gib(room)} {limit}; nothing was changed. Free "
            f"memory, or {way}",
            nbytes,
        )
