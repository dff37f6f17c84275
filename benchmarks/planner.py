"""How near the best possible the planner is: small step graphs of which every plan is tried.

    python -m benchmarks.planner --json out.json

For each of 30 small models, on a machine drawn with it: every combination of lookahead (0 to 2), home of each block's
parameters, where each value between blocks waits (device, host, or recomputed), and what becomes of each value saved for
the backward (kept on the device, kept on the host, recomputed) is rewritten, lowered and simulated: some thousand plans a
graph. The planner's choice at six budgets from floor to resident is put beside the fastest of them that fits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import fx, nn

from mtcompile.capture.tracing import trace
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.saved import crossing_values, saved_values
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Choice, Decision, Plan
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem
from mtcompile.passes.step_graph import regions, results

GRAPHS, FEWEST_PLANS, MOST_PLANS = 30, 500, 8000
TIERS: tuple[Choice, ...] = ("device", "host")
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.95)  # of the way from the smallest peak to the resident plan's


class Block(nn.Module):
    """One linear layer, or two with ``hidden`` features between them."""

    def __init__(self, width: int, hidden: int, residual: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden or width)
        self.down = nn.Linear(hidden, width) if hidden else nn.Identity()
        self.residual = residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + made if self.residual else made


class Net(nn.Module):
    def __init__(self, blocks: tuple[tuple[int, int, bool], ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(*block) for block in blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@dataclass(frozen=True, slots=True)
class Result:
    """``ratios``: the planner's predicted step time over the optimum's, by budget; ``bounds``: its certificate's. ``rejected``:
    budgets at which the planner found nothing and the search did."""

    graph: int
    plans: int
    seconds: float
    evaluations: int
    ratios: tuple[float, ...]
    bounds: tuple[float, ...]
    rejected: int


def draw(seed: int) -> tuple[fx.GraphModule, Machine]:
    """A step graph of one to three blocks and a machine on which something is scarce."""
    choose = random.Random(seed)
    width = choose.choice([16, 32, 64, 128])
    blocks = tuple((width, width * choose.choice([0, 0, 1, 4]), choose.random() < 0.5) for _ in range(choose.choice([1, 2, 3])))
    rows = choose.choice([4, 32, 128, 512])
    link = choose.choice([0.3, 1.0, 3.0, 10.0])
    flops = choose.choice([3e11, 1e12, 3e12])
    machine = Machine(f"drawn-{seed}", flops, 100.0, link, link, issue_us=0.2, host_gbps=choose.choice([5.0, 20.0]))
    torch.compiler.reset()
    torch.manual_seed(seed)
    return trace(Net(blocks), {"x": torch.randn(rows, width)}).step, machine


def every_plan(step: fx.GraphModule, base: Plan, blocks: list[str]) -> Iterator[Plan]:
    """All combinations of decisions, the values of least bytes decided together until they are few enough to try."""
    variables: list[list[tuple[Decision, ...]]] = [[_home(b, tier) for tier in TIERS] for b in blocks]
    small = []
    for region in regions(step):
        names = step.meta["blocks"][region.meta["block"]]
        saved, crossing = (saved_values(region), crossing_values(region)) if region.meta["phase"] == "forward" else ([], [])
        others = []
        for value in results(region):
            if value.meta["role"] != "activation":
                continue
            tiers = [(Decision("activation", value.name, tier, 0, "tried"),) for tier in TIERS]
            if value in saved:
                kept = Decision("variant", names, "keep", 0, "tried", (value.name,))
                variables.append([*((*tier, kept) for tier in tiers), ()])
            elif value in crossing:
                variables.append([*tiers, (Decision("activation", value.name, "recompute", 0, "tried"),)])
            elif value.meta["nbytes"] > 1024:
                others.append(value.name)
            else:
                small.append(value.name)
        if others:
            variables.append([tuple(Decision("activation", v, t, 0, "tried") for v in others) for t in TIERS])
    together = tuple(Decision("activation", name, "device", 0, "tried") for name in small)
    for lookahead, *drawn in itertools.product((0, 1, 2), *variables):
        decisions: dict[tuple[str, str], Decision] = {}
        for decision in itertools.chain(together, *drawn):
            key = (decision.kind, decision.subject)
            before = decisions.get(key)
            values = (*(before.values if before else ()), *decision.values)
            decisions[key] = Decision(decision.kind, decision.subject, decision.choice, 0, decision.reason, values)
        yield replace(base, decisions=(*base.decisions, *decisions.values()), lookahead=lookahead)


def _home(block: str, tier: Choice) -> tuple[Decision, ...]:
    return (Decision("params", block, tier, 0, "tried"),)


def examine(seed: int, most: int = MOST_PLANS, effort: str = "normal") -> Result | None:
    """None where there would be fewer or more plans to try than is worth the time."""
    step, machine = draw(seed)
    candidates = Candidates(PlanningProblem(step, machine, Budgets(), effort=effort))
    plans = list(itertools.islice(every_plan(step, candidates.base, list(candidates.sizes)), most + 1))
    if not FEWEST_PLANS <= len(plans) <= most:
        return None
    tried = [(made.schedule.peak_nbytes["device"], made.plan.total_us) for made in map(candidates.evaluate, plans)]
    least, full = min(peak for peak, _ in tried), candidates.best(None, None).schedule.peak_nbytes["device"]
    start, ratios, bounds, rejected = time.perf_counter(), [], [], 0
    for share in SHARES:
        budget = int(least + share * (full - least))
        optimum = min(total for peak, total in tried if peak <= budget)
        certificate = candidates.certificate(budget, None)
        bounds.append(certificate.bound_us / optimum if certificate else 0.0)
        try:
            ratios.append(candidates.best(budget, None).plan.total_us / optimum)
        except DoesNotFit:
            rejected += 1
    return Result(seed, len(plans), time.perf_counter() - start, candidates.evaluations, tuple(ratios), tuple(bounds), rejected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=GRAPHS, help="how many (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default %(default)s)")
    parser.add_argument("--json", type=Path, help="where the raw results go")
    options = parser.parse_args()
    found: list[Result] = []
    seed = options.first
    while len(found) < options.graphs:
        result = examine(seed)
        seed += 1
        if result is not None:
            found.append(result)
            shown = " ".join(f"{ratio:.3f}" for ratio in result.ratios)
            bounds = " ".join(f"{ratio:.3f}" for ratio in result.bounds)
            print(f"graph {result.graph}: {result.plans} plans; planner/optimum {shown}; bound/optimum {bounds}; ", end="")
            print(f"refused {result.rejected}", flush=True)
    ratios = [ratio for result in found for ratio in result.ratios]
    worst, refused = max(ratios), sum(result.rejected for result in found)
    median = statistics.median(ratios)
    print(f"{len(found)} graphs, {len(ratios)} budgets: worst {worst:.4f}, median {median:.4f}; refused {refused}")
    print(f"certificate over optimum: at most {max(bound for result in found for bound in result.bounds):.4f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in found], indent=1))


if __name__ == "__main__":
    main()
