"""Random training programs as users write them: a small model and a loop, drawn from a seed, run plainly or compiled.

Each feature is something people do: views and detached tensors among the outputs, buffers that change, random numbers, hooks,
freezing, averaged weights, changes of weights between steps, shared memory, several kinds of loops and optimizers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import mtcompile

FEATURES = (
    *("buffer", "noise", "dropout", "norm", "tied", "storage_tied", "view_buffer", "noted", "repeated", "in_place"),
    *("detached", "views", "whole_and_part", "passed_parameter", "input_grad"),
    *("forward_hook", "parameter_hook", "output_hook", "outside_term", "evaluation", "freeze", "clip", "accumulated"),
    *("averaged", "scaled_weights", "clamped_data", "schedule", "reload", "zero_in_place", "held", "dropped", "two_sizes"),
)
OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.SGD(p, lr=0.05),
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: torch.optim.AdamW(p, lr=1e-2),
    lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    lambda p: torch.optim.Adagrad(p, lr=1e-2),
)
POLICIES = ("fastest", "resident", "megatrain", "checkpoint-all", "offload-all")


@dataclass(frozen=True, slots=True)
class Spec:
    """One program. ``tight``: it runs in little more than the smallest budget that works."""

    seed: int
    features: frozenset[str]
    layers: int
    optimizer: int
    policy: str
    tight: bool

    @staticmethod
    def of(seed: int) -> Spec:
        rng = Random(seed)
        features = frozenset(rng.sample(FEATURES, rng.randint(3, 8)))
        return Spec(seed, features, rng.randint(2, 4), rng.randrange(len(OPTIMIZERS)), rng.choice(POLICIES), rng.random() < 0.3)


@dataclass(slots=True)
class Run:
    """What a program showed: everything that must agree, in order, and the error that ended it early."""

    seen: list[tuple[str, Any]]
    refused: mtcompile.MtcompileError | None = None

    def see(self, what: str, value: Any) -> None:
        self.seen.append((what, value.detach().clone() if isinstance(value, Tensor) else value))


class Block(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8) if "norm" in spec.features else nn.Identity()
        if "buffer" in spec.features:
            self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        features = self.spec.features
        hidden = self.norm(self.linear(x))
        if "buffer" in features and self.training:
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
            hidden = hidden - self.mean
        if "in_place" in features:
            hidden = hidden * 1.0
            hidden[:, ::2] *= 2
            hidden.relu_()
        if "noise" in features and self.training:
            hidden = hidden + 0.1 * torch.randn_like(hidden) * (torch.rand(hidden.shape[0], 1, device=hidden.device) > 0.5)
        if "dropout" in features:
            hidden = nn.functional.dropout(hidden, 0.2, self.training)
        return x + torch.tanh(hidden)


class Model(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.head = nn.Linear(8, 8, bias=False)
        self.noted: Tensor | None = None
        if "tied" in spec.features:
            self.blocks[-1].linear.weight = self.blocks[0].linear.weight
        if "storage_tied" in spec.features:
            self.head.weight.data = self.blocks[0].linear.weight.data
        if "view_buffer" in spec.features:
            self.register_buffer("transposed", self.head.weight.data.t(), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = self.spec.features
        for block in self.blocks:
            x = block(x)
        if "repeated" in features:
            x = self.blocks[0](x)
        if "noted" in features:
            self.noted = x.detach()
        logits = self.head(x)
        outputs: dict[str, Any] = {"loss": logits.pow(2).mean()}
        if "view_buffer" in features:
            outputs["loss"] = outputs["loss"] + (x @ self.transposed).abs().mean()
        if "detached" in features:
            outputs["first"] = logits.detach()
            outputs["target"] = x.detach()[:, :4]
        if "views" in features:
            outputs["flat"], outputs["chunks"] = logits.view(-1), logits.chunk(2, 1)
        if "whole_and_part" in features:
            outputs["hidden"], outputs["row"], outputs["wide"] = x, x[0], x.sum(0).expand(3, 8)
        if "passed_parameter" in features:
            outputs["weight"] = self.head.weight
        return outputs


def run(spec: Spec, compiled: bool) -> Run:
    """Runs a program. One that is refused must have changed nothing in the step that was refused."""
    torch.manual_seed(spec.seed)
    model: Any = Model(spec)
    shown = Run([])
    features, optimizer = spec.features, OPTIMIZERS[spec.optimizer](model.parameters())
    held = {name: p.data for name, p in model.named_parameters()} if "held" in features else {}
    if compiled:
        model = mtcompile.compile(model, memory=_budget(spec), optimizer=optimizer, policy=spec.policy)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if "schedule" in features else None
    if "forward_hook" in features:
        model.head.register_forward_hook(lambda module, args, output: output * 1.5)
    if "parameter_hook" in features:
        model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    average = {name: p.data.clone() for name, p in model.named_parameters()}
    try:
        for step in range(4):
            if "freeze" in features and step == 2:
                model.blocks[0].linear.weight.requires_grad_(False)
            _train(spec, model, optimizer, step, shown)
            if schedule is not None:
                schedule.step()
            _between_steps(spec, model, optimizer, average, shown)
    except mtcompile.MtcompileError as error:
        shown.refused = error
    for name, tensor in held.items():
        shown.see(f"held {name}", tensor)
    _see_state(model, shown)
    return shown


def _budget(spec: Spec) -> int | str:
    if not spec.tight or spec.policy != "fastest":
        return "1GiB"
    state = torch.get_rng_state()
    probe = mtcompile.compile(Model(spec), memory=1)
    try:
        probe(torch.randn(8, 8))
    except mtcompile.BudgetError as error:
        return int(error.minimum_bytes * 1.2)
    finally:
        torch.set_rng_state(state)
    return "1GiB"


def _train(spec: Spec, model: Any, optimizer: torch.optim.Optimizer, step: int, shown: Run) -> None:
    features = spec.features
    for _ in range(2 if "accumulated" in features else 1):
        x = torch.randn(4 if "two_sizes" in features and step % 2 else 8, 8, requires_grad="input_grad" in features)
        if "dropped" in features and step == 1:
            model(x.detach())  # skipped, as after a batch that is not finite
        outputs = model(x)
        loss = _loss(outputs, model, features)
        if "output_hook" in features:
            loss.register_hook(lambda gradient: gradient * 2)
        shown.see("loss", loss)
        for name, value in outputs.items():
            for part in value if isinstance(value, tuple) else (value,):
                shown.see(f"layout of {name}", (part.shape, part.stride(), part.requires_grad))
                shown.see(name, part)
        loss.backward()
        if x.grad is not None:
            shown.see("gradient of x", x.grad)
    if "noted" in features:
        shown.see("noted", model.noted)
    if "clip" in features:
        shown.see("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    for name, parameter in model.named_parameters():
        shown.see(f"gradient of {name}", parameter.grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none="zero_in_place" not in features)


def _loss(outputs: dict[str, Any], model: Any, features: frozenset[str]) -> Tensor:
    loss: Tensor = outputs["loss"]
    if "detached" in features:
        loss = loss + (outputs["first"].mean() - model.head.weight.mean()).pow(2) + outputs["target"].sum() * loss
    if "views" in features:
        loss = loss + outputs["flat"].abs().mean() + outputs["chunks"][1].sum() * 0.1
    if "whole_and_part" in features:
        loss = loss + outputs["row"].sum() * 0.1 + outputs["wide"].pow(2).mean()
    if "passed_parameter" in features:
        loss = loss + outputs["weight"].abs().sum() * 0.01
    if "outside_term" in features:
        loss = loss + 0.01 * model.blocks[-1].linear.bias.pow(2).sum()  # used once: see the contract for those used twice
    return loss


def _between_steps(spec: Spec, model: Any, optimizer: torch.optim.Optimizer, average: dict[str, Tensor], shown: Run) -> None:
    features = spec.features
    if "scaled_weights" in features:
        with torch.no_grad():
            model.head.weight.mul_(0.9)
    if "clamped_data" in features:
        model.blocks[0].linear.weight.data.clamp_(-0.3, 0.3)
    if "averaged" in features:
        backup = {}
        for name, parameter in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * parameter.data
            backup[name], parameter.data = parameter.data, average[name]
        with torch.no_grad():
            shown.see("averaged", model(torch.ones(8, 8))["loss"])
        for name, parameter in model.named_parameters():
            parameter.data = backup[name]
    if "evaluation" in features:
        model.eval()
        with torch.no_grad():
            shown.see("evaluation", model(torch.ones(8, 8))["loss"])
        model.train()
    if "reload" in features:
        states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])


def _see_state(model: Any, shown: Run) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        shown.see(name, tensor)
    shown.see("generator", torch.get_rng_state())
