"""The limits within which climbs look for plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from math import ceil, inf, log
from typing import NamedTuple

from mtcompile.passes.plan import Plan

_CLIMBS, _SHARES = 16, 25  # peaks up to which plans are improved, of how many
_FINER = 4  # times as many shares for small steps, whose homes may be as large as one of these
_NEAR_FLOOR = (1.0, 1.03, 1.06, 1.1, 1.15, 1.2)  # of the lowest peak: where little room makes plans much faster
_APART, _PARTS = 0.01, 4  # between two limits: how far apart others are at least, as a share, and how many parts they make
STEEP, _EVEN, _MOST_PARTS = 1.06, 1.015, 8  # times the bound at the next limit: where others are between, how near; at most
_FALLS, _GROWS = 0.97, 1.35  # times the bound, and the limit, from one of those that are apart to the next


class Limits(NamedTuple):
    """The most bytes on the device and on the host; None: no limit there."""

    device: int
    host: int | None = None

    def missing(self, plan: Plan) -> dict[str, int]:
        """Returns by how many bytes a plan is above the limits, by tier: the device first."""
        above = {tier: plan.peak_bytes[tier] - most for tier, most in self._asdict().items() if most is not None}
        return {tier: nbytes for tier, nbytes in above.items() if nbytes > 0}


def limits_between(low: int, highest: Iterable[int], device_nbytes: int, small: bool = False) -> list[int]:
    """Returns the peaks up to which climbs go, by each of the ``highest``: shares of the device's memory, or, where few of
    these lie between the lowest peak and the highest, peaks spread over these; and some near the lowest peak. ``small``: for a
    small step, which has more."""
    parts, limits = _SHARES * _FINER if small else _SHARES, set[int]()
    shares = [round(device_nbytes * i / parts) for i in range(1, parts)]
    for high in highest:
        if len(within := {limit for limit in shares if low <= limit <= high}) < _CLIMBS // 2:
            within = {round(low * (high / max(1, low)) ** (i / _CLIMBS)) for i in range(1, _CLIMBS + 1)}
        limits |= within | {limit for share in _NEAR_FLOOR if (limit := int(low * share)) <= high}
    return sorted(limits)


def limits_in_between(limits: Sequence[int], highest: int) -> dict[int, int]:
    """Returns limits between each two of the rising ``limits``, and above the last of them up to the ``highest``, with the
    limit that each follows."""
    following: dict[int, int] = {}
    for low, high in itertools.pairwise((*limits, *([highest] if highest > limits[-1] else []))):
        parts = max(1, min(_PARTS, int((high - low) / (_APART * high))))
        rising = [low + (high - low) * part // parts for part in range(parts + (high not in limits))]
        following |= {limit: lower for lower, limit in itertools.pairwise(rising)}
    return following


def parts_of(low_us: float, high_us: float) -> int:
    """Returns how many parts others make of the way between two limits, by the bound at each: more where it falls steeply."""
    if high_us <= 0 or low_us == inf or low_us <= STEEP * high_us:
        return 1
    return min(_MOST_PARTS, ceil(log(low_us / high_us) / log(_EVEN)))


def apart(limits: Sequence[int], bound: Callable[[int], float]) -> list[int]:
    """Returns those of the rising ``limits`` that differ: each has much more memory than the one before, or a bound that is
    some percent lower. Which they are does not depend on higher ones."""
    chosen, low, low_us = list[int](), 0, inf
    for limit in limits:
        if (us := bound(limit)) <= _FALLS * low_us or limit >= _GROWS * low:
            chosen.append(limit)
            low, low_us = limit, us
    return chosen
