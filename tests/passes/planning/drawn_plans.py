"""Small steps, machines and ways of updating, and plans drawn at random for them."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mtcompile.capture.tracing import Traced, trace_joint
from mtcompile.machine.presets import PRESETS
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets, streamable
from mtcompile.passes.cuts.fragments.cut import Cut, cut_weights
from mtcompile.passes.joint.build import InputHomes, build
from mtcompile.passes.plan import Decision, Plan, Updates
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.problem import PlanningProblem
from tests.helpers.models import Mixture, Straight
from tests.helpers.tracing import trace, traced_case

SLOW = replace(PRESETS["rtx4090"], host_gbps=2.0, h2d_gbps=1.0, d2h_gbps=1.0)
WAYS = {
    "after the backward": None,
    "as gradients arrive": Updates(),
    "in turns of four": Updates(sets=4),
    "held": Updates(held=True),
    "behind the forward": Updates(run_ahead=True),
    "on both sides": Updates(streamed=6),
    "on both sides, held": Updates(held=True, streamed=6),
    "on both sides, behind the forward": Updates(run_ahead=True, streamed=6),
}


_AHEAD = 1.03  # times as slow as with less memory a plan may be: each budget has climbs of its own, and their luck


def are_hardly_slower(times: Sequence[float]) -> bool:
    """Tells whether no plan of rising budgets takes longer than an earlier one, but for the luck of climbs."""
    return all(more <= _AHEAD * less for less, more in itertools.combinations(times, 2))


class Mixed(nn.Module):
    """Residual blocks with fp32 weights, computed in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = x + layer(x)
        return x.float().square().mean()


@functools.cache
def traced_mixed() -> Traced:
    torch.manual_seed(0)
    return trace(Mixed(), {"x": torch.randn(64, 64)})


def mixed() -> Any:
    return traced_mixed().step


@functools.cache
def straight() -> Any:
    return trace(Straight(), {"x": torch.randn(16, 64)}).step


class Crossing(nn.Module):
    """Residual blocks that all read one more value of the first block, which is read in the backward as it is: what leaves the
    first block is of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 48)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.first(x))
        x = x * 1.5
        for layer in self.layers:
            x = x + layer(x.tanh()) * gate
        return x.square().mean()


@functools.cache
def crossing() -> Any:
    torch.manual_seed(0)
    return trace(Crossing(), {"x": torch.randn(32, 48)}).step


class Down(nn.Module):
    """Two layers of one block. The value between them leaves the block too; its own backward reads it as well."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        between = nn.functional.gelu(self.first(x))
        return nn.functional.gelu(self.second(between)), between


