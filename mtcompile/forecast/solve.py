"""What a training step will need and take, before anything is allocated: ``mtcompile.plan`` and ``mtcompile plan``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from mtcompile import cache
from mtcompile.capture.tracing import collecting_later
from mtcompile.forecast.request import MOST_CHUNKS, Question, Sized, chunked, head_nbytes, sized_step, takes_sizes
from mtcompile.forecast.text import lines, time_of
from mtcompile.machine.presets import named
from mtcompile.models.decoders import SHAPES
from mtcompile.optim.backward_update import update_options
from mtcompile.optim.precision import MOMENTS, PRECISIONS, precision_named
from mtcompile.options import parse_bytes
from mtcompile.passes.analysis.cost import Machine, kernel_cost
from mtcompile.passes.analysis.memory import workspace_nbytes
from mtcompile.passes.analysis.state import Budgets, resident_nbytes
from mtcompile.passes.analysis.symbolic import MONOMIALS, evaluated, peak_expressions
from mtcompile.passes.plan import Updates
from mtcompile.passes.planning.planner import Candidates, DoesNotFit, Planned, Source, Tell, silent
from mtcompile.passes.planning.policies import POLICIES
from mtcompile.passes.step_graph import placeholders
from mtcompile.runtime.schedule import Schedule, gib, placed
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us, exposed_us
from mtcompile.runtime.verify import verify

_LEFT_FREE = 0.08  # of a machine's device memory when no budget is given
_ONE_GIB = 2**30
_GRAIN = 128  # tokens of a sequence that is solved for
_MOST = 2**30  # of what is solved for


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
    ``update_us`` is what the update adds; ``busy``: share of forward and backward that each queue works; ``exposed_us``: how
    long each but compute does while compute is idle. Steps do not overlap, so one is as long as the next.
    ``next_gib_us``: what one more GiB of a tier saves. ``ways_out``: when nothing fits. ``solved``: what was asked for with
    ``solve``, and ``peak_expressions``: the bytes of each tier as sympy prints them, of the plan that needs least.
    ``planned`` is None when nothing fits and it was not forced; ``joint`` and ``source``: the captured graph, and what was
    planned of it.
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
    optimizer: str = "adamw"
    update: str = "step"
    numerics: str = ""
    busy: Mapping[str, float] | None = None
    exposed_us: Mapping[str, float] | None = None
    ledger: Mapping[str, Mapping[str, int]] | None = None
    load_host_bytes: int = 0
    next_gib_us: Mapping[str, float] | None = None
    ways_out: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    solved: Mapping[str, int] | None = None
    peak_expressions: Mapping[str, str] | None = None
    planned: Planned | None = None
    joint: fx.GraphModule | None = None
    source: Source | None = None

    def to_json(self, indent: int | None = None) -> str:
        """One object with every field but ``planned``, ``joint`` and ``source``."""
        graphs = ("planned", "joint", "source")
        data = asdict(replace(self, planned=None, joint=None, source=None))
        return json.dumps({name: value for name, value in data.items() if name not in graphs}, indent=indent)

    def __str__(self) -> str:
        return "\n".join(lines(self))


def plan(
    model: str | nn.Module | Callable[..., Any],
    data: Mapping[str, Any] | None = None,
    *,
    batch: int = 1,
    seq: int = 2048,
    memory: str | int | None = None,
    host: str | int | None = None,
    machine: str | Machine = "h200-sxm",
    precision: str = "model",
    optimizer: str = "adamw",
    update: str = "step",
    max_grad_norm: float | None = None,
    run_ahead: bool = False,
    accumulate: int = 1,
    policies: tuple[str, ...] = (),
    solve: str | None = None,
    force: bool = False,
    tell: Tell = silent,
) -> Forecast:
    """Plan one training step without running or allocating it.

    model      a built-in shape (``"llama-8b"``), a module, or what makes one, or (module, data): called where tensors
               take no memory, with batch and seq if it takes them
    data       the module's keyword arguments, tensors of the sizes meant; made from ``batch`` and ``seq`` for a shape
    memory     device bytes; default the machine's, less a reserve. ``host``: host bytes, default no limit
    machine    a preset, a JSON file, ``"this"`` for the one this runs on (measured), or a ``Machine``
    precision  ``model`` (dtypes as the module's), ``fp32``, ``bf16``, or ``bf16-master32``: bf16 weights, 12 bytes each with
               fp32 masters and AdamW's state
    optimizer  ``adamw``, ``adam``, ``sgd-momentum`` or ``sgd``
    update     ``step``: by optimizer.step(), after the backward; ``backward``: as gradients arrive, which keeps none of them;
               with ``max_grad_norm``, once all are there; with ``run_ahead``, behind the next forward too
    accumulate  micro-batches that the batch is run as, region by region
    policies   fixed strategies to compare with
    solve      ``batch`` or ``seq``: plan the largest that fits (sequences in steps of 128 tokens); ``memory``: the least
               device memory that works
    force      show the plan that needs least even where it does not fit
    tell       is told what is being done: (text, done, of how many)

    Raises ValueError for what it does not know and CaptureError for a model that cannot be captured.
    """
    if optimizer not in MOMENTS:
        raise ValueError(f"expected optimizer to be one of {', '.join(MOMENTS)}, found {optimizer!r}")
    options = update_options(update, max_grad_norm, run_ahead, "stop")
    if accumulate < 1 or (isinstance(model, str) and batch % accumulate):
        raise ValueError(f"expected accumulate to divide the batch of {batch}, found {accumulate}")
    if accumulate > 1 and solve in ("batch", "seq"):
        raise ValueError(f"solve={solve!r} expects accumulate=1, found {accumulate}: ask for the size of a micro-batch")
    if solve not in (None, "batch", "seq", "memory"):
        raise ValueError(f"expected solve to be batch, seq or memory, found {solve!r}")
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        raise ValueError(f"expected policies among {', '.join(POLICIES)}, found {', '.join(unknown)}")
    if isinstance(model, str) and model not in SHAPES:
        raise ValueError(f"expected a model among {', '.join(SHAPES)}, or a module, found {model!r}")
    if solve in ("batch", "seq") and not (isinstance(model, str) or takes_sizes(model)):
        raise ValueError(f"solve={solve!r} expects a built-in shape or a factory of (batch, seq), found {type(model).__name__}")
    kind, there = precision_named(precision), named(machine)
    device = parse_bytes(memory)
    if device is None and there.device_nbytes:
        device = int(there.device_nbytes * (1 - _LEFT_FREE))
    copies = kind.state_copies(optimizer)
    updates = None if options is None else Updates(copies, held=options.held, run_ahead=run_ahead)
    budgets = Budgets(device, parse_bytes(host), copies, updates=updates)
    question = Question(model, data, kind, optimizer, there, budgets, policies, force, tell, accumulate)
    with collecting_later():
        if solve in ("batch", "seq"):
            return _largest(question, solve, batch, seq)
        first, sized = _answer(question, batch, seq)
        if solve == "memory" and first.minimum_device_bytes:
            least = first.minimum_device_bytes
            found = _told(replace(question, budgets=replace(budgets, device=least)), sized)
            return replace(found, solved={"memory": least})
        return first


def _answer(question: Question, batch: int, seq: int) -> tuple[Forecast, Sized]:
    """With more chunks of the loss head where those that the device's memory calls for leave too little of it."""
    sized = sized_step(question, batch, seq)
    while not (found := _told(question, sized)).feasible and found.minimum_device_bytes and sized.chunks < MOST_CHUNKS:
        if not head_nbytes(sized.whole):
            break
        sized = chunked(question, sized.whole, sized.tokens, min(MOST_CHUNKS, 4 * sized.chunks))
    return found, sized


def _told(question: Question, sized: Sized) -> Forecast:
    candidates, budgets, model = sized.candidates, question.budgets, question.model
    about = Forecast(
        model=model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__),
        machine=question.machine.name,
        feasible=False,
        parameters=sum(p.numel() for p in _parameters(sized.step)),
        tokens=sized.tokens,
        state_bytes=sum(resident_nbytes(candidates.sizes, candidates.base, budgets).values()),
        budget_bytes=budgets.limits,
        peak_bytes={},
        minimum_device_bytes=0,
        precision=question.precision.name,
        optimizer=question.optimizer,
        update="step" if budgets.updates is None else "backward",
        numerics=candidates.base.numerics,
        rows=tuple(_row(candidates, policy, budgets) for policy in question.policies),
        joint=sized.joint,
        source=Source(sized.step, question.machine, budgets, workspace_nbytes),
    )
    try:
        planned = _best(candidates, budgets.device, budgets.host)
    except DoesNotFit as error:
        refused = _refused(about, candidates, budgets, error)
        if not question.force:
            return refused
        least = candidates.least()
        shown = _described(refused, candidates, budgets, least)
        return replace(shown, feasible=False, minimum_device_bytes=least.schedule.peak_nbytes["device"])
    verify(planned.schedule)
    return _described(replace(about, feasible=True), candidates, budgets, planned)


