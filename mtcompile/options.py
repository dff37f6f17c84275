"""Sizes as people write them: ``"16GiB"``, ``"16GB"``, plain bytes."""

from __future__ import annotations

import re

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_bytes(size: str | int | float | None) -> int | None:
    """Bytes of ``size``; None stays None. Raises ValueError saying what forms are read."""
    if size is None:
        return None
    if isinstance(size, (int, float)) and not isinstance(size, bool):
        if size <= 0:
            raise ValueError(f"expected a size above zero, found {size!r}")
        return int(size)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match.group(2).lower() not in _UNITS or float(match.group(1)) <= 0:
        raise ValueError(f'expected a size such as "16GiB", "16GB" or a number of bytes, found {size!r}')
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])
