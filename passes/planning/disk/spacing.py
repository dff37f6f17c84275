"""Orders and choices of homes that are spread evenly over a step, so that reads from disk hide behind the blocks in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def evenly(homes: Sequence[str]) -> list[str]:
    """The same homes, so that any first few of them are spread evenly over the step."""

    def halves(low: int, high: int) -> Iterator[list[int]]:
        level = [(low, high)]
        while level:
            middles = [(a + b) // 2 for a, b in level]
            yield middles
            level = [part for (a, b), m in zip(level, middles) for part in ((a, m), (m + 1, b)) if part[0] < part[1]]

    return [homes[index] for level in halves(0, len(homes)) for index in level] if homes else []


def spaced(homes: Sequence[str], count: int, shift: int) -> list[str]:
    """So many of the homes in equal distances, the last of them ``shift`` before the end, or as far as there is room."""
    return [homes[len(homes) * place // count - 1 - min(shift, len(homes) // count - 1)] for place in range(1, count + 1)]
