"""Plans whose host casts weights and gradients: less crosses the link, and the host has more to do.

Searches leave these casts out. They are tried with the plans that a search has found: for all homes, and for the share
of them at which, by the work of each queue, the link and the host are done soonest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import fx

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.evaluate import faster, identity
from mtcompile.passes.planning.problem import Candidate
from mtcompile.passes.step_graph import param_homes_by_node
from mtcompile.runtime.schedule import PHASES, Schedule

_NEARLY = 1.05  # times the fastest plan: slower ones are not tried, ...
_SAVED = 1.2  # ... those of less of the host not if they are as many times slower than with casts, ...
_MAYBE = 1.03  # ... nor shares of the homes that are expected to take longer
_GRID = 16  # shares of the homes that are compared by the work of queues
_BESIDE = 2  # of these, on both sides of the best one, that are evaluated too


def with_casts(
    step: fx.GraphModule,
    candidate: Candidate,
    others: Iterable[Plan],
    evaluate: Callable[[Plan], Candidate],
    budgets: Budgets,
    uncast: Callable[[int | None], Candidate | None] = lambda host: None,
) -> Candidate:
    """Returns the candidate, or it or one of ``others`` that are nearly as fast with casts on the host, if that is faster and
    within the budgets. Where the budget of the host costs time, so that those of less are tried as well: more of it is not
    slower then. ``uncast``: gives the candidate within some bytes of the host; None if there is none."""
    cast, limit = candidate, _NEARLY * candidate.plan.total_us
    for plan in {identity(plan): plan for plan in (candidate.plan, *others) if plan.total_us <= limit}.values():
        cast = _with_casts_of(step, plan, cast, evaluate, budgets)
    if budgets.host is None or (free := uncast(None)) is None or free.plan.total_us >= candidate.plan.total_us:
        return cast
    while (less := uncast(candidate.plan.peak_bytes["host"] - 1)) and less.plan.total_us <= _SAVED * cast.plan.total_us:
        candidate, cast = less, _with_casts_of(step, less.plan, cast, evaluate, budgets)
    return cast


def _with_casts_of(
    step: fx.GraphModule, plan: Plan, candidate: Candidate, evaluate: Callable[[Plan], Candidate], budgets: Budgets
) -> Candidate:
    """Returns the candidate, or a plan with casts on the host if that is faster and within the budgets."""
    everywhere = evaluate(replace(plan, narrow=True, wide=()))
    candidate = faster(candidate, everywhere, budgets)
    homes = _casting(step, everywhere.schedule)
    for count in _counts(everywhere, len(homes), _MAYBE * candidate.plan.total_us):
        some = replace(plan, narrow=True, wide=_spread(homes, len(homes) - count))
        candidate = faster(candidate, evaluate(some), budgets)
    return candidate


def _casting(step: fx.GraphModule, schedule: Schedule) -> list[str]:
    """The homes whose weights the host casts, in the order of the step."""
    home_of = param_homes_by_node(step)
    converts = (i for i in schedule.instructions if i.work == "convert")
    return list(dict.fromkeys(home_of[name] for i in converts for name in i.reads if name in home_of))


def _counts(everywhere: Candidate, homes: int, us: float) -> list[int]:
    """Returns numbers of homes for which the host is to cast, by the work of each queue. Leaves out all and none of them, and
    numbers with which a step would take ``us`` or longer, if it takes longer than that work by as much as ``everywhere``, whose
    host casts for all."""
    schedule, updates = everywhere.schedule, everywhere.plan.updates
    run_ahead = updates is not None and updates.run_ahead
    busy, spared = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    copied, casts_us = Counter[str](), Counter[str]()
    for i in schedule.instructions:
        busy[i.queue, i.phase] += i.time_us
        if i.op == "copy":
            copied[i.queue] += i.nbytes
        if i.work == "convert":
            casts_us[i.phase] += i.time_us
            read, written = (sum(schedule.buffers[name].nbytes for name in names) for names in (i.reads, i.writes))
            spared["h2d" if read > written else "d2h", i.phase] += abs(read - written)

    def total_us(share: float) -> float:
        phases, total = list[float](), 0.0
        for phase in PHASES:
            links = (busy[q, phase] + (1 - share) * spared[q, phase] * rates[q] for q in rates)
            casts, others = share * casts_us[phase], busy["host", phase] - casts_us[phase]
            total += casts + others
            phases.append(max(busy["compute", phase], casts if run_ahead else casts + others, *links))
        return max(sum(phases), total if run_ahead else 0.0)

    rates = {q: sum(busy[q, phase] for phase in PHASES) / max(1, copied[q]) for q in ("h2d", "d2h")}
    best = min(range(_GRID, -1, -1), key=lambda sixteenths: total_us(sixteenths / _GRID))
    if best in (0, _GRID):
        return []
    longer = everywhere.plan.total_us / total_us(1.0)
    shares = [each for each in (best, best - _BESIDE, best + _BESIDE) if longer * total_us(each / _GRID) < us]
    counts = (round(homes * sixteenths / _GRID) for sixteenths in shares)
    return [count for count in dict.fromkeys(counts) if 0 < count < homes]


def _spread(homes: Sequence[str], count: int) -> tuple[str, ...]:
    """So many of the homes, evenly spaced."""
    return tuple(home for i, home in enumerate(homes) if (i + 1) * count // len(homes) > i * count // len(homes))
