"""Plans remembered between runs, on disk: the search is left out when the same step is planned for the same budgets.

What is remembered is decisions, never numbers or bytes: a plan from here is rewritten, lowered, measured against the
budgets and proven as a new one is, and dropped where it no longer fits.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mtcompile import knobs, passes
from mtcompile.passes.plan import Plan, plan_from_json
from mtcompile.passes.step_graph import listing


def key_of(step: fx.GraphModule, *constraints: Any) -> str:
    """By the step graph with its kernels' bodies, what the plan must keep to, threads, torch, and the passes themselves."""
    kernels = sorted(step.meta["kernels"])
    about = [torch.__version__, torch.get_num_threads(), _sources(), step.meta["homes"], *constraints]
    text = "\n".join([listing(step), *kernels, *map(repr, about)])
    return hashlib.sha256(text.encode()).hexdigest()


def remembered(key: str) -> Plan | None:
    path = _path(key)
    if path is None:
        return None
    try:
        return plan_from_json(path.read_text())
    except (OSError, ValueError, TypeError, KeyError):  # none, or not one of this version
        return None


def remember(key: str, plan: Plan) -> None:
    """Written whole or not at all; a disk that refuses costs the next run its search."""
    path = _path(key)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False) as file:
            file.write(plan.to_json())
        os.replace(file.name, path)
    except OSError:
        pass


def _path(key: str) -> Path | None:
    folder = knobs.cache()
    return Path(folder, "plans", f"{key}.json") if folder else None


@cache
def _sources() -> str:
    """A digest of the passes' source files: another planner plans anew."""
    digest = hashlib.sha256()
    for path in sorted(Path(passes.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
