"""Figures without a schedule are those of the schedule."""

from __future__ import annotations

import heapq
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Decision, Plan, Updates
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.evaluate import completed, evaluate
from mtcompile.passes.planning.figures import compiled as compiled_module
from mtcompile.passes.planning.figures.compiled import library
from mtcompile.passes.planning.figures.drawn import Drawn
from mtcompile.passes.planning.figures.evaluator import Evaluator, Figures
from mtcompile.passes.planning.pace import Due, impatient, with_pace
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.runtime.deps import waits
from mtcompile.runtime.schedule import PHASES, Schedule
from mtcompile.runtime.sim import clock
from tests.helpers.tracing import traced_case
from tests.passes.planning.drawn_plans import (
    BOUNDED,
    MACHINES,
    SLOW,
    WAYS,
    crossing,
    in_fragments,
    problem_of_ranks,
    sliced,
    varied,
    with_homes_on_disk,
)

CASES = {"chain", "tied", "cnn", "crossing", "fragments", "mixed", "straight"}


def step_of(case: str) -> Any:
    if case == "fragments":
        return in_fragments()
    return BOUNDED[case]() if case in BOUNDED else traced_case(case).step


def due_first(schedule: Schedule) -> Due:
    """Returns the updates on the host, earliest due date first, each by its first parameter."""
    _, ends = clock(schedule, waits=waits(schedule))
    due, ended = dict[str, int](), dict[str, float]()  # by home, the first to read it; by buffer, its last use
    arriving = list[tuple[float, int, float, str]]()  # when gradients are there, when they are due, the µs and the name
    for index, instruction in enumerate(schedule.instructions):
        if instruction.phase == PHASES[0]:
            due |= {name: index for name in instruction.reads if name not in due}
        elif instruction.work == "update" and instruction.queue == "host":
            there = max(ended.get(name, 0.0) for name in instruction.reads)
            homes = [schedule.buffers[name].version_of for name in instruction.writes]
            last = len(schedule)
            arriving.append((there, min(due.get(home, last) for home in homes), instruction.time_us, homes[0]))
        for name in (*instruction.reads, *instruction.writes):
            ended[name] = max(ended.get(name, 0.0), ends[index])
    order, waiting, now = list[str](), list[tuple[int, float, str]](), 0.0
    arriving.sort(reverse=True)
    while arriving or waiting:
        if not waiting:
            now = max(now, arriving[-1][0])
        while arriving and arriving[-1][0] <= now:
            heapq.heappush(waiting, arriving.pop()[1:])
        _, time_us, name = heapq.heappop(waiting)
        now += time_us
        order.append(name)
    return Due(tuple(order), any(i.work == "convert" and i.phase == PHASES[1] for i in schedule.instructions))


def check(problem: PlanningProblem, plan: Plan, candidates: Candidates) -> None:
    """Checks the plan, and it with other paces of its updates."""
    evaluator, others = candidates._evaluator, [impatient(plan)]
    due = evaluator.due_first(plan)
    if plan.updates is not None and not plan.updates.held:
        others.append(with_pace(plan, True, due.order))
    for one in (plan, *(other for other in others if other is not None)):
        expected = (candidate := evaluate(problem, one)).plan
        assert evaluator.figures(one) == Figures(expected.peak_bytes, expected.step_time_us, expected.update_us)
        if one.updates is not None and not one.updates.held:
            assert evaluator.due_first(one) == due_first(candidate.schedule)


