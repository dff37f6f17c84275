"""Whole training steps (forward, backward, AdamW) of one model by one peer: ``measure`` runs in a process of its own.

Peers hold weights, gradients and AdamW's state in the shape's dtype, except those with ``masters`` in their name, which hold
fp32 masters and fp32 state, and those of ``outside.py``, which have precisions of their own: compare these with each other.
All train on the same bytes of text, and clip nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import mtcompile
from benchmarks import outside
from benchmarks.decoder import Checkpointed, build, text
from mtcompile import torch_private
from mtcompile.machine.device import allocator_peak
from mtcompile.models.decoders import model_flops, parameter_counts
from mtcompile.models.shapes import SHAPES, Shape

WARMUPS, STEPS = 3, 5
_SLOW_S, _FEW = 30.0, (1, 3)  # where a step takes longer, so many warm-ups and steps instead
_OVERHEAD = 0.92  # of a capped device for our plan, which counts what tensors ask for; the rest is the allocator's and cuBLAS's
_CHUNKS = 32  # of the loss, where logits of the whole batch would not fit


@dataclass(frozen=True, slots=True)
class Training:
    """``memory``: device bytes, None for all there are; ``share``: of what the plain step needs instead. ``peers``: in the
    order they are worth running in."""

    name: str
    shape: str
    batch: int
    seq: int
    peers: tuple[str, ...]
    memory: int | None = None
    share: float | None = None


_OF_MASTERS = (
    *("mtcompile inductor, masters", "mtcompile eager, masters"),
    *("megatrain policy, masters", "deepspeed zero3 offload", "megatrain"),
)
_LARGE = ("mtcompile inductor", "megatrain policy", "fsdp2 offload", "mtcompile eager", *_OF_MASTERS)
_FITS = ("mtcompile inductor", "torch.compile", "mtcompile eager", "plain", "torch.compile budget", "checkpoint")
_ATTENTION = ("flash", "cudnn", "mem_efficient", "math")  # torch's backends, in the order of what is worth knowing
GiB = 2**30


def _by(backend: str, kernels: str = "inductor") -> str:
    return f"mtcompile {kernels}, {backend.replace('_', ' ')} attention"


GPU = (
    Training("4b-fits", "qwen3-4b", 8, 1024, _FITS),
    Training("7b-158x1024", "qwen2.5-7b", 158, 1024, (*_OF_MASTERS, *_LARGE[: -len(_OF_MASTERS)])),
    Training("7b-8x2048", "qwen2.5-7b", 8, 2048, _LARGE),
    Training("7b-16x4096", "qwen2.5-7b", 16, 4096, _LARGE),
    Training("7b-4x4096", "qwen2.5-7b", 4, 4096, _LARGE),
    Training("14b-16x4096", "qwen3-14b", 16, 4096, _LARGE),
    Training("8b-32k", "llama-8b", 1, 32 * 1024, _LARGE),
    Training("8b-128k", "llama-8b", 1, 128 * 1024, _LARGE),
    Training("4b-in-24GiB", "qwen3-4b", 8, 2048, _LARGE, memory=24 * GiB),
    Training("7b-in-40GiB", "qwen2.5-7b", 16, 4096, _LARGE, memory=40 * GiB),
    Training("7b-in-24GiB", "qwen2.5-7b", 4, 4096, _LARGE, memory=24 * GiB),
    Training("7b-4x4096-attention", "qwen2.5-7b", 4, 4096, tuple(_by(backend) for backend in _ATTENTION)),
)
_CPU_MASTERS = "mtcompile eager, masters"
CPU = (
    Training("step-11m", "gpt-11m", 4, 128, ("plain", "checkpoint", "mtcompile eager", "megatrain policy", _CPU_MASTERS)),
    Training("step-11m-half", "gpt-11m", 4, 128, ("mtcompile eager", "megatrain policy"), share=0.5),
    Training("step-11m-quarter", "gpt-11m", 4, 128, ("mtcompile eager", "megatrain policy"), share=0.25),
    Training("step-11m-attention", "gpt-11m", 4, 128, (_by("flash", "eager"), _by("math", "eager"))),  # those of a CPU
)
CASES = {case.name: case for case in (*GPU, *CPU)}

Loss = Callable[[Tensor, Tensor], Tensor]
Prepared = tuple[nn.Module, Loss, torch.optim.Optimizer]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _plain(model: Checkpointed, device: torch.device, memory: int | None) -> Prepared:
    model = model.to(device)
    return model, model, _adamw(model)


def _checkpoint(model: Checkpointed, device: torch.device, memory: int | None) -> Prepared:
    model.recompute, model.loss_chunks = True, _CHUNKS
    return _plain(model, device, memory)


def _compiled(model: Checkpointed, device: torch.device, memory: int | None) -> Prepared:
    model = model.to(device)
    return model, torch.compile(model, fullgraph=True), _adamw(model)


def _compiled_within(model: Checkpointed, device: torch.device, memory: int | None) -> Prepared:
    from benchmarks.peers import compiled_within

    model = model.to(device)
    return model, compiled_within(0.5)(model, None), _adamw(model)


def _fsdp2(model: Checkpointed, device: torch.device, memory: int | None) -> Prepared:
    """FSDP2 in a world of one, parameters, gradients and optimizer on the host; blocks checkpointed."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    policy = {} if device.type == "cpu" else {"offload_policy": CPUOffloadPolicy()}
    model.recompute, model.loss_chunks = True, _CHUNKS
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **policy)  # type: ignore[call-overload]
    fully_shard(model, mesh=mesh, **policy)  # type: ignore[call-overload]
    return model, model, _adamw(model)


