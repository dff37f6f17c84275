"""``mtcompile.plan``: a training step planned without being run, at the size asked for or at the largest that fits."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mtcompile import knobs
from mtcompile.capture.arguments import possible_counts
from mtcompile.compiler import pass_errors
from mtcompile.distributed.layout import layout_named, updates_once
from mtcompile.errors import CaptureError, did_you_mean
from mtcompile.forecast.figures import figures, with_run_cost
from mtcompile.forecast.forms import StepForms, forms_of, planned_form
from mtcompile.forecast.gains import gains_of
from mtcompile.forecast.request import ForecastRequest, SizedStep, sized_step, takes_sizes, with_disk
from mtcompile.forecast.result import Forecast
from mtcompile.forecast.scaling import with_scaling
from mtcompile.machine.device import HOST_RESERVE
from mtcompile.machine.presets import named
from mtcompile.models.shapes import check_shape
from mtcompile.optim.precision import Precision, precision_named
from mtcompile.optim.state_sizes import FORECAST_STATES, optimizer_named, state_copies, streamed_copies, update_workspace
from mtcompile.optim.update_options import update_options
from mtcompile.options import check_effort, check_fragments, parse_disk
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts.fastest import takes_at_least
from mtcompile.passes.plan import NORM_COPIES, Updates
from mtcompile.passes.planning.policies import POLICIES
from mtcompile.passes.planning.problem import DoesNotFit, Planned, Progress, no_progress
from mtcompile.reading import check_package
from mtcompile.references import collecting_seldom
from mtcompile.sizes import parse_bytes, parse_tokens

_LEFT_FREE = 0.08  # of a machine's device memory when no budget is given
_GRAIN = 128  # tokens of a sequence that is solved for
_MOST = 2**30  # of what is solved for


def plan(
    model: str | nn.Module | Callable[..., Any],
    data: Mapping[str, Any] | None = None,
    *,
    batch: int = 1,
    seq: int = 2048,
    memory: str | int | None = None,
    host: str | int | None = None,
    disk: str | int | None = None,
    machine: str | Machine = "h200-sxm",
    precision: str = "model",
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "adamw",
    lora: int = 0,
    base_bits: int | None = None,
    update: str = "step",
    max_grad_norm: float | None = None,
    run_ahead: bool = False,
    accumulate: int | str = 1,
    fragments: str | None = "auto",
    gpus: int = 1,
    hosts: int = 1,
    network: float | None = None,
    policies: tuple[str, ...] = (),
    solve: str | None = None,
    force: bool = False,
    advise: bool = False,
    effort: str | None = None,
    tokens: int | str | None = None,
    progress: Progress = no_progress,
) -> Forecast:
    """Plans one training step without running or allocating it.

    model      a built-in shape (``"llama-8b"``), a module, or a function that returns a module or (module, data); it is
               called where tensors take no memory, with (batch, seq) if it takes two arguments
    data       the module's keyword arguments, tensors of the intended sizes; for a shape, made from ``batch`` and ``seq``
    memory     device bytes; default: the machine's, less a reserve of 8 %
    host       host bytes; default: the machine's RAM, less a reserve of 5 %; where that is not known, no limit
    disk       disk bytes, or a folder and bytes as for ``compile``; expects ``host`` or a machine with known RAM; default: none
    machine    a preset, a JSON file, ``"this"`` for this machine as measured, or a ``Machine``
    precision  ``model`` (the module's dtypes), ``fp32``, ``bf16``, or ``bf16-master32`` (bf16 weights; 12 bytes each with
               fp32 masters and AdamW's state)
    optimizer  ``adamw``, ``adam``, ``sgd-momentum``, ``sgd``, the name of another class of torch.optim, or a function that
               makes an optimizer of a list of parameters: its state is measured in a step without memory;
               parameters that it does not take, as Muon takes matrices only, are counted as AdamW's
    lora       freezes the model and adds LoRA adapters of this rank to its linear layers, except the head; 0: none
    base_bits  with ``lora``, 4: the linear layers that get adapters are in bitsandbytes' 4 bits, as QLoRA has them
    update     ``step``: updates in optimizer.step(), after the backward; ``backward``: as gradients arrive, so that none are
               kept; with ``max_grad_norm``: once all gradients are there; with ``run_ahead``: also during the next forward
    accumulate  micro-batches per batch, run region by region; ``"auto"``: as many as are fastest, of powers of two; without
               ``solve``, with one rank, and with a model that takes sizes
    fragments  as for ``compile``; ``"exact"`` and ``"split"``: without ``solve``
    gpus       GPUs of a host that train together, each with ``batch`` sequences, and a link, of its own; they share the host's
               memory and its speed
    hosts      hosts that train together, each with ``gpus`` GPUs
    network    GB/s between hosts, per direction; default: the machine's
    policies   fixed strategies to compare with
    solve      ``batch`` or ``seq``: plans the largest that fits (sequences in steps of 128 tokens); ``memory``: the least
               device memory that works
    force      returns the leanest plan even if it does not fit
    advise     if the step fits, also estimates what changes of it would gain; not with ``solve``
    effort     as for ``compile``
    tokens     tokens of the whole run, such as ``"1B"``: also says what the run costs in days, kWh and writes to a drive
    progress   called with (text, done, total)

    Raises ValueError for an argument that it does not know, and CaptureError if the model cannot be captured.
    """
    make_optimizer = optimizer_named(optimizer) if isinstance(optimizer, str) and optimizer not in FORECAST_STATES else None
    if not isinstance(optimizer, str):
        make_optimizer, optimizer = optimizer, getattr(optimizer, "__name__", "optimizer")
    if lora < 0:
        raise ValueError(f"expected lora to be a rank of 1 or more, or 0 for none, found {lora}")
    if base_bits is not None:
        if base_bits != 4 or not lora or precision == "bf16-master32":
            raise ValueError(
                f"expected base_bits=4 with lora= and without fp32 masters, found base_bits={base_bits}, lora={lora}, "
                f"precision={precision!r}: leave out base_bits=, or change the others"
            )
        check_package("bitsandbytes", "base_bits=4", "qlora")
        importlib.import_module("bitsandbytes")  # registers its operations
    options = update_options(update, max_grad_norm, run_ahead, "stop")
    check_fragments(fragments, options)
    if fragments not in (None, "auto") and (solve is not None or hosts > 1 or (gpus > 1 and options is not None)):
        raise ValueError(
            'expected fragments= without solve=, and with one rank, or several of one host and update="step", found '
            f'solve={solve!r}, gpus={gpus}, hosts={hosts}, update={update!r}; pass update="step" for several ranks of one '
            "host, or leave fragments= out"
        )
    if isinstance(accumulate, str):
        if accumulate != "auto":
            raise ValueError(f'expected accumulate to be a whole number of 1 or more, or "auto", found {accumulate!r}')
        if solve is not None or gpus * hosts > 1 or not (isinstance(model, str) or takes_sizes(model)):
            raise ValueError(
                'accumulate="auto": expected no solve=, one rank, and a shape or a factory of (batch, seq); pass a number'
            )
        counts = possible_counts(batch)
    elif accumulate < 1 or (isinstance(model, str) and batch % accumulate):
        raise ValueError(f"expected accumulate to divide the batch of {batch}, found {accumulate}")
    elif accumulate > 1 and solve in ("batch", "seq"):
        raise ValueError(f"solve={solve!r} expects accumulate=1, found {accumulate}: ask for the size of a micro-batch")
    else:
        counts = [accumulate]
    if solve not in (None, "batch", "seq", "memory"):
        raise ValueError(f"expected solve to be batch, seq or memory, found {solve!r}")
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        close = did_you_mean(unknown[0], POLICIES)
        raise ValueError(f"expected policies among {', '.join(POLICIES)}, found {', '.join(unknown)}{close}")
    if isinstance(model, str):
        check_shape(model)
    if solve in ("batch", "seq") and not (isinstance(model, str) or takes_sizes(model)):
        raise ValueError(f"solve={solve!r} expects a built-in shape or a factory of (batch, seq), found {type(model).__name__}")
    if data is not None and not isinstance(data, Mapping):
        raise TypeError(f'expected data as a dictionary of keyword arguments, {{"x": tensor}}, found {type(data).__name__}')
    kind, described = precision_named(precision), named(machine)
    device = parse_bytes(memory, "memory")
    if device is None and described.device_nbytes:
        device = int(described.device_nbytes * (1 - _LEFT_FREE))
    host_nbytes = parse_bytes(host, "host")
    if host_nbytes is None and described.host_nbytes:
        host_nbytes = int(described.host_nbytes * (1 - HOST_RESERVE))
    if make_optimizer is not None and kind.split:
        raise ValueError(f'expected {", ".join(FORECAST_STATES)} with precision="bf16-master32", found {optimizer!r}')
    copies = state_copies(kind, optimizer) if make_optimizer is None else 2.0
    updates = None
    if options is not None:
        norm_copies, held = NORM_COPIES if kind.split else 1.0, options.needs_all_gradients
        workspace = update_workspace(kind.split, optimizer != "sgd")
        states = FORECAST_STATES.get(optimizer, 0) if optimizer != "adam" else 0  # which has no kernel for a GPU
        updates = Updates(copies, workspace, held=held, run_ahead=run_ahead, checked=not held, norm_copies=norm_copies)
        updates = replace(updates, streamed=streamed_copies(kind.split, states))
    ranks, once = layout_named(gpus, hosts, network, solve, disk), updates_once(make_optimizer)
    budgets = _with_disk(Budgets(device, host_nbytes, copies, updates=updates), disk, kind, force)
    if budgets.disk is not None and solve is not None:
        raise ValueError(f"solve={solve!r} expects no disk=, found {disk!r}: plan single sizes with a disk")
    alone = ForecastRequest(
        model, data, kind, optimizer, described, budgets, policies, force, progress, counts[0], lora, base_bits, make_optimizer
    )
    run_tokens = parse_tokens(tokens)
    check_effort(effort := knobs.effort() if effort is None else effort)
    alone = replace(alone, fragments=fragments, effort=effort, run_tokens=run_tokens)
    of_rank = ranks.machine(described, once), ranks.budgets(budgets, once)
    request = replace(alone, machine=of_rank[0], budgets=of_rank[1], ranks=ranks)
    with collecting_seldom(), pass_errors():
        if solve in ("batch", "seq"):
            return with_run_cost(request, _largest(request, solve, batch, seq))
        if solve == "memory":
            return with_run_cost(request, _least_memory(request, batch, seq))
        request, forecast, sized = _of_fastest_count(request, counts, batch, seq)
        if ranks.count > 1:
            forecast = with_scaling(request, forecast, described, lambda: _forecast(alone, batch, seq)[0])
            return with_run_cost(request, forecast)
        if advise and forecast.feasible:
            advice, no_gain = gains_of(request, sized, forecast)
            forecast = replace(forecast, advice=advice, no_gain=no_gain)
        return with_run_cost(request, forecast)


def _with_disk(budgets: Budgets, disk: str | int | None, precision: Precision, force: bool) -> Budgets:
    """Returns the budgets with a disk of that size, if any. ``force``: however slow it is, and however soon it wears out."""
    if disk is None:
        return budgets
    if budgets.host is None:
        raise ValueError("disk= takes what host= has no room for; expected host= too, found none")
    named = isinstance(disk, str) and ":" in disk
    taken = parse_disk(str(disk)) if named else None
    return with_disk(budgets, taken.nbytes if taken is not None else parse_bytes(disk, "disk"), precision, force)


def _forecast(request: ForecastRequest, batch: int, seq: int, forms: StepForms | None = None) -> tuple[Forecast, SizedStep]:
    """Forecasts one size, in the form that is the fastest. ``forms``: of that size, made before."""
    sized, planned = planned_form(request, forms or forms_of(request, batch, seq))
    return figures(request, sized, planned), sized


def _of_fastest_count(
    request: ForecastRequest, counts: list[int], batch: int, seq: int
) -> tuple[ForecastRequest, Forecast, SizedStep]:
    """Forecasts one size in as many micro-batches as are fastest; where none fit, in as many as need the least. ``counts``:
    those to try, the smallest first."""
    best: tuple[ForecastRequest, SizedStep, Planned | DoesNotFit] | None = None
    for count in counts:
        counted = replace(request, accumulate=count)
        try:
            forms = forms_of(counted, batch, seq)
        except CaptureError:
            if best is None:
                raise
            break  # a loss that cannot be put together, say
        fastest = None if best is None else best[2]
        if isinstance(fastest, Planned) and takes_at_least(forms.first.candidates, fastest.plan.total_us):
            break  # smaller micro-batches take longer still
        sized, planned = planned_form(counted, forms)
        if best is None or _order(planned) < _order(best[2]):
            best = counted, sized, planned
    assert best is not None, "expected a number of micro-batches"
    request, sized, planned = best
    return request, figures(request, sized, planned), sized


def _order(planned: Planned | DoesNotFit) -> tuple[bool, float]:
    """Orders plans by their time, behind them refusals by the memory that they need."""
    return (True, planned.minimum) if isinstance(planned, DoesNotFit) else (False, planned.plan.total_us)


def _least_memory(request: ForecastRequest, batch: int, seq: int) -> Forecast:
    """Plans the step in the least device memory that works in any form: with a byte less, none fits. Where none fits however
    much memory there is, as with too small a host, returns that refusal."""
    forms = forms_of(request, batch, seq)

    def within(device: int) -> tuple[ForecastRequest, SizedStep, Planned | DoesNotFit]:
        limited = replace(request, budgets=replace(request.budgets, device=device), force=False)
        return limited, *planned_form(limited, forms)

    least, (limited, sized, planned) = 1, within(1)
    while isinstance(planned, DoesNotFit) and planned.tier == "device" and planned.minimum > least:
        least = planned.minimum
        limited, sized, planned = within(least)
    forecast = figures(limited, sized, planned)
    return replace(forecast, solved={"memory": least}) if forecast.feasible else forecast


def _largest_planned(request: ForecastRequest, at: Callable[[int], tuple[int, int]], guess: int) -> int:
    """Returns the largest size of which a plan fits, by steps from a guess that double, and then halve: where the step is cut,
    it is far from what the leanest uncut plan has room for. 1 if none fits."""

    def fits(n: int) -> bool:
        return isinstance(planned_form(request, forms_of(request, *at(n)))[1], Planned)

    low, high, step = 0, guess, 1
    while fits(high) and high < _MOST:
        low, high, step = high, high + step, 2 * step
    while low == 0 and high > 1:
        size = max(1, high - step)
        low, high, step = (size, high, step) if fits(size) else (0, size, 2 * step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(1, low)


def _largest(request: ForecastRequest, what: str, batch: int, seq: int) -> Forecast:
    """Plans the largest batch or sequence that fits: takes the size that the expression of the leanest plan's peak gives, then
    confirms it by planning that size and the next. Raises ValueError if the model cannot be traced at the sizes this needs."""

    from mtcompile.forecast.symbolic import MONOMIALS, evaluated, peak_expressions  # loads sympy: only here

    def at(n: int) -> tuple[int, int]:
        return (n, seq) if what == "batch" else (batch, n * _GRAIN)

    sizes = (2, 3, 5) if what == "batch" else (2, 4, 6, 7)
    first = sized_step(request, *at(sizes[-1]))
    steps = [*(sized_step(request, *at(n), first) for n in sizes[:-1]), first]
    leanest = first.candidates.least().plan
    planned = [sized.candidates.planned(leanest) for sized in steps]
    points = [at(n) for n in sizes]
    expressions = peak_expressions(planned[:-1], points[:-1], MONOMIALS[what])
    for tier, expression in expressions.items():
        expected, planned_nbytes = evaluated(expression, *points[-1]), planned[-1].schedule.peak_nbytes[tier]
        if expected < planned_nbytes:
            raise ValueError(
                f"solve={what!r}: the {tier} bytes are no polynomial of the {what}: {expected} expected, {planned_nbytes} found"
            )

    def fits(n: int) -> bool:
        limits = request.budgets.nbytes.items()
        return all(limit is None or evaluated(expressions[tier], *at(n)) <= limit for tier, limit in limits)

    if all(limit is None for limit in request.budgets.nbytes.values()):
        raise ValueError(f"solve={what!r} expects a limit to solve for, found none: give memory or host")
    text = {tier: str(expression) for tier, expression in expressions.items()}
    low, high = 0, 1
    while fits(high) and high < _MOST:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    low = _largest_planned(replace(request, effort="quick"), at, max(1, low))
    best, _ = _forecast(request, *at(low))
    while not best.feasible and low > 1:  # if sizes are rounded up, or the loss head is cut otherwise
        low -= 1
        best, _ = _forecast(request, *at(low))
    while best.feasible and (more := _forecast(request, *at(low + 1))[0]).feasible:
        low, best = low + 1, more
    solved = {what: low if what == "batch" else low * _GRAIN} if best.feasible else None
    return replace(best, solved=solved, peak_expressions=text)
