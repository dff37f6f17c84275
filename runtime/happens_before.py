"""Happens-before, from what a schedule stores: its queues, its waits and its phases. Nothing here derives hazards."""

from __future__ import annotations

from collections.abc import Collection

from mtcompile.runtime.schedule import HOST_AWAITS, HOST_QUEUES, QUEUES, Queue, Schedule


class Order:
    """``before(a, b)``: instruction ``a`` has completed before ``b`` starts, in every execution.

    Holds when both are on one queue and ``a`` is listed first, or ``b`` waits for ``a``, or ``a`` is of an earlier phase, or
    through a chain of these. For ``b`` on one of the host's queues, an earlier phase counts of those in ``host_awaits`` alone:
    the device may still be busy with the others. Expects phases one after the other and waits for earlier instructions only; a
    wait for an earlier phase's is none, since the executor leaves it out.
    """

    __slots__ = ("_complete", "_queue")

    def __init__(self, schedule: Schedule, host_awaits: Collection[Queue] = HOST_AWAITS) -> None:
        self._queue = [QUEUES.index(instruction.queue) for instruction in schedule.instructions]
        # per instruction, for each queue: every instruction of that queue up to this index completes before it starts
        self._complete: list[list[int]] = []
        newest = [-1] * len(QUEUES)
        barrier, phase = -1, ""
        by_host, at_once = {QUEUES.index(queue) for queue in HOST_QUEUES}, [queue not in host_awaits for queue in QUEUES]
        for index, instruction in enumerate(schedule.instructions):
            if instruction.phase != phase:
                barrier, phase = index - 1, instruction.phase
            complete = [barrier] * len(QUEUES)
            if (mine := self._queue[index]) in by_host:
                before = self._complete[newest[mine]] if newest[mine] >= 0 else [-1] * len(QUEUES)
                complete = [earlier if early else barrier for earlier, early in zip(before, at_once)]
            for earlier in (newest[self._queue[index]], *instruction.deps):
                if earlier > barrier and complete[queue := self._queue[earlier]] < earlier:  # else all before it is known, too
                    complete = list(map(max, complete, self._complete[earlier]))
                    complete[queue] = earlier
            self._complete.append(complete)
            newest[self._queue[index]] = index

    def before(self, a: int, b: int) -> bool:
        return a != b and self._complete[b][self._queue[a]] >= a
