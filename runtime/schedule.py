"""The schedule: what runs when, on which queue, over which bytes.

A schedule is a flat tuple of four kinds of instruction (``alloc``, ``free``, ``copy``, ``run``) over a table of
buffers. List order is the order a single thread could run it in; each queue runs its own instructions in list order,
and two queues are ordered only by the stored dependencies (``runtime/deps.py`` derives them) and by the barrier at the
end of each phase. ``docs/schedule.md`` specifies the text and JSON forms on one page.

This file, like all of ``runtime`` but the devices and arenas, needs the standard library only: a schedule can be read,
proven and simulated on a machine without torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar, get_args

T = TypeVar("T")

Op = Literal["alloc", "free", "copy", "run"]
Queue = Literal["compute", "h2d", "d2h", "disk_read", "disk_write", "host", "network"]
Tier = Literal["device", "host", "disk"]
Phase = Literal["forward", "backward"]
Kind = Literal["home", "placed", "pooled"]
Role = Literal["param", "grad", "state", "activation", "input", "output", "buffer", "constant", "tangent", "rng"]
Work = Literal["", "compute", "recompute", "update", "convert", "prefetch", "offload", "read", "write", "collective"]

QUEUES: tuple[Queue, ...] = ("compute", "h2d", "d2h", "disk_read", "disk_write", "host", "network")
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
PHASES: tuple[Phase, ...] = ("forward", "backward")
# The queues whose work the host does: what they meet of the device they wait for.
HOST_QUEUES: tuple[Queue, ...] = ("host", "disk_read", "disk_write", "network")
# They start a phase when the earlier phases of these queues have ended. They share no bytes with queue compute.
HOST_AWAITS: tuple[Queue, ...] = ("h2d", "d2h", "disk_read", "disk_write", "host", "network")
ALIGNMENT = 64  # bytes; what torch's CPU allocator aligns to, so that a slot gives the same vectorised bits as a tensor

# Values in arenas and slabs start at multiples of this. GPU libraries choose kernels by up to this alignment, which a
# tensor with its own storage always has.
PLACEMENT = 256
BLOCK = 4096  # bytes; where values on disk start, so that no two share a block
SECTOR = 512  # bytes; memory at multiples of this is read from disk and written there without a copy

FORMAT = "mtcompile-schedule-2"
MOST_NBYTES = 2**62  # of anything in a schedule that is read: sums of them fit into 64 bits


def aligned(nbytes: int) -> int:
    """Rounds ``nbytes`` up to the granularity in which both tiers account."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def placed(nbytes: int, tier: str = "host", by_disk: bool = False) -> int:
    """Rounds ``nbytes`` up to where the next value in an arena or slab of ``tier`` may start. ``by_disk``: of host memory that
    a disk reads or writes."""
    step = BLOCK if tier == "disk" else SECTOR if by_disk else PLACEMENT
    return -(-nbytes // step) * step


class Copied(NamedTuple):
    """One copy of ``nbytes`` bytes. ``to``, ``of``: the memories, each whole, that it writes and reads, ``at`` and ``since`` so
    many bytes along."""

    to: Hashable
    at: int
    of: Hashable
    since: int
    nbytes: int


def joined(copies: Iterable[Copied]) -> Iterator[tuple[int, int]]:
    """Yields the fewest copies that do the same, each as the position of its first one and its bytes. Neighbours at the same
    distance in both memories are joined, with the padding between them. Copies of no bytes are left out."""
    run: tuple[int, Copied, int] | None = None  # position, the first copy, and the bytes so far
    for position, each in enumerate(copies):
        if each.nbytes == 0:
            continue
        if run is not None:
            index, first, nbytes = run
            apart = each.at - first.at
            beside = apart == each.since - first.since and 0 <= apart - nbytes < PLACEMENT
            if beside and each.to == first.to and each.of == first.of:
                run = index, first, apart + each.nbytes
                continue
            yield index, nbytes
        run = position, each, each.nbytes
    if run is not None:
        yield run[0], run[2]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes in one tier that hold one version of one value.

    ``kind``: a ``home`` exists before and after the step (parameters, gradients at home, module buffers, the user's
    tensors) and is never allocated or freed by the schedule. A ``placed`` buffer lies ``offset`` bytes into its tier's
    arena. A ``pooled`` buffer comes from the device's allocator, which reserves ``nbytes`` for it.
    ``value`` names the version held (SSA): two buffers with the same value hold the same bits.
    ``returned``: the user receives it (outputs, gradients of resident parameters), so the schedule never frees it.
    ``version_of``: of a home that is the next version of another one and is written over it (an updated parameter), the
    other one's name; else empty.
    """

    name: str
    value: str
    tier: Tier
    kind: Kind
    nbytes: int
    role: Role
    offset: int | None = None
    returned: bool = False
    version_of: str = ""

    def overlaps(self, other: Buffer) -> bool:
        """Tells whether writing one of the two may change the bytes of the other."""
        if (self.version_of or self.name) == (other.version_of or other.name):
            return True
        if self.kind != "placed" or other.kind != "placed" or self.tier != other.tier:
            return False
        assert self.offset is not None and other.offset is not None
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of one queue.

    ``copy`` moves reads[i] to writes[i], bytes unchanged. ``run`` calls ``kernel`` with ``reads`` in order and produces
    ``writes`` in order, using up to ``workspace`` more bytes of the device. ``alloc`` and ``free`` name their one buffer
    in ``writes``. ``time_us`` is the predicted duration, ``label`` the call's name in the step graph.
    ``block``: the block of the model it works for; of an ``alloc`` or ``free``, the block of the work that needs the buffer
    first or last. ``work``: what kind of work a copy or run is (``recompute`` computes part of the forward again, alone or
    within a backward); empty for ``alloc`` and ``free``. Nothing that is safe or unsafe depends on these two.
    ``deps``: indices of earlier instructions on *other* queues that must have completed (at most one per queue, since a
    queue is first in, first out). ``previous_step_deps``, in a schedule that runs ahead: indices of instructions on queue
    host in the previous step's backward that must have completed.
    ``ends``: of a copy of slices, the last of ``reads``, which is not copied: int32 [slices] on the device. Slice i along the
    first dimension of each pair is copied if ``ends[i]`` differs from ``ends[i - 1]`` (the first one, if it is not 0); the
    others are left as they are. ``nbytes`` and ``time_us`` are those of all slices.
    ``rows``: of a copy of rows, the reads behind the first, which are not copied: integers on the host or the device. The rows
    of the first pair that these name are copied. On the device they are one behind the other, on the host at their places; on
    the way there, the other ones become zeros. ``nbytes`` and ``time_us`` are of as many rows as they can name.
    """

    op: Op
    queue: Queue
    phase: Phase
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    kernel: str = ""
    workspace: int = 0
    nbytes: int = 0
    time_us: float = 0.0
    label: str = ""
    block: str = ""
    work: Work = ""
    deps: tuple[int, ...] = ()
    previous_step_deps: tuple[int, ...] = ()
    ends: str = ""
    rows: tuple[str, ...] = ()


def used_by_disk(instructions: Iterable[Instruction]) -> set[str]:
    """Returns the buffers on the host that a disk fills, or whose bytes it takes."""
    copies = [each for each in instructions if each.op == "copy"]
    filled = {name for each in copies if each.queue == "disk_read" for name in each.writes}
    return filled.union(name for each in copies if each.queue == "disk_write" for name in each.reads)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Instructions, the buffers they name, and the bytes per tier they may use.

    ``arena_nbytes``: size of each tier's arena of placed slots. ``resident_nbytes``: bytes of persistent homes per tier
    (weights, gradients, optimizer state), counted against the limit at all times. ``budget_nbytes``: the budget per
    tier; a tier that is absent is unlimited. ``peak_nbytes``: the planned peak per tier, the number that is enforced.
    ``run_ahead``: queue host does not drain at the end of the backward. Its remaining instructions run during the next
    step's forward, which waits for single ones (``Instruction.previous_step_deps``) and, at its end, for all of them.
    """

    instructions: tuple[Instruction, ...]
    buffers: Mapping[str, Buffer]
    arena_nbytes: Mapping[str, int]
    resident_nbytes: Mapping[str, int]
    budget_nbytes: Mapping[str, int]
    peak_nbytes: Mapping[str, int] = field(default_factory=dict)
    run_ahead: bool = False

    def phase(self, phase: Phase) -> Iterator[tuple[int, Instruction]]:
        return ((i, instruction) for i, instruction in enumerate(self.instructions) if instruction.phase == phase)

    def __len__(self) -> int:
        return len(self.instructions)

    def __str__(self) -> str:
        return to_text(self)

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(to_dict(self), indent=indent)


class ScheduleFormatError(ValueError):
    """A schedule file that is not of the format in docs/schedule.md."""


def to_dict(schedule: Schedule) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "arena_nbytes": dict(schedule.arena_nbytes),
        "resident_nbytes": dict(schedule.resident_nbytes),
        "budget_nbytes": dict(schedule.budget_nbytes),
        "peak_nbytes": dict(schedule.peak_nbytes),
        "run_ahead": schedule.run_ahead,
        "buffers": [asdict(buffer) for buffer in schedule.buffers.values()],
        "instructions": [asdict(instruction) for instruction in schedule.instructions],
    }


def from_json(text: str) -> Schedule:
    """Reads what ``to_json`` wrote. Raises ScheduleFormatError, which names the field at fault."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleFormatError(f"expected a JSON object, found {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        name = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ScheduleFormatError(f"expected format {FORMAT!r}, found {name!r}; write the schedule again with this version")
    try:
        buffers = [Buffer(**_typed(Buffer, row)) for row in data["buffers"]]
        instructions = tuple(Instruction(**_typed(Instruction, row)) for row in data["instructions"])
        tables = {key: dict(data[key].items()) for key in ("arena_nbytes", "resident_nbytes", "budget_nbytes", "peak_nbytes")}
        run_ahead = data.get("run_ahead", False)
        if type(run_ahead) is not bool:
            raise TypeError(f"run_ahead: expected true or false, found {run_ahead!r}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ScheduleFormatError(f"a field is missing or of the wrong type: {error!r}") from None
    schedule = Schedule(instructions, {b.name: b for b in buffers}, **tables, run_ahead=run_ahead)
    _check_form(schedule, len(buffers))
    return schedule


_IS_TYPE: dict[str, Callable[[Any], bool]] = {  # by annotation; all other annotations are kinds of strings
    "int": lambda v: type(v) is int and abs(v) < MOST_NBYTES,
    "int | None": lambda v: v is None or (type(v) is int and abs(v) < MOST_NBYTES),
    "float": lambda v: type(v) in (int, float) and abs(v) < MOST_NBYTES,  # not for NaN
    "bool": lambda v: type(v) is bool,
    "tuple[str, ...]": lambda v: type(v) is tuple and all(type(x) is str for x in v),
    "tuple[int, ...]": lambda v: type(v) is tuple and all(type(x) is int for x in v),
}


def _typed(kind: type[Buffer] | type[Instruction], row: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of one row, with lists as tuples. Raises TypeError where a value is not of its field's type."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    for f in fields(kind):
        if f.name in values and not _IS_TYPE.get(str(f.type), lambda v: type(v) is str)(values[f.name]):
            raise TypeError(f"{kind.__name__} {f.name}: expected {f.type}, found {row[f.name]!r:.80}")
    return values


def _check_form(schedule: Schedule, rows: int) -> None:
    """Checks the form only. ``runtime/verify`` proves that a schedule is *safe*."""

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise ScheduleFormatError(message)

    need(len(schedule.buffers) == rows, "two buffers share a name")
    for table in (schedule.arena_nbytes, schedule.resident_nbytes, schedule.budget_nbytes, schedule.peak_nbytes):
        for tier, nbytes in table.items():
            known = tier in TIERS and type(nbytes) is int and 0 <= nbytes < MOST_NBYTES
            need(known, f"expected bytes per tier of {TIERS}, found {tier}: {nbytes!r:.80}")
    for buffer in schedule.buffers.values():
        need(buffer.tier in TIERS, f"buffer {buffer.name}: tier {buffer.tier!r} is not one of {TIERS}")
        need(buffer.kind in ("home", "placed", "pooled"), f"buffer {buffer.name}: unknown kind {buffer.kind!r}")
        need(buffer.role in get_args(Role), f"buffer {buffer.name}: unknown role {buffer.role!r}")
        placed = buffer.kind == "placed"
        need((buffer.offset is not None) == placed, f"buffer {buffer.name}: only placed ones have an offset")
        need(buffer.nbytes >= 0, f"buffer {buffer.name}: negative nbytes")
        need(
            not buffer.version_of or buffer.version_of in schedule.buffers,
            f"buffer {buffer.name}: version_of {buffer.version_of!r}, which is not in the table",
        )
    for index, instruction in enumerate(schedule.instructions):
        need(instruction.op in ("alloc", "free", "copy", "run"), f"#{index}: unknown op {instruction.op!r}")
        need(instruction.queue in QUEUES, f"#{index}: unknown queue {instruction.queue!r}")
        need(instruction.phase in PHASES, f"#{index}: unknown phase {instruction.phase!r}")
        need(instruction.work in get_args(Work), f"#{index}: unknown work {instruction.work!r}")
        for name in (*instruction.reads, *instruction.writes):
            need(name in schedule.buffers, f"#{index}: names buffer {name!r}, which is not in the table")
        need(all(0 <= d < index for d in instruction.deps), f"#{index}: a dependency must be an earlier instruction")
        known = all(0 <= d < len(schedule) for d in instruction.previous_step_deps)
        need(known, f"#{index}: waits for an instruction of the previous step that is not in the list")
        reads, writes = len(instruction.reads), len(instruction.writes)
        if instruction.op in ("alloc", "free"):
            need((reads, writes) == (0, 1), f"#{index}: {instruction.op} names one buffer, in writes")
        if instruction.op == "copy":
            paired = reads - bool(instruction.ends) - len(instruction.rows)
            need(0 < paired == writes, f"#{index}: copy pairs reads with writes, found {paired} and {writes}")
        last = instruction.reads[-1:] == (instruction.ends,) and instruction.op == "copy"
        need(last or not instruction.ends, f"#{index}: expected ends as the last read of a copy, found {instruction.ends!r}")
        last = instruction.reads[1:] == instruction.rows and instruction.op == "copy" and not instruction.ends
        need(last or not instruction.rows, f"#{index}: expected rows as the last reads of a copy, found {instruction.rows!r}")


def listed(names: Iterable[str], most: int) -> str:
    """Joins names for people: the first ``most`` of them, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def gib(nbytes: int) -> str:
    """Formats bytes for people: in GiB, or in the largest smaller unit that does not read 0.00."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def to_text(schedule: Schedule) -> str:
    """Returns the listing: one line per instruction, with what it waits for."""
    lines = [f"# {FORMAT}: {len(schedule)} instructions, {len(schedule.buffers)} buffers"]
    for tier in TIERS:
        if any(tier in table for table in (schedule.arena_nbytes, schedule.resident_nbytes, schedule.peak_nbytes)):
            limit = schedule.budget_nbytes.get(tier)
            peak, arena = schedule.peak_nbytes.get(tier, 0), schedule.arena_nbytes.get(tier, 0)
            lines.append(
                f"# {tier}: peak {gib(peak)} of {gib(limit) if limit is not None else 'no limit'}, "
                f"arena {gib(arena)}, resident {gib(schedule.resident_nbytes.get(tier, 0))}"
            )
    for index, instruction in enumerate(schedule.instructions):
        lines.append(f"{index:5d} {instruction_text(instruction, schedule.buffers)}")
    return "\n".join(lines)


def instruction_text(instruction: Instruction, buffers: Mapping[str, Buffer]) -> str:
    """Returns one line: phase, queue, op, operands with tier and place, waits."""
    if instruction.op in ("alloc", "free"):
        what = buffer_text(buffers[instruction.writes[0]])
    elif instruction.op == "copy":
        what = ", ".join(f"{r} -> {w}" for r, w in zip(instruction.reads, instruction.writes))
        what += f"  [{'at most ' if instruction.ends or instruction.rows else ''}{gib(instruction.nbytes)}]"
        what += "  straight from disk" if is_direct(instruction, buffers) else ""
        what += f"  slices by {instruction.ends}" if instruction.ends else ""
        what += f"  rows by {', '.join(instruction.rows)}" if instruction.rows else ""
    else:
        what = f"{instruction.kernel}({', '.join(instruction.reads)}) -> {', '.join(instruction.writes) or '()'}"
        if instruction.workspace:
            what += f"  [workspace {gib(instruction.workspace)}]"
    waits = f"  waits {' '.join(f'#{d}' for d in instruction.deps)}" if instruction.deps else ""
    if instruction.previous_step_deps:
        waits += f"  waits {' '.join(f'#{d}' for d in instruction.previous_step_deps)} of the previous step"
    label = f"  ; {instruction.label}" if instruction.label else ""
    return f"{instruction.phase[:3]} {instruction.queue:7s} {instruction.op:5s} {what}{waits}{label}"


def buffer_text(buffer: Buffer) -> str:
    place = f"{buffer.tier}+{buffer.offset}" if buffer.kind == "placed" else f"{buffer.tier} {buffer.kind}"
    place += f", next version of {buffer.version_of}" if buffer.version_of else ""
    return f"{buffer.name}  [{gib(buffer.nbytes)} {place}, {buffer.role}]"


def is_direct(instruction: Instruction, buffers: Mapping[str, Buffer]) -> bool:
    """Tells whether it reads a disk straight into the device."""
    return instruction.op == "copy" and instruction.queue == "h2d" and buffers[instruction.reads[0]].tier == "disk"


def way_of(instruction: Instruction, buffers: Mapping[str, Buffer]) -> str:
    """Returns what decides how long an instruction takes: its queue, or ``direct`` if it reads a disk straight into the
    device."""
    return "direct" if is_direct(instruction, buffers) else instruction.queue


@functools.cache
def _slots(frozen: type) -> Mapping[str, tuple[Callable[[Any, Any], None], Callable[[Any], Any]]]:
    """Returns what sets and reads each field of a dataclass with slots."""
    return {each.name: (getattr(frozen, each.name).__set__, getattr(frozen, each.name).__get__) for each in fields(frozen)}


def changed(frozen: T, **changes: Any) -> T:
    """Returns a frozen dataclass with other values of some fields, several times as fast as ``dataclasses.replace``. Does not
    call ``__post_init__``."""
    kind: Any = type(frozen)
    other: T = object.__new__(kind)
    slots = _slots(kind)
    for put, get in slots.values():
        put(other, get(frozen))
    for name, value in changes.items():
        slots[name][0](other, value)
    return other


def with_deps(
    schedule: Schedule, deps: Iterable[tuple[int, ...]], previous_step_deps: Iterable[tuple[int, ...]] | None = None
) -> Schedule:
    """Returns the schedule with the given dependencies, one tuple per instruction."""
    previous = ((),) * len(schedule) if previous_step_deps is None else previous_step_deps
    triples = zip(schedule.instructions, deps, previous, strict=True)
    return replace(schedule, instructions=tuple(changed(i, deps=d, previous_step_deps=p) for i, d, p in triples))
