"""Moves of climbs about which weights and gradients the host casts: less crosses the link, and the host has more to do.

Searches leave these casts out, as a plan with them takes far longer to evaluate; their best plans climb on by these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import fx

from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.climbs.move import FIRST, Move, Moved
from mtcompile.passes.step_graph import param_homes_by_node
from mtcompile.runtime.schedule import Schedule

_PARTS = 8  # shares of the homes that are tried


def casts(homes: Sequence[str]) -> Move:
    """Returns the moves: for all of the ``homes`` whose weights the host may cast, for none, or for other shares of them."""

    def neighbours(plan: Plan) -> Iterator[Moved]:
        if not plan.narrow:
            for part in range(0, _PARTS, 2):  # where all is worse than none, some may be better than either
                wide = _spread(homes, len(homes) * part // _PARTS)
                yield Moved(part, FIRST, partial(plan.changed, narrow=True, wide=wide))
            return
        yield Moved("none", FIRST, partial(plan.changed, narrow=False, wide=()))
        crossing = len(plan.wide) * _PARTS // max(1, len(homes))
        for part in (crossing + 1, crossing - 1, crossing + 3):
            if 0 <= part < _PARTS:
                wide = _spread(homes, len(homes) * part // _PARTS)
                yield Moved(part, FIRST, partial(plan.changed, narrow=True, wide=wide))

    return neighbours


def casting(step: fx.GraphModule, schedule: Schedule) -> list[str]:
    """The homes whose weights the host casts, in the order of the step."""
    home_of = param_homes_by_node(step)
    converts = (i for i in schedule.instructions if i.work == "convert")
    return list(dict.fromkeys(home_of[name] for i in converts for name in i.reads if name in home_of))


def _spread(homes: Sequence[str], count: int) -> tuple[str, ...]:
    """So many of the homes, evenly spaced."""
    return tuple(home for i, home in enumerate(homes) if (i + 1) * count // len(homes) > i * count // len(homes))
