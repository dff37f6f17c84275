"""How near the bound plans are at real sizes: seven models, five machines, four budgets.

    python -m benchmarks.plan_quality --json benchmarks/results/plan_quality.json
    python -m benchmarks.plan_quality --model unet --machine rtx4090

A budget is the fewest device bytes that work and a tenth more, or 25, 60 or 92 % of the machine's memory. Host memory has no
limit, or, with ``--host 0.25``, one at that share of the way from the fewest bytes that work to what the plan without one
takes. Precision bf16-master32 with AdamW, updates in the backward, and run ahead. ``step_time_us``: the whole step as the plan
predicts it; ``bound_us``: the certificate's. ``--before``: results of earlier sources to compare with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.plan_quality_models import MODELS
from mtcompile.capture.tracing import collecting_seldom
from mtcompile.forecast.request import ForecastRequest, sized_step
from mtcompile.machine.presets import PRESETS
from mtcompile.optim.precision import precision_named
from mtcompile.optim.state_sizes import state_copies, update_workspace
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Updates
from mtcompile.passes.planning.problem import DoesNotFit, no_progress

MACHINES = ("rtx3090", "rtx4090", "h100-sxm", "h200-sxm", "gh200")
SHARES = (None, 0.25, 0.6, 0.92)  # of the machine's memory; None: the fewest bytes that work, and a tenth more


def rows(model: str, machines: list[str], hosts: list[float]) -> Iterator[dict[str, Any]]:
    """Plans a model for each machine and budget. ``hosts``: shares for host budgets."""
    factory, batch, seq = MODELS[model]
    kind = precision_named("bf16-master32")
    copies = state_copies(kind, "adamw")
    for name in machines:
        machine = PRESETS[name]
        budgets = Budgets(
            int(machine.device_nbytes * 0.92),
            None,
            copies,
            updates=Updates(copies, update_workspace(kind.split), run_ahead=True),
        )
        request = ForecastRequest(factory, None, kind, "adamw", machine, budgets, (), False, no_progress, 1)
        with collecting_seldom():
            begun = time.process_time()
            sized = sized_step(request, batch, seq)
            captured_s = time.process_time() - begun
            yield from _budgets(model, name, sized.candidates, captured_s, hosts)


def _budgets(model: str, machine: str, candidates: Any, captured_s: float, hosts: list[float]) -> Iterator[dict[str, Any]]:
    for share, host_share in itertools.product(SHARES, hosts or [None]):
        begun = time.process_time()
        row: dict[str, Any] = {"model": model, "machine": machine, "share": share}
        row |= {} if host_share is None else {"host_share": host_share}
        try:
            if share is None:
                try:
                    candidates.best(1, None)
                except DoesNotFit as error:
                    budget = int(error.minimum * 1.1)
            else:
                budget = int(PRESETS[machine].device_nbytes * share)
            plan = candidates.best(budget, None).plan
            if host_share is not None:
                host, begun = _between(candidates, budget, plan.peak_bytes["host"], host_share), time.process_time()
                plan, row = candidates.best(budget, host).plan, row | {"host_bytes": host}
        except DoesNotFit as error:
            yield row | {"needs_bytes": error.minimum}
            continue
        certificate = getattr(plan, "certificate", None)
        yield row | {
            "budget_bytes": budget,
            "step_time_us": plan.total_us,
            "bound_us": certificate.bound_us if certificate else None,
            "gains_us": dict(certificate.gains_us) if certificate else {},
            "peak_bytes": plan.peak_bytes["device"],
            "capture_cpu_s": round(captured_s, 2),
            "plan_cpu_s": round(time.process_time() - begun, 2),
        }


def _between(candidates: Any, device: int, most: int, share: float) -> int:
    """The bytes at a share of the way from the fewest of the host that work to the ``most`` that a plan takes."""
    try:
        candidates.best(device, 0)
    except DoesNotFit as error:
        return int(error.minimum + share * (most - error.minimum))
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; may be repeated")
    parser.add_argument("--machine", action="append", choices=PRESETS, help="only this one; may be repeated")
    parser.add_argument("--host", action="append", type=float, metavar="SHARE", help="a host budget; may be repeated")
    parser.add_argument("--json", type=Path, help="where the raw results go")
    parser.add_argument("--before", type=Path, help="raw results of earlier sources")
    options = parser.parse_args()
    before = {}
    if options.before:
        for row in json.loads(options.before.read_text()):
            before[_key(row)] = row.get("step_time_us")
    results: list[dict[str, Any]] = []
    for model in options.model or MODELS:
        for row in rows(model, options.machine or list(MACHINES), options.host or []):
            row["before_us"] = before.get(_key(row))
            results.append(row)
            print(_line(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    gaps = [row["step_time_us"] / row["bound_us"] for row in results if row.get("bound_us")]
    if gaps:
        print(f"{len(gaps)} plans: step over bound: median {statistics.median(gaps):.4f}, worst {max(gaps):.4f}")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["machine"], row["share"], row.get("host_share")


def _line(row: dict[str, Any]) -> str:
    budget = "floor + 10 %" if row["share"] is None else f"{row['share']:.0%}"
    head = f"{row['model']:12s} {row['machine']:9s} {budget:12s}"
    head += f" host {row['host_share']:4.0%}" if "host_share" in row else ""
    if "needs_bytes" in row:
        return f"{head} does not fit: needs {row['needs_bytes'] / 1e9:.2f} GB"
    gap = f"{row['step_time_us'] / row['bound_us']:.4f} of the bound" if row["bound_us"] else "no bound"
    faster = f", {row['before_us'] / row['step_time_us']:.3f} x as fast as before" if row["before_us"] else ""
    return f"{head} {row['step_time_us'] / 1e3:10.1f} ms, {gap}{faster}; {row['plan_cpu_s']:.1f} CPU s"


if __name__ == "__main__":
    main()
