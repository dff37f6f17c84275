"""An explanation of a part of a plan, and its text for a reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from mtcompile.passes.plan import Certificate, Decision
from mtcompile.report.alternatives import Alternative
from mtcompile.report.compare import Compared
from mtcompile.runtime.schedule import gib, listed
from mtcompile.runtime.trace import time_of
from mtcompile.viz.notebook import text

_MOST = 40  # values that are written out


@dataclass(frozen=True, slots=True)
class Life:
    """One copy of a value in one tier. ``kind``: the buffer's. It exists from ``start_us`` to ``end_us`` of the predicted
    step, a home all the time. ``began``, ``ended``: the instructions that make and free it, by number and label."""

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
    """One value of the step. ``name``: a parameter's path, or else the name in the graph (``value``). ``block``: the block
    whose decisions apply to it. ``home``: the tier where it is at home; empty if it exists only within a step.
    ``made_again``: the regions of the backward that recompute it. ``why``: the plan's decisions about it."""

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
    """The values that ``asked`` names, why the plan treats them as it does, and what else it could have done.

    ``step_time_us`` (update included), ``peak_bytes`` and ``certificate`` are the plan's. ``exact``: lowering the plan again
    gives its own figures, so that the ``alternatives`` compare with it (compiled and recorded kernels need other workspace).
    ``compared`` and ``compared_here``: predicted and measured times of the last step, of all instructions and of those that
    touch these values. ``unmeasured``: why there are none. ``notes``: those of the plan that name one of these parameters."""

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
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent)

    def __str__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        return text(self)


def _text(e: Explanation) -> str:
    total = sum(value.nbytes for value in e.values)
    lines = [f"{e.asked}: {len(e.values)} value(s), {gib(total)}, in a step of {time_of(e.step_time_us)}"]
    for tier, peak in e.peak_bytes.items():
        budget = e.budget_bytes.get(tier)
        lines.append(f"  {tier}: peak {gib(peak)} of {gib(budget) if budget is not None else 'no limit'}")
    if e.certificate is not None:
        lines.append(f"  {e.certificate.of(e.step_time_us)}")
    for value in e.values[:_MOST]:
        lines += _value(value)
    if len(e.values) > _MOST:
        lines.append(f"  ... and {len(e.values) - _MOST} more values: ask for less, or read to_json()")
    lines += ["why"]
    reasons: dict[tuple[str, str, str, str], list[str]] = {}
    for value in e.values:
        for d in value.why:
            subject = d.subject if d.kind != "activation" else "waits"
            reasons.setdefault((d.kind, subject, d.choice, d.reason), []).append(value.name)
    for (kind, subject, choice, reason), names in reasons.items():
        lines.append(f"  {kind} {subject}: {choice}, for {listed(names, 3)}: {reason}")
    if not reasons:
        lines.append("  there was nothing to decide: it is made and used within its regions, or belongs to the caller")
    lines += [f"  note: {note}" for note in e.notes]
    lines += _alternatives(e)
    if e.compared is None or e.compared_here is None:
        lines += [f"  {e.unmeasured}"] if e.unmeasured else []
    else:
        lines += _compared("predicted against measured, the whole step", e.compared)
        lines += _compared(f"predicted against measured, the work on {e.asked}", e.compared_here)
    return "\n".join(lines)


def _value(value: Value) -> list[str]:
    at_home = f"at home on the {value.home}" if value.home else "made in the step"
    block = f", block {value.block}" if value.block else ""
    lines = [f"  {value.name}: {value.role}, {gib(value.nbytes)}, {at_home}{block}"]
    lines += [f"    {_life(life)}" for life in value.lives if life.kind != "home" or life.began]
    if value.made_again:
        lines.append(f"    computed again inside {listed(value.made_again, 3)}")
    elif not value.lives:
        lines.append("    not in the plan: the regions that need it compute it themselves")
    return lines


def _life(life: Life) -> str:
    ends = f"freed by {life.ended}" if life.ended else "kept"
    began = f"from {life.began}" if life.began else "from the start"
    phases = " to ".join(life.phases) or "step"
    span = f"{life.start_us / 1e3:.3f} to {life.end_us / 1e3:.3f} ms"
    return f"{phases}: on the {life.tier} {span} ({gib(life.nbytes)}), {began}, {ends}"


def _alternatives(e: Explanation) -> list[str]:
    lines = ["otherwise"]
    for a in e.alternatives:
        fits = "" if a.fits else ", which does not fit"
        lines.append(
            f"  {a.what}: {time_of(a.step_time_us)} a step ({_signed(a.more_us)}), device peak "
            f"{gib(a.peak_bytes['device'])} ({'+' if a.more_bytes >= 0 else ''}{gib(a.more_bytes)}){fits}"
        )
    if not e.alternatives:
        lines.append("  no decision could be made otherwise")
    if not e.exact:
        lines.append("  (peaks as eager kernels need them; differences are from the plan with those)")
    return lines


def _compared(title: str, c: Compared) -> list[str]:
    off = c.measured_us - c.predicted_us
    lines = [f"{title}: {time_of(c.predicted_us)} predicted, {time_of(c.measured_us)} measured ({_signed(off)})"]
    for kind in c.kinds:
        lines.append(
            f"  {kind.queue:8s} {kind.kind}: {kind.count} in {time_of(kind.predicted_us)} predicted, "
            f"{time_of(kind.measured_us)} measured; most off: {kind.worst} by {_signed(kind.worst_us)}"
        )
    for queue in c.queues:
        what = "working longer" if queue.queue == "compute" else "working while compute was idle"
        lines.append(f"  {queue.queue:8s} {_signed(queue.cost_us)} by {what}")
    return lines


def _signed(us: float) -> str:
    return ("-" if us < 0 else "+") + time_of(abs(us))
