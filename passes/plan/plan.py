"""The plan of a step: all its decisions, and what is predicted of it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mtcompile.passes.plan.decisions import Choice, Decision, Decisions, Kind
from mtcompile.passes.plan.listing import alike
from mtcompile.runtime.schedule import changed, gib
from mtcompile.runtime.trace import time_of

FORMAT = "mtcompile-plan-2"
NORM_COPIES = 5.0  # of a bf16 gradient, which is cast to fp32 first: 2 bytes read, 4 written, 4 read


@dataclass(frozen=True, slots=True)
class Updates:
    """Updates of parameters in the backward. ``state_copies``, ``workspace_copies``: what an update reads and writes
    beside a parameter and its gradient, and what it needs for itself on the device, in sizes of the parameter. ``held``: no
    update starts before all gradients are there, because their norm is needed first. ``run_ahead``: updates go on behind the
    next forward. ``patient``: any number of gradients may wait on the host for their updates; otherwise as many sets of slots
    as ``sets`` says take turns. ``order``: of patient updates on the host, each by the name of its first parameter; the others
    follow as their gradients arrive. ``checked``: an update reads its gradient once before, for values that are not finite.
    ``norm_copies``: what the norm of a gradient reads and writes on the host, in sizes of the gradient. ``sharded``: the home
    blocks of which each rank updates a share; of several hosts, each has the optimizer state of its ranks' shares alone.
    ``in_turn``: updates come in the order of the gradients, never patient, as ranks of other hosts gather what they change.
    ``streamed``: what crosses the link in each direction for an update on the device of a parameter whose home is the host, in
    sizes of the parameter: weight, remainder and state; 0: the device updates none of these."""

    state_copies: float = 2.0
    workspace_copies: float = 0.0
    held: bool = False
    run_ahead: bool = False
    patient: bool = False
    sets: int = 2
    order: tuple[str, ...] = ()
    checked: bool = False
    norm_copies: float = 1.0
    sharded: tuple[str, ...] = ()
    in_turn: bool = False
    streamed: int = 0

    def __str__(self) -> str:
        when = "once all gradients and their norm are there" if self.held else "as gradients arrive"
        first = "; those due first in the next forward come first" if self.order else ""
        where = "; each rank updates a share" if self.sharded else ""
        wait = f"; {self.sets} sets of them take turns on the host" if self.sets > 2 else ""
        behind = "; they go on behind the next forward" if self.run_ahead else ""
        return f"in the backward, {when}{first}{wait}{where}{behind}"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A lower bound on the time of a whole step, of any plan within the budgets on this machine. ``gains_us``: about how much
    lower the bound would be with one GiB more of a tier's memory (``device memory``, ``host memory``), or with something a
    tenth faster (``compute``, ``link``, ``host``, ``disk``); what is not there would change nothing. ``other_cuts``: how many
    other forms of the step were compared that have plans within the budgets; ``other_bound_us``: the lowest of their bounds."""

    bound_us: float
    gains_us: Mapping[str, float] = field(default_factory=dict)
    other_cuts: int = 0
    other_bound_us: float = 0.0

    def gap(self, step_time_us: float) -> float:
        """The share of the bound by which a step is longer than it."""
        return max(0.0, step_time_us / self.bound_us - 1) if self.bound_us else 0.0

    def of(self, step_time_us: float) -> str:
        """One sentence about a step, for a reader."""
        if (gap := self.gap(step_time_us)) <= 1:
            return f"within {gap:.1%} of the bound: {self}"
        return f"{1 + gap:.1f} times the bound: the bound says little here: {self}"

    def __str__(self) -> str:
        """The bound alone, and what would lower it."""
        words = {name: ("1 GiB more " if name.endswith("memory") else "a 10 % faster ") + name for name in self.gains_us}
        words |= {"compute": "10 % more compute"}
        worth = sorted((us, name) for name, us in self.gains_us.items() if us > self.bound_us / 1000)
        gains = [f"{time_of(us)} with {words[name]}" for us, name in reversed(worth)]
        sentence = f"no plan within these budgets, cut as here, is faster than {time_of(self.bound_us)}"
        if self.other_cuts:
            others = "in the other cut" if self.other_cuts == 1 else f"in any of the {self.other_cuts} other cuts"
            sentence += f", nor, {others} compared, than {time_of(self.other_bound_us)}"
        return sentence + (f" (the bound falls by {', by '.join(gains)})" if gains else "")