def _best(candidates: Candidates, device: int | None, host: int | None) -> Planned:
    """The fastest plan within these bytes, which is remembered between runs. Raises DoesNotFit."""
    constraints = replace(candidates.budgets, device=device, host=host), candidates.base.numerics
    key = cache.plan_key(candidates.step, "by shapes", candidates.machine, *constraints)
    return cache.through_cache(key, lambda known: candidates.best(device, host, known))


def _parameters(step: fx.GraphModule) -> list[torch.Tensor]:
    specs = zip(step.meta["inputs"], placeholders(step.graph), strict=True)
    return [node.meta["val"] for spec, node in specs if spec.role == "param"]


# -------------------------------------------------------------------------------------------------------------- solving


def _largest(question: Question, what: str, batch: int, seq: int) -> Forecast:
    """The plan at the largest batch or sequence that fits: where the expression of the leanest plan's peak says, made sure of
    by planning there and one size further. Raises ValueError where the model cannot be traced at the sizes this takes."""

    def at(n: int) -> tuple[int, int]:
        return (n, seq) if what == "batch" else (batch, n * _GRAIN)

    sizes = (2, 3, 5) if what == "batch" else (2, 4, 6, 7)
    first = sized_step(question, *at(sizes[-1]))
    steps = [*(sized_step(question, *at(n), first) for n in sizes[:-1]), first]
    leanest = first.candidates.least().plan
    planned = [sized.candidates.evaluate(leanest) for sized in steps]
    points = [at(n) for n in sizes]
    expressions = peak_expressions(planned[:-1], points[:-1], MONOMIALS[what])
    for tier, expression in expressions.items():
        said, found = evaluated(expression, *points[-1]), planned[-1].schedule.peak_nbytes[tier]
        if said < found:
            raise ValueError(f"solve={what!r}: the {tier} bytes are no polynomial of the {what}: {said} said, {found} found")

    def fits(n: int) -> bool:
        limits = question.budgets.limits.items()
        return all(limit is None or evaluated(expressions[tier], *at(n)) <= limit for tier, limit in limits)

    if all(limit is None for limit in question.budgets.limits.values()):
        raise ValueError(f"solve={what!r} expects a limit to solve for, found none: give memory or host")
    text = {tier: str(expression) for tier, expression in expressions.items()}
    low, high = 0, 1
    while fits(high) and high < _MOST:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    best, _ = _answer(question, *at(max(1, low)))
    low = max(1, low)
    while not best.feasible and low > 1:  # where sizes are rounded up, or other chunks are taken
        low -= 1
        best, _ = _answer(question, *at(low))
    while best.feasible and (more := _answer(question, *at(low + 1))[0]).feasible:
        low, best = low + 1, more
    solved = {what: low if what == "batch" else low * _GRAIN} if best.feasible else None
    return replace(best, solved=solved, peak_expressions=text)


