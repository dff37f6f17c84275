"""The two sides of a comparison: a reference trained in plain PyTorch and a copy of it compiled, both stepped by the same
optimizer on the same data. ``verification`` compares their results, ``benchmark`` their times."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.api import compile, master_parameters
from mtcompile.capture.arguments import micro_batches
from mtcompile.errors import BudgetError
from mtcompile.optim.master_weights import cast
from mtcompile.optim.written_update import norm_in_fp32
from mtcompile.parity.workload import TrainingSetup, Workload, loss_of, on_device
from mtcompile.passes.generators import generator_state, set_generator_state
from mtcompile.passes.joint.loss_weights import MEAN, SUM
from mtcompile.torch_private import counting_losses


class Side:
    """One training. ``model`` is called; ``owner`` is the module whose parameters the optimizer updates."""

    setup: TrainingSetup
    model: Any
    owner: nn.Module
    optimizer: torch.optim.Optimizer

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def state(self) -> dict[str, dict[str, Tensor | None]]:
        """Returns the tensors that outlast a step, by kind and name."""
        weights: dict[str, Tensor | None] = dict(self.owner.named_parameters())
        return {"buffer": dict(self.model.named_buffers()), "weight": weights, "master": dict(self.masters())}

    def masters(self) -> Mapping[str, Tensor]:
        raise NotImplementedError


class CompiledSide(Side):
    """The compiled training. ``limit``: its budget in bytes, raised to the minimum if the workload's own guess is too small."""

    def __init__(self, setup: TrainingSetup, workload: Workload) -> None:
        self.setup, self.workload = setup, workload
        self._compile(workload.memory)

    def _compile(self, limit: int) -> None:
        self.limit, setup = limit, self.setup
        model = copy.deepcopy(self.workload.module)
        self.optimizer = setup.optimizer(model)
        self.model = self.owner = compile(
            model,
            memory=limit,
            optimizer=self.optimizer,
            kernels=setup.kernels,
            device=setup.device.where,
            precision=setup.precision.name,
            accumulate=setup.accumulate,
            update=setup.update,
            max_grad_norm=setup.max_grad_norm if setup.update == "backward" else None,
        )

    def forward_backward(self) -> Tensor:
        where = str(self.setup.device.where)
        state = generator_state(where)
        try:
            output = self.model(**self.workload.data)
        except BudgetError as error:
            if self.setup.memory is not None:
                raise
            self._compile(error.minimum_bytes)
            set_generator_state(where, state)
            output = self.model(**self.workload.data)
        loss = loss_of(output)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        if self.setup.update == "step" and self.setup.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setup.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def masters(self) -> Mapping[str, Tensor]:
        return master_parameters(self.model) if self.setup.precision.split else {}


