"""Small schedules of the shapes the compiler makes, short enough for proof/oracle.py to try every order."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

from mtcompile.runtime.deps import derive
from mtcompile.runtime.schedule import Buffer, Instruction, Kind, Phase, Queue, Role, Schedule, Tier
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import Trace
from mtcompile.runtime.verify import peak

UNIT = 256  # bytes of one value; slots are a multiple, so that every size and offset is aligned


class Builder:
    """Appends instructions; the queue of an alloc or free is that of the work it belongs to."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.instructions: list[Instruction] = []
        self.phase: Phase = "forward"

    def buffer(self, name: str, value: str, tier: Tier, kind: Kind, role: Role, nbytes: int = UNIT, **more: Any) -> str:
        self.buffers[name] = Buffer(name, value, tier, kind, nbytes, role, **more)
        return name

    def home(self, name: str, role: Role, tier: Tier = "host", value: str = "", nbytes: int = UNIT) -> str:
        return self.buffer(name, value or name, tier, "home", role, nbytes)

    def _add(self, op: Any, queue: Queue, **fields: Any) -> None:
        self.instructions.append(Instruction(op, queue, self.phase, **fields))

    def slot(
        self, name: str, value: str, offset: int, role: Role, queue: Queue, tier: Tier = "device", nbytes: int = UNIT
    ) -> str:
        self.buffer(name, value, tier, "placed", role, nbytes, offset=offset)
        self._add("alloc", queue, writes=(name,))
        return name

    def pooled(self, name: str, role: Role, value: str = "", returned: bool = False) -> str:
        self.buffer(name, value or name, "device", "pooled", role, returned=returned)
        self._add("alloc", "compute", writes=(name,))
        return name

    def free(self, name: str, queue: Queue = "compute") -> None:
        self._add("free", queue, writes=(name,))

    def copy(self, queue: Queue, source: str, target: str) -> None:
        nbytes = self.buffers[target].nbytes
        self._add("copy", queue, reads=(source,), writes=(target,), nbytes=nbytes, time_us=nbytes / 64)

    def run(
        self, kernel: str, reads: tuple[str, ...], writes: tuple[str, ...], queue: Queue = "compute", workspace: int = 0
    ) -> None:
        self._add("run", queue, reads=reads, writes=writes, kernel=kernel, workspace=workspace, time_us=3.0)

    def build(self) -> Schedule:
        """With arenas and peaks no larger than needed, so that anything more does not fit, and with dependencies."""
        arena: dict[str, int] = {}
        resident: dict[str, int] = {}
        for b in self.buffers.values():
            if b.offset is not None:
                arena[b.tier] = max(arena.get(b.tier, 0), b.offset + b.nbytes)
            if b.kind == "home" and b.role in ("param", "grad", "state", "buffer"):
                resident[b.tier] = resident.get(b.tier, 0) + b.nbytes
        schedule = Schedule(tuple(self.instructions), dict(self.buffers), arena, resident, {})
        most = peak(schedule)
        return derive(replace(schedule, peak_nbytes=most, budget_nbytes=most))


def inference(layers: int = 4) -> Schedule:
    """Parameters stream through two slots; activations are pooled; the last one is returned."""
    b = Builder()
    x = b.home("x", "input", "device")
    for k in range(layers):
        w = b.slot(f"w{k}", f"p{k}", k % 2 * UNIT, "param", "h2d")
        b.copy("h2d", b.home(f"p{k}", "param"), w)
        y = b.pooled(f"y{k}", "output" if k == layers - 1 else "activation", returned=k == layers - 1)
        b.run("layer", (w, x), (y,), workspace=64)
        b.free(w)
        if k:
            b.free(x)
        x = y
    return b.build()


def training() -> Schedule:
    """Two streamed layers, forward and backward, activations kept, gradients of the parameters sent home."""
    b = Builder()
    activations = [b.home("x", "input", "device")]
    for k in range(2):
        w = b.slot(f"w{k}", f"p{k}", k * UNIT, "param", "h2d")
        b.copy("h2d", b.home(f"p{k}", "param"), w)
        activations.append(b.pooled(f"a{k}", "output" if k else "activation", returned=bool(k)))
        b.run("layer", (w, activations[k]), (activations[k + 1],))
        b.free(w)
    b.phase = "backward"
    delta = b.home("t", "tangent", "device")
    for k in (1, 0):
        w = b.slot(f"v{k}", f"p{k}", k * UNIT, "param", "h2d")
        b.copy("h2d", f"p{k}", w)
        g = b.slot(f"g{k}", f"dp{k}", 2 * UNIT, "grad", "compute")
        below = [b.pooled("d", "activation")] if k else []
        b.run("layer_backward", (w, activations[k], delta), (g, *below), workspace=64 if k else 128)
        b.free(w)
        b.copy("d2h", g, b.home(f"home.g{k}", "grad", value=f"dp{k}"))
        b.free(g, "d2h")
        if k:
            b.free(activations[k])
            delta = below[0]
    b.free("d")
    return b.build()


