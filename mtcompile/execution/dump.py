"""Prints and writes what was compiled, as ``MT_DEBUG`` and ``MT_DUMP`` ask."""

from __future__ import annotations

import os
from pathlib import Path

from mtcompile import knobs
from mtcompile.execution.compiled import CompiledStep
from mtcompile.passes import rewrite
from mtcompile.passes.step_graph import listing
from mtcompile.reading import write_replacing


def dump(compiled: CompiledStep) -> None:
    """Prints with MT_DEBUG: 1 the plan, 2 also the schedule, 3 also the step graph after each pass. With MT_DUMP=dir, writes
    plan, schedule and rewritten step graph to files in dir."""
    level, folder = knobs.debug(), knobs.dump()
    if level >= 1:
        print(f"program: {compiled.signature}\n{compiled.plan}")
    if level >= 2:
        print(compiled.schedule)
    if level >= 3:
        rewrite(compiled.problem.step, compiled.plan, lambda name, step: print(f"--- after {name}\n{listing(step)}"))
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"program{len(list(Path(folder).glob('*.plan.json')))}-{os.getpid()}"
        write_replacing(Path(folder, f"{name}.plan.json"), compiled.plan.to_json(indent=1))
        write_replacing(Path(folder, f"{name}.schedule.json"), compiled.schedule.to_json(indent=1))
        write_replacing(Path(folder, f"{name}.step.txt"), listing(compiled.step))
