"""Timelines of running models: ``model.schedule.show()``, ``compile(..., viz=path)`` and ``MT_VIZ``."""

from __future__ import annotations

import itertools
import os
import tempfile
import warnings
import webbrowser
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from torch import fx

from mtcompile import knobs
from mtcompile.execution.compiled import CompiledStep
from mtcompile.passes.analysis.names import value_names
from mtcompile.passes.plan import Plan
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.trace import Trace
from mtcompile.viz.notebook import timeline
from mtcompile.viz.page import write

_numbers = itertools.count()  # of the pages that this process writes by itself
_OF_SCHEDULE = tuple(f.name for f in fields(Schedule))


@dataclass(frozen=True, slots=True, eq=False)
class Viewable(Schedule):
    """A schedule that can be shown as a timeline. It equals the plain schedule."""

    measured: Trace | None = field(default=None, repr=False)
    plan: Plan | None = field(default=None, repr=False)
    title: str = field(default="", repr=False)
    names: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _OF_SCHEDULE)

    __hash__ = Schedule.__hash__

    def _repr_html_(self) -> str:
        """Returns the timeline, as notebooks show it."""
        return timeline(self, measured=self.measured, plan=self.plan, title=self.title, names=self.names)

    def show(self, path: str | Path | None = None, open: bool = True) -> Path:
        """Write the schedule as an HTML timeline (by default to a new temporary file), open that in a browser if there is
        one, and return its path. Raises OSError when the file cannot be written."""
        if path is None:
            handle, path = tempfile.mkstemp(prefix="mtcompile-", suffix=".html")
            os.close(handle)
        page = write(self, path, measured=self.measured, plan=self.plan, title=self.title, names=self.names).resolve()
        if open:
            webbrowser.open(page.as_uri())
        return page


def viewable(
    schedule: Schedule, step: fx.GraphModule, plan: Plan | None = None, measured: Trace | None = None, title: str = ""
) -> Viewable:
    """Returns a schedule that can be shown. ``step``: the step graph it was lowered from, which has the user's names."""
    parts = {name: getattr(schedule, name) for name in _OF_SCHEDULE}
    return Viewable(**parts, measured=measured, plan=plan, title=title, names=value_names(step))


def view(program: CompiledStep, measured: Trace | None, title: str) -> Viewable:
    """Returns a program's schedule, to be shown under the model's title, the machine's name and what tells the program from
    others. ``measured``: its last step."""
    heading = f"{' on '.join(filter(None, (title, program.problem.machine.name)))} ({program.signature})"
    return viewable(program.schedule, program.step, program.plan, measured, heading)


class Pages:
    """Listens to a model's steps, and writes a page for each program that trains: after its first step as predicted, and after
    its second with what was measured. ``path``: the first program's page; None: numbered pages in ``folder``."""

    def __init__(self, path: Path | None, folder: Path, title: str = "") -> None:
        self.path, self.folder, self.title = path, folder, title
        self._begun: dict[int, tuple[Schedule, Path]] = {}  # by id; the schedule is held, so that no other takes its id
        self._finished: set[int] = set()

    def wants_device_times(self, schedule: Schedule) -> bool:
        """Tells whether the next step of this schedule will be written."""
        return id(schedule) not in self._finished

    def step_ran(self, program: CompiledStep, measured: Trace | None) -> None:
        """Write the page after a step. Only warns when it cannot: the step is worth more."""
        schedule, shown = program.schedule, view(program, measured, self.title)
        if not self.wants_device_times(schedule):
            return
        if id(schedule) in self._begun:
            self._finished.add(id(schedule))
        else:
            self._begun[id(schedule)] = schedule, self._next()
            shown = replace(shown, measured=None)
        target = self._begun[id(schedule)][1]
        try:
            shown.show(target, open=False)
        except OSError as error:
            self._finished.add(id(schedule))
            warnings.warn(f"expected to write the timeline to {target}, found {error}; pass another viz=", stacklevel=2)

    def _next(self) -> Path:
        if self.path is None:
            return self.folder / f"mtcompile-{os.getpid()}-{next(_numbers)}.html"
        number = len(self._begun) + 1
        return self.path if number == 1 else self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}")


def timelines(path: str | Path | None, title: str) -> list[Pages]:
    """Returns the pages asked for by ``viz=`` or, where that is None, by MT_VIZ, as listeners: one or none. ``title``: the
    model's."""
    folder = knobs.viz()
    if path is None and not folder:
        return []
    return [Pages(None if path is None else Path(path), Path(folder), title)]
