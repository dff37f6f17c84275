"""The workload of a comparison: how a model is trained plainly and compiled, on what, and within which budget."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from mtcompile.capture.arguments import micro_batches
from mtcompile.errors import BudgetError
from mtcompile.forecast import solve
from mtcompile.machine.device import choose
from mtcompile.machine.presets import machine_of
from mtcompile.models.loading import build_model
from mtcompile.optim.master_weights import cast
from mtcompile.optim.precision import Precision, precision_named
from mtcompile.optim.update_options import update_options
from mtcompile.passes.planning.problem import Progress
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import gib
from mtcompile.sizes import parse_bytes
from mtcompile.torch_private import building_without_memory

_UNLIMITED = 2**60


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """The settings that both sides train with. ``memory``: device bytes of the compiled side; None: half of what everything
    resident takes."""

    device: Device
    precision: Precision
    memory: int | None = None
    batch: int = 1
    seq: int = 128
    update: str = "step"
    max_grad_norm: float | None = None
    accumulate: int = 1
    kernels: str = "auto"
    seed: int = 0
    lr: float = 1e-3

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.1)


def setup_of(device: str | torch.device | None, precision: str, memory: str | int | None, **settings: Any) -> TrainingSetup:
    """Builds a setup from what users write; ``settings``: its other fields. Raises ValueError."""
    return TrainingSetup(choose(device), precision_named(precision), parse_bytes(memory, "memory"), **settings)


@dataclass(frozen=True, slots=True)
class Workload:
    """A module of which both sides train a copy, and the keyword arguments of its call. ``memory``: the compiled side's first
    budget in bytes, as the user gave it or half of ``resident_bytes``, which the plan says everything resident takes."""

    module: nn.Module
    data: Mapping[str, Any]
    memory: int
    resident_bytes: int | None


def prepare_workload(
    setup: TrainingSetup, model: str | nn.Module | Callable[..., Any], data: Mapping[str, Any] | None, progress: Progress
) -> Workload:
    """Builds or copies the model, and checks that plain PyTorch runs it. Raises ValueError, and BudgetError if this machine
    cannot hold it twice."""
    update_options("backward", setup.max_grad_norm, False, "stop")  # checks the norm, whenever clipping happens
    if not isinstance(model, nn.Module):
        _refuse_giants(setup, model)
    torch.manual_seed(setup.seed)
    if isinstance(model, nn.Module):
        if data is None:
            raise ValueError("expected data=, the module's keyword arguments")
        module = copy.deepcopy(model).train()
    else:
        module, data = build_model(model, setup.batch, setup.seq)
        module.train()
    _check_runs(setup, module, data)
    if setup.memory is not None:
        return Workload(module, data, setup.memory, None)
    resident = _resident_bytes(setup, module, data, progress)
    return Workload(module, data, resident // 2, resident)


def _refuse_giants(setup: TrainingSetup, model: str | Callable[..., Any]) -> None:
    state = 0
    with (
        building_without_memory(),
        contextlib.suppress(ValueError),
    ):  # some factories fail there; real mistakes are reported later
        module, _ = build_model(model, setup.batch, setup.seq)
        state = 4 * sum(p.nbytes for p in module.parameters())
    needed, free = 2 * state, int(psutil.virtual_memory().available)
    if needed > free:
        raise BudgetError(
            f"two trainings are held at once, about {gib(needed)} of host memory for this model, and {gib(free)} are free; "
            "take a smaller one, such as the same configuration with fewer layers",
            needed,
        )


def _check_runs(setup: TrainingSetup, module: nn.Module, data: Mapping[str, Any]) -> None:
    """Raises ValueError if plain PyTorch cannot run the model, before anything is said about compiling it."""
    copied = copy.deepcopy(module)
    cast(copied, setup.precision)
    with torch.no_grad():
        try:
            output = copied.to(setup.device.where)(**on_device(setup.device.where, data))
        except torch.OutOfMemoryError:  # no mistake of the model's
            return
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise ValueError(
                f"expected a model that plain PyTorch runs, found that its call raises {type(error).__name__}: {reason}"
            ) from error
    loss_of(output)


def on_device(where: torch.device, data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments with their tensors moved to a device."""
    return {name: value.to(where) if isinstance(value, Tensor) else value for name, value in data.items()}


def _resident_bytes(setup: TrainingSetup, module: nn.Module, data: Mapping[str, Any], progress: Progress) -> int:
    """Plans the step without a budget. Returns the device bytes that everything resident takes."""
    micro: Mapping[str, Any] = next(iter(micro_batches(data, setup.accumulate))) if setup.accumulate > 1 else data
    forecast = solve.plan(
        copy.deepcopy(module),
        micro,
        batch=setup.batch,
        memory=_UNLIMITED,
        machine=machine_of(setup.device.where, setup.kernels == "inductor", staged=False),
        precision=setup.precision.name,
        update=setup.update,
        max_grad_norm=setup.max_grad_norm if setup.update == "backward" else None,
        accumulate=setup.accumulate,
        progress=progress,
    )
    return forecast.peak_bytes["device"]


def loss_of(output: Any) -> Tensor:
    """Returns the loss in what a model's call returned. Raises ValueError."""
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
