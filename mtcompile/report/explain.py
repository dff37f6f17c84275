"""Explains why a part of a model lives where it does: ``model.explain("layers.3.mlp")`` and ``mtcompile explain``.

Nothing is planned again. The explanation comes from the plan's decisions, the rewritten step graph and the schedule; each
alternative is the same plan with one decision changed, lowered and simulated.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Sequence

from torch import fx, nn

from mtcompile.errors import StepError
from mtcompile.execution.calibration import TimedPhase
from mtcompile.execution.compiled import CompiledStep
from mtcompile.passes.analysis.names import value_names
from mtcompile.passes.analysis.saved import saved_values
from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.planning.problem import Planned, PlanningProblem
from mtcompile.passes.planning.reasons import Reasons
from mtcompile.passes.step_graph import calls, inputs_of, outputs_of, recomputes, regions, results
from mtcompile.report.alternatives import alternatives
from mtcompile.report.compare import compare
from mtcompile.report.explanation import Explanation, Life, Value
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import Trace, moments, shifted, span_us, takes_time


def explain(
    planned: Planned, problem: PlanningProblem, name: str, measured: Trace | None = None, unmeasured: str = ""
) -> Explanation:
    """Explains what a plan does with the values that ``name`` names: a parameter, a module, a block, or a value of the graph.

    ``measured``: a step as it ran; ``unmeasured``: why there is none. Raises ValueError, with the names that come close, if
    nothing has this name.
    """
    described = _described(planned, problem, predicted := simulate(planned.schedule))
    values = tuple(value for value in described if _names(name, value))
    if not values:
        raise ValueError(_unknown(name, described, problem.step.meta["blocks"]))
    schedule, plan = planned.schedule, planned.plan
    buffers = {life.buffer for value in values for life in value.lives}
    here = frozenset(i for i, ins in enumerate(schedule.instructions) if buffers & {*ins.reads, *ins.writes})
    exact, others = alternatives(planned, problem, [d for value in values for d in value.why], [v.value for v in values])
    return Explanation(
        name,
        plan.total_us,
        dict(schedule.peak_nbytes),
        dict(plan.budget_bytes),
        values,
        others,
        exact,
        compare(schedule, predicted, measured) if measured else None,
        compare(schedule, predicted, measured, here) if measured else None,
        "" if measured else unmeasured,
        plan.certificate,
        tuple(note for note in plan.notes if any(_is_about(note, value) for value in values)),
    )


def first_name(model: nn.Module, name: str) -> str:
    """Returns the name under which plans know a parameter: of a tied weight, the first; any other name as it is."""
    names = dict(nn.Module.named_parameters(model, remove_duplicate=False))
    return next((first for first, parameter in names.items() if parameter is names.get(name)), name)


def explain_program(
    program: CompiledStep | None, timed: Sequence[TimedPhase], name: str, parts: Sequence[CompiledStep] = ()
) -> Explanation:
    """Explains part of the program that last trained. ``timed``: (program, phase, records) of phases that have run, oldest
    first. ``parts``: those of a forward that is compiled in parts; the last that has what is asked for is explained. Raises
    StepError when ``program`` is None, before the first training call."""
    for part in reversed(parts):
        with contextlib.suppress(ValueError):  # it may be of another part
            return explain_program(part, timed, name)
    if program is None:
        raise StepError("expected a model that has trained, found one that has not; train it for one step, then explain")
    unmeasured = (
        "nothing measured: times are those of the second step and later ones, not those under MT_CHECK=1, and on a GPU those "
        "under MT_TRACE=1"
    )
    planned = Planned(program.plan, program.step, program.schedule)
    return explain(planned, program.problem, name, last_step(program, timed), unmeasured)


def last_step(program: CompiledStep, timed: Iterable[TimedPhase]) -> Trace | None:
    """Returns the program's last step, forward and backward, among the timed phases; None if one of the two is missing."""
    phases = {phase: records for other, phase, records in timed if other is program}
    if "backward" not in phases or "forward" not in phases:
        return None
    forward = phases["forward"]
    return Trace((*forward, *shifted(phases["backward"], max((r.end_us for r in forward), default=0.0))), "measured")


# --------------------------------------------------------------------------------------------------------------- values


