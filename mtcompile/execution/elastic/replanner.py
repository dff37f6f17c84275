"""Plans again in the background for the speeds of the last steps, and swaps plans between steps.

    steps    | plan A | A | A | A | A | A | plan B | B | ...
    speeds          measured, 3 steps
    planning                    for these speeds
    swap                                  B built and proven, if it is at least 3 % faster by the same speeds

A plan changes no bits: kernels are eager, and every plan computes the captured graph. Homes of parameters stay where they are.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch

from mtcompile.compiler import JointStep, PlannedStep, Target, built_step, pass_errors
from mtcompile.execution.calibration import speeds
from mtcompile.execution.compiled import CompiledStep
from mtcompile.execution.elastic.speeds import Recent, Speeds, drift_of
from mtcompile.execution.session import CompiledSteps, Session
from mtcompile.passes.cuts.form import WHOLE
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.disk.within import within_disk
from mtcompile.passes.planning.evaluate import completed, evaluate
from mtcompile.passes.planning.limits import fits
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem, leaves_room
from mtcompile.runtime.schedule import Schedule, gib
from mtcompile.runtime.trace import Trace, time_of

GAIN = 0.03  # of the step time, that a swap must save
_MOST_SWAPS, _WITHIN = 8, 500  # swaps in so many steps
_NOTABLE, _MUCH = 1.1, 1.5  # drifts of a queue's speed that are worth a plan: where the last one was of use; at all times
_LEAST_REST = 20  # steps
_TIMED_EVERY = 2  # steps, where a step must be timed on purpose


@dataclass(slots=True)
class _Job:
    """A plan that is being made. ``problem``: with the measured speeds. ``before_us``: the step time of the plan in use, by
    these speeds; ``plan``: the fastest found, None if nothing fits. ``error``: what stopped the planning."""

    recent: Recent
    problem: PlanningProblem
    why: str
    beside: int
    thread: threading.Thread | None = None
    before_us: float = 0.0
    plan: Plan | None = None
    error: Exception | None = None


class Elastic:
    """Listens to a session's steps and swaps its plans. ``changes``: a line for each swap."""

    def __init__(self, session: Session) -> None:
        self.changes: list[str] = []
        self._session, self._speeds = session, Speeds(speeds(session.device, session.options))
        self._job: _Job | None = None
        self._steps = self._rests = self._rests_until = 0
        self._swaps: deque[int] = deque(maxlen=_MOST_SWAPS)  # the steps of the last ones

    # ------------------------------------------------------------------------------------------------------ listening

    def wants_device_times(self, schedule: Schedule) -> bool:
        return self._steps % _TIMED_EVERY == 0

    def step_ran(self, compiled: CompiledStep, measured: Trace | None) -> None:
        self._steps += 1
        if measured is None or compiled.tangents is None:
            return
        recent = self._speeds.add(compiled, measured)
        if recent is None or self._job is not None or not self._may_swap():
            return
        machine = self._speeds.now(recent)
        drift = drift_of(recent, machine)
        if drift.far > _MUCH or (drift.far > _NOTABLE and self._steps >= self._rests_until):
            recent.scale = machine.measured.scale if machine.measured is not None else None
            self._start(recent, replace(compiled.problem, machine=machine), str(drift))

    def _may_swap(self) -> bool:
        return len(self._swaps) < _MOST_SWAPS or self._steps - self._swaps[0] >= _WITHIN

    def _rest(self) -> None:
        """Lets small drifts alone for a while, twice as long each time in a row that planning again was for nothing."""
        self._rests = min(max(_LEAST_REST, 2 * self._rests), _WITHIN)
        self._rests_until = self._steps + self._rests

    # ------------------------------------------------------------------------------------------------------- planning

    def _start(self, recent: Recent, problem: PlanningProblem, why: str) -> None:
        """Starts to plan, with parameters at home where they are now."""
        session = self._session
        budgets, fixed = session.door.constraints(problem.step)
        workspace = partial(session.toolchain.eager.about, threads=torch.get_num_threads())  # beside a step, none is measured
        problem = replace(problem, budgets=budgets, fixed_homes=fixed, workspace=workspace)
        self._job = job = _Job(recent, problem, why, max(0, session.frames.expected - 1))
        job.thread = threading.Thread(target=_plan, args=(job, session.planning), daemon=True, name="mtcompile planning")
        job.thread.start()

    def join(self) -> None:
        """Waits for a plan that is being made."""
        if self._job is not None and self._job.thread is not None:
            self._job.thread.join()

    # ------------------------------------------------------------------------------------------------------- swapping

    def before_step(self, known: CompiledSteps) -> None:
        """Puts a plan that is ready in place of the one that it was made for, if it is worth it. Called between steps."""
        job = self._job
        if job is None or job.thread is None or job.thread.is_alive() or self._session.frames.waiting():
            return
        compiled = job.recent.compiled
        if not any(step is compiled for _, step in known.values()):
            return
        self._job = None
        if job.error is not None:
            warnings.warn(f"elastic: no plan was made for the speeds of the last steps: {job.error!r}", stacklevel=2)
        faster = job.plan is not None and job.plan.total_us <= (1 - GAIN) * job.before_us
        with pass_errors():
            swapped = faster and job.plan is not None and self._swap(job, job.plan, known)
        if swapped:
            self._rests = self._rests_until = 0
        else:
            self._rest()

    def _swap(self, job: _Job, plan: Plan, known: CompiledSteps) -> bool:
        """Builds and proves a plan and lets it take over. Tells whether it fits."""
        session, compiled = self._session, job.recent.compiled
        session.drain()
        problem = replace(job.problem, workspace=session.toolchain.eager.measured)  # now kernels may be run
        candidate = evaluate(problem, plan)
        now, _ = session.door.constraints(problem.step)
        if not fits(candidate.plan, now) or not leaves_room(now, candidate.schedule, job.beside):
            return False
        planned = completed(problem, candidate, plan.minimum_device_bytes, plan.certificate)
        target = Target(session.options, session.device, session.toolchain, problem.machine)
        best = PlannedStep(JointStep(compiled.joint, problem.numerics, WHOLE), problem, planned)
        new = built_step(best, compiled.tangents, target, session.door)
        for key, (_, step) in list(known.items()):
            if step is compiled:
                known[key] = session.parameters.version, new
        self._speeds.replaced(job.recent, new)
        self._swaps.append(self._steps)
        saved = 1 - new.plan.total_us / job.before_us
        self.changes.append(
            f"step {self._steps}: {job.why}; {_difference(compiled.schedule, new.schedule)}; predicted are "
            f"{time_of(new.plan.total_us)} a step instead of {time_of(job.before_us)} (-{saved:.0%})"
        )
        return True