@pytest.mark.parametrize("plans", [5, pytest.param(120, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", sorted(CASES))
def test_figures_are_those_of_the_schedule(case: str, plans: int) -> None:
    rnd, ways = random.Random(case), sorted(WAYS)
    for number in range(plans):
        machine, way = MACHINES[number % len(MACHINES)], WAYS[ways[number % len(ways)]]
        candidates = Candidates(problem := PlanningProblem(step_of(case), machine, Budgets(updates=way)))
        check(problem, varied(candidates, rnd), candidates)


@pytest.mark.parametrize("plans", [5, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("case", ["chain", "cnn", "tied", "mixed"])
def test_figures_of_ranks_are_those_of_the_schedule(case: str, hosts: int, plans: int) -> None:
    rnd, ways, combined = random.Random(case), sorted(WAYS), set[str]()
    for number in range(plans):
        way = WAYS[ways[number % len(ways)]]
        candidates = Candidates(problem := problem_of_ranks(case, MACHINES[number % len(MACHINES)], way, hosts, rnd))
        check(problem, plan := varied(candidates, rnd), candidates)
        schedule = evaluate(problem, plan).schedule
        combined |= {i.kernel.partition("_")[0] for i in schedule.instructions if i.work == "collective"}
    assert combined >= {"reduce", *(["scatter", "gather"] if hosts > 1 else ())}


@pytest.mark.slow
@pytest.mark.parametrize("plans", [5, pytest.param(60, marks=pytest.mark.long)])
def test_figures_of_slices_are_those_of_the_schedule(plans: int) -> None:
    rnd, ways, by_slices = random.Random(0), sorted(WAYS), 0
    for number in range(plans):
        budgets = Budgets(updates=WAYS[ways[number % len(ways)]], disk=1 << 40)
        candidates = Candidates(problem := PlanningProblem(sliced(), MACHINES[number % len(MACHINES)], budgets))
        plan = varied(candidates, rnd)
        check(problem, plan := with_homes_on_disk(plan, rnd) if number % 2 else plan, candidates)
        by_slices += sum(bool(i.ends) for i in evaluate(problem, plan).schedule.instructions)
    assert by_slices


@pytest.mark.parametrize("plans", [8, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", [*sorted(CASES), "gpt2"])
def test_figures_do_not_depend_on_the_plans_before(case: str, plans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two blocks and of many, also after an evaluation that was interrupted."""
    rnd, left = random.Random(case), Drawn.trimmed
    candidates = Candidates(PlanningProblem(step_of(case), SLOW, Budgets(updates=WAYS["behind the forward"])))
    drawn, interrupted = [varied(candidates, rnd) for _ in range(plans)], 0
    for plan in [*drawn, *reversed(drawn)]:
        monkeypatch.setattr(Drawn, "trimmed", _interrupted(left, rnd.randrange(2)))
        try:
            candidates._evaluator.figures(plan)
        except KeyboardInterrupt:
            interrupted += 1
        monkeypatch.setattr(Drawn, "trimmed", left)
        anew = Evaluator(candidates.problem)
        assert candidates._evaluator.figures(plan) == anew.figures(plan)
    assert interrupted or case in ("chain", "straight")  # whose plans make values again by calls of their own, or none


def _interrupted(trimmed: Any, after: int) -> Any:
    """``Drawn.trimmed``, until it was called a few times."""
    remaining = [after]

    def until_then(*args: Any) -> Any:
        remaining[0] -= 1
        if remaining[0] < 0:
            raise KeyboardInterrupt
        return trimmed(*args)

    return until_then


def test_a_plan_made_of_another_is_read_by_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that was not evaluated itself, and where what is not named changes."""
    rnd = random.Random(0)
    candidates = Candidates(PlanningProblem(step_of("crossing"), SLOW, Budgets(updates=WAYS["behind the forward"])))
    candidates._evaluator.figures(plan := candidates.base)
    steps, read = candidates._evaluator._compiled, list[Plan]()
    steps._choices.clear()
    whole = steps._decided
    monkeypatch.setattr(steps, "_decided", lambda plan: (read.append(plan), whole(plan))[1])
    homes, activations = list(steps.layout.homes), list(steps.layout.activations)
    subjects = {"params": homes, "fetch": homes, "activation": activations}
    subjects |= {"return": subjects["params"], "gradients": subjects["params"], "load": subjects["activation"]}
    choices = {"params": ("device", "host"), "fetch": ("keep", "again"), "activation": ("device", "host")}
    for number in range(60):
        kind: Any = rnd.choice(sorted(subjects))
        choice: Any = rnd.choice(choices.get(kind, ("early", "late")))
        plan = plan.with_decision(Decision(kind, rnd.choice(subjects[kind]), choice, 0, ""))
        if number == 40:
            plan = plan.with_decision(Decision("activation", "*", "device", 0, ""))
        if number % 3:
            assert steps.choices(plan) == whole(plan)
    assert len(read) == 2  # the first, and where all that is not named changed


@pytest.mark.parametrize("plans", [4, pytest.param(120, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", sorted(CASES))
def test_figures_of_plans_on_disk_are_those_of_the_schedule(case: str, plans: int) -> None:
    """Of homes and of activations."""
    rnd, ways = random.Random(case), sorted(WAYS)
    for number in range(plans):
        machine, way = MACHINES[number % len(MACHINES)], WAYS[ways[number % len(ways)]]
        budgets = Budgets(
            updates=way, disk=1 << 40, disk_staging=1 << 16, disk_updates=True, update_piece=rnd.choice([0, 4096])
        )
        candidates = Candidates(problem := PlanningProblem(step_of(case), machine, budgets))
        check(problem, with_homes_on_disk(varied(candidates, rnd), rnd), candidates)


def test_figures_of_casts_that_wait_for_the_backward_are_those_of_the_schedule() -> None:
    """Where all that a region does is to cast, the host does it, and the region goes."""
    rnd, waiting, gone = random.Random(1), 0, 0
    for number in range(20):
        problem = PlanningProblem(step_of("straight"), MACHINES[number % 5], Budgets(updates=Updates()))
        candidates = Candidates(problem)
        plan = replace(varied(candidates, rnd), narrow=True, wide=())
        check(problem, plan, candidates)
        schedule = evaluate(problem, plan).schedule
        loads = [i for i in schedule.instructions if i.label.startswith("load")]
        waiting += sum(schedule.buffers[i.reads[0]].role == "param" for i in loads)
        wide = evaluate(problem, replace(plan, narrow=False)).schedule
        gone += sum(i.op == "run" and i.queue == "compute" for i in wide.instructions)
        gone -= sum(i.op == "run" and i.queue == "compute" for i in schedule.instructions)
    assert waiting and gone


def test_figures_that_are_not_those_of_the_schedule_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PlanningProblem(crossing(), MACHINES[1], Budgets(updates=WAYS["as gradients arrive"]))
    candidates = Candidates(problem)
    candidate = candidates.evaluate(candidates.base)
    wrong = replace(candidate, plan=replace(candidate.plan, step_time_us=candidate.plan.step_time_us / 2))
    assert completed(problem, candidate, 0, None).plan.total_us == candidate.plan.total_us
    with pytest.raises(AssertionError, match="expected the figures that the plan was chosen by"):
        completed(problem, wrong, 0, None)


def test_a_library_of_other_sources_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_module, "_VERSION", 0)
    with pytest.raises(ImportError, match=r"expected version 0 of mtcompile's C library.*setup\.py build_ext --inplace"):
        library.__wrapped__()


def test_an_install_without_a_compiler_ends_with_one_sentence(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    missing = {**os.environ, "CC": str(tmp_path / "no-compiler"), "CXX": str(tmp_path / "no-compiler")}
    done = subprocess.run(command, cwd=root, env=missing, capture_output=True, text=True)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "mtcompile: expected a C compiler that builds passes/planning/figures/c/moves.c" in done.stderr