class PlainSide(Side):
    """The training in plain PyTorch. ``homes``: the device of each parameter of the compiled model; updates run there, because
    a CPU and a GPU round the same update differently. ``model`` computes on the device and is ``owner`` if that is the host."""

    def __init__(self, setup: TrainingSetup, workload: Workload, homes: list[torch.device]) -> None:
        self.setup, self.where = setup, setup.device.where
        self.owner = self.model = copy.deepcopy(workload.module)
        self.split = cast(self.owner, setup.precision)
        if self.where.type != "cpu":
            self.model = copy.deepcopy(self.owner).to(self.where)
            for parameter, home in zip(self.owner.parameters(), homes, strict=True):
                parameter.data = parameter.data.to(home)
                if self.split is not None:
                    self.split.moved(parameter)
        self.data = on_device(self.where, workload.data)
        self.optimizer = setup.optimizer(self.owner)
        if self.split is not None:
            self.split.bind(self.optimizer)

    def about(self) -> str:
        """Describes the reference in one line."""
        update = "AdamW's own update"
        if self.split is not None:
            update = "mtcompile's written formula for fp32 masters, which plain PyTorch does not have"
        parts = "" if self.setup.accumulate == 1 else f", {self.setup.accumulate} backwards weighted by the tokens that count"
        return f"plain PyTorch {torch.__version__} on {self.where}, {torch.get_num_threads()} threads{parts}; {update}"

    def forward_backward(self) -> Tensor:
        for parameter in self.model.parameters():
            parameter.grad_dtype = parameter.dtype
        if self.setup.accumulate == 1:
            loss = loss_of(self.model(**self.data))
            loss.backward()
        else:
            loss = self._accumulated()
        if self.model is not self.owner:
            for home, computed in zip(self.owner.parameters(), self.model.parameters(), strict=True):
                home.grad = None
                if computed.grad is not None:
                    _set_gradient(home, computed.grad.to(home.device))
        return loss.detach()

    def _accumulated(self) -> Tensor:
        """Runs one backward per micro-batch. Returns the loss as ``compile(accumulate=)`` defines it."""
        losses: list[Tensor] = []
        counted: list[tuple[int, int, bool]] = []
        for micro_batch in micro_batches(self.data, self.setup.accumulate):
            with counting_losses(counted):
                losses.append(loss_of(self.model(**micro_batch)))
        weighted = [share(loss) for loss, share in zip(losses, _shares(losses, counted), strict=True)]
        sums: dict[nn.Parameter, Tensor] = {}
        for loss in weighted:
            loss.backward()
            if self.split is not None:  # each gradient is bf16, their sum is fp32
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        gradient, parameter.grad = parameter.grad.float(), None
                        sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
        for parameter, total in sums.items():
            _set_gradient(parameter, total)
        total_loss = functools.reduce(torch.add, (loss.detach() for loss in weighted))
        return total_loss.to(losses[0].dtype)

    def step(self) -> None:
        norm = self.setup.max_grad_norm
        if norm is not None and self.setup.update == "backward" and self.split is not None:
            self._clip_in_fp32(norm)
        elif norm is not None:
            torch.nn.utils.clip_grad_norm_(self.owner.parameters(), norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.model is not self.owner:
            self.model.zero_grad()
            for home, computed in zip(self.owner.parameters(), self.model.parameters(), strict=True):
                computed.data.copy_(home.data)

    def _clip_in_fp32(self, max_norm: float) -> None:
        """Clips like ``update="backward"`` with fp32 masters: torch would round the norm of bf16 gradients to bf16."""
        parameters = [p for p in self.owner.parameters() if p.grad is not None]
        norms = [norm_in_fp32(p.grad) for p in parameters if p.grad is not None]
        factor = (max_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            assert parameter.grad is not None
            _set_gradient(parameter, parameter.grad.float() * factor)

    def masters(self) -> Mapping[str, Tensor]:
        return {} if self.split is None else self.split.tensors()


def _set_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Sets a gradient that may be wider than its parameter."""
    parameter.grad_dtype = None
    parameter.grad = gradient


def _shares(losses: list[Tensor], counted: list[tuple[int, int, bool]]) -> list[Callable[[Tensor], Tensor]]:
    """Returns, for each micro-batch, a function that multiplies its loss by its share of the batch. ``counted``: for each
    cross-entropy that ran, its reduction, the tokens that count, and whether its classes are weighted."""
    reductions = {reduction for reduction, _, _ in counted}
    if reductions == {SUM}:
        return [lambda loss: loss] * len(losses)
    if reductions == {MEAN} and len(counted) == len(losses) and not any(weighted for _, _, weighted in counted):
        exact = torch.float64 if losses[0].dtype == torch.float64 else torch.float32
        counts = [torch.tensor(float(tokens), dtype=exact, device=losses[0].device) for _, tokens, _ in counted]
        total = sum(counts[1:], counts[0])
        return [functools.partial(_scaled, share=count / total) for count in counts]
    return [lambda loss: loss / len(losses)] * len(losses)


def _scaled(loss: Tensor, share: Tensor) -> Tensor:
    return loss.to(share.dtype) * share
