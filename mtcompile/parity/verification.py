"""``mtcompile.verify``: compares the same training steps in plain PyTorch and compiled, on this machine, bit by bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.parity.determinism import deterministic
from mtcompile.parity.reference import CompiledSide, PlainSide
from mtcompile.parity.workload import TrainingSetup, prepare_workload, setup_of
from mtcompile.passes.generators import generator_state, rng_preserved, set_generator_state
from mtcompile.passes.planning.problem import Progress, no_progress
from mtcompile.runtime.schedule import gib

# Tolerances with kernels="inductor", relative to the largest element: a few roundings of the weights' dtype, or the error of
# fp32 sums in another order. They apply to losses and the first step's gradients only: AdamW turns any sign into a whole step.
_ROUNDINGS, _SUMS = 8, 256 * torch.finfo(torch.float32).eps
_KINDS = ("loss", "gradient", "generator", "buffer", "weight", "master")


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that differs. ``kind``: loss, gradient, generator, buffer, weight or master. ``elements`` out of ``of`` differ,
    by at most ``largest`` (None if not finite). ``relative``: ``largest`` over the largest element. ``why``: in words."""

    kind: str
    name: str
    step: int
    elements: int = 0
    of: int = 0
    largest: float | None = None
    relative: float | None = None
    why: str = ""

    def __str__(self) -> str:
        named = f"{self.kind} {self.name}".rstrip()
        return f"step {self.step}: the {named} differs: {self.why}"


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of ``verify``. ``equal``: whether all bits are equal; with kernels="inductor", whether differences are within
    rounding. ``compared``: number of tensors by kind. ``differences``: those of the first step that has any.
    ``largest_relative``: the largest relative difference by kind. ``memory_bytes``: the budget. ``resident_bytes``: what the
    step takes without a budget, by the plan (None if memory was given). ``peak_device_bytes``: the measured peak."""

    equal: bool
    kernels: str
    steps: int
    compared: Mapping[str, int]
    differences: tuple[Difference, ...]
    largest_relative: Mapping[str, float]
    memory_bytes: int
    resident_bytes: int | None
    peak_device_bytes: int
    reference: str
    notes: tuple[str, ...]

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent)

    def __str__(self) -> str:
        counts = ", ".join(f"{kind} {count:,}" for kind, count in self.compared.items() if count)
        budget = f"device memory {gib(self.memory_bytes)}, measured peak {gib(self.peak_device_bytes)}"
        if self.resident_bytes:
            budget += f", everything resident {gib(self.resident_bytes)}"
        lines = [f"compared tensors of {self.steps} steps: {counts}", f"  {budget}", f"  reference: {self.reference}"]
        lines += [f"  note: {note}" for note in self.notes]
        if self.kernels == "inductor":
            largest = ", ".join(f"{kind} {value:.2g}" for kind, value in self.largest_relative.items())
            lines.append(f"  largest relative differences: {largest}")
        if self.equal:
            lines.append("equal within rounding" if self.kernels == "inductor" else "equal: every bit")
        else:
            lines.append(f"different: {len(self.differences)} of step {self.differences[0].step}, the first:")
            lines.append(f"  {self.differences[0]}")
        return "\n".join(lines)


def verify(
    model: str | nn.Module | Callable[..., Any],
    data: Mapping[str, Any] | None = None,
    *,
    memory: str | int | None = None,
    batch: int = 1,
    seq: int = 128,
    steps: int = 3,
    precision: str = "model",
    update: str = "step",
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    kernels: str = "auto",
    device: str | torch.device | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Verification:
    """Trains copies of a model plainly and compiled for a few steps, and compares every bit.

    model      a module (it stays unchanged), a factory of (batch, seq) that returns (module, keyword arguments), or a
               built-in shape. Calling it returns the loss, or an object with a ``loss``
    data       the keyword arguments of a module
    memory     device bytes for the compiled model; default: half of what the step takes with everything resident, by the
               plan, or the least that works if that is more
    update     with ``"backward"`` there are no gradients to compare; the weights show any difference

    The other options are those of ``compile``. Both copies train in turn with AdamW, on the same data, with the same seed and
    number of threads. Compares losses, gradients, the generator's state, buffers, stepped weights and masters. Raises
    ValueError, and whatever ``compile`` raises.
    """
    if steps < 1:
        raise ValueError(f"expected steps of 1 or more, found {steps}")
    sizes = {"batch": batch, "seq": seq, "accumulate": accumulate, "seed": seed}
    setup = setup_of(device, precision, memory, update=update, max_grad_norm=max_grad_norm, kernels=kernels, **sizes)
    where = setup.device.where
    with rng_preserved("cpu"), rng_preserved(str(where)), deterministic(where):
        return _compare_steps(setup, model, data, steps, progress)


def _compare_steps(
    setup: TrainingSetup, model: Any, data: Mapping[str, Any] | None, steps: int, progress: Progress
) -> Verification:
    workload, where = prepare_workload(setup, model, data, progress), str(setup.device.where)
    compiled, plain, comparison = CompiledSide(setup, workload), None, Comparison()
    torch.manual_seed(setup.seed)
    state = generator_state(where)
    for step in range(1, steps + 1):
        progress("compiled step", 2 * step - 2, 2 * steps)
        actual: Values = {"loss": {"": compiled.forward_backward()}, "gradient": compiled.gradients()}
        actual["generator"] = {"state": generator_state(where)}
        if plain is None:  # the homes of parameters are known only now
            plain = PlainSide(setup, workload, [parameter.device for parameter in compiled.model.parameters()])
        progress("plain step", 2 * step - 1, 2 * steps)
        set_generator_state(where, state)
        expected: Values = {"loss": {"": plain.forward_backward()}, "gradient": plain.gradients()}
        if setup.accumulate > 1 and not torch.equal(generator_state(where), state):
            raise ValueError(
                f"accumulate={setup.accumulate}: the model draws random numbers, and compiled it draws them region by region "
                "instead of micro-batch by micro-batch; set its dropout to 0 to verify it, or leave accumulate out"
            )
        state = generator_state(where)
        expected["generator"] = {"state": state}
        if setup.update == "backward":  # the compiled run keeps no gradients
            del expected["gradient"]
        differences = comparison.differences(expected, actual, step)
        compiled.step()
        plain.step()
        differences += comparison.differences(plain.state(), compiled.state(), step)
        if setup.kernels == "inductor":
            differences = [difference for difference in differences if _beyond_rounding(difference, compiled.model)]
        if differences:
            break
    assert plain is not None
    return Verification(
        equal=not differences,
        kernels=setup.kernels,
        steps=step,
        compared=comparison.counts,
        differences=tuple(differences),
        largest_relative=comparison.largest,
        memory_bytes=compiled.limit,
        resident_bytes=workload.resident_bytes,
        peak_device_bytes=compiled.model.memory_report()["peak_device_bytes"],
        reference=plain.about(),
        notes=tuple(comparison.notes),
    )


def _beyond_rounding(difference: Difference, model: nn.Module) -> bool:
    """Says whether a difference is more than rounding. A difference that is not finite always is."""
    if difference.relative is None:
        return True
    eps = max((torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()), default=0.0)
    is_judged = difference.kind == "loss" or (difference.kind == "gradient" and difference.step == 1)
    return is_judged and difference.relative > max(_ROUNDINGS * eps, _SUMS)


Values = dict[str, dict[str, Tensor | None]]


class Comparison:
    """Compares tensors of several steps. ``counts``: tensors by kind. ``largest``: the largest relative difference by kind."""

    def __init__(self) -> None:
        self.counts, self.largest, self.notes = dict.fromkeys(_KINDS, 0), dict[str, float](), dict[str, None]()

    def differences(self, expected: Values, actual: Values, step: int) -> list[Difference]:
        """Compares every tensor in ``expected``. Strides are not part of a value: if they differ, adds to ``notes``."""
        differences = []
        for kind, tensors in expected.items():
            for name, tensor in tensors.items():
                other = actual[kind].get(name)
                if tensor is None and other is None:
                    continue
                self.counts[kind] += 1
                if tensor is None or other is None:
                    side = "compiled" if tensor is None else "plain"
                    differences.append(Difference(kind, name, step, why=f"only the {side} run has one"))
                    continue
                difference = difference_of(kind, name, step, tensor.detach(), other.detach())
                if difference is not None:
                    differences.append(difference)
                    if difference.relative is not None:
                        self.largest[kind] = max(self.largest.get(kind, 0.0), difference.relative)
                elif _strides(tensor) != _strides(other):
                    strides = f"strides {tuple(other.stride())}, and {tuple(tensor.stride())} in plain PyTorch"
                    self.notes[f"the {kind} {name} has {strides}"] = None
        return differences


def difference_of(kind: str, name: str, step: int, expected: Tensor, actual: Tensor) -> Difference | None:
    """Returns None if dtype, shape and every bit are equal. NaNs of the same bits are equal; -0 and 0 are not."""
    of = expected.numel()
    shapes = (tuple(expected.shape), tuple(actual.shape))
    for what, one, other in (("dtype", expected.dtype, actual.dtype), ("shape", *shapes)):
        if one != other:
            return Difference(kind, name, step, of=of, why=f"{what} {one} in plain PyTorch, {other} compiled")
    actual = actual.to(expected.device)
    unequal = _bits(expected) != _bits(actual)
    if not bool(unequal.any()):
        return None
    elements = min(of, int(unequal.sum()))
    gap, size = (expected.double() - actual.double()).abs(), float(expected.double().abs().max())
    largest = float(gap.max())
    relative = largest / size if math.isfinite(largest) and size > 0 else None
    why = f"{elements:,} of {of:,} elements, by at most {largest:.3g}"
    return Difference(kind, name, step, elements, of, largest if math.isfinite(largest) else None, relative, why)


def _bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _strides(tensor: Tensor) -> list[int]:
    """Returns the strides of dimensions with more than one element; the others say nothing about where an element is."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
