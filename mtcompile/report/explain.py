"""Why a part of a model lives where it does: ``model.explain("layers.3.mlp")`` and ``mtcompile explain``.

Nothing is planned anew. What is said comes from the plan's decisions, the rewritten step graph and the schedule; what else
could have been done is the same plan with one decision made otherwise, lowered and simulated.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torch import fx

from mtcompile.errors import StepError
from mtcompile.passes.analysis.saved import saved_values
from mtcompile.passes.plan import Decision, Plan
from mtcompile.passes.planning.planner import Planned, Source
from mtcompile.passes.step_graph import calls, placeholders, recomputes, regions, results, step_outputs
from mtcompile.report.alternatives import Alternative, alternatives
from mtcompile.report.chrome_trace import moments, takes_time
from mtcompile.report.compare import Compared, compare
from mtcompile.report.explain_text import text_of
from mtcompile.runtime.schedule import Buffer, Schedule
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import Record, Trace, shifted, span_us

if TYPE_CHECKING:
    from mtcompile.execution.session import Engine

FLOOR = "nothing else was decided: what needs least device memory"


@dataclass(frozen=True, slots=True)
class Life:
    """One copy of a value in one tier. ``kind``: as a buffer's. From ``start_us`` to ``end_us`` of the predicted step, for
    homes all of it. ``began``, ``ended``: the instructions that made and freed it, as the schedule numbers and labels them."""

    buffer: str
    tier: str
    kind: str
    nbytes: int
    start_us: float
    end_us: float
    phases: tuple[str, ...] = ()
    began: str = ""
    ended: str = ""


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the step. ``name``: a parameter's path, or the name in the graph (``value``); ``block``: whose decisions
    count for it; ``home``: the tier it is at home in, empty for what exists within a step only. ``made_again``: the regions of
    the backward that compute it again inside. ``why``: the plan's decisions about it."""

    name: str
    value: str
    role: str
    nbytes: int
    block: str
    module: str
    home: str
    lives: tuple[Life, ...]
    made_again: tuple[str, ...]
    why: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was asked for, the values it names, and what the plan could have done otherwise. ``step_time_us`` (update included)
    and ``peak_bytes``: the plan's. ``exact``: lowering the plan again gives its own figures, so that those of the
    ``alternatives`` compare (compiled and recorded kernels need other workspace). ``compared``: predicted and measured times
    of the last step, of all its instructions and of those that touch these values; ``unmeasured``: why there are none."""

    asked: str
    step_time_us: float
    peak_bytes: Mapping[str, int]
    budget_bytes: Mapping[str, int | None]
    values: tuple[Value, ...]
    alternatives: tuple[Alternative, ...]
    exact: bool
    compared: Compared | None = None
    compared_here: Compared | None = None
    unmeasured: str = ""

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent)

    def __str__(self) -> str:
        return text_of(self)


def explain(planned: Planned, source: Source, name: str, measured: Trace | None = None, unmeasured: str = "") -> Explanation:
    """What a plan does with the values that ``name`` names: a parameter, a module, a block, or a value of the graph.

    ``measured``: a step as it ran. Raises ValueError, with names that come close, where there is none.
    """
    described = _described(planned, source)
    found = [value for value in described if _names(name, value)]
    if not found:
        raise ValueError(_unknown(name, described, source.step.meta["blocks"]))
    schedule, plan = planned.schedule, planned.plan
    buffers = {life.buffer for value in found for life in value.lives}
    here = frozenset(i for i, ins in enumerate(schedule.instructions) if buffers & {*ins.reads, *ins.writes})
    exact, others = alternatives(planned, source, [d for value in found for d in value.why], [v.value for v in found])
    predicted = simulate(schedule)
    return Explanation(
        name,
        plan.total_us,
        dict(schedule.peak_nbytes),
        dict(plan.budget_bytes),
        tuple(found),
        others,
        exact,
        compare(schedule, predicted, measured) if measured else None,
        compare(schedule, predicted, measured, here) if measured else None,
        "" if measured else unmeasured,
    )


def explain_compiled(engine: Engine, name: str) -> Explanation:
    """Of the program that last trained. Raises StepError before the first call."""
    last = engine.last
    if last is None:
        raise StepError("expected a model that has run, found one that has not; call it once, then explain")
    measured = last_step(engine)
    why = (
        "nothing measured: times are those of the second step and later ones, not those under MT_CHECK=1, and on a GPU those "
        "under MT_TRACE=1"
    )
    return explain(Planned(last.plan, last.step, last.schedule), last.source, name, measured, why)


def last_step(engine: Engine) -> Trace | None:
    """The last step of the program that last trained, forward and backward, whose times can be told; None before there is."""
    found: dict[str, list[Record]] = {phase: records for made, phase, records in engine.timed if made is engine.last}
    if "backward" not in found or "forward" not in found:
        return None
    forward = found["forward"]
    return Trace((*forward, *shifted(found["backward"], max((r.end_us for r in forward), default=0.0))), "measured")


# --------------------------------------------------------------------------------------------------------------- values


def _described(planned: Planned, source: Source) -> list[Value]:
    """Every value of the step as captured, in order: what exists before it, then what its regions make."""
    step, plan = source.step, planned.plan
    blocks, homes = step.meta["blocks"], step.meta["homes"]
    lives = _lives(planned)
    again: dict[int, list[str]] = {}
    for call in calls(planned.step):
        for index in recomputes(call):
            again.setdefault(index, []).append(call.name)
    gradients = {
        value: spec.name
        for spec, value in zip(step.meta["outputs"], step_outputs(step), strict=True)
        if spec.kind in ("grad", "update")
    }
    found = []

    def add(node: fx.Node, name: str, block: str, why: tuple[Decision, ...], made_again: Iterable[str] = ()) -> None:
        meta, here = node.meta, tuple(lives.get(node.name, ()))
        home = next((life.tier for life in here if life.kind == "home"), "")
        module = name.rpartition(".")[0] if meta["role"] == "param" else meta.get("module_path", "")
        found.append(Value(name, node.name, meta["role"], meta["nbytes"], block, module, home, here, tuple(made_again), why))

    for spec, node in zip(step.meta["inputs"], placeholders(step.graph), strict=True):
        home = homes.get(spec.name, "") if spec.role == "param" else ""
        add(node, spec.name, home, (_params(plan, home, node.meta["nbytes"]),) if home else ())
    for region in regions(step):
        block, saved = blocks[region.meta["block"]], saved_values(region)
        for item in results(region):
            if item in gradients:
                home = homes.get(gradients[item], "")
                decided = (_params(plan, home, item.meta["nbytes"]),) if home else ()
                add(item, f"{gradients[item]}.grad", home or block, decided)
            else:
                kept = item not in saved or plan.keeps(block, item.name)
                why = _of_result(plan, block, item, item in saved)
                chained = not kept or plan.activation(item.name) == "recompute"
                inside = again.get(region.meta["block"], ()) if chained and item.meta["role"] == "activation" else ()
                add(item, item.name, block, why, inside)
    return found


def _params(plan: Plan, block: str, nbytes: int) -> Decision:
    return plan.find("params", block) or Decision("params", block, plan.params(block), nbytes, FLOOR)


def _of_result(plan: Plan, block: str, item: fx.Node, saved: bool) -> tuple[Decision, ...]:
    if item.meta["role"] != "activation":
        return ()
    found = []
    if saved:
        nbytes = item.meta["nbytes"]
        found.append(plan.find("variant", block) or Decision("variant", block, "recompute", nbytes, FLOOR))
    if not saved or plan.keeps(block, item.name):
        waits = plan.find("activation", item.name) or plan.find("activation", "*")
        found.append(waits or Decision("activation", item.name, plan.activation(item.name), item.meta["nbytes"], FLOOR))
    return tuple(found)


def _lives(planned: Planned) -> dict[str, list[Life]]:
    """Value as captured -> its copies, by when they begin in the predicted step."""
    schedule = planned.schedule
    predicted = simulate(schedule)
    when, end = moments(schedule, predicted), span_us(predicted)
    made: dict[str, int] = {}
    freed: dict[str, int] = {}
    for index, instruction in enumerate(schedule.instructions):
        for name in instruction.writes:
            if takes_time(instruction):
                made.setdefault(name, index)
            elif instruction.op == "free":
                freed[name] = index
    found: dict[str, list[Life]] = {}
    for node in planned.step.graph.nodes:
        if node.name in schedule.buffers and "origin" in node.meta:
            life = _life(schedule, schedule.buffers[node.name], made.get(node.name), freed.get(node.name), when, end)
            found.setdefault(node.meta["origin"], []).append(life)
    return {origin: sorted(lives, key=lambda life: (life.start_us, life.kind != "home")) for origin, lives in found.items()}


def _life(
    schedule: Schedule, buffer: Buffer, made: int | None, freed: int | None, when: Mapping[int, tuple[float, float]], end: float
) -> Life:
    began = "" if made is None else f"#{made} {schedule.instructions[made].label}"
    ended = "" if freed is None else f"#{freed}"
    start_us = 0.0 if made is None else when[made][0]
    end_us = end if freed is None else when[freed][1]
    indices = [i for i in (made, freed) if i is not None]
    phases = tuple(dict.fromkeys(schedule.instructions[i].phase for i in indices))
    about = buffer.name, buffer.tier, buffer.kind, buffer.nbytes
    return Life(*about, start_us, end_us, phases, began, ended)


# ---------------------------------------------------------------------------------------------------------------- names


def _names(asked: str, value: Value) -> bool:
    """Whether its block, its module or its own name is what is asked for: parts of a path between dots, next to each other."""
    wanted = asked.split(".")
    paths = [path.split(".") for path in (value.name, value.module, value.block, value.value) if path]
    return any(path[i : i + len(wanted)] == wanted for path in paths for i in range(len(path) - len(wanted) + 1))


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