class Skips(nn.Module):
    """Values of the first blocks wait for the last ones: one is read in the backward as it is, one is put beside others."""

    def __init__(self) -> None:
        super().__init__()
        wide = nn.Sequential(nn.Linear(48, 384), nn.GELU(), nn.Linear(384, 48))
        self.layers = nn.ModuleList([nn.Linear(48, 48), Down(48), Down(48), wide, nn.Linear(96, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, first = self.layers[1](self.layers[0](x))
        x, second = self.layers[2](x)
        x = self.layers[3](x).sin() * first
        x = self.layers[4](torch.cat([x, second], 1))
        return x.square().mean()


@functools.cache
def skips() -> Any:
    torch.manual_seed(0)
    return trace(Skips(), {"x": torch.randn(64, 48)}).step


class Chain(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(each for _ in range(layers) for each in (nn.Linear(width, width, bias=False), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.net(x).square().mean()
        return made


@functools.cache
def chain(layers: int, width: int, batch: int) -> Any:
    torch.manual_seed(0)
    return trace(Chain(layers, width), {"x": torch.randn(batch, width)}).step


@functools.cache
def in_fragments() -> Any:
    """A layer, and a larger one in fragments, which are put together again for the gradient of its input."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 288))
    joint, _ = trace_joint(model, {"input": torch.randn(8, 48)})
    cut_weights(joint, Cut(20_000, gathers=True))
    return build(joint)


BOUNDED = {
    "tied": lambda: traced_case("tied").step,
    "cnn": lambda: traced_case("cnn").step,
    "mixed": mixed,
    "straight": straight,
    "crossing": crossing,
    "skips": skips,
}
MACHINES = (
    SLOW,
    Machine("slow link", 1e12, 100.0, 0.05, 0.05, issue_us=0.2, host_gbps=20.0),
    Machine("slow memory", 1e12, 1.0, 1.0, 1.0, issue_us=0.0, host_gbps=100.0),
    Machine("slow compute", 1e10, 100.0, 0.2, 0.2, issue_us=0.1, host_gbps=50.0),
    Machine("fast", 1e12, 100.0, 50.0, 50.0, issue_us=0.2, host_gbps=1000.0),
)


def varied(candidates: Candidates, rnd: random.Random) -> Plan:
    """A plan with many decisions made at random, some of them alike."""
    ahead, pooled = rnd.choice([0, 1, 2, 3]), rnd.random() < 0.5
    wide = tuple(home for i, home in enumerate(candidates.sizes) if ahead and i % (ahead + 1))
    plan = replace(candidates.base, lookahead=ahead, narrow=rnd.random() < 0.7, wide=wide, pooled=pooled)
    homes = rnd.choice([["device", "host"], ["device"], ["host"]])
    tiers = rnd.choice([["device", "device", "host"], ["device"], ["host"]])
    keeps = rnd.choice(["a variant", "some", "all", "nothing"])
    for home, nbytes in candidates.sizes.items():
        if home not in candidates.problem.fixed_homes:
            plan = plan.with_decision(Decision("params", home, rnd.choice(homes), nbytes, ""))
        plan = plan.with_decision(Decision("fetch", home, rnd.choice(["keep", "again"]), nbytes, ""))
        plan = plan.with_decision(Decision("return", home, rnd.choice(["early", "late"]), nbytes, ""))
        plan = plan.with_decision(Decision("gradients", home, rnd.choice(["early", "late"]), nbytes, ""))
    for home in streamable(candidates.problem.step, candidates.problem.budgets):
        plan = plan.with_decision(Decision("update", home, rnd.choice(["device", "host"]), candidates.sizes[home], ""))
    for block in candidates.blocks:
        some = tuple(i for i in range(len(block.saved)) if keeps == "all" or (keeps == "some" and rnd.random() < 0.5))
        positions = rnd.choice(block.variants).positions if keeps == "a variant" else some
        names = tuple(block.saved[position].name for position in positions)
        plan = plan.with_decision(Decision("variant", block.name, "keep" if names else "recompute", 0, "", names))
        for value in (*block.saved, *block.crossing, *block.others):
            again = value in block.crossing and rnd.random() < 0.2
            tier = "recompute" if again else rnd.choice(tiers)
            plan = plan.with_decision(Decision("activation", value.name, tier, value.meta["nbytes"], ""))
            plan = plan.with_decision(Decision("load", value.name, rnd.choice(["early", "late"]), value.meta["nbytes"], ""))
    return plan


def with_homes_on_disk(plan: Plan, rnd: random.Random) -> Plan:
    """The plan with some of the homes and activations on the host on disk instead, read a random number of regions ahead, or
    straight to the device."""
    decisions = [replace(d, choice="disk") if d.choice == "host" and rnd.random() < 0.6 else d for d in plan.decisions]
    ahead = rnd.choice([0, 1, 2, 4])
    return replace(plan, decisions=tuple(decisions), disk_lookahead=ahead, disk_direct=rnd.random() < 0.5)


@functools.cache
def of_ranks(case: str, hosts: int) -> Any:
    """A step that four ranks run together."""
    torch.compiler.reset()
    traced = traced_mixed() if case == "mixed" else traced_case(case)
    return build(traced.joint, input_homes=InputHomes(ranks=4, hosts=hosts))


def problem_of_ranks(case: str, machine: Machine, updates: Updates | None, hosts: int, rnd: random.Random) -> PlanningProblem:
    """A step of ranks that update shares of some homes, of which each host may have a part."""
    step = of_ranks(case, hosts)
    homes = dict.fromkeys(step.meta["homes"].values(), "host")
    sharded = tuple(home for home in sorted(homes) if rnd.random() < 0.7)
    parts = frozenset(home for home in sharded if hosts > 1 and rnd.random() < 0.5)
    if updates is not None:
        updates = replace(updates, sharded=sharded, run_ahead=False, in_turn=hosts > 1)
    machine = replace(machine.shared_by(2, True, hosts), network_gbps=rnd.choice([0.1, 10.0]))
    budgets = Budgets(updates=updates, hosts=hosts, parts=parts if updates is not None else frozenset())
    return PlanningProblem(step, machine, budgets, fixed_homes=homes)


@functools.cache
def sliced() -> Any:
    """Experts, of which those are fetched that tokens chose."""
    torch.manual_seed(0)
    traced = trace(Mixture(2, experts=8, active=2).bfloat16(), {"tokens": torch.tensor([[3, 3, 5]])})
    return build(traced.joint, input_homes=InputHomes(experts="used"))