def offload() -> Schedule:
    """Activations wait for backward in host slots, which outlive the phase; the first host slot is used twice."""
    b = Builder()
    w = b.home("w", "param", "device")
    x = b.home("x", "input", "device")
    for k in range(2):
        y = b.pooled(f"y{k}", "activation")
        b.run("layer", (w, x), (y,))
        if k:
            b.free(x)
        b.copy("d2h", y, b.slot(f"s{k}", y, k * UNIT, "activation", "d2h", "host"))
        x = y
    b.free(x)
    b.phase = "backward"
    delta = b.home("t", "tangent", "device")
    for k in (1, 0):
        y = b.slot(f"z{k}", f"y{k}", 0, "activation", "h2d")
        b.copy("h2d", f"s{k}", y)
        b.free(f"s{k}", "h2d")
        new = b.pooled(f"d{k}", "activation") if k else b.pooled("dw", "grad", returned=True)
        b.run("layer_backward", (w, y, delta), (new,))
        b.free(y)
        if not k:
            b.free(delta)
        delta = new
    return b.build()


def recompute() -> Schedule:
    """The activation is dropped and made again in backward; the weight's gradient goes home by compute's own copy."""
    b = Builder()
    w, x = b.home("w", "param", "device"), b.home("x", "input", "device")
    y = b.pooled("y", "activation")
    b.run("layer", (w, x), (y,), workspace=64)
    loss = b.pooled("loss", "output", returned=True)
    b.run("head", (y,), (loss,))
    b.free(y)
    b.phase = "backward"
    again = b.pooled("y.again", "activation", value="y")
    b.run("layer", (w, x), (again,), workspace=64)
    g = b.pooled("g", "grad")
    b.run("layer_backward", (w, x, again, b.home("t", "tangent", "device")), (g,))
    b.free(again)
    b.copy("compute", g, b.home("home.g", "grad", "device", value="g"))
    b.free(g)
    return b.build()


def from_disk() -> Schedule:
    """Parameters come from disk through one host slot and one device slot; gradients return to disk the same way."""
    b = Builder()
    x = b.home("x", "input", "device")
    for k in range(2):
        s = b.slot(f"s{k}", f"p{k}", 0, "param", "disk_read", "host")
        b.copy("disk_read", b.home(f"p{k}", "param", "disk"), s)
        w = b.slot(f"w{k}", f"p{k}", k * UNIT, "param", "h2d")
        b.copy("h2d", s, w)
        b.free(s, "h2d")
        g = b.slot(f"g{k}", f"dp{k}", 2 * UNIT, "grad", "compute")
        b.run("gradient", (w, x), (g,))
        b.free(w)
        h = b.slot(f"h{k}", f"dp{k}", UNIT, "grad", "d2h", "host")
        b.copy("d2h", g, h)
        b.free(g, "d2h")
        b.copy("disk_write", h, b.home(f"home.g{k}", "grad", "disk", value=f"dp{k}"))
        b.free(h, "disk_write")
    return b.build()


def straight_from_disk() -> Schedule:
    """Parameters come from disk to two device slots in turn, past the host."""
    b = Builder()
    x = b.home("x", "input", "device")
    for k in range(3):
        w = b.slot(f"w{k}", f"p{k}", k % 2 * UNIT, "param", "h2d")
        b.copy("h2d", b.home(f"p{k}", "param", "disk"), w)
        y = b.pooled(f"y{k}", "output" if k == 2 else "activation", returned=k == 2)
        b.run("layer", (w, x), (y,))
        b.free(w)
        if k:
            b.free(x)
        x = y
    return b.build()


def module_buffers() -> Schedule:
    """Statistics are read in their old version, made anew and written back; slots of unequal size share their bytes."""
    b = Builder()
    mean, x = b.home("mean", "buffer", "device"), b.home("x", "input", "device")
    w = b.slot("w", "p", 0, "param", "h2d", nbytes=3 * UNIT)
    b.copy("h2d", b.home("p", "param", nbytes=3 * UNIT), w)
    y = b.pooled("y", "activation")
    new = b.pooled("mean.1", "buffer")
    b.run("norm", (w, x, mean), (y, new))
    b.free(w)
    b.copy("compute", new, b.home("home.mean.1", "buffer", "device", value=new))
    b.free(new)
    for k in range(2):
        u = b.slot(f"u{k}", f"q{k}", (2 * k) * UNIT, "param", "h2d", nbytes=(2 - k) * UNIT)
        b.copy("h2d", b.home(f"q{k}", "param", nbytes=(2 - k) * UNIT), u)
    out = b.pooled("out", "output", returned=True)
    b.run("head", ("u0", "u1", y), (out,))
    b.free("u0")
    b.free("u1")
    b.free(y)
    return b.build()