# ------------------------------------------------------------------------------------------------------------ figures


def _row(candidates: Candidates, policy: str, budgets: Budgets) -> Row:
    planned = candidates.by_policy(policy, replace(budgets, device=None, host=None))
    peaks = dict(planned.schedule.peak_nbytes)
    time_us = planned.plan.total_us
    for tier, limit in budgets.limits.items():
        if limit is not None and peaks[tier] > limit:
            return Row(policy, False, peaks, time_us, peaks[tier] - limit, tier)
    return Row(policy, True, peaks, time_us)


def _described(about: Forecast, candidates: Candidates, budgets: Budgets, planned: Planned) -> Forecast:
    plan, schedule, limits = planned.plan, planned.schedule, budgets.limits
    bodies: dict[str, Any] = dict(planned.step.named_children())
    flops = sum(kernel_cost(bodies[i.kernel]).flops for i in schedule.instructions if i.kernel in bodies)
    trace = simulate(schedule)
    busy: dict[str, float] = {queue: us / plan.step_time_us for queue, us in busy_us(trace).items()}
    queues = [queue for queue in busy_us(trace) if queue != "compute"]
    more = {}
    for tier, limit in limits.items():
        if limit is not None and about.feasible:
            device, host = (limit + _ONE_GIB if tier == t else n for t, n in limits.items())
            more[tier] = max(0.0, plan.total_us - _best(candidates, device, host).plan.total_us)
    return replace(
        about,
        peak_bytes=dict(schedule.peak_nbytes),
        minimum_device_bytes=plan.minimum_device_bytes,
        step_time_us=plan.total_us,
        update_us=plan.update_us,
        tokens_per_s=about.tokens / plan.total_us * 1e6,
        tflops=flops / plan.total_us / 1e6,
        limiting_resource=plan.limiting_resource,
        busy=busy,
        exposed_us={queue: exposed_us(trace, queue) for queue in queues},
        ledger=_ledger(about, candidates, planned),
        load_host_bytes=sum(candidates.sizes.values()) + max(candidates.sizes.values(), default=0),
        next_gib_us=more,
        planned=planned,
    )


