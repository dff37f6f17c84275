"""Keeps the answers of ``mtcompile plan`` in the cache, so that the same question is answered again without loading torch.

A question is all that its answer depends on: the options, these sources, the packages that trace and solve, the processor and
the environment. Questions about a user's code or about this machine's speeds are not kept: they depend on more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mtcompile import knobs
from mtcompile.cached.files import own_sources, read, write
from mtcompile.machine.system_files import text_of
from mtcompile.reading import installed_version

_KIND = "answers"
_PACKAGES = ("torch", "numpy", "highspy", "networkx")
_SETTINGS = ("MT_", "ATEN_", "OMP_", "MKL_", "TORCH", "PYTORCH")  # variables that may change what is traced or found
_SILENT = ("MT_CACHE", "MT_PROGRESS")  # those that change no answer


class Answer(NamedTuple):
    """The answer to a question, as both forms of output. ``feasible``: whether the step fits."""

    text: str
    as_json: str
    feasible: bool


def key_of(model: str, question: Mapping[str, Any]) -> str | None:
    """Returns the key of a question about a model with these options by name; None if its answer is not kept. Neither is it
    in a process that has loaded torch: it would gain little, and may plan with shapes and rules of its own."""
    machine = str(question["machine"])
    if "torch" in sys.modules or knobs.debug() or knobs.dump() or knobs.viz():
        return None
    if ":" in model or model.endswith((".py", ".json")) or machine == "this":
        return None
    about = [sys.version, own_sources(), _processor(), *map(installed_version, _PACKAGES)]
    about += [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(_SETTINGS) and name not in _SILENT]
    about.append(text_of(Path(machine)) if machine.endswith(".json") else "")  # if there is none, planning says so
    return hashlib.sha256(repr((model, sorted(question.items()), about)).encode()).hexdigest()


def known_answer(key: str | None) -> Answer | None:
    """Reads the answer that was written with a key; None if there is none or it cannot be read."""
    with contextlib.suppress(ValueError, TypeError):
        text, as_json, feasible = json.loads(read(_KIND, key) or "")
        return Answer(str(text), str(as_json), bool(feasible))
    return None


def keep_answer(key: str | None, answer: Answer) -> None:
    if key is not None:
        write(_KIND, key, json.dumps(answer))


def _processor() -> str:
    """Returns what says which of torch's CPU kernels are traced, and by how many threads."""
    if not (lines := text_of(Path("/proc/cpuinfo")).splitlines()):
        return f"{os.cpu_count()}"
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{os.cpu_count()} {len(os.sched_getaffinity(0))} {flags}"
