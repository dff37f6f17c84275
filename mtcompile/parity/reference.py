"""The two sides of a comparison: a model trained in plain PyTorch and a copy of it compiled, stepped in turn by the same
optimizer on the same data. ``verifying`` compares what they make, ``mtcompile bench`` what they take."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from mtcompile.api import compile
from mtcompile.capture.arguments import micro_batches
from mtcompile.errors import BudgetError
from mtcompile.forecast import solve
from mtcompile.machine.presets import machine_of
from mtcompile.models.loading import made
from mtcompile.optim.master_weights import cast
from mtcompile.optim.precision import Precision
from mtcompile.optim.update_options import update_options
from mtcompile.passes.generators import generator_state, set_generator_state
from mtcompile.passes.joint.loss_weights import MEAN, SUM
from mtcompile.passes.planning.planner import Tell
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import gib
from mtcompile.torch_private import counting_losses, without_memory

_UNLIMITED = 2**60


@dataclass(frozen=True, slots=True)
class Asked:
    """How to train both. ``memory``: device bytes of the compiled one, None: half of what everything resident takes."""

    device: Device
    precision: Precision
    memory: int | None = None
    batch: int = 1
    seq: int = 128
    update: str = "step"
    max_grad_norm: float | None = None
    accumulate: int = 1
    kernels: str = "eager"
    seed: int = 0
    lr: float = 1e-3

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.1)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is trained: copies of ``module`` on ``data``. ``memory``: bytes, the budget to begin with; ``given`` by the user, or
    what ``resident_bytes`` (what the plan says everything resident takes) led to."""

    module: nn.Module
    data: Mapping[str, Any]
    memory: int
    resident_bytes: int | None


def subject(asked: Asked, model: str | nn.Module | Callable[..., Any], data: Mapping[str, Any] | None, tell: Tell) -> Subject:
    """Raises ValueError, and BudgetError for what this machine cannot hold twice."""
    resident = None
    update_options("backward", asked.max_grad_norm, False, "stop")  # clipping is checked here whenever it is done
    if not isinstance(model, nn.Module):
        _refuse_giants(asked, model)
    torch.manual_seed(asked.seed)
    if isinstance(model, nn.Module):
        if data is None:
            raise ValueError("expected data=, the module's keyword arguments")
        module = copy.deepcopy(model).train()
    else:
        module, data = made(model, asked.batch, asked.seq)
        module.train()
    _works(asked, module, data)
    if asked.memory is None:
        resident = _resident_bytes(asked, module, data, tell)
    memory = resident // 2 if resident is not None else asked.memory
    assert memory is not None
    return Subject(module, data, memory, resident)


def _refuse_giants(asked: Asked, model: str | Callable[..., Any]) -> None:
    state = 0
    with without_memory(), contextlib.suppress(ValueError):  # not every factory works there; what is wrong is said later
        module, _ = made(model, asked.batch, asked.seq)
        state = 4 * sum(p.numel() * p.element_size() for p in module.parameters())
    needed, free = 2 * state, int(psutil.virtual_memory().available)
    if needed > free:
        raise BudgetError(
            f"two trainings are held at once, about {gib(needed)} of host memory for this model, and {gib(free)} are free; "
            "take a smaller one, such as the same configuration with fewer layers",
            needed,
        )


def _works(asked: Asked, module: nn.Module, data: Mapping[str, Any]) -> None:
    """Raises ValueError for a model that plain PyTorch cannot run, before anything is said of compiling it."""
    copied = copy.deepcopy(module)
    cast(copied, asked.precision)
    with torch.no_grad():
        try:
            output = copied.to(asked.device.where)(**_on(asked.device.where, data))
        except torch.OutOfMemoryError:  # which is no mistake
            return
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(
                f"expected a model that plain PyTorch runs, found that its call raises {type(error).__name__}: {reason}"
            ) from error
    loss_of(output)


def _on(where: torch.device, data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.to(where) if isinstance(value, Tensor) else value for name, value in data.items()}


