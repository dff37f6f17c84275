"""Minimum cuts: the sink's side is that of another library, and depends neither on names nor on the order of edges."""

from __future__ import annotations

import random
from typing import Any

import networkx
import pytest

from mtcompile.passes.analysis.flow import Edge, sink_side


def random_edges(seed: int) -> list[Edge]:
    """Edges such as trade-offs have: values, what makes them, and states that this replays; some capacities are huge."""
    draw = random.Random(seed)
    values, makers = [f"value{i}" for i in range(draw.randint(2, 20))], [f"maker{i}" for i in range(draw.randint(1, 20))]
    edges: list[Edge] = [("source", value, draw.choice((0, 1, draw.randint(0, 10**14)))) for value in values]
    for maker in makers:
        edges.append((maker, "sink", draw.randint(0, 3) * draw.choice((1, 10**12))))
        edges += [(value, maker, None) for value in draw.sample(values, draw.randint(1, min(4, len(values))))]
    for maker in makers[::3]:
        edges += [(maker, f"state of {maker}", None), (f"state of {maker}", "sink", draw.randint(0, 10))]
    edges += [(one, other, draw.randint(1, 9)) for one, other in zip(makers, values, strict=False)]
    return edges


def by_networkx(edges: list[Edge]) -> set[Any]:
    graph: Any = networkx.DiGraph()
    for begin, end, capacity in edges:
        graph.add_edge(begin, end, **({} if capacity is None else {"capacity": capacity}))
    _, (_, sink) = networkx.minimum_cut(graph, "source", "sink")
    return set(sink)


@pytest.mark.parametrize("seed", range(30))
def test_sink_side(seed: int) -> None:
    edges = random_edges(seed)
    assert sink_side(edges, "source", "sink") == by_networkx(edges)
    assert sink_side(edges[::-1], "source", "sink") == by_networkx(edges)


def test_equal_cuts_leave_the_sink_little() -> None:
    """Of two minimum cuts, that nearer to the sink: what could be on either side is on the source's."""
    assert sink_side([("source", "one", 3), ("one", "other", 3), ("other", "sink", 3)], "source", "sink") == {"sink"}


def test_no_way() -> None:
    assert sink_side([("source", "one", 3), ("other", "sink", 3)], "source", "sink") == {"sink", "other"}
