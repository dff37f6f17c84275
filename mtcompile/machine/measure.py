"""How fast this machine is: its copies, memories, disk, optimizer and products, measured in a few seconds.

Each figure is the median of short repetitions of what a training step does there, through the code that does it. Rates are
GB/s (1e9 bytes), TFLOP/s and microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from mtcompile.machine.device import total_nbytes
from mtcompile.passes.analysis.cost import Machine
from mtcompile.runtime.devices.cuda import CudaDevice
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import Queue

MIB = 2**20
ADAMW_NBYTES = 28  # per fp32 parameter: weight, gradient and two moments read, weight and moments written (Machine.update_us)
_WEIGHTS_GB, _PARAMETERS = 14.0, 7e9  # of the model that figures are explained with: 7 billion bf16 weights
_BLOCK = 8 * MIB  # of one disk transfer
_ISSUED = 1000  # tiny operations per measurement


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: bytes of the copies, of each array of the memory streams and of the file; parameters that AdamW
    steps; sides of the products on the host and on an accelerator; seconds that one figure's repetitions may take."""

    copies: tuple[int, ...]
    stream: int
    disk: int
    parameters: int
    host_side: int
    accelerator_side: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """Of host memory at most held at once: the copies' two pairs of buffers."""
        return max(4 * self.copies[-1], 3 * self.stream, 16 * self.parameters)


QUICK = Effort((MIB, 16 * MIB, 64 * MIB), 64 * MIB, 32 * MIB, 8 * MIB, 768, 4096, 0.05)
FULL = Effort((MIB, 16 * MIB, 256 * MIB), 256 * MIB, 128 * MIB, 16 * MIB, 1536, 8192, 0.4)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure at several sizes, numbers of threads or kinds; ``meaning``: what it says about training."""

    what: str
    unit: str
    values: Mapping[str, float]
    meaning: str


@dataclass(frozen=True, slots=True)
class Findings:
    machine: Machine
    measurements: tuple[Measurement, ...]


def name_of(where: torch.device) -> str:
    """What the device calls itself; for the emulated one, the processor."""
    if where.type != "cpu":
        return str(torch.get_device_module(where).get_device_properties(where).name)
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def identity(where: torch.device) -> str:
    """What a measured machine depends on: device, processor, processors and threads in use, torch."""
    names = (name_of(where), name_of(torch.device("cpu")), usable_cpus(), torch.get_num_threads(), torch.__version__)
    return " | ".join(map(str, names))


def usable_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(device: Device, effort: Effort, folder: Path) -> Findings:
    """``folder``: where the disk is measured, in a file that is gone afterwards. Raises RuntimeError where memory is short."""
    where = device.where
    link, copies = _copies(device, effort)
    host, streams = _host_memory(effort)
    update, adamw = _adamw(effort)
    flops, products = _matmul(where, effort)
    issue, tiny = _issue(where, effort)
    rows = [*copies, streams, adamw, *_disk(folder, effort), *products, _attention(where, effort, flops), tiny]
    if where.type != "cpu":
        host, row = _device_memory(where, effort)
        rows.insert(len(copies), row)
    threads = torch.get_num_threads()
    name = name_of(where) if where.type != "cpu" else f"{name_of(where)}, {threads} threads (emulated device)"
    name += ", host memory not pinned" if device.staging else ""
    machine = Machine(
        name=name,
        flops=_rounded(flops),
        memory_gbps=_rounded(host),
        h2d_gbps=_rounded(link["h2d"]),
        d2h_gbps=_rounded(link["d2h"]),
        issue_us=_rounded(issue),
        host_gbps=_rounded(update),
        device_nbytes=total_nbytes(device) or 0,
    )
    return Findings(machine, tuple(rows))


def median_s(work: Callable[[], object], at_most_s: float, wait: Callable[[], object] = lambda: None) -> float:
    """Median seconds of a call with what it waits for, after one that is not counted: it touches pages and chooses kernels.
    Of as many calls as fit into the time; of three, if those fit into four times as much."""
    work()
    wait()
    times: list[float] = []
    while not times or (len(times) < 50 and sum(times) < at_most_s * (1 if len(times) > 2 else 4)):
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB"


def _waiter(where: torch.device) -> Callable[[], object]:
    return (lambda: None) if where.type == "cpu" else (lambda: torch.get_device_module(where).synchronize(where))


# ------------------------------------------------------------------------------------------------------------ the link


def _copies(device: Device, effort: Effort) -> tuple[dict[Queue, float], list[Measurement]]:
    """GB/s per direction at the largest size, and the rows: each direction alone, and each while the other works too. A
    direction has a thread of its own, as in a step; small copies walk through all of the memory, so that no cache serves."""
    most = effort.copies[-1]
    ends: dict[Queue, tuple[torch.Tensor, torch.Tensor]] = {  # (target, source) of each direction
        "h2d": (device.arena("device", most), device.arena("host", most)),
        "d2h": (device.arena("host", most), device.arena("device", most)),
    }
    for pair in ends.values():
        for tensor in pair:
            tensor.fill_(1)  # memory that was never written has no pages
    movers = {queue: _mover(device, queue) for queue in ends}

    def all_of(queue: Queue, size: int) -> None:
        target, source = ends[queue]
        for start in range(0, most, size):
            movers[queue](target[start : start + size], source[start : start + size])

    alone: dict[Queue, dict[str, float]] = {"h2d": {}, "d2h": {}}
    both: dict[str, float] = {}
    with ThreadPoolExecutor(2) as threads:

        def run(size: int, queues: Sequence[Queue]) -> float:
            def work() -> None:
                for future in [threads.submit(all_of, queue, size) for queue in queues]:
                    future.result()

            return most / median_s(work, effort.seconds, device.synchronize) / 1e9

        for size in effort.copies:
            for queue in ends:
                alone[queue][_size(size)] = run(size, (queue,))
            both[_size(size)] = run(size, tuple(ends))
    last = {queue: rates[_size(most)] for queue, rates in alone.items()}
    share = both[_size(most)] / min(last.values())
    pinned = "; host memory is not pinned here, so copies go through a small ring" if device.staging else ""
    to = f"one direction{pinned}; weights of a 7B model (14 GB) cross in {_WEIGHTS_GB / last['h2d']:.1f} s"
    home = f"one direction; a 7B model's gradients (14 GB) come home in {_WEIGHTS_GB / last['d2h']:.1f} s"
    how = "weights in and gradients out overlap" if share > 0.7 else "the two share what they go through"
    together = f"each keeps {min(share, 1):.0%} of its speed while the other works: {how}"
    return last, [
        Measurement("copy to the device", "GB/s", alone["h2d"], to),
        Measurement("copy to the host", "GB/s", alone["d2h"], home),
        Measurement("copies both ways at once, each", "GB/s", both, together),
    ]


def _mover(device: Device, queue: Queue) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Copies (target, source) as the runtime's queue does."""
    if not isinstance(device, CudaDevice):
        return _move
    api, stream = device.api, device.streams.copying[queue]
    ring = device.staging[queue] if device.staging else None
    through = api.copy if ring is None else ring.to_device if queue == "h2d" else ring.to_host

    def move(target: torch.Tensor, source: torch.Tensor) -> None:
        with api.use(stream):
            through(target, source)

    return move


