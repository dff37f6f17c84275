"""The memory report of a compiled model: its figures, and its programs with what each was planned to take."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from typing import Any

from mtcompile.execution.compiled import CompiledStep
from mtcompile.execution.program import Program
from mtcompile.runtime.schedule import gib
from mtcompile.runtime.trace import time_of


class MemoryReport(dict[str, Any]):
    """The dictionary that ``memory_report`` returns, which notebooks show as tables."""

    def _repr_html_(self) -> str:
        figures = [(name, gib(value)) for name, value in self.items() if isinstance(value, int)]
        programs = [
            (
                row["program"] + (" (last)" if row["last"] else ""),
                gib(row["planned_peak_device_bytes"]),
                gib(row["planned_peak_host_bytes"]),
                time_of(row["step_time_us"]),
            )
            for row in self.get("programs", ())
        ]
        header = ("program", "device, planned", "host, planned", "step, predicted")
        return _table(("", "held"), figures) + (_table(header, programs) if programs else "")


def rows(programs: Iterable[Program], last: CompiledStep | None) -> list[dict[str, Any]]:
    """Returns a dictionary per compiled program. ``program``: its signature; ``last``: whether it is the one that last trained,
    whose plan and schedule ``model.plan`` and ``model.schedule`` are."""
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


def _table(header: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{row(header, 'th')}{''.join(row(cells, 'td') for cells in body)}</table>"