def update_on_host() -> Schedule:
    """Gradients land in host memory while a kernel there reads the ones before: three queues, two staging slots."""
    b = Builder()
    x = b.home("x", "input", "device")
    for k in range(3):
        g = b.pooled(f"g{k}", "grad", value=f"dp{k}")
        b.run("gradient", (x,), (g,))
        h = b.home(f"home.g{k}", "grad", value=f"dp{k}")
        b.copy("d2h", g, h)
        n = b.slot(f"n{k}", f"norm{k}", k % 2 * UNIT, "state", "host", "host")
        b.run("square_norm", (h,), (n,), queue="host")
        if k:
            b.free(f"n{k - 1}", "host")
            b.free(f"g{k - 1}")
    b.free("n2", "host")
    b.free("g2")
    return b.build()


def streamed(layers: int) -> Schedule:
    """A long forward: parameters of many sizes, first fit in one arena, about six instructions a layer."""
    b = Builder()
    x = b.home("x", "input", "device")
    live: dict[str, tuple[int, int]] = {}
    offset, arena = 0, 256 * UNIT
    for k in range(layers):
        nbytes = UNIT * (20 + k * 7 % 40)
        offset = 0 if offset + nbytes > arena else offset
        for name, (start, end) in list(live.items()):
            if start < offset + nbytes and offset < end:
                b.free(name)
                del live[name]
        w = b.slot(f"w{k}", f"p{k}", offset, "param", "h2d", nbytes=nbytes)
        b.copy("h2d", b.home(f"p{k}", "param", nbytes=nbytes), w)
        live[w] = (offset, offset + nbytes)
        offset += nbytes
        y = b.pooled(f"y{k}", "output" if k == layers - 1 else "activation", returned=k == layers - 1)
        b.run("layer", (w, x), (y,))
        if k:
            b.free(x)
        x = y
    for name in live:
        b.free(name)
    return b.build()


def update_on_device() -> Schedule:
    """Two weights at home on the host are updated by the device: the state of one comes while the other goes home."""
    b = Builder()
    b.phase = "backward"
    for k in range(2):
        w = b.slot(f"w{k}", f"p{k}", k * UNIT, "param", "h2d")
        b.copy("h2d", b.home(f"p{k}", "param"), w)
        b.run("layer_backward", (w, b.home(f"x{k}", "input", "device")), (b.pooled(f"g{k}", "grad"),))
        b.free(w)
        b.run("fetch_state", (f"p{k}",), (b.slot(f"s{k}", f"s{k}", (2 + k) * UNIT, "state", "h2d"),), "h2d")
    for k in range(2):
        new = b.buffer(f"p{k}.new", f"p{k}.new", "host", "home", "param", version_of=f"p{k}")
        b.run("update", (f"g{k}", f"s{k}"), (new,), "d2h")
        b.free(f"g{k}")
        b.free(f"s{k}", "d2h")
    return b.build()


def small_schedules() -> dict[str, Schedule]:
    makers = (inference, training, offload, recompute, from_disk, straight_from_disk, module_buffers, update_on_host)
    makers = (*makers, update_on_device)
    return {make.__name__: make() for make in makers}


def lines_run(function: Callable[[Schedule], object], schedule: Schedule) -> int:
    """How many lines of Python it runs: what it costs, on any machine."""
    count = 0

    def line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        function(schedule)
    finally:
        sys.settrace(before)
    return count


def measured(schedule: Schedule, seed: int = 0) -> Trace:
    """Makes the trace of a device: copies and kernels only, each taking another time than predicted."""
    choose = random.Random(seed)
    rows = tuple(replace(i, time_us=i.time_us * choose.uniform(0.7, 1.6)) for i in schedule.instructions)
    ran = [r for r in simulate(replace(schedule, instructions=rows)).records if rows[r.index].op in ("copy", "run")]
    return Trace(tuple(ran), "measured")


def of_layers(schedule: Schedule) -> Schedule:
    """``training`` as it would be lowered: every instruction with its block, the last layer's backward recomputing."""
    blocks = iter([0, 0, 1, 1, 1, 1, 1, 0, 0, 0])  # of each copy and run
    kinds = {"h2d": "prefetch", "d2h": "offload", "compute": "compute"}
    rows: list[Any] = []
    for i in schedule.instructions:
        block = f"layers.{next(blocks)}" if i.op in ("copy", "run") else ""
        rows.append(replace(i, block=block, work=kinds[i.queue] if block else ""))
    late = next(k for k, i in enumerate(rows) if i.kernel == "layer_backward")
    rows[late] = replace(rows[late], work="recompute")
    return replace(schedule, instructions=tuple(rows))
