"""One operation that runs a program tile by tile: how it is written in a graph, what it does, and what it needs inside.

``run_tiles(program, *operands)`` is a call in a joint graph or a region's body. The program is text: the operations of one
tile as a graph (``graph_json``), which operands are cut into tiles and along which dimension, and how each result is put
together. So equal pieces of equal blocks are equal calls, and a graph with tiles has no more operations than one without.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from mtcompile.passes.graph_json import graph_from_json, graph_to_json, in_graphs

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Tiled:
    """A value that is cut into tiles along ``dim`` of ``shape``, which it is viewed in; or, with ``dim`` -1, is not cut: an
    operand that every tile reads, a result that is a sum over tiles. ``whole``: its own shape. ``length``: how many rows there
    are along ``dim``, if these are not all: those of one sequence, of which ``sequences`` is the dimension; with -1, each
    sequence has the same. ``strides``: of a result that is not contiguous."""

    whole: tuple[int, ...]
    shape: tuple[int, ...] = ()
    dim: int = -1
    sequences: int = -1
    length: int = 0
    strides: tuple[int, ...] = ()

    def tile(self, value: torch.Tensor, start: int, size: int) -> torch.Tensor:
        """The tile of a value, viewed in ``shape``, that begins at a row: a view; all of a value that is not cut."""
        if self.dim < 0:
            return value
        if self.sequences >= 0:
            value = value.narrow(self.sequences, start // self.length, 1)
        return value.narrow(self.dim, start % self.length if self.length else start, size)


@dataclass(frozen=True, slots=True)
class Program:
    """The operations of a tile of ``size`` rows, and of the ``last`` one if that has fewer. ``rows``: of all tiles."""

    rows: int
    size: int
    takes: tuple[Tiled, ...]
    makes: tuple[Tiled, ...]
    tile: fx.GraphModule
    last: fx.GraphModule | None

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first row of each tile, and its end."""
        return [(start, min(start + self.size, self.rows)) for start in range(0, self.rows, self.size)]

    @property
    def bodies(self) -> list[tuple[fx.GraphModule, int]]:
        """Each body with the number of tiles that it runs for."""
        whole = [(self.tile, self.rows // self.size)]
        return whole if self.last is None else [*whole, (self.last, 1)]

    def text(self) -> str:
        """The program as ``program_of`` reads it."""
        cuts = {"takes": [asdict(cut) for cut in self.takes], "makes": [asdict(cut) for cut in self.makes]}
        last = None if self.last is None else graph_to_json(self.last)
        return json.dumps({"rows": self.rows, "size": self.size, **cuts, "tile": graph_to_json(self.tile), "last": last})


@functools.lru_cache(maxsize=512)
def program_of(text: str) -> Program:
    """Reads the text of a program. Raises GraphFormatError for operations that a graph may not have."""
    data = json.loads(text)
    takes, makes = (
        tuple(Tiled(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}) for row in data[name])
        for name in ("takes", "makes")
    )
    last = None if data["last"] is None else graph_from_json(data["last"])
    return Program(data["rows"], data["size"], takes, makes, graph_from_json(data["tile"]), last)


@in_graphs
def run_tiles(program: str, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Runs a program for one tile after the other. What is inside a tile is gone before the next one begins."""
    described = program_of(program)
    cut = [value.view(take.shape) if take.dim >= 0 else value for value, take in zip(operands, described.takes, strict=True)]
    results: list[torch.Tensor] = []
    dtypes: list[torch.dtype] = []
    for start, end in described.bounds:
        body = described.tile if end - start == described.size or described.last is None else described.last
        parts = list(body(*(take.tile(value, start, end - start) for value, take in zip(cut, described.takes, strict=True))))
        if not start:
            dtypes = [part.dtype for part in parts]
            results = [_begun(part, make) for part, make in zip(parts, described.makes, strict=True)]
        for place, make in enumerate(described.makes):
            if make.dim >= 0:
                make.tile(results[place], start, end - start).copy_(parts[place])
            elif start:
                results[place].add_(parts[place])
        del parts
    return tuple(r.to(dtype).view(m.whole) for r, dtype, m in zip(results, dtypes, described.makes, strict=True))


def _begun(part: torch.Tensor, make: Tiled) -> torch.Tensor:
    """A result after the first tile: room for all rows, or a sum so far, in fp32 where the parts are in half precision."""
    if make.dim >= 0:
        return part.new_empty_strided(make.shape, make.strides) if make.strides else part.new_empty(make.shape)
    return part.float() if part.dtype in HALF else part


def inside_nbytes(program: Program, peak: int) -> int:
    """The bytes that a program needs beside operands and results. ``peak``: of a tile's body."""
    results: Any = program.tile.graph.output_node().args[0]
    halves = [
        make for node, make in zip(results, program.makes, strict=True) if node.meta["val"].dtype in HALF and make.dim < 0
    ]
    return peak + sum(4 * prod(make.whole) for make in halves)
