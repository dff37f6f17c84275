"""The answer to a forecast: its figures, as an object and as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from torch import fx

from mtcompile.forecast.run_cost import RunCost
from mtcompile.passes.plan import Certificate, disk_traffic
from mtcompile.passes.planning.problem import Planned, PlanningProblem
from mtcompile.runtime.schedule import gib
from mtcompile.runtime.trace import time_of
from mtcompile.sizes import three_digits


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy's figures: bytes per tier, microseconds, and, if it does not fit, ``short_bytes`` missing in ``tier``."""

    policy: str
    feasible: bool
    peak_bytes: Mapping[str, int]
    step_time_us: float
    short_bytes: int = 0
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of a step that fits. Its figures are estimates (see ``changes``). ``gain``: by what share the tokens per second
    rise. ``at_most``: the figures are a bound, which only a plan with the change can tell more about. ``run``: the costs of a
    run with it, without what it writes to a drive."""

    what: str
    step_time_us: float
    tokens_per_s: float
    gain: float
    at_most: bool = False
    run: RunCost | None = None

    def __str__(self) -> str:
        gain, step = f"{'≤' if self.at_most else ''}+{self.gain:.0%}", f"{time_of(self.step_time_us)} a step"
        told = f"{gain:>6}  {step:>15}  {self.tokens_per_s:>8,.0f} tokens/s  {self.what}"
        return told if self.run is None else f"{told}: {self.run}"


@dataclass(frozen=True, slots=True)
class Scaling:
    """The speed that several ranks reach: ``gpus`` on each of ``hosts``. ``alone_us``: a step of one of them alone on its host;
    ``speedup``: the tokens per second of all by those of one alone; ``limited_by``: what is busy longest. ``host_bytes``: what
    all ranks of a host hold there."""

    gpus: int
    hosts: int
    alone_us: float
    speedup: float
    limited_by: str
    host_bytes: int

    def __str__(self) -> str:
        count = self.gpus * self.hosts
        where = "on one host" if self.hosts == 1 else f"on {self.hosts} hosts"
        return (
            f"{count} ranks {where}: {self.speedup:.2f} times one alone "
            f"({time_of(self.alone_us)} a step), {self.speedup / count:.0%} of linear; limited by {self.limited_by}; "
            f"{gib(self.host_bytes)} on each host"
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step that has been planned but not run.

    ``minimum_device_bytes``: the least device memory found in which the step fits, cut as in this plan; if nothing fits, cut in
    the way that needs least.
    ``ledger``: tier -> part -> bytes at the step's peak. ``step_time_us``: time of forward, backward and update, of which
    ``update_us`` is what the update adds. ``process_bytes``: the RAM that a training process takes, without CUDA's libraries:
    the host's peak, and what the process that planned the step held; 0 from ``mtcompile.plan``, whose process may hold much
    else. ``certificate``: how fast any plan within the budgets could be; ``gap``: the share by which this one is slower.
    ``busy``: share of the step in which each queue works. ``exposed_us``: how long each queue works while compute is idle.
    ``disk_read_bytes``, ``disk_write_bytes``: of one step; ``disk_days``: of such steps in a row, after which the drive has
    been written as often as it is rated for; ``disk_direct``: whether weights on disk are read straight to the device.
    ``advice``: if the step fits, the changes that would gain 3 % or more; None if that was not asked for. ``no_gain``: those
    that would gain less. ``ways_out``: what would help if nothing fits, or if the disk makes no sense; ``refusal``: why it
    does not. ``solved``: the size that ``solve`` found. ``peak_expressions``: with ``solve``, the bytes that the leanest plan
    needs in each tier, as sympy expressions.
    ``scaling``: of several ranks; then ``tokens`` and ``tokens_per_s`` are those of all, bytes of the host and of the state
    those of all ranks of a host, and other figures those of each.
    ``run``: the costs of a run of the ``tokens`` asked for.
    ``notes``: what else a reader should know of the plan, such as which large weights stay whole beside others in fragments.
    ``planned``: None if nothing fits, unless forced. ``joint`` and ``problem``: the joint graph, and the planning problem made
    from it.
    """

    model: str
    machine: str
    feasible: bool
    parameters: int
    tokens: int
    state_bytes: int
    budget_bytes: Mapping[str, int | None]
    peak_bytes: Mapping[str, int]
    minimum_device_bytes: int
    short_bytes: int = 0
    step_time_us: float = 0.0
    update_us: float = 0.0
    tokens_per_s: float = 0.0
    tflops: float = 0.0
    limiting_resource: str = ""
    precision: str = "model"
    optimizer: str = "adamw"
    update: str = "step"
    accumulate: int = 1
    numerics: str = ""
    busy: Mapping[str, float] | None = None
    exposed_us: Mapping[str, float] | None = None
    ledger: Mapping[str, Mapping[str, int]] | None = None
    load_host_bytes: int = 0
    process_bytes: int = 0
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    disk_days: float | None = None
    disk_direct: bool = False
    refusal: str = ""
    certificate: Certificate | None = None
    gap: float = 0.0
    advice: tuple[Advice, ...] | None = None
    no_gain: tuple[str, ...] = ()
    ways_out: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    solved: Mapping[str, int] | None = None
    peak_expressions: Mapping[str, str] | None = None
    scaling: Scaling | None = None
    run: RunCost | None = None
    notes: tuple[str, ...] = ()
    planned: Planned | None = None
    joint: fx.GraphModule | None = None
    problem: PlanningProblem | None = None

    def to_json(self, indent: int | None = None) -> str:
        """Returns one JSON object with every field except ``planned``, ``joint`` and ``problem``."""
        data = asdict(replace(self, planned=None, joint=None, problem=None))
        graphs = ("planned", "joint", "problem")
        return json.dumps({name: value for name, value in data.items() if name not in graphs}, indent=indent)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        """Returns the text and, if there is a plan, its timeline, as notebooks show it."""
        from mtcompile.viz.notebook import text, timeline

        if self.planned is None:
            return text(self)
        return text(self) + timeline(self.planned.schedule, plan=self.planned.plan, title=f"{self.model} on {self.machine}")


