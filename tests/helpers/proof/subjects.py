"""Real steps to corrupt: small models under drawn plans, with casts, buffers, updates in the backward, clipping, run-ahead,
micro-batches and half-precision weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mtcompile.passes import rewrite
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.joint.accumulate import repeat
from mtcompile.passes.joint.batch.joining import Micro, joining_of
from mtcompile.passes.joint.build import InputHomes, build
from mtcompile.passes.lower import lower
from mtcompile.passes.plan import Plan, Updates
from mtcompile.passes.proof.schedule import Given
from mtcompile.runtime.schedule import Schedule
from tests.helpers.models import Block, Mixture
from tests.helpers.tracing import lowered, random_plan, trace


@dataclass(frozen=True, slots=True)
class Subject:
    """A step that was rewritten under ``given.plan`` and lowered. ``inputs``: the tensors that the captured graph takes."""

    name: str
    joint: fx.GraphModule
    step: fx.GraphModule
    schedule: Schedule
    given: Given
    inputs: tuple[Tensor, ...]


class Gpt(nn.Module):
    """Attention, dropout, norms and tied weights; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = x @ self.embed.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits.argmax(-1)


class Halved(nn.Module):
    """fp32 weights that are read in bf16, as under autocast: they are cast at home."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            half = x.to(torch.bfloat16) @ layer.weight.to(torch.bfloat16) + layer.bias.to(torch.bfloat16)
            x = x + torch.tanh(half.float())
        return x.square().mean()


class Normed(nn.Module):
    """Module buffers that a step changes, a constant tensor and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3))
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x + layer(x) * torch.tensor([1.0, 2.0 + index]).repeat(4)
        return x.square().mean()


def _tokens() -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(1))}


def _mixture() -> nn.Module:
    return Mixture(2, experts=8, active=2).bfloat16()


def _rows(width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, width, generator=torch.Generator().manual_seed(2))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "gpt": (Gpt, _tokens),
    "gpt in bf16": (lambda: Gpt().bfloat16(), _tokens),
    "halved": (Halved, lambda: _rows(16)),
    "normed": (Normed, lambda: _rows(8)),
}
MIXTURE = "mixture"  # whose experts are fetched by slices
UPDATES: dict[str, Updates | None] = {
    "by step()": None,
    "in the backward": Updates(2.0, 3.0),
    "clipped": Updates(2.0, 3.0, held=True),
    "running ahead": Updates(3.5, 1.0, run_ahead=True),
    "clipped, running ahead": Updates(2.0, 1.0, held=True, run_ahead=True),
}


@functools.cache
def _traced(model: str, micro_batches: int) -> tuple[fx.GraphModule, fx.GraphModule, tuple[Tensor, ...]]:
    """The joint graph, the step graph built of it, and its inputs."""
    torch.manual_seed(0)
    make, data = (_mixture, _tokens) if model == MIXTURE else MODELS[model]
    traced = trace(make().train(), data())
    joint, inputs = traced.joint, list(traced.inputs)
    if micro_batches > 1:
        split = tuple(spec.index for spec in joint.meta["inputs"] if spec.role == "input")
        micro = Micro(micro_batches, split, len(inputs), wide=True)
        joint = repeat(joint, micro, joining_of(joint, micro))
        inputs += [inputs[index].flip(0).clone() for _ in range(1, micro_batches) for index in split]
    return joint, build(joint, input_homes=InputHomes(experts="used")), tuple(inputs)


def subject(model: str, updates: str, plan: int | None, micro_batches: int = 1) -> Subject:
    """A step under the plan drawn by a number; None: under the floor's, in which everything streams and is recomputed."""
    joint, step, inputs = _traced(model, micro_batches)
    asked = UPDATES[updates]
    drawn = Plan(lookahead=1) if plan is None else random_plan(step, Random(f"{model} {updates} {plan}").choice)
    drawn = replace(drawn, updates=asked)
    budgets = Budgets(device=2**24, host=2**26, updates=asked, reserve=128)
    rewritten = rewrite(step, drawn)
    rewritten.recompile()
    schedule = lowered(rewritten, drawn, budgets=budgets)
    name = f"{model}, updated {updates}, plan {plan}, {micro_batches} micro-batches"
    return Subject(name, joint, rewritten, schedule, Given(drawn, budgets), inputs)


def lowered_again(own: Subject, step: fx.GraphModule) -> Schedule:
    """The schedule of another step under the same plan, as lowering makes it: unchecked."""
    plan = replace(own.given.plan, budget_bytes=own.given.budgets.nbytes)
    return lower(step, plan, Machine(), own.schedule.resident_nbytes, own.given.workspace)


def subjects(plans: int) -> Iterator[Subject]:
    """Every model with every kind of update, under the floor's plan and ``plans`` drawn ones."""
    for model in MODELS:
        for updates in UPDATES:
            for plan in (None, *range(plans)):
                yield subject(model, updates, plan)
    for updates in ("by step()", "clipped"):
        yield subject("gpt in bf16", updates, None, 2)
    yield subject(MIXTURE, "in the backward", None)


def few_subjects() -> Iterator[Subject]:
    """One of each kind."""
    rows: Any = (("gpt", "clipped", None), ("halved", "running ahead", None), ("normed", "by step()", 2))
    for row in rows:
        yield subject(*row)
    yield subject("gpt in bf16", "clipped", None, 2)
