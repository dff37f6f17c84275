"""Sizes as people write them; read before torch is imported."""

from __future__ import annotations

import re

Size = str | int | float | None
_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip

MOST = (1 << 63) - 1  # bytes that sizes and places in files may have
_LONGEST = 40  # characters of a size that a message repeats
FEWEST = 1024  # bytes: a smaller number without a unit probably means GiB


def parse_bytes(size: Size, option: str = "") -> int | None:
    """Converts a size such as ``"16GiB"``, ``"16GB"`` or a number to bytes; None stays None. Raises ValueError, which names the
    ``option``."""
    if size is None:
        return None
    place = f"{option}: " if option else ""
    given = repr(size) if len(str(size)) <= _LONGEST else f"one of {len(str(size))} characters"
    if isinstance(size, (int, float)) and not isinstance(size, bool):
        if not 0 < size <= MOST:  # nan too
            raise ValueError(f"{place}expected a size above zero, and below 8 EiB, found {given}")
        return int(size)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match.group(2).lower() not in _UNITS or float(match.group(1)) <= 0:
        raise ValueError(f'{place}expected a size such as "16GiB", "16GB" or a number of bytes, found {given}')
    exact = float(match.group(1)) * _UNITS[match.group(2).lower()]
    if exact > MOST:
        raise ValueError(f'{place}expected a size below 8 EiB, such as "16GiB", found {given}')
    nbytes = int(exact)
    if not match.group(2) and nbytes < FEWEST:
        meant = f'did you mean "{match.group(1)}GiB"? For bytes write "{match.group(1)}B"'
        raise ValueError(f'{place}expected a size such as "16GiB", "16GB" or a number of bytes, found {given}; {meant}')
    return nbytes


def parse_tokens(count: int | str | None) -> int | None:
    """Converts a number of tokens such as ``"1B"``, ``"300M"`` or 1000 to an int; None stays None. Raises ValueError."""
    if count is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmbt]?)\s*", str(count).lower())
    tokens = int(float(match.group(1)) * 1000 ** " kmbt".index(match.group(2) or " ")) if match else 0
    if not 0 < tokens <= MOST:
        raise ValueError(f'tokens: expected a number of tokens such as "1B" or "300M", found {count!r}')
    return tokens


def three_digits(value: float) -> str:
    """Writes a positive number in three digits, or in all before the point: never in powers of ten where it is large."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
