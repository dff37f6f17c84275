"""What a training step will need and take, before anything is allocated: ``mtcompile.plan`` and ``mtcompile plan``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from mtcompile.internals import without_memory
from mtcompile.machine import named
from mtcompile.passes.build import build
from mtcompile.passes.cost import Machine, kernel_cost
from mtcompile.passes.loss_head import chunk_loss
from mtcompile.passes.planner import BIT_EQUAL, Budgets, Candidates, DoesNotFit, Planned
from mtcompile.passes.policies import POLICIES
from mtcompile.passes.step_graph import copy_step, placeholders, storage_nbytes
from mtcompile.runtime.schedule import gib
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us
from mtcompile.runtime.verify import verify
from mtcompile.shapes import SHAPES, fake
from mtcompile.sizes import parse_bytes
from mtcompile.tracing import Traced, trace

STATE_COPIES = {"adamw": 2.0, "adam": 2.0, "sgd-momentum": 1.0, "sgd": 0.0}
_CHUNKS, _LARGE_HEAD = 64, 0.02  # a loss head whose logits take more than that part of the device is cut into so many
_LEFT_FREE = 0.08  # of a machine's device memory when no budget is given
_ONE_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy's figures: bytes per tier, microseconds, or why it does not fit (``short_bytes`` missing in ``tier``)."""

    policy: str
    feasible: bool
    peak_bytes: Mapping[str, int]
    step_time_us: float
    short_bytes: int = 0
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step that has been planned and not run.

    ``ledger``: tier -> part -> bytes at the step's peak. ``step_time_us``: forward, backward and update, of which
    ``update_us`` is the update's, after the backward; ``busy``: share of forward and backward that each queue works.
    ``next_gib_us``: what one more GiB of a tier saves. ``ways_out``: when nothing fits. ``planned`` is None then.
    """

    model: str
    machine: str
    feasible: bool
    parameters: int
    tokens: int
    state_bytes: int
    budget_bytes: Mapping[str, int | None]
    peak_bytes: Mapping[str, int]
    minimum_device_bytes: int
    short_bytes: int = 0
    step_time_us: float = 0.0
    update_us: float = 0.0
    tokens_per_s: float = 0.0
    tflops: float = 0.0
    limiting_resource: str = ""
    precision: str = "model"
    numerics: str = BIT_EQUAL
    busy: Mapping[str, float] | None = None
    ledger: Mapping[str, Mapping[str, int]] | None = None
    load_host_bytes: int = 0
    next_gib_us: Mapping[str, float] | None = None
    ways_out: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    planned: Planned | None = None

    def to_json(self, indent: int | None = None) -> str:
        """One object with every field but ``planned``."""
        data = asdict(replace(self, planned=None))
        del data["planned"]
        return json.dumps(data, indent=indent)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def plan(
    model: str | nn.Module | Callable[[], Any],
    data: Mapping[str, Any] | None = None,
    *,
    batch: int = 1,
    seq: int = 2048,
    memory: str | int | None = None,
    host: str | int | None = None,
    machine: str | Machine = "h200-sxm",
    optimizer: str = "adamw",
    policies: tuple[str, ...] = (),
) -> Forecast:
    """Plan one training step without running or allocating it.

    model      a built-in shape (``"llama-8b"``), a module, or what makes one, or (module, data): called where tensors
               take no memory
    data       the module's keyword arguments, tensors of the sizes meant; made from ``batch`` and ``seq`` for a shape
    memory     device bytes; default the machine's, less a reserve. ``host``: host bytes, default no limit
    machine    a preset, ``"this"`` (as measured here), a JSON file, or a ``Machine``
    optimizer  ``adamw``, ``adam``, ``sgd-momentum`` or ``sgd``: its state, in the parameters' dtype
    policies   fixed strategies to compare with

    Raises ValueError for what it does not know and CaptureError for a model that cannot be captured.
    """
    if optimizer not in STATE_COPIES:
        raise ValueError(f"expected optimizer to be one of {', '.join(STATE_COPIES)}, found {optimizer!r}")
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        raise ValueError(f"expected policies among {', '.join(POLICIES)}, found {', '.join(unknown)}")
    there = named(machine)
    device = parse_bytes(memory)
    if device is None and there.device_nbytes:
        device = int(there.device_nbytes * (1 - _LEFT_FREE))
    budgets = Budgets(device, parse_bytes(host), STATE_COPIES[optimizer])
    name = model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__)
    traced = _traced(model, data, batch, seq)
    chunks = _chunks(traced, device)
    joint = copy_step(traced.joint)
    whole = chunks == 1 or not chunk_loss(joint, chunks)
    step = traced.step if whole else build(joint)
    numerics = BIT_EQUAL if whole else f"{BIT_EQUAL}; the loss head's sums over tokens in {chunks} chunks"
    candidates = Candidates(step, there, budgets, numerics=numerics)
    tokens = _tokens(data, batch, seq)
    rows = tuple(_row(candidates, policy, budgets) for policy in policies)
    about = Forecast(
        model=name,
        machine=there.name,
        feasible=False,
        parameters=sum(p.numel() for p in _parameters(step)),
        tokens=tokens,
        state_bytes=int(sum(candidates.sizes.values()) * (2 + budgets.state_copies)),
        budget_bytes=budgets.limits,
        peak_bytes={},
        minimum_device_bytes=0,
        numerics=numerics,
        rows=rows,
    )
    try:
        planned = candidates.best(budgets.device, budgets.host)
    except DoesNotFit as error:
        return _refused(about, candidates, error)
    verify(planned.schedule)
    return _feasible(about, candidates, planned)


def _traced(model: Any, data: Mapping[str, Any] | None, batch: int, seq: int) -> Traced:
    with without_memory():
        if isinstance(model, str):
            if model not in SHAPES:
                raise ValueError(f"expected a model among {', '.join(SHAPES)}, or a module, found {model!r}")
            tokens = torch.zeros((batch, seq), dtype=torch.int64)
            module: nn.Module = fake(SHAPES[model])
            data = {"tokens": tokens, "targets": tokens}
        else:
            made = model if isinstance(model, nn.Module) else model()
            module, data = made if isinstance(made, tuple) else (made, data)
        if data is None:
            raise ValueError("expected data=, the module's keyword arguments, for a model that is not a built-in shape")
        torch.compiler.reset()
        return trace(module.train(), dict(data))


def _chunks(traced: Traced, device: int | None) -> int:
    """Of the loss head: one, unless its logits would take a large part of the device."""
    wide = [n for n in traced.joint.graph.nodes if n.target is torch.ops.aten._log_softmax.default]
    nbytes = max((storage_nbytes(node.meta["val"]) for node in wide), default=0)
    return 1 if device is None or nbytes < device * _LARGE_HEAD else _CHUNKS


def _parameters(step: fx.GraphModule) -> list[torch.Tensor]:
    specs = zip(step.meta["inputs"], placeholders(step.graph), strict=True)
    return [node.meta["val"] for spec, node in specs if spec.role == "param"]


def _tokens(data: Mapping[str, Any] | None, batch: int, seq: int) -> int:
    """Integers of the largest integer input, which is what a language model calls tokens; else samples."""
    tensors = [v for v in (data or {}).values() if isinstance(v, torch.Tensor)]
    if data is None:
        return batch * seq
    whole = [t.numel() for t in tensors if not t.is_floating_point()]
    return max(whole, default=tensors[0].shape[0] if tensors and tensors[0].dim() else 1)


# ------------------------------------------------------------------------------------------------------------ figures


def _update_us(candidates: Candidates, planned: Planned) -> float:
    """Of the optimizer, after the backward, where each block's parameters are at home."""
    there = sum(n for block, n in candidates.sizes.items() if planned.plan.params(block) == "device")
    here = sum(candidates.sizes.values()) - there
    return candidates.machine.update_us(here, there, candidates.budgets.state_copies)


