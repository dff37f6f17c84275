"""Bandwidths in GB/s (1e9 bytes): copies to and from the device, memories, and AdamW on the host.

Copies go through the code that a training step uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from mtcompile.machine.timing import MIB, PARAMETERS, WEIGHTS_GB, Effort, Measurement, median_s, waiter
from mtcompile.runtime.devices.cuda import CudaDevice
from mtcompile.runtime.devices.cuda_driver import catch_up
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import Queue

_ADAMW_NBYTES = 28  # per fp32 parameter: weight, gradient and two moments read, weight and moments written (Machine.update_us)
# The part of a step in which copies run both ways: so much in steps of a 7B model on an H100. In those of a 4B model it was
# 0.2, and with that, updates were as fast as ``in_a_step`` says.
_COPYING = 0.4


def usable_cpus() -> int:
    """Returns the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def copies(device: Device, effort: Effort) -> tuple[dict[Queue, float], list[Measurement]]:
    """Measures each direction alone, and each while the other works too. Returns each one's GB/s at the largest size while both
    work, as in most of a step that fetches and offloads; and the rows. Each direction has its own thread, as in a step.
    Small copies walk through all of the memory, so that they do not come from a cache."""
    largest = effort.copies[-1]
    ends = _ends(device, largest)
    movers = {queue: _mover(device, queue) for queue in ends}

    def copy_all(queue: Queue, size: int) -> None:
        target, source = ends[queue]
        for start in range(0, largest, size):
            movers[queue](target[start : start + size], source[start : start + size])

    alone: dict[Queue, dict[str, float]] = {"h2d": {}, "d2h": {}}
    both: dict[str, float] = {}
    with ThreadPoolExecutor(2) as threads:

        def run(size: int, queues: Sequence[Queue]) -> float:
            def work() -> None:
                for future in [threads.submit(copy_all, queue, size) for queue in queues]:
                    future.result()

            return largest / median_s(work, effort.seconds, device.synchronize) / 1e9

        for size in effort.copies:
            for queue in ends:
                alone[queue][_size(size)] = run(size, (queue,))
            both[_size(size)] = run(size, tuple(ends))
    fastest = {queue: rates[_size(largest)] for queue, rates in alone.items()}
    share = min(1.0, both[_size(largest)] / min(fastest.values()))
    pinned = "; host memory is not pinned here, so copies go through a small ring" if device.staging else ""
    to_device = f"one direction{pinned}; weights of a 7B model (14 GB) cross in {WEIGHTS_GB / fastest['h2d']:.1f} s"
    to_host = f"one direction; a 7B model's gradients (14 GB) come home in {WEIGHTS_GB / fastest['d2h']:.1f} s"
    how = "weights in and gradients out overlap" if share > 0.7 else "the two directions share one path"
    together = f"each keeps {share:.0%} of its speed while the other works, and plans count on no more: {how}"
    return {queue: rate * share for queue, rate in fastest.items()}, [
        Measurement("copy to the device", "GB/s", alone["h2d"], to_device),
        Measurement("copy to the host", "GB/s", alone["d2h"], to_host),
        Measurement("copies both ways at once, each", "GB/s", both, together),
    ]


@contextlib.contextmanager
def copying(device: Device, effort: Effort) -> Iterator[None]:
    """Copies both ways, over and over, for as long as the context lasts. They compete for the host's memory as those of a step
    do, and their threads wait without work, as in a step. Not for the emulated device, whose copies are the processor's own
    work."""
    assert isinstance(device, CudaDevice)
    ends, stopped = _ends(device, effort.copies[-1]), threading.Event()

    def copy_all(queue: Queue) -> None:
        move = _mover(device, queue)
        with device.api.use(device.streams.copying[queue]):
            while not stopped.is_set():
                move(*ends[queue])
                catch_up(device.api)

    with ThreadPoolExecutor(2) as threads:
        try:
            running = [threads.submit(copy_all, queue) for queue in ends]
            yield
        finally:
            stopped.set()
        for each in running:
            each.result()


def _ends(device: Device, nbytes: int) -> dict[Queue, tuple[torch.Tensor, torch.Tensor]]:
    """Returns target and source of each direction."""
    ends: dict[Queue, tuple[torch.Tensor, torch.Tensor]] = {
        "h2d": (device.arena("device", nbytes), device.arena("host", nbytes)),
        "d2h": (device.arena("host", nbytes), device.arena("device", nbytes)),
    }
    for pair in ends.values():
        for tensor in pair:
            tensor.fill_(1)  # memory has no pages until it is written
    return ends