def _resident_bytes(asked: Asked, module: nn.Module, data: Mapping[str, Any], tell: Tell) -> int:
    micro: Mapping[str, Any] = next(iter(micro_batches(data, asked.accumulate))) if asked.accumulate > 1 else data
    found = solve.plan(
        copy.deepcopy(module),
        micro,
        batch=asked.batch,
        memory=_UNLIMITED,
        machine=machine_of(asked.device.where, asked.kernels == "inductor", staged=False),
        precision=asked.precision.name,
        update=asked.update,
        max_grad_norm=asked.max_grad_norm if asked.update == "backward" else None,
        accumulate=asked.accumulate,
        tell=tell,
    )
    return found.peak_bytes["device"]


def loss_of(output: Any) -> Tensor:
    """The loss in what a model's call returned. Raises ValueError."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    loss = first if isinstance(first, Tensor) else getattr(first, "loss", None)
    if loss is None and isinstance(first, Mapping):
        loss = first.get("loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise ValueError(
            f"expected the model's call to return its loss, or something with a loss, found {type(first).__name__}{shape}"
        )
    return loss


class Side:
    """What both have. ``holder``: the module whose parameters the optimizer updates."""

    asked: Asked
    model: Any
    holder: nn.Module
    optimizer: torch.optim.Optimizer

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def kept(self) -> dict[str, dict[str, Tensor | None]]:
        """What a step leaves behind, by kind and name."""
        weights: dict[str, Tensor | None] = dict(self.holder.named_parameters())
        return {"buffer": dict(self.model.named_buffers()), "weight": weights, "master": dict(self.masters())}

    def masters(self) -> Mapping[str, Tensor]:
        raise NotImplementedError


class Compiled(Side):
    """``limit``: the bytes that it has in the end, more than it began with where those do not do and nobody gave them."""

    def __init__(self, asked: Asked, what: Subject) -> None:
        self.asked, self.what = asked, what
        self._make(what.memory)

    def _make(self, limit: int) -> None:
        self.limit, asked = limit, self.asked
        model = copy.deepcopy(self.what.module)
        self.optimizer = asked.optimizer(model)
        self.model = self.holder = compile(
            model,
            memory=limit,
            optimizer=self.optimizer,
            kernels=asked.kernels,
            device=asked.device.where,
            precision=asked.precision.name,
            accumulate=asked.accumulate,
            update=asked.update,
            max_grad_norm=asked.max_grad_norm if asked.update == "backward" else None,
        )

    def forward_backward(self) -> Tensor:
        where = str(self.asked.device.where)
        state = generator_state(where)
        try:
            output = self.model(**self.what.data)
        except BudgetError as error:
            if self.asked.memory is not None:
                raise
            self._make(error.minimum_bytes)
            set_generator_state(where, state)
            output = self.model(**self.what.data)
        loss = loss_of(output)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        if self.asked.update == "step" and self.asked.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.asked.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def masters(self) -> Mapping[str, Tensor]:
        from mtcompile.api import master_parameters

        return master_parameters(self.model) if self.asked.precision.split else {}


class Plain(Side):
    """``homes``: where the compiled model's parameters are updated, since a CPU and a GPU round the same update differently:
    here too they are, and computed with on the device. Where that is the host, both are one."""

    def __init__(self, asked: Asked, what: Subject, homes: list[torch.device]) -> None:
        self.asked, self.where = asked, asked.device.where
        self.holder = self.model = copy.deepcopy(what.module)
        self.split = cast(self.holder, asked.precision)
        if self.where.type != "cpu":
            self.model = copy.deepcopy(self.holder).to(self.where)
            for parameter, home in zip(self.holder.parameters(), homes, strict=True):
                parameter.data = parameter.data.to(home)
                if self.split is not None:
                    self.split.moved(parameter)
        self.data = _on(self.where, what.data)
        self.optimizer = asked.optimizer(self.holder)
        if self.split is not None:
            self.split.bind(self.optimizer)

    def about(self) -> str:
        update = "AdamW's own update"
        if self.split is not None:
            update = "mtcompile's written formula for fp32 masters, which plain PyTorch has not"
        parts = "" if self.asked.accumulate == 1 else f", {self.asked.accumulate} backwards weighted by the tokens that count"
        return f"plain PyTorch {torch.__version__} on {self.where}, {torch.get_num_threads()} threads{parts}; {update}"

    def forward_backward(self) -> Tensor:
        for parameter in self.model.parameters():
            parameter.grad_dtype = parameter.dtype
        if self.asked.accumulate == 1:
            loss = loss_of(self.model(**self.data))
            loss.backward()
        else:
            loss = self._accumulated()
        if self.model is not self.holder:
            for mine, its in zip(self.holder.parameters(), self.model.parameters(), strict=True):
                mine.grad = None
                if its.grad is not None:
                    _give(mine, its.grad.to(mine.device))
        return loss.detach()

    def _accumulated(self) -> Tensor:
        """One backward after the other; the loss is what ``compile(accumulate=)`` says it is."""
        losses: list[Tensor] = []
        counted: list[tuple[int, int, bool]] = []
        for part in micro_batches(self.data, self.asked.accumulate):
            with counting_losses(counted):
                losses.append(loss_of(self.model(**part)))
        weighted = [share(loss) for loss, share in zip(losses, _shares(losses, counted), strict=True)]
        sums: dict[nn.Parameter, Tensor] = {}
        for loss in weighted:
            loss.backward()
            if self.split is not None:  # each gradient is bf16, their sum is fp32
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        wide, parameter.grad = parameter.grad.float(), None
                        sums[parameter] = sums[parameter] + wide if parameter in sums else wide
        for parameter, total in sums.items():
            _give(parameter, total)
        of_all = functools.reduce(torch.add, (loss.detach() for loss in weighted))
        return of_all.to(losses[0].dtype)

    def step(self) -> None:
        norm = self.asked.max_grad_norm
        if norm is not None and self.asked.update == "backward" and self.split is not None:
            self._clip_in_fp32(norm)
        elif norm is not None:
            torch.nn.utils.clip_grad_norm_(self.holder.parameters(), norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.model is not self.holder:
            self.model.zero_grad()
            for mine, its in zip(self.holder.parameters(), self.model.parameters(), strict=True):
                its.data.copy_(mine.data)

    def _clip_in_fp32(self, most: float) -> None:
        """As ``update="backward"`` does it where there are masters: torch's norm of bf16 gradients is rounded to bf16."""
        having = [p for p in self.holder.parameters() if p.grad is not None]
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in having]
        factor = (most / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        for parameter in having:
            assert parameter.grad is not None
            _give(parameter, parameter.grad.float() * factor)

    def masters(self) -> Mapping[str, Tensor]:
        return {} if self.split is None else self.split.tensors()


def _give(parameter: nn.Parameter, gradient: Tensor) -> None:
    """A gradient that is wider than its parameter."""
    parameter.grad_dtype = None
    parameter.grad = gradient


def _shares(losses: list[Tensor], counted: list[tuple[int, int, bool]]) -> list[Callable[[Tensor], Tensor]]:
    """What each micro-batch's loss is multiplied by. ``counted``: of all cross-entropies that ran: reduction, tokens that
    count, whether classes are weighted."""
    reductions = {reduction for reduction, _, _ in counted}
    if reductions == {SUM}:
        return [lambda loss: loss] * len(losses)
    if reductions == {MEAN} and len(counted) == len(losses) and not any(weighted for _, _, weighted in counted):
        exact = torch.float64 if losses[0].dtype == torch.float64 else torch.float32
        counts = [torch.tensor(float(tokens), dtype=exact, device=losses[0].device) for _, tokens, _ in counted]
        of_all = sum(counts[1:], counts[0])
        return [functools.partial(_scaled, share=count / of_all) for count in counts]
    return [lambda loss: loss / len(losses)] * len(losses)


def _scaled(loss: Tensor, share: Tensor) -> Tensor:
    return loss.to(share.dtype) * share
