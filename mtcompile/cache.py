"""What is remembered between runs, on disk: joint graphs, so that nothing is traced; plans, and the candidates they were
chosen from, so that nothing is searched, whatever the budget; this machine's speeds and times of its kernels, so that nothing
is measured.

What comes from here is text, never code. A plan is decisions: it is rewritten, lowered, measured against the budgets and
proven as a new one is, and dropped where it no longer fits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from mtcompile import knobs, passes
from mtcompile.passes.graph_json import GraphFormatError, graph_from_json, graph_to_json
from mtcompile.passes.plan import Plan, plan_from_json
from mtcompile.passes.step_graph import kernel_of, listing, regions

if TYPE_CHECKING:
    from mtcompile.passes.analysis.state import Budgets
    from mtcompile.passes.planning.problem import Planned

Times = Mapping[str, Mapping[str, tuple[float, float]]]  # queue -> what ran there -> microseconds: measured, by formula


def read_joint(key: str | None) -> fx.GraphModule | None:
    """A normalized joint graph; ``key`` is capture.joint_key's."""
    text = _read("joints", key and _digest(key))
    try:
        return graph_from_json(text) if text else None
    except GraphFormatError:
        return None


def write_joint(key: str | None, joint: fx.GraphModule) -> None:
    if key is None or joint.meta["constants"]:  # a tensor's content is not written
        return
    with contextlib.suppress(GraphFormatError):
        _write("joints", _digest(key), graph_to_json(joint))


def plan_key(step: fx.GraphModule, *constraints: Any) -> str:
    """By the step graph with its kernels' bodies, and what the plan must keep to."""
    kernels = sorted({str(kernel_of(step, region).meta["key"]) for region in regions(step)})  # not those of rewritten copies
    return _digest("\n".join([listing(step), *kernels, *map(repr, [step.meta["homes"], *constraints])]))


def planned(key: str, find: Callable[[Plan | None], Planned]) -> Planned:
    """What ``find`` makes of the plan that was found for all of this before, if any; its plan is remembered."""
    known = read_plan(key)
    found = find(known)
    if known is None or found.plan.decisions != known.decisions:
        write_plan(key, found.plan)
    return found


def read_plan(key: str) -> Plan | None:
    text = _read("plans", key)
    try:
        return plan_from_json(text) if text else None
    except (ValueError, TypeError, KeyError):
        return None


def write_plan(key: str, plan: Plan) -> None:
    _write("plans", key, plan.to_json())


@dataclass(frozen=True, slots=True)
class Points:
    """Where the search of one step keeps the plans it looked at; ``key``: a plan_key of all but the bytes it may take."""

    key: str

    def read(self) -> str | None:
        return _read("points", self.key)

    def write(self, text: str) -> None:
        _write("points", self.key, text)


def points(step: fx.GraphModule, budgets: Budgets, *constraints: Any) -> Points:
    return Points(plan_key(step, replace(budgets, device=None, host=None), *constraints))


def machine_path(identity: str) -> Path | None:
    """The machine file of what ``identity`` names; it does not depend on these sources. None: nothing is remembered."""
    return _path("machines", hashlib.sha256(identity.encode()).hexdigest()[:16])


def write_machine(identity: str, text: str) -> None:
    if path := machine_path(identity):
        _write("machines", path.stem, text)


def times_key(machine: str, device: str, kernels: str) -> str:
    """``device``: the kind of it, so that an emulated machine is not taken for a real one; ``kernels``: eager or Inductor's."""
    return _digest(f"times {machine} on {device}, {kernels}")


def read_times(key: str) -> Times | None:
    """None where nothing was measured, or where what is there makes no sense."""
    text = _read("times", key)
    try:
        data = json.loads(text) if text else {}
        times = {q: {what: (float(us), float(formula)) for what, (us, formula) in rows.items()} for q, rows in data.items()}
    except (ValueError, TypeError, AttributeError):
        return None
    sound = all(0 <= us < inf for rows in times.values() for pair in rows.values() for us in pair)
    return times if times and sound else None


def write_times(key: str, times: Times) -> bool:
    """Whether they are there now."""
    _write("times", key, json.dumps(times, indent=1))
    return read_times(key) == times


def _digest(text: str) -> str:
    """With what else it depends on: threads, torch, and these sources, so that another version starts anew."""
    about = f"{torch.__version__} {torch.get_num_threads()} {_sources()}"
    return hashlib.sha256(f"{about}\n{text}".encode()).hexdigest()


def _path(kind: str, key: str) -> Path | None:
    folder = knobs.cache()
    return Path(folder, kind, f"{key}.json") if folder else None


def _read(kind: str, key: str | None) -> str | None:
    path = _path(kind, key) if key else None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text() if path else None
    return None


def _write(kind: str, key: str, text: str) -> None:
    """Whole or not at all; a disk that refuses costs the next run its time."""
    path = _path(kind, key)
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for file in (__file__, passes.__file__):
        for path in sorted(Path(str(file)).parent.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