def _ledger(about: Forecast, candidates: Candidates, planned: Planned) -> dict[str, dict[str, int]]:
    """tier -> part -> bytes at the moment the tier is fullest; the parts of a tier add up to its peak."""
    schedule, copies = planned.schedule, candidates.budgets.state_copies
    master = 1.0 if PRECISIONS[about.precision].split else 0.0
    weights = {"device": 0, "host": 0}
    for block, nbytes in candidates.sizes.items():
        weights["device" if planned.plan.params(block) == "device" else "host"] += nbytes
    held = resident_nbytes(candidates.sizes, planned.plan, candidates.budgets)
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
        parts = {"weights": nbytes, "master": int(nbytes * master), "optimizer": int(nbytes * (copies - master))}
        parts["gradients"] = held[tier] - sum(parts.values())
        arena = schedule.arena_nbytes.get(tier, 0)
        if tier == "host":
            slots = min(arena, _gradient_slots(schedule))
            parts["gradients"], arena = parts["gradients"] + slots, arena - slots
        parts["staging" if tier == "device" else "activations"] = arena
        if tier == "device":
            parts |= {"activations": most, "workspace": workspace}
        parts["other"] = schedule.peak_nbytes[tier] - sum(parts.values())
        found[tier] = parts
    return found


def _gradient_slots(schedule: Schedule) -> int:
    """The most bytes of the host's slots that gradients hold at once."""
    live = most = 0
    for instruction in schedule.instructions:
        if instruction.op in ("alloc", "free"):
            buffer = schedule.buffers[instruction.writes[0]]
            if (buffer.kind, buffer.tier, buffer.role) == ("placed", "host", "grad"):
                live += placed(buffer.nbytes) * (1 if instruction.op == "alloc" else -1)
                most = max(most, live)
    return most


def _refused(about: Forecast, candidates: Candidates, budgets: Budgets, error: DoesNotFit) -> Forecast:
    """What is short, and the three cheapest ways out: those that cost nothing first."""
    tier = error.tier
    limit = budgets.limits[tier] or 0
    other = "host" if tier == "device" else "device"
    short = error.minimum - limit
    ways = []
    kept = sum(candidates.sizes.values()) - 2 * max(candidates.sizes.values(), default=0)
    if budgets.updates is None and tier == "host" and kept >= short:
        ways.append(f'update="backward": no gradients are kept for a step of their own, {gib(kept)} less')
    more = candidates.needs(other, {tier: limit})
    if more is not None:
        ways.append(f"{other} memory of {gib(more)} ({more} bytes) takes what the {tier} cannot")
    then = candidates.best(*((error.minimum, None) if tier == "device" else (None, error.minimum))).plan.total_us
    ways.append(f"{tier} memory of {gib(error.minimum)} ({error.minimum} bytes) or more: {time_of(then)} a step then")
    parts = ", ".join(f"{what} {gib(nbytes)}" for what, nbytes in error.causes)
    ways.append('fewer tokens a step: solve="batch" or solve="seq" finds how many fit')
    ways.append(f"less in one of the largest parts: {parts}")
    minimum = error.minimum if tier == "device" else 0
    return replace(about, short_bytes=short, minimum_device_bytes=minimum, ways_out=tuple(ways[:3]))
