"""Expresses the peaks of a fixed plan by batch and sequence.

A step is traced at a few sizes. If its graphs differ only in sizes, every value's bytes are a polynomial in batch and sequence,
which those traces determine, and the peak is a maximum of sums of such polynomials. Slots are stacked here without filling
holes, so an expression gives at least what the planner needs, unless sizes are rounded up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

import sympy
from torch import fx

from mtcompile.passes.analysis.memory import body_lives, output_nbytes
from mtcompile.passes.planning.problem import Planned
from mtcompile.passes.slots import slots_of
from mtcompile.runtime.schedule import Instruction, Schedule, Tier, placed

BATCH, SEQ = sympy.symbols("batch seq", positive=True, integer=True)
Point = tuple[int, int]  # batch, sequence
Monomial = tuple[int, int]  # exponents of batch and sequence
Bytes = tuple[int, ...]  # the size of one thing at each point
Polynomial = tuple[Fraction, ...]  # a coefficient per monomial

MONOMIALS: Mapping[str, tuple[Monomial, ...]] = {  # what varies -> the monomials of a size
    "batch": ((0, 0), (1, 0)),
    "seq": ((0, 0), (0, 1), (0, 2)),
    "both": ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)),
}


class NotPolynomial(ValueError):
    """Raised if the traces differ in more than sizes."""


def peak_expressions(
    planned: Sequence[Planned], points: Sequence[Point], monomials: Sequence[Monomial]
) -> dict[str, sympy.Expr]:
    """Returns each tier's peak in bytes, from the same plan at as many points as there are monomials. Raises NotPolynomial."""
    schedules = [p.schedule for p in planned]
    first = schedules[0]
    if any([_shape(i) for i in s.instructions] != [_shape(i) for i in first.instructions] for s in schedules):
        raise NotPolynomial("expected the same schedule at every size, found others")
    inverse = sympy.Matrix([[b**i * s**j for i, j in monomials] for b, s in points]).inv()
    rows = [[Fraction(int(x.p), int(x.q)) for x in inverse.row(i)] for i in range(len(monomials))]

    def polynomial(nbytes: Bytes) -> Polynomial:
        return tuple(sum((x * n for x, n in zip(row, nbytes, strict=True)), Fraction(0)) for row in rows)

    def largest(sizes: Iterable[Bytes]) -> list[Polynomial]:
        return _largest(polynomial(nbytes) for nbytes in set(sizes))

    expressions = {}
    for tier in ("device", "host"):
        resident = largest([tuple(s.resident_nbytes.get(tier, 0) for s in schedules)])
        parts = [resident, _arena(schedules, tier, polynomial)]
        if tier == "device":
            parts.append(largest(_live(planned)))
        expressions[tier] = sympy.Add(*(_expression(part, monomials) for part in parts))
    return expressions


def evaluated(expression: sympy.Expr, batch: int, seq: int) -> int:
    """Returns the bytes at a batch and sequence, rounded up."""
    return int(sympy.ceiling(expression.subs({BATCH: batch, SEQ: seq})))


def _shape(instruction: Instruction) -> tuple[object, ...]:
    return instruction.op, instruction.queue, instruction.phase, instruction.reads, instruction.writes


def _body_nbytes(bodies: Sequence[fx.GraphModule]) -> list[Bytes]:
    """Returns the live bytes beside the outputs, at each position of a kernel's body."""
    lives = [body_lives(body.graph) for body in bodies]
    if len({len(live) for live in lives}) > 1:
        raise NotPolynomial("expected the same operations at every size, found others")
    outputs = [output_nbytes(body) for body in bodies]
    return [tuple(n - o for n, o in zip(at, outputs, strict=True)) for at in zip(*lives, strict=True)]


def _live(planned: Sequence[Planned]) -> Iterator[Bytes]:
    """Yields the bytes of pooled values, workspace and tangents at each instruction, as ``lower`` does, for all sizes."""
    schedules = [p.schedule for p in planned]
    tangents = [sum(b.nbytes for b in s.buffers.values() if b.role == "tangent" and b.tier == "device") for s in schedules]
    none = (0,) * len(planned)
    bodies: dict[tuple[str, ...], set[Bytes]] = {}
    live = none
    for alike in zip(*(s.instructions for s in schedules), strict=True):
        first = alike[0]
        if first.op in ("alloc", "free"):
            buffers = [s.buffers[first.writes[0]] for s in schedules]
            if buffers[0].kind == "pooled":
                sign = 1 if first.op == "alloc" else -1
                live = tuple(n + sign * b.nbytes for n, b in zip(live, buffers, strict=True))
        names = tuple(i.kernel for i in alike)
        if first.op == "run" and names not in bodies:
            kernels = [getattr(p.step, name, None) for p, name in zip(planned, names, strict=True)]
            graphs = [kernel for kernel in kernels if isinstance(kernel, fx.GraphModule)]
            of_update = tuple(i.workspace for i in alike)  # which has no graph
            bodies[names] = {none, *(_body_nbytes(graphs) if graphs else [of_update])}
        for inside in bodies[names] if first.op == "run" else (none,):
            more = tangents if first.phase == "backward" else none
            yield tuple(map(sum, zip(live, inside, more, strict=True)))


def _arena(schedules: Sequence[Schedule], tier: Tier, polynomial: Callable[[Bytes], Polynomial]) -> list[Polynomial]:
    """Returns the largest ends of a tier's slots. Slots are stacked from the largest down, each above all earlier ones whose
    lives overlap with its own."""
    lives: dict[str, list[int]] = {}
    for position, instruction in enumerate(schedules[0].instructions):
        if instruction.op in ("alloc", "free"):
            lives.setdefault(instruction.writes[0], []).append(position)
    last = len(schedules[0].instructions)
    sizes: dict[str, Bytes] = {}
    for slot, names in slots_of(schedules[0].instructions, schedules[0].buffers).items():
        if schedules[0].buffers[slot].tier == tier:
            sizes[slot] = tuple(sum(placed(s.buffers[name].nbytes, tier) for name in names) for s in schedules)
    stacked: list[tuple[int, int, list[Polynomial]]] = []  # start and end of a slot's life, and its possible ends in bytes
    for slot in sorted(sizes, key=lambda slot: (-sizes[slot][-1], lives[slot][0], slot)):
        start, end = (*lives[slot], last)[:2]
        size = polynomial(sizes[slot])
        below = _largest(top for first, until, tops in stacked if first <= end and start <= until for top in tops)
        stacked.append((start, end, [tuple(a + b for a, b in zip(size, top, strict=True)) for top in below] or [size]))
    return _largest(top for _, _, tops in stacked for top in tops)


def _largest(polynomials: Iterable[Polynomial]) -> list[Polynomial]:
    """Returns the polynomials that no other one dominates, coefficient by coefficient."""
    largest: list[Polynomial] = []
    for polynomial in sorted(set(polynomials), reverse=True):
        if not any(all(a >= b for a, b in zip(other, polynomial, strict=True)) for other in largest):
            largest.append(polynomial)
    return largest


def _expression(polynomials: Sequence[Polynomial], monomials: Sequence[Monomial]) -> sympy.Expr:
    """Returns the maximum of the polynomials."""
    terms = [BATCH**i * SEQ**j for i, j in monomials]
    sums = [sum(sympy.Rational(c.numerator, c.denominator) * t for c, t in zip(p, terms, strict=True)) for p in polynomials]
    return sympy.Max(*sums) if sums else sympy.Integer(0)