def _mover(device: Device, queue: Queue) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Returns a function of (target, source) that copies as the runtime's queue does."""
    if not isinstance(device, CudaDevice):
        return lambda target, source: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
    api, stream = device.api, device.streams.copying[queue]
    ring = device.staging[queue] if device.staging else None
    copy = api.copy if ring is None else ring.to_device if queue == "h2d" else ring.to_host

    def move(target: torch.Tensor, source: torch.Tensor) -> None:
        with api.use(stream):
            copy(target, source)

    return move


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB"


@contextlib.contextmanager
def _thread_count(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _stream_gbps(where: torch.device, effort: Effort, repeat: int = 1) -> float:
    """Measures c = a + b in fp32, which moves three arrays, in GB/s."""
    a, b, c = (torch.ones(effort.stream // 4, device=where) for _ in range(3))

    def work() -> None:
        for _ in range(repeat):
            torch.add(a, b, out=c)

    return 3 * effort.stream * repeat / median_s(work, effort.seconds, waiter(where)) / 1e9


def host_memory(effort: Effort) -> tuple[float, Measurement]:
    """Measures by number of threads. Returns GB/s with the threads that torch uses, and the row."""
    cpus, used = usable_cpus(), torch.get_num_threads()
    counts = sorted({1, *(2**i for i in range(1, cpus.bit_length()) if 2**i < cpus), cpus, used})
    values: dict[int, float] = {}
    for count in counts:
        with _thread_count(count):
            values[count] = _stream_gbps(torch.device("cpu"), effort)
    best = max(values.values())
    enough = min(count for count, rate in values.items() if rate > 0.9 * best)
    meaning = f"reached with {enough} of {cpus} threads; an update on the host is bound by this, not by their number"
    row = Measurement("host memory, by threads", "GB/s", {str(count): rate for count, rate in values.items()}, meaning)
    return values[used], row


def device_memory(where: torch.device, effort: Effort) -> tuple[float, Measurement]:
    """Measures an accelerator's own memory. Returns GB/s, and the row."""
    rate = _stream_gbps(where, effort, repeat=10)
    meaning = f"AdamW on the device steps 7 billion fp32 parameters in {_ADAMW_NBYTES * PARAMETERS / rate / 1e9:.2f} s"
    return rate, Measurement("device memory", "GB/s", {"a + b": rate}, meaning)


def adamw_gbps(effort: Effort, fused: bool = True) -> float:
    """Measures torch's AdamW on fp32 on the host, by the bytes it has to move."""
    weights = [torch.full((effort.parameters // 4,), 0.5, requires_grad=True) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.5)
    step = torch.optim.AdamW(weights, fused=fused).step
    return _ADAMW_NBYTES * effort.parameters / median_s(step, effort.seconds) / 1e9


def in_a_step(alone: float, copying: float) -> float:
    """Returns the GB/s of updates in a step, whose copies run for a part of the time. ``alone``: without copies; ``copying``:
    while copies run both ways without a pause."""
    return alone + _COPYING * (copying - alone)


def host_adamw(device: Device, effort: Effort) -> tuple[float, Measurement]:
    """Measures torch's AdamW on fp32 by the bytes it has to move. Returns the fused one's GB/s in a step, which is slower than
    alone on a device with copies of its own; and the row."""
    values = {"fused=True": adamw_gbps(effort), "fused=False": adamw_gbps(effort, fused=False)}
    fused, default = values.values()
    counted, why = fused, ""
    if isinstance(device, CudaDevice):
        with copying(device, effort):
            values["fused=True, while copies run"] = adamw_gbps(effort)
        counted = in_a_step(fused, values["fused=True, while copies run"])
        why = f", if copies both ways run {_COPYING:.0%} of the time, as plans assume"
    seconds = _ADAMW_NBYTES * PARAMETERS / counted / 1e9
    meaning = f"7 billion fp32 parameters step in {seconds:.1f} s{why}; "
    meaning += f"fused=True is {fused / default:.1f} times as fast as without"
    return counted, Measurement("host AdamW", "GB/s", values, meaning)
