"""The inputs and outputs of joint and step graphs: what each placeholder and each result means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mtcompile.runtime.schedule import Role, Tier


@dataclass(frozen=True, slots=True)
class Fragment:
    """The rows ``start`` to ``end`` of a parameter [rows, columns], which is input ``index`` of the program."""

    parameter: str
    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Places:
    """The places of the numbers of input ``index`` in a parameter of ``rows`` rows, once only those that the inputs ``among``
    name are there, in order. The number ``without`` gets the place ``spare``; what is no row gets -1."""

    index: int
    among: tuple[int, ...]
    rows: int
    without: int = -1
    spare: int = -1


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The source of a placeholder's tensor. ``index``: position among the program's inputs; for a tangent, the
    position of its output; -1 for a constant. ``name``: the user's name (a parameter's path), unique in the graph.
    ``tier``: where an input arrives. ``fragment``: what it is a part of; ``places``: what it says the places of. Its own index
    is then none of the program's. ``in_backward``: its values are those that the backward finds when it begins; another
    placeholder of this index has those of the forward."""

    role: Role
    name: str
    index: int
    differentiable: bool = False
    tier: Tier = "host"
    fragment: Fragment | None = None
    places: Places | None = None
    in_backward: bool = False


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The meaning of one result: the ``index``-th output, the gradient of input ``index``, or the new version of input
    ``index`` (a mutated buffer or input; for an update, a parameter). ``in_backward``: of a new version that the backward
    makes, not the forward."""

    kind: Literal["output", "grad", "mutation", "update"]
    index: int
    name: str
    in_backward: bool = False
