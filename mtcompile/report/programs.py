"""The programs of a compiled model: which there are, and what each was planned to take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mtcompile.execution.compiled import CompiledStep
from mtcompile.execution.program import Program


def rows(programs: Iterable[Program], last: CompiledStep | None) -> list[dict[str, Any]]:
    """Returns an object per compiled program. ``program``: its signature; ``last``: whether it is the one that last trained, of
    which ``model.plan`` and ``model.schedule`` are."""
    return [
        {
            "program": compiled.signature,
            "last": compiled is last,
            "planned_peak_device_bytes": compiled.schedule.peak_nbytes.get("device", 0),
            "planned_peak_host_bytes": compiled.schedule.peak_nbytes.get("host", 0),
            "step_time_us": compiled.plan.total_us,
        }
        for compiled in _compiled(programs)
    ]


def _compiled(programs: Iterable[Program]) -> Iterator[CompiledStep]:
    for program in programs:
        steps = [step for _, step in program.compiled.values() if isinstance(step, CompiledStep)]
        yield from {step.tangents: step for step in steps}.values()  # without those compiled for other places of parameters
        yield from _compiled(program.of_micro_batches())
