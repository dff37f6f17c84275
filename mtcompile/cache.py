"""Remembers what takes long to make. The cache on disk keeps between runs: joint graphs, so that nothing is traced
again; plans and the candidates they were chosen from, so that nothing is searched again, whatever the budget; this machine's
speeds and the times of its kernels, so that nothing is measured again. This process remembers the joint graphs of all models.

The cache holds text, never code. A file is read only if this user wrote it and nobody else can write it; its first line is a
digest of its key and content, and any doubt is a miss. A plan is a list of decisions: a plan from the cache is rewritten,
lowered, measured against the budgets and proven like a new one, and dropped if it no longer fits.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from mtcompile.cached import files
from mtcompile.cached.remembered import Remembered
from mtcompile.passes.analysis.memory import workspace_nbytes
from mtcompile.passes.analysis.state import is_trained
from mtcompile.passes.graph_json import GraphFormatError, graph_from_json, graph_to_json
from mtcompile.passes.plan import Plan, plan_from_json
from mtcompile.passes.registered import NotKnown, key_of
from mtcompile.passes.step_graph import inputs_of, kernel_of, listing, regions
from mtcompile.reading import parsed_json
from mtcompile.torch_private.plain_torch import stand_ins

if TYPE_CHECKING:
    from mtcompile.passes.planning.problem import Planned, PlanningProblem

Times = Mapping[str, Mapping[str, tuple[float, float]]]  # queue -> operation -> microseconds: (measured, by formula)

# What compiled chains have shown: those that are equal to eager, the operations and the chains that differ, with their names.
Chains = tuple[set[str], dict[str, str], dict[str, str]]

_joints = Remembered[str](64 << 20, len)  # packed; one of a thousand nodes has 40 kB


def read_joint(key: str | None) -> fx.GraphModule | None:
    """Reads a normalized joint graph that some process wrote. None if there is none or it cannot be read."""
    return _unpacked(files.read("joints", key and _digest(key)))


def write_joint(key: str | None, joint: fx.GraphModule) -> None:
    """Writes a joint graph, unless it holds large constant tensors or something that JSON cannot say."""
    if key is not None and (packed := _packed(joint)):
        files.write("joints", _digest(key), packed)


def recalled_joint(key: str | None) -> fx.GraphModule | None:
    """Returns a copy of a normalized joint graph that this process has traced; ``key`` comes from capture.program_key."""
    return _unpacked(_joints.get(key))


def remember_joint(key: str | None, joint: fx.GraphModule) -> None:
    """Lets this process remember a joint graph, unless it holds large constant tensors or something that JSON cannot say."""
    if key is not None and (packed := _packed(joint)):
        _joints.put(key, packed)


def _unpacked(packed: str | None) -> fx.GraphModule | None:
    with contextlib.suppress(ValueError, zlib.error):  # GraphFormatError too: as if there were none
        text = zlib.decompress(base64.b64decode(packed)).decode() if packed else ""
        if '"mtcompile.' in text:
            stand_ins()  # which define operators
        return graph_from_json(text) if text else None
    return None


def _packed(joint: fx.GraphModule) -> str:
    """A joint graph as text."""
    with contextlib.suppress(GraphFormatError):
        return base64.b64encode(zlib.compress(graph_to_json(joint, whole=True).encode(), 1)).decode()
    return ""


def plan_key(problem: PlanningProblem, *constraints: Any) -> str | None:
    """Hashes the step graph, the bodies of its kernels, the constraints on the plan, and what registered passes do; None if
    one of these uses a value that no text describes."""
    step, own = problem.step, [(transform, problem.passes.index(transform)) for transform in problem.own_passes]
    try:
        constraints = *constraints, *_constraints(problem), *map(key_of, own)
    except NotKnown:
        return None
    kernels = sorted({str(kernel_of(step, region).meta["key"]) for region in regions(step)})  # not those of rewritten copies
    trained = [spec.name for spec, _ in inputs_of(step) if is_trained(spec)]
    homes, sliced = step.meta["homes"], step.meta.get("sliced", ())
    ranks = step.meta.get("ranks", 1), step.meta.get("hosts", 1)
    return _digest("\n".join([listing(step), *kernels, *map(repr, [homes, sliced, ranks, trained, *constraints])]))


def through_cache(key: str | None, make_plan: Callable[[Plan | None], Planned]) -> Planned:
    """Calls ``make_plan`` with the cached plan of this key (None if there is none), and caches the plan it returns."""
    text, cached = files.read("plans", key), None
    with contextlib.suppress(ValueError, TypeError, KeyError):  # it cannot be read: as if there were none
        cached = plan_from_json(text) if text else None
    planned = make_plan(cached)
    if key is not None and (cached is None or planned.plan.decisions != cached.decisions):
        files.write("plans", key, planned.plan.to_json())
    return planned


def recalled(problem: PlanningProblem, policy: str, find: Callable[[Plan | None], Planned]) -> Planned:
    """Returns the plan for a problem, cached between runs. ``find``: makes it, given the plan found before, if any."""
    return through_cache(plan_key(problem, problem.budgets, policy), find)


def _constraints(problem: PlanningProblem) -> tuple[object, ...]:
    workspace = "by shapes" if problem.workspace is workspace_nbytes else "measured"
    return problem.machine, problem.fixed_homes, str(problem.numerics), workspace, problem.effort


def machine_path(identity: str) -> Path | None:
    """Returns the machine file for an ``identity``, which does not depend on these sources; None if the cache is off. It
    is JSON without a digest: people may read and change it."""
    return files.path_of("machines", hashlib.sha256(identity.encode()).hexdigest()[:16])


def write_machine(identity: str, text: str) -> None:
    if path := machine_path(identity):
        files.write_whole(path, text)


def times_key(machine: str, device: str, kernels: str) -> str:
    """Hashes a machine's name, the device's type (so that emulated and real machines differ) and "eager" or "inductor"."""
    return _digest(f"times {machine} on {device}, {kernels}")


def read_times(key: str) -> Times | None:
    """Reads measured times; None if there are none, or if they are not all finite and at least 0."""
    text = files.read("times", key)
    try:
        data = parsed_json(text, "times") if text else {}
        times = {q: {name: (float(us), float(formula)) for name, (us, formula) in rows.items()} for q, rows in data.items()}
    except (ValueError, TypeError, AttributeError):
        return None
    sound = all(0 <= us < inf for rows in times.values() for pair in rows.values() for us in pair)
    return times if times and sound else None


def write_times(key: str, times: Times) -> bool:
    """Writes measured times. Returns whether they can be read back."""
    files.write("times", key, json.dumps(times, indent=1))
    return read_times(key) == times


def chains_key(identity: str) -> str:
    """Hashes on what the bits of compiled chains may depend."""
    return _digest(f"chains {identity}")


def read_chains(key: str | None) -> Chains:
    """Reads what chains have shown: nothing if there is none, or if it cannot be read."""
    text = files.read("chains", key)
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        if text:
            equal, *named = parsed_json(text, "chains")
            operations, chains = ({str(key): str(words) for key, words in each.items()} for each in named)
            return set(map(str, equal)), operations, chains
    return set(), {}, {}


def write_chains(key: str, shown: Chains) -> None:
    """Writes what chains have shown, beside what other processes have written."""
    known = read_chains(key)
    equal, *named = shown[0] | known[0], known[1] | shown[1], known[2] | shown[2]
    files.write("chains", key, json.dumps([sorted(equal - named[1].keys()), *named], indent=1))


def _digest(text: str) -> str:
    """Hashes ``text`` with torch's version, the number of threads and these sources, so that a new version starts afresh."""
    versions = f"{torch.__version__} {torch.get_num_threads()} {files.own_sources()}"
    return hashlib.sha256(f"{versions}\n{text}".encode()).hexdigest()