def follow_speeds(session: Session) -> None:
    """Lets a session's plans follow the speeds of its steps."""
    elastic = Elastic(session)
    session.replanner = elastic
    session.listeners.append(elastic)


def _plan(job: _Job, planning: AbstractContextManager[object]) -> None:
    """Makes a plan, in a thread of its own. ``planning``: held meanwhile."""
    problem = job.problem
    try:
        with planning:
            job.before_us = evaluate(problem, job.recent.compiled.plan).plan.total_us
            searched_for, planned = within_disk(problem, lambda part: (part, make_plan(part)))
            job.problem, job.plan = searched_for, planned.plan
            for earlier in job.recent.earlier:
                again = evaluate(problem, earlier).plan
                if fits(again, problem.budgets) and again.total_us <= job.plan.total_us:  # so that speeds that return find it
                    job.problem, job.plan = problem, replace(again, certificate=planned.plan.certificate)
    except DoesNotFit:
        pass
    except Exception as error:  # told by whoever takes it
        job.error = error


def _difference(old: Schedule, new: Schedule) -> str:
    """Says what a step does now and what it did before."""

    def moved(schedule: Schedule) -> int:
        return sum(i.nbytes for i in schedule.instructions if i.queue in ("h2d", "d2h"))

    def recomputing(schedule: Schedule) -> int:
        return sum(i.work == "recompute" for i in schedule.instructions)

    return (
        f"a step copies {gib(moved(new))} instead of {gib(moved(old))}, and {recomputing(new)} regions recompute instead of "
        f"{recomputing(old)}"
    )
