"""The limits on the device's memory up to which climbs go: few, so that budgets share climbs, and the same for all of them."""

from __future__ import annotations

from collections.abc import Iterable

_CLIMBS, _SHARES = 16, 25  # peaks up to which plans are improved, of how many
_FINER = 4  # times as many shares for small steps, whose homes may be as large as one of these
_NEAR_FLOOR = (1.0, 1.03, 1.06, 1.1, 1.15, 1.2)  # of the lowest peak: where little room makes plans much faster


def limits_between(low: int, highest: Iterable[int], device_nbytes: int, finer: bool) -> list[int]:
    """Returns the peaks up to which climbs go, by each of the ``highest``: shares of the device's memory, or, if few of these
    lie between the lowest peak and the highest, peaks spread over these; and some near the lowest peak. ``finer``: of a small
    step."""
    parts = _SHARES * _FINER if finer else _SHARES
    shares, limits = [round(device_nbytes * i / parts) for i in range(1, parts)], set[int]()
    for high in highest:
        if len(within := {limit for limit in shares if low <= limit <= high}) < _CLIMBS // 2:
            within = {round(low * (high / max(1, low)) ** (i / _CLIMBS)) for i in range(1, _CLIMBS + 1)}
        limits |= within | {limit for share in _NEAR_FLOOR if (limit := int(low * share)) <= high}
    return sorted(limits)
