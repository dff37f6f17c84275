"""A forecast for a reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtcompile.runtime.schedule import gib

if TYPE_CHECKING:
    from mtcompile.forecast.solve import Forecast


def lines(f: Forecast) -> list[str]:
    budget = ", ".join(f"{tier} {gib(n) if n is not None else 'no limit'}" for tier, n in f.budget_bytes.items())
    lines = [f"{f.model}: {_count(f.parameters)} parameters, {f.tokens:,} tokens a step, on {f.machine} ({budget})"]
    if f.solved and f.feasible:
        lines += [f"  largest {what} that fits: {n}" for what, n in f.solved.items() if what != "memory"]
        lines += [f"  least device memory: {gib(n)} ({n} bytes)" for what, n in f.solved.items() if what == "memory"]
    if not f.feasible:
        lines.append(f"does not fit: {gib(f.short_bytes)} ({f.short_bytes} bytes) short. Ways out:")
        lines += [f"  {way}" for way in f.ways_out]
    if f.planned is not None:
        lines.append(
            f"{'fits' if f.feasible else 'if there were room'}: {time_of(f.step_time_us)} a step "
            f"({time_of(f.update_us)} of it for the update), {f.tokens_per_s:,.0f} tokens/s, {f.tflops:.3g} TFLOPS with "
            f"recomputation; limited by {f.limiting_resource}"
        )
        for tier, parts in (f.ledger or {}).items():
            told = ", ".join(f"{part} {gib(nbytes)}" for part, nbytes in parts.items() if nbytes)
            lines.append(f"  {tier}: {gib(f.peak_bytes[tier])} = {told}")
        lines.append(f"  host at load: {gib(f.load_host_bytes)}; at save: as in the step, since files are written from views")
        waits = f.exposed_us or {}
        shown = [_busy(queue, share, waits.get(queue, 0.0)) for queue, share in (f.busy or {}).items()]
        lines.append(f"  busy: {', '.join(shown)}")
        for tier, us in (f.next_gib_us or {}).items():
            lines.append(f"  one GiB more of {tier} memory: {time_of(us)} a step less")
        lines.append(f"  smallest device memory that works: {gib(f.minimum_device_bytes)}")
        lines.append(f"  numerics: {f.numerics}")
    for tier, expression in (f.peak_expressions or {}).items():
        lines.append(f"  bytes of {tier}, at least needed: {expression}")
    for row in f.rows:
        short = "" if row.feasible else f"; does not fit: {gib(row.short_bytes)} short of {row.tier} memory"
        peaks = ", ".join(f"{tier} {gib(nbytes)}" for tier, nbytes in row.peak_bytes.items())
        lines.append(f"  policy {row.policy}: {time_of(row.step_time_us)} a step, {peaks}{short}")
    return lines


def _busy(queue: str, share: float, exposed: float) -> str:
    return f"{queue} {share:.0%}" + (f" ({time_of(exposed)} of it exposed)" if exposed else "")


def time_of(us: float) -> str:
    return f"{us / 1e6:.2f} s" if us >= 1e6 else f"{us / 1e3:.3g} ms"


def _count(n: int) -> str:
    for size, word in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if n >= size:
            return f"{n / size:.3g}{word}"
    return str(n)