def _row(candidates: Candidates, policy: str, budgets: Budgets) -> Row:
    planned = candidates.by_policy(policy, replace(budgets, device=None, host=None))
    peaks = dict(planned.schedule.peak_nbytes)
    time_us = planned.plan.step_time_us + _update_us(candidates, planned)
    for tier, limit in budgets.limits.items():
        if limit is not None and peaks[tier] > limit:
            return Row(policy, False, peaks, time_us, peaks[tier] - limit, tier)
    return Row(policy, True, peaks, time_us)


def _feasible(about: Forecast, candidates: Candidates, planned: Planned) -> Forecast:
    plan, schedule, limits = planned.plan, planned.schedule, candidates.budgets
    update_us = _update_us(candidates, planned)
    step_us = plan.step_time_us + update_us
    bodies: dict[str, Any] = dict(planned.step.named_children())
    flops = sum(kernel_cost(bodies[i.kernel]).flops for i in schedule.instructions if i.op == "run")
    trace = simulate(schedule)
    busy: dict[str, float] = {queue: us / plan.step_time_us for queue, us in busy_us(trace).items()}
    more = {}
    for tier, limit in limits.limits.items():
        if limit is not None:
            device, host = (limit + _ONE_GIB if tier == t else n for t, n in limits.limits.items())
            again = candidates.best(device, host)
            more[tier] = max(0.0, step_us - again.plan.step_time_us - _update_us(candidates, again))
    host_update = candidates.machine.update_us(
        sum(n for b, n in candidates.sizes.items() if plan.params(b) != "device"), 0, limits.state_copies
    )
    return replace(
        about,
        feasible=True,
        peak_bytes=dict(schedule.peak_nbytes),
        minimum_device_bytes=plan.minimum_device_bytes,
        step_time_us=step_us,
        update_us=update_us,
        tokens_per_s=about.tokens / step_us * 1e6,
        tflops=flops / step_us / 1e6,
        limiting_resource="host update" if host_update > plan.step_time_us else plan.limiting_resource,
        busy=busy,
        ledger=_ledger(candidates, planned),
        load_host_bytes=sum(candidates.sizes.values()) + max(candidates.sizes.values(), default=0),
        next_gib_us=more,
        planned=planned,
    )