def _lines(f: Forecast) -> list[str]:
    budget = ", ".join(f"{tier} {gib(n) if n is not None else 'no limit'}" for tier, n in f.budget_bytes.items())
    lines = [f"{f.model}: {_count(f.parameters)} parameters, {f.tokens:,} tokens a step, on {f.machine} ({budget})"]
    if f.solved and f.feasible:
        lines += [f"  largest {what} that fits: {n}" for what, n in f.solved.items() if what != "memory"]
        lines += [f"  least device memory: {gib(n)} ({n} bytes)" for what, n in f.solved.items() if what == "memory"]
    if not f.feasible:
        short = f"does not fit: {gib(f.short_bytes)} ({f.short_bytes} bytes) short"
        lines.append(f"makes no sense: {f.refusal}. Ways out:" if f.refusal else f"{short}. Ways out:")
        lines += [f"  {way}" for way in f.ways_out]
    if f.planned is not None:
        tokens = f"{f.tokens_per_s:,.0f} tokens/s"
        fits = f"fits, if the host has {gib(f.peak_bytes['host'])}"
        lines.append(
            f"{fits if f.feasible else 'if there were room'}: {time_of(f.step_time_us)} a step "
            f"({time_of(f.update_us)} of it for the update), {tokens}, {three_digits(f.tflops)} TFLOPS with "
            f"recomputation; limited by {f.limiting_resource}"
        )
        for tier, parts in (f.ledger or {}).items():
            told = ", ".join(f"{part} {gib(nbytes)}" for part, nbytes in parts.items() if nbytes)
            lines.append(f"  {tier}: {gib(f.peak_bytes[tier])}" + (f" = {told}" if told else ""))
        lines.append(f"  host at load: {_at_load(f)}; at save: as in the step, since files are written from views")
        if f.process_bytes:
            beside = gib(f.process_bytes - f.peak_bytes["host"])
            libraries = f"{beside} of Python, libraries and what planning leaves (CUDA's libraries come on top)"
            lines.append(f"  process: about {gib(f.process_bytes)} of RAM = host {gib(f.peak_bytes['host'])}, {libraries}")
        waits = f.exposed_us or {}
        shown = [_busy(queue, share, waits.get(queue, 0.0), f.step_time_us) for queue, share in (f.busy or {}).items()]
        lines.append(f"  busy: {', '.join(shown)}")
        if f.scaling is not None:
            lines.append(f"  {f.scaling}")
        if f.disk_read_bytes or f.disk_write_bytes:
            direct = "; weights go straight to the device" if f.disk_direct else ""
            lines.append(f"  {disk_traffic(f.disk_read_bytes, f.disk_write_bytes, f.disk_days)}{direct}")
        if f.run is not None:
            lines.append(f"  {f.run.tokens:,} tokens: {f.run}")
        if f.certificate is not None:
            lines.append(f"  {f.certificate.of(f.step_time_us)}")
        if f.advice is not None:
            lines += _advice(f.advice, f.no_gain)
        lines.append(
            f"  smallest device memory that works, cut as here: at most {gib(f.minimum_device_bytes)} "
            '(solve="memory" tries every cut)'
        )
    lines += [f"  note: {note}" for note in f.notes]
    if f.planned is not None:
        lines.append(f"  numerics: {f.numerics}")
    for tier, expression in (f.peak_expressions or {}).items():
        lines.append(f"  bytes of {tier}, at least needed: {expression}")
    for row in f.rows:
        short = "" if row.feasible else f"; does not fit: {gib(row.short_bytes)} short of {row.tier} memory"
        peaks = ", ".join(f"{tier} {gib(nbytes)}" for tier, nbytes in row.peak_bytes.items())
        lines.append(f"  policy {row.policy}: {time_of(row.step_time_us)} a step, {peaks}{short}")
    return lines


def _advice(advice: tuple[Advice, ...], no_gain: tuple[str, ...]) -> list[str]:
    less = [f"    under +3%: {'; '.join(no_gain)}"] if no_gain else []
    return ["  what changes would gain, estimated:", *(f"    {each}" for each in advice), *less]


def _at_load(f: Forecast) -> str:
    """Says what loading needs of the host; where it has not that much, what ``from_pretrained`` does."""
    host, loaded = f.budget_bytes.get("host"), gib(f.load_host_bytes)
    if host is None or f.load_host_bytes <= host or not f.budget_bytes.get("disk"):
        return loaded
    return f"{loaded}; it has less, so from_pretrained reads the weights to the disk, beside the plan's until the first step"


def _busy(queue: str, share: float, exposed_us: float, step_time_us: float) -> str:
    told = f" ({time_of(exposed_us)} of it while nothing computes)" if exposed_us > step_time_us / 1000 else ""
    return f"{queue} {share:.0%}{told}"


def _count(n: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if (times := n / size) >= 0.9995:
            return f"{times:.{2 if times < 9.995 else 1 if times < 99.95 else 0}f} {word}"
    return str(n)
