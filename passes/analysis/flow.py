"""Minimum cuts of small graphs with whole capacities of any size."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

Edge = tuple[Hashable, Hashable, int | None]  # from, to, capacity; None: it is never cut


def sink_side(edges: Iterable[Edge], source: Hashable, sink: Hashable) -> set[Hashable]:
    """Returns the nodes on the sink's side of a minimum cut between ``source`` and ``sink``: those from which more could flow
    into the sink. All maximum flows leave the same. Some edge of each way from ``source`` to ``sink`` has a capacity.

    Dinic's algorithm: as long as there are ways with room, flow goes along the shortest ones until none of these has any."""
    edges = list(edges)
    numbers: dict[Hashable, int] = {source: 0, sink: 1}
    unlimited = 1 + sum(capacity for _, _, capacity in edges if capacity is not None)
    leaving: list[list[int]] = [[], []]  # by node: its arcs; that in the other direction of arc i is i ^ 1
    heads, room = list[int](), list[int]()
    for begin, end, capacity in edges:
        for node in (begin, end):
            if node not in numbers:
                numbers[node] = len(leaving)
                leaving.append([])
        one, other = numbers[begin], numbers[end]
        leaving[one].append(len(heads))
        leaving[other].append(len(heads) + 1)
        heads += (other, one)
        room += (unlimited if capacity is None else capacity, 0)
    while (ranks := _ranks(leaving, heads, room))[0] >= 0:
        _fill(leaving, heads, room, ranks)
    return {node for node, number in numbers.items() if ranks[number] >= 0}


def _ranks(leaving: list[list[int]], heads: list[int], room: list[int]) -> list[int]:
    """Returns how many arcs with room each node is from the sink, node 1; -1 where there is no way."""
    ranks = [-1] * len(leaving)
    ranks[1], queue = 0, [1]
    for node in queue:
        rank = ranks[node] + 1
        for arc in leaving[node]:
            if room[arc ^ 1] and ranks[heads[arc]] < 0:
                ranks[heads[arc]] = rank
                queue.append(heads[arc])
    return ranks


def _fill(leaving: list[list[int]], heads: list[int], room: list[int], ranks: list[int]) -> None:
    """Lets flow go from the source, node 0, along shortest ways until none of them has room."""
    tried, way, node = [0] * len(leaving), list[int](), 0
    while True:
        if node == 1:
            least = min(room[arc] for arc in way)
            for arc in way:
                room[arc] -= least
                room[arc ^ 1] += least
            way, node = [], 0
        arcs = leaving[node]
        while tried[node] < len(arcs):
            arc = arcs[tried[node]]
            if room[arc] and ranks[heads[arc]] == ranks[node] - 1:
                way.append(arc)
                node = heads[arc]
                break
            tried[node] += 1
        else:
            if not way:
                return
            node = heads[way.pop() ^ 1]
            tried[node] += 1