def _mtcompiled(
    kernels: str, policy: str = "fastest", masters: bool = False
) -> Callable[[Checkpointed, torch.device, int | None], Prepared]:
    def prepare(model: Checkpointed, device: torch.device, memory: int | None) -> Prepared:
        optimizer = _adamw(model)
        host = None
        if device.type == "cuda":
            memory = int(memory * _OVERHEAD) if memory is not None else None
            host = int(psutil.virtual_memory().available * 0.9) + sum(p.nbytes for p in model.parameters())
        options: dict[str, Any] = {"kernels": kernels, "loss_chunks": "auto", "policy": policy}
        if masters:
            options |= {"precision": "bf16-master32", "update": "backward"}
        made: Any = mtcompile.compile(model, memory=memory, host=host, optimizer=optimizer, device=device, **options)
        return made, made, optimizer

    return prepare


def _with_attention(backend: str, prepare: Callable[[Checkpointed, torch.device, int | None], Prepared]) -> Any:
    """Lets one backend compute attention, for the rest of the process."""

    def prepare_with_it(*args: Any) -> Prepared:
        for each in _ATTENTION:
            getattr(torch.backends.cuda, f"enable_{each}_sdp")(each == backend)
        return prepare(*args)

    return prepare_with_it


PEERS: dict[str, Callable[[Checkpointed, torch.device, int | None], Prepared]] = {
    "plain": _plain,
    "checkpoint": _checkpoint,
    "torch.compile": _compiled,
    "torch.compile budget": _compiled_within,
    "fsdp2 offload": _fsdp2,
    # Stream everything, recompute everything, AdamW on the host after the backward: inside our own runtime.
    "megatrain policy": _mtcompiled("eager", "megatrain"),
    "mtcompile eager": _mtcompiled("eager"),
    "mtcompile inductor": _mtcompiled("inductor"),
    # fp32 masters, updates in the backward: MegaTrain's and ZeRO's precision.
    "mtcompile eager, masters": _mtcompiled("eager", masters=True),
    "mtcompile inductor, masters": _mtcompiled("inductor", masters=True),
    "megatrain policy, masters": _mtcompiled("eager", "megatrain", masters=True),
    "deepspeed zero3 offload": outside.deepspeed_zero3,
    "megatrain": outside.megatrain,
    **{_by(b, kernels): _with_attention(b, _mtcompiled(kernels)) for kernels in ("inductor", "eager") for b in _ATTENTION},
}