def _move(target: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


# ------------------------------------------------------------------------------------------------------------ memories


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _stream_gbps(where: torch.device, effort: Effort, repeat: int = 1) -> float:
    """Of c = a + b in fp32: three arrays' bytes."""
    a, b, c = (torch.ones(effort.stream // 4, device=where) for _ in range(3))

    def work() -> None:
        for _ in range(repeat):
            torch.add(a, b, out=c)

    return 3 * effort.stream * repeat / median_s(work, effort.seconds, _waiter(where)) / 1e9


def _host_memory(effort: Effort) -> tuple[float, Measurement]:
    """With the threads that torch uses, and by number of threads."""
    cpus, used = usable_cpus(), torch.get_num_threads()
    counts = sorted({1, *(2**i for i in range(1, cpus.bit_length()) if 2**i < cpus), cpus, used})
    values: dict[int, float] = {}
    for count in counts:
        with _threads(count):
            values[count] = _stream_gbps(torch.device("cpu"), effort)
    best = max(values.values())
    enough = min(count for count, rate in values.items() if rate > 0.9 * best)
    meaning = f"reached with {enough} of {cpus} threads; an update on the host is bound by this, not by their number"
    row = Measurement("host memory, by threads", "GB/s", {str(count): rate for count, rate in values.items()}, meaning)
    return values[used], row


def _device_memory(where: torch.device, effort: Effort) -> tuple[float, Measurement]:
    rate = _stream_gbps(where, effort, repeat=10)
    meaning = f"AdamW on the device steps 7 billion fp32 parameters in {ADAMW_NBYTES * _PARAMETERS / rate / 1e9:.2f} s"
    return rate, Measurement("device memory", "GB/s", {"a + b": rate}, meaning)


def _adamw(effort: Effort) -> tuple[float, Measurement]:
    """The host's update: torch's fused AdamW on fp32, in bytes it has to move."""

    def rate(fused: bool) -> float:
        weights = [torch.rand(effort.parameters // 4, requires_grad=True) for _ in range(4)]
        for weight in weights:
            weight.grad = torch.rand_like(weight)
        step = torch.optim.AdamW(weights, fused=fused).step
        return ADAMW_NBYTES * effort.parameters / median_s(step, effort.seconds) / 1e9

    values = {"fused=True": rate(True), "fused=False": rate(False)}
    fused, default = values.values()
    seconds = ADAMW_NBYTES * _PARAMETERS / fused / 1e9
    meaning = f"7 billion fp32 parameters step in {seconds:.1f} s; fused=True is {fused / default:.1f} times as fast as without"
    return fused, Measurement("host AdamW", "GB/s", values, meaning)


# ------------------------------------------------------------------------------------------------------------ disk


def _disk(folder: Path, effort: Effort) -> list[Measurement]:
    """Of one file, past the page cache where the file system allows it; no row where the folder cannot be written."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as there:
            return _disk_rows(Path(there, "blocks"), effort)
    except OSError as error:
        return [Measurement("disk", "GB/s", {}, f"not measured: {folder}: {error.strerror or error}")]


def _opened(path: Path, block: mmap.mmap) -> tuple[int, bool]:
    """A descriptor, and whether it goes past the page cache: not every system or file system does."""
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            try:
                os.pwritev(file, [block], 0)
                return file, True
            except OSError:
                os.close(file)
    return os.open(path, os.O_RDWR | os.O_CREAT), False


def _disk_rows(path: Path, effort: Effort) -> list[Measurement]:
    block = mmap.mmap(-1, _BLOCK)  # page-aligned, as O_DIRECT wants it
    block.write(os.urandom(MIB) * (_BLOCK // MIB))  # a disk that compresses gains nothing within a block of 1 MiB
    count = effort.disk // _BLOCK
    file, direct = _opened(path, block)

    def write() -> None:
        for i in range(count):
            os.pwritev(file, [block], i * _BLOCK)
        os.fsync(file)

    def read() -> None:
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        for i in range(count):
            os.preadv(file, [block], i * _BLOCK)

    try:
        times = {"write": median_s(write, effort.seconds), "read": median_s(read, effort.seconds)}
    finally:
        os.close(file)
    rates = {what: effort.disk / seconds / 1e9 for what, seconds in times.items()}
    how = "" if direct else "; the file system refuses O_DIRECT, so its cache may flatter this"
    save, load = (_WEIGHTS_GB / rate for rate in rates.values())
    meaning = f"weights of a 7B model (14 GB) are saved in {save:.0f} s, read in {load:.0f} s{how}"
    return [Measurement("disk", "GB/s", rates, meaning)]


# ------------------------------------------------------------------------------------------------------------ compute


def _matmul(where: torch.device, effort: Effort) -> tuple[float, list[Measurement]]:
    """FLOP/s of a square product, in the type that training there is in, and the row."""
    host = where.type == "cpu"
    side, repeat = (effort.host_side, 1) if host else (effort.accelerator_side, 10)
    rates: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16) if host else (torch.bfloat16,):
        a, b = (torch.randn(side, side, device=where).to(dtype) for _ in range(2))
        out = torch.empty_like(a)

        def work(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
            for _ in range(repeat):
                torch.mm(a, b, out=out)

        rates[str(dtype).removeprefix("torch.")] = 2 * side**3 * repeat / median_s(work, effort.seconds, _waiter(where))
    first = next(iter(rates.values()))
    meaning = f"a 7B model (6 FLOP per weight and token) trains at {first / 6 / _PARAMETERS:.3g} tokens/s at most"
    return first, [Measurement(f"product of {side} x {side}", "TFLOP/s", {k: v / 1e12 for k, v in rates.items()}, meaning)]


def _attention(where: torch.device, effort: Effort, flops: float) -> Measurement:
    """Causal, forward: half of all pairs count, 4 FLOP per pair and element."""
    host = where.type == "cpu"
    heads, tokens, width = (4, effort.host_side, 64) if host else (32, effort.accelerator_side // 2, 128)
    dtype = torch.float32 if host else torch.bfloat16
    q, k, v = (torch.randn(1, heads, tokens, width, device=where).to(dtype) for _ in range(3))
    with torch.no_grad():
        seconds = median_s(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), effort.seconds, _waiter(where))
    rate = 2 * heads * tokens**2 * width / seconds
    meaning = f"{rate / flops:.0%} of the product's rate: what long sequences run at, forward"
    what = f"causal attention, {tokens} tokens"
    return Measurement(what, "TFLOP/s", {str(dtype).removeprefix("torch."): rate / 1e12}, meaning)


def _issue(where: torch.device, effort: Effort) -> tuple[float, Measurement]:
    one = torch.ones(1, device=where)
    out = torch.empty_like(one)

    def work() -> None:
        for _ in range(_ISSUED):
            torch.add(one, one, out=out)

    us = median_s(work, effort.seconds, _waiter(where)) / _ISSUED * 1e6
    meaning = f"a step of 10,000 operations takes {us * 10:.0f} ms or more, however small they are"
    return us, Measurement("a tiny operation", "us", {"add": us}, meaning)