@dataclass(frozen=True, slots=True)
class Plan:
    """Every decision about a step. Missing subjects take the floor's choice: parameters on the host, activations on the host,
    blocks recomputed. ``lookahead``: how many regions ahead a prefetch is issued; ``disk_lookahead``: how many more a read
    from disk. ``disk_direct``: fetches read parameters on disk straight to the device, not through the host, unless only rows
    or slices cross. ``span``: how many blocks in a row are recomputed at once (longer runs are halved, recursively); 0: all
    of them. ``peak_bytes``, ``budget_bytes``: bytes per tier. ``step_time_us``: forward and backward as the simulator
    predicts them; ``update_us``: what the optimizer's update adds to them. ``certificate``: how fast any plan within these
    budgets could be. ``updates``: how parameters are updated in the backward; None: by optimizer.step(). ``narrow``: casts
    run on the side of the link where fewer bytes cross, but for the home blocks ``wide``, which cross as they are.
    ``pooled``: what is fetched comes from the device's allocator, beside what regions make, and both share its bytes; otherwise
    it has slots, whose bytes are held at all times. What stays from the forward to the backward is pooled in any case.
    ``parts``: the home blocks of which each of several hosts has a part of the weights; they are gathered before each fetch.
    ``fetched``: parameters that a step fetches, in so many ``copies``: neighbours at home cross together. ``all_resident``: the
    step was lowered, computes nothing again, and moves nothing but what it is given and what buffers become.
    ``notes``: what else a reader should know, such as how kernels were measured. ``names``: of values that decisions are about,
    for a reader. ``numerics``: the contract in words."""

    decisions: Decisions = field(default_factory=Decisions)
    lookahead: int = 0
    span: int = 0
    budget_bytes: Mapping[str, int | None] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    minimum_device_bytes: int = 0
    state_bytes: int = 0
    step_time_us: float = 0.0
    update_us: float = 0.0
    limiting_resource: str = ""
    machine: str = ""
    numerics: str = ""
    pooled: bool = False
    certificate: Certificate | None = None
    updates: Updates | None = None
    narrow: bool = True
    wide: tuple[str, ...] = ()
    disk_lookahead: int = 0
    disk_direct: bool = False
    # Bytes of one step, and the days of such steps in a row after which the drive has been written as often as it is rated for.
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    disk_days: float | None = None
    fetched: int = 0
    copies: int = 0
    all_resident: bool = False
    parts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.decisions) is not Decisions:
            object.__setattr__(self, "decisions", Decisions(self.decisions))

    def find(self, kind: str, subject: str) -> Decision | None:
        """The decision of that kind about that subject, if there is one."""
        return self.decisions.of_kind(kind).get(subject)

    def choices(self, kind: Kind, subjects: Iterable[str]) -> list[Choice | None]:
        """The choice about each subject; None where there is none."""
        return [d and d.choice for d in map(self.decisions.of_kind(kind).get, subjects)]

    def tiers(self, blocks: Iterable[str]) -> list[Choice]:
        """The home tier of each block's parameters, as ``params`` says it."""
        return [choice or "host" for choice in self.choices("params", blocks)]

    def keeps(self, block: str, value: str) -> bool:
        """Says whether a value that a block saves for its backward is kept (and not recomputed there)."""
        decision = self.find("variant", block)
        return decision is not None and (decision.choice == "save" or value in decision.values)

    def params(self, block: str) -> Choice:
        """The home tier of a block's parameters, their gradients and optimizer state."""
        decision = self.decisions.of_kind("params").get(block)
        return decision.choice if decision else "host"

    def stays(self, block: str) -> bool:
        """Says whether a block's parameters, fetched for the forward, stay on the device until the backward has read them."""
        decision = self.find("fetch", block)
        return decision is not None and decision.choice == "keep" and self.params(block) != "device"

    def returns_late(self, block: str) -> bool:
        """Says whether a block's parameters are fetched for the backward no sooner than they are read."""
        decision = self.find("return", block)
        return decision is not None and decision.choice == "late"

    def loads_late(self, value: str) -> bool:
        """Says whether a value that waits at home comes back for the backward no sooner than it is read."""
        decision = self.find("load", value)
        return decision is not None and decision.choice == "late"

    def frees_early(self, block: str) -> bool:
        """Says whether the region behind one that makes a block's gradients waits until these are at home."""
        decision = self.find("gradients", block)
        return decision is not None and decision.choice == "early"

    def streams(self, block: str) -> bool:
        """Says whether the device updates a block whose home is the host: its state comes there and goes home again."""
        decision = self.decisions.of_kind("update").get(block)
        device = decision is not None and decision.choice == "device" and self.params(block) == "host"
        return device and self.updates is not None and self.updates.streamed > 0

    def activation(self, value: str) -> Choice:
        """The tier where a value waits between uses, or ``recompute``."""
        decision = self.find("activation", value) or self.find("activation", "*")
        return decision.choice if decision else "host"

    @property
    def total_us(self) -> float:
        """The microseconds of a whole step: what plans are compared by."""
        return self.step_time_us + self.update_us

    @property
    def gap(self) -> float:
        """The share of the bound by which the step is longer than it; 0 without a certificate."""
        return self.certificate.gap(self.total_us) if self.certificate else 0.0

    def with_decision(self, decision: Decision) -> Plan:
        """The same plan with this decision in place of the one about the same subject."""
        return self.with_decisions((decision,))

    def with_decisions(self, decisions: Iterable[Decision]) -> Plan:
        """The same plan with these decisions in place of those about the same subjects; of several about one, the last."""
        return self.changed(decisions=self.decisions.replaced(decisions))

    def changed(self, **changes: Any) -> Plan:
        """The same plan with other values of these fields, for searches, which make thousands. ``decisions``: must be of that
        class."""
        return changed(self, **changes)

    def to_json(self, indent: int | None = None) -> str:
        """The plan as text that ``plan_from_json`` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=indent)

    def _repr_html_(self) -> str:
        """The plan as notebooks show it."""
        return f'<pre style="white-space: pre-wrap">{html.escape(str(self))}</pre>'

    def __str__(self) -> str:
        """The plan for a reader: bytes per tier, time, then a line per decision."""
        lines = [f"plan for {self.machine or 'an unnamed machine'}: step {self.total_us / 1e3:.2f} ms predicted"]
        if self.update_us:
            lines[0] += f", {self.update_us / 1e3:.2f} of it the update"
        if self.limiting_resource:
            lines[0] += f", limited by {self.limiting_resource}"
        for tier, peak in self.peak_bytes.items():
            budget = self.budget_bytes.get(tier)
            lines.append(f"  {tier}: peak {gib(peak)} of {gib(budget) if budget is not None else 'no limit'}")
        if self.certificate is not None:
            lines.append(f"  {self.certificate.of(self.total_us)}")
        lines.append(f"  smallest device budget that works: at most {gib(self.minimum_device_bytes)}")
        runs = f"; runs of recomputed blocks are halved down to {self.span}" if self.span else ""
        where = "pooled" if self.pooled else "in slots"
        state = gib(self.state_bytes)
        fetched = f"; {self.fetched} parameters are fetched in {self.copies} copies a step" if self.fetched else ""
        lines.append(f"  training state: {state}; prefetch {self.lookahead} region(s) ahead, {where}{fetched}{runs}")
        if self.disk_read_bytes or self.disk_write_bytes:
            traffic = disk_traffic(self.disk_read_bytes, self.disk_write_bytes, self.disk_days)
            ahead = f"reads are {self.disk_lookahead} region(s) before the fetch"
            lines.append(f"  {traffic}; {'weights go straight to the device' if self.disk_direct else ahead}")
        if self.updates is not None:
            streamed = sum(map(self.streams, self.decisions.of_kind("update")))
            also = f"; the device updates {streamed} home blocks of the host, whose state crosses for that" if streamed else ""
            lines.append(f"  updates: {self.updates}{also}")
        if self.narrow and self.wide:
            lines.append(f"  casts: on the host, except for {len(self.wide)} home blocks, which cross as they are")
        if self.parts:
            lines.append("  weights: each host has a part, and gathers the others before each fetch")
        lines.append(f"  numerics: {self.numerics}")
        lines += [f"  note: {note}" for note in self.notes]
        for same in alike(self.decisions, self.names):
            d, subjects = same.decisions[0], same.subjects
            shown = ", ".join(subjects[:3]) + (f", ... ({len(subjects)} alike)" if len(subjects) > 3 else "")
            values = f" {', '.join(same.values)}" if same.values else ""
            nbytes = gib(sum(each.nbytes for each in same.decisions))
            lines.append(f"  {d.kind:10s} {shown}: {d.choice}{values} [{nbytes}] {same.reason}")
        return "\n".join(lines)


def disk_traffic(read: int, written: int, days: float | None) -> str:
    """One line about what a step does to a disk."""
    wear = f"; {days:.3g} days of such steps to the drive's rated writes" if days is not None else ""
    if written and days is None:
        wear = "; how much the drive is rated for is not known"
    return f"disk traffic: {read / 1e9:.3g} GB read and {written / 1e9:.3g} GB written a step{wear}"