def measure(name: str, peer: str, memory: int | None) -> dict[str, Any]:
    """One row: what ``rows`` of a result file hold. ``memory``: device bytes, for a case whose budget is a share."""
    outside.check_installed(peer)
    case = CASES[name]
    shape = SHAPES[case.shape]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    memory = case.memory or memory
    if memory is not None and device.type == "cuda":  # as on a smaller card: nobody gets more, libraries included
        torch.cuda.set_per_process_memory_fraction(memory / torch.cuda.get_device_properties(device).total_memory)
    model = build(shape, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    process, parameters = psutil.Process(), parameter_counts(shape)[0]
    without = process.memory_info().rss - sum(p.nbytes for p in model.parameters())
    batch = tuple(t.to(device) for t in text(case.batch, case.seq))
    row: dict[str, Any] = {"case": name, "peer": peer, "parameters": parameters, "budget_bytes": memory}
    row |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
    model, call, optimizer = PEERS[peer](model, device, memory)
    row["attention"] = _attention(shape, case.seq, device)

    def step() -> tuple[float, float, float]:
        """Seconds of forward and backward, of the update, and the loss."""
        _wait(device)
        started = time.perf_counter()
        loss = call(*batch)
        loss.backward()
        _wait(device)
        half = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        return half - started, time.perf_counter() - half, loss.item()

    started = time.perf_counter()
    step()
    first = time.perf_counter() - started
    started = time.perf_counter()
    step()  # parameters that went to the device with the first are captured anew
    second = time.perf_counter() - started
    warmups, steps = _FEW if second > _SLOW_S else (WARMUPS, STEPS)
    for _ in range(warmups - 2):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runs = [step() for _ in range(steps)]
    row["steps_s"] = [run[0] + run[1] for run in runs]
    row["step_s"] = statistics.median(row["steps_s"])
    row["update_ms"] = statistics.median(run[1] for run in runs) * 1e3
    row["loss"] = runs[-1][2]
    row["tokens_per_s"] = case.batch * case.seq / row["step_s"]
    row["model_tflops"] = model_flops(shape, case.batch, case.seq) / row["step_s"] / 1e12
    row["start_s"] = first + second - 2 * row["step_s"]
    row["host_bytes_per_parameter"] = max(0, process.memory_info().rss - without) / parameters
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    if isinstance(model, mtcompile.CompiledModule):
        row |= _own(model, call, optimizer, batch, statistics.median(run[0] for run in runs))
    if device.type != "cuda":  # emulated: the allocator's own events, and what is held at all times
        row["peak_bytes"] = row.get("own_peak_bytes") or _peak(model, call, optimizer, batch)
    return row


def _attention(shape: Shape, seq: int, device: torch.device) -> str:
    """The backend that torch chooses for attention here."""
    options: Any = {"dtype": shape.torch_dtype, "device": device}
    q, k = (torch.empty(1, heads, seq, shape.head_dim, **options) for heads in (shape.heads, shape.kv_heads))
    return torch_private.attention_backend(q, k, k)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(model: nn.Module, call: Loss, optimizer: Any, batch: Any) -> int:
    """Of forward and backward on the emulated device: training state, and what the allocator gave beside it."""
    state = sum(p.nbytes * 4 for p in model.parameters())  # weights, gradients, AdamW's two
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with allocator_peak(torch.device("cpu")) as peak:
        call(*batch).backward()
    optimizer.zero_grad()
    return state + (peak.nbytes or 0)


def _own(model: Any, call: Loss, optimizer: Any, batch: Any, step_s: float) -> dict[str, Any]:
    """What only our runs can say, from one more step that the device's clock watches."""
    from mtcompile.passes.analysis.cost import kernel_cost
    from mtcompile.runtime.trace import busy_us, exposed_us, span_us

    with _environment("MT_TRACE", "1"):
        call(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    trace, compiled = model.last_trace, model._mt_model.session.last
    bodies = dict(compiled.step.named_children())
    flops = sum(kernel_cost(bodies[i.kernel]).flops for i in compiled.schedule.instructions if i.kernel in bodies)
    busy, span = busy_us(trace), span_us(trace)
    report, plan = model.memory_report(), compiled.plan
    predicted_s = (plan.step_time_us if plan.updates is None else plan.total_us) / 1e6  # of what the backward holds
    return {
        "hardware_tflops": flops / step_s / 1e12,
        "busy": {queue: us / span for queue, us in busy.items()},
        "exposed_transfer_ms": sum(exposed_us(trace, q) for q in busy if q in ("h2d", "d2h")) / 1e3,
        "predicted_s": predicted_s,
        "predicted_over_measured": predicted_s / step_s,
        "own_peak_bytes": report["peak_device_bytes"],
        "planned_peak_bytes": report["planned_peak_device_bytes"],
        "limiting_resource": compiled.plan.limiting_resource,
        "instructions": len(compiled.schedule),
    }


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