def _described(planned: Planned, problem: PlanningProblem, predicted: Trace) -> list[Value]:
    """Describes every value of the captured step, in order: what exists before it, then what its regions make."""
    step, plan, names = problem.step, planned.plan, value_names(problem.step)
    reasons = Reasons(problem, plan, planned.step, planned.schedule, predicted)
    blocks, homes = step.meta["blocks"], step.meta["homes"]
    lives = _lives(planned, predicted)
    recomputing: dict[int, list[str]] = {}  # forward block -> the calls that compute something of it again
    for call in calls(planned.step):
        for index in recomputes(call):
            recomputing.setdefault(index, []).append(call.name)
    gradients = {value: spec.name for spec, value in outputs_of(step) if spec.kind in ("grad", "update")}
    values: list[Value] = []

    def add(node: fx.Node, name: str, block: str, why: tuple[Decision, ...], made_again: Iterable[str] = ()) -> None:
        meta, here = node.meta, tuple(lives.get(node.name, ()))
        home = next((life.tier for life in here if life.kind == "home"), "")
        module = name.rpartition(".")[0] if meta["role"] == "param" else meta.get("module_path", "")
        values.append(Value(name, node.name, meta["role"], meta["nbytes"], block, module, home, here, tuple(made_again), why))

    for spec, node in inputs_of(step):
        home = homes.get(spec.name, "") if spec.role == "param" else ""
        add(node, spec.name, home, (_params(plan, home, node.meta["nbytes"], reasons),) if home else ())
    for region in regions(step):
        block, saved = blocks[region.meta["block"]], saved_values(region)
        for item in results(region):
            if item in gradients:
                home = homes.get(gradients[item], "")
                decided = (_params(plan, home, item.meta["nbytes"], reasons),) if home else ()
                add(item, f"{gradients[item]}.grad", home or block, decided)
            else:
                dropped = item in saved and not plan.keeps(block, item.name)
                recomputed = dropped or plan.activation(item.name) == "recompute"
                inside = recomputing.get(region.meta["block"], ()) if recomputed and item.meta["role"] == "activation" else ()
                add(item, names[item.name], block, _of_result(plan, block, item, item in saved, reasons), inside)
    return values


def _params(plan: Plan, block: str, nbytes: int, reasons: Reasons) -> Decision:
    return plan.find("params", block) or reasons.given(Decision("params", block, plan.params(block), nbytes))


def _of_result(plan: Plan, block: str, item: fx.Node, saved: bool, reasons: Reasons) -> tuple[Decision, ...]:
    if item.meta["role"] != "activation":
        return ()
    decisions, nbytes = [], item.meta["nbytes"]
    if saved:
        decisions.append(plan.find("variant", block) or reasons.given(Decision("variant", block, "recompute", nbytes)))
    if not saved or plan.keeps(block, item.name):
        waits = plan.find("activation", item.name) or plan.find("activation", "*")
        decisions.append(waits or reasons.given(Decision("activation", item.name, plan.activation(item.name), nbytes)))
    return tuple(decisions)


def _lives(planned: Planned, predicted: Trace) -> dict[str, list[Life]]:
    """Returns captured value -> its copies, in the order in which they begin in the predicted step."""
    schedule = planned.schedule
    when, end = moments(schedule, predicted), span_us(predicted)
    writer: dict[str, int] = {}
    free: dict[str, int] = {}
    for index, instruction in enumerate(schedule.instructions):
        for name in instruction.writes:
            if takes_time(instruction):
                writer.setdefault(name, index)
            elif instruction.op == "free":
                free[name] = index
    lives: dict[str, list[Life]] = {}
    for node in planned.step.graph.nodes:
        if node.name not in schedule.buffers or "origin" not in node.meta:
            continue
        buffer, began, ended = schedule.buffers[node.name], writer.get(node.name), free.get(node.name)
        about = buffer.name, buffer.tier, buffer.kind, buffer.nbytes
        life = Life(
            *about,
            0.0 if began is None else when[began][0],
            end if ended is None else when[ended][1],
            tuple(dict.fromkeys(schedule.instructions[i].phase for i in (began, ended) if i is not None)),
            "" if began is None else f"#{began} {schedule.instructions[began].label}",
            "" if ended is None else f"#{ended}",
        )
        lives.setdefault(node.meta["origin"], []).append(life)
    return {origin: sorted(copies, key=lambda life: (life.start_us, life.kind != "home")) for origin, copies in lives.items()}


# ---------------------------------------------------------------------------------------------------------------- names


def _names(asked: str, value: Value) -> bool:
    """Tells whether the path of the value, its module or its block contains ``asked``, as neighbouring parts between dots."""
    wanted = asked.split(".")
    paths = [path.split(".") for path in (value.name, _whole(value), value.module, value.block, value.value) if path]
    return any(path[i : i + len(wanted)] == wanted for path in paths for i in range(len(path) - len(wanted) + 1))


def _whole(value: Value) -> str:
    """The name of the parameter that a value is, or is a fragment of."""
    return value.name.partition("[")[0]


def _is_about(note: str, value: Value) -> bool:
    """Tells whether a plan's note names a parameter."""
    return value.role == "param" and re.search(rf"(?<![\w.]){re.escape(_whole(value))}(?![\w.]*\w)", note) is not None


def _unknown(asked: str, values: Iterable[Value], blocks: Iterable[str]) -> str:
    known: dict[str, None] = {}
    for value in values:
        for path in (value.name, value.module, value.block):
            parts = path.split(".")
            known.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts)) if path))
    close = difflib.get_close_matches(asked, known, n=5, cutoff=0.5)
    near = f"; close to it: {', '.join(close)}" if close else ""
    return (
        f"expected the name of a parameter, a module, a block or a value of the step graph, found {asked!r}{near}. "
        f"The blocks are {', '.join(blocks)}"
    )