def _ledger(candidates: Candidates, planned: Planned) -> dict[str, dict[str, int]]:
    """tier -> part -> bytes at the moment the tier is fullest; the parts of a tier add up to its peak."""
    schedule, copies = planned.schedule, candidates.budgets.state_copies
    weights = {"device": 0, "host": 0}
    for block, nbytes in candidates.sizes.items():
        weights["device" if planned.plan.params(block) == "device" else "host"] += nbytes
    live = most = workspace = 0
    for instruction in schedule.instructions:
        if instruction.op in ("alloc", "free"):
            buffer = schedule.buffers[instruction.writes[0]]
            if buffer.kind == "pooled":
                live += buffer.nbytes if instruction.op == "alloc" else -buffer.nbytes
        if live + instruction.workspace > most + workspace:
            most, workspace = live, instruction.workspace
    found: dict[str, dict[str, int]] = {}
    for tier, nbytes in weights.items():
        parts = {"weights": nbytes, "gradients": nbytes, "optimizer": int(nbytes * copies)}
        parts["staging" if tier == "device" else "activations"] = schedule.arena_nbytes.get(tier, 0)
        if tier == "device":
            parts |= {"activations": most, "workspace": workspace}
        parts["other"] = schedule.peak_nbytes[tier] - sum(parts.values())
        found[tier] = parts
    return found


def _refused(about: Forecast, candidates: Candidates, error: DoesNotFit) -> Forecast:
    """What is short, and the three cheapest ways out that were tried."""
    limits = candidates.budgets.limits
    limit = limits[error.tier] or 0
    ways = [f"{error.tier} memory of {error.minimum} bytes ({gib(error.minimum)}) or more"]
    other = "host" if error.tier == "device" else "device"
    try:
        need = dict.fromkeys(("device", "host"), None) | {other: limits[other]}
        least = candidates.best(error.minimum, need["host"]) if error.tier == "device" else candidates.best(None, error.minimum)
        ways.append(f"with that, a step of {(least.plan.step_time_us + _update_us(candidates, least)) / 1e6:.3f} s")
    except DoesNotFit:
        pass
    parts = ", ".join(f"{what} {gib(nbytes)}" for what, nbytes in error.causes)
    ways.append(f"less in one of its largest parts: {parts}; a smaller batch or sequence shrinks all but the state")
    minimum = error.minimum if error.tier == "device" else 0
    return replace(about, short_bytes=error.minimum - limit, minimum_device_bytes=minimum, ways_out=tuple(ways))


# ------------------------------------------------------------------------------------------------------------ for people


def _lines(f: Forecast) -> list[str]:
    budget = ", ".join(f"{tier} {gib(n) if n is not None else 'no limit'}" for tier, n in f.budget_bytes.items())
    lines = [f"{f.model}: {f.parameters / 1e9:.3g} billion parameters, {f.tokens} tokens a step, on {f.machine} ({budget})"]
    if not f.feasible:
        lines.append(f"does not fit: {gib(f.short_bytes)} ({f.short_bytes} bytes) short. Ways out:")
        lines += [f"  {way}" for way in f.ways_out]
    else:
        lines.append(
            f"fits: {f.step_time_us / 1e6:.3f} s a step ({f.update_us / 1e6:.3f} s of it the update), {f.tokens_per_s:,.0f} "
            f"tokens/s, {f.tflops:.0f} TFLOPS with recomputation; limited by {f.limiting_resource}"
        )
        for tier, parts in (f.ledger or {}).items():
            told = ", ".join(f"{part} {gib(nbytes)}" for part, nbytes in parts.items() if nbytes)
            lines.append(f"  {tier}: {gib(f.peak_bytes[tier])} = {told}")
        lines.append(f"  host at load: {gib(f.load_host_bytes)}; at save: as in the step, since files are written from views")
        lines.append("  busy: " + ", ".join(f"{queue} {share:.0%}" for queue, share in (f.busy or {}).items()))
        for tier, us in (f.next_gib_us or {}).items():
            lines.append(f"  one GiB more of {tier} memory: {us / 1e3:.1f} ms a step less")
        lines.append(f"  smallest device memory that works: {gib(f.minimum_device_bytes)}")
        lines.append(f"  numerics: {f.numerics}")
    for row in f.rows:
        short = "" if row.feasible else f"; does not fit: {gib(row.short_bytes)} short of {row.tier} memory"
        peaks = ", ".join(f"{tier} {gib(nbytes)}" for tier, nbytes in row.peak_bytes.items())
        lines.append(f"  policy {row.policy}: {row.step_time_us / 1e6:.3f} s a step, {peaks}{short}")
    return lines
