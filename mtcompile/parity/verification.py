"""``mtcompile.verify``: the same training steps in plain PyTorch and compiled, on this machine, compared bit for bit."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.machine.device import choose
from mtcompile.optim.precision import precision_named
from mtcompile.options import parse_bytes
from mtcompile.parity.reference import Asked, Compiled, Plain, subject
from mtcompile.passes.generators import generator_state, set_generator_state
from mtcompile.passes.planning.problem import Progress, no_progress
from mtcompile.runtime.schedule import gib

# With kernels="inductor", of the largest element: some roundings of the weights' dtype, or what sums of many terms in another
# order make of fp32. Of losses, and of the first step's gradients only: AdamW makes a whole step of a gradient's sign.
_ROUNDINGS, _SUMS = 8, 256 * torch.finfo(torch.float32).eps
_KINDS = ("loss", "gradient", "generator", "buffer", "weight", "master")


@dataclass(frozen=True, slots=True)
class Difference:
    """``kind``: loss, gradient, generator, buffer, weight or master. ``elements`` of ``of`` differ, the most by ``largest``
    (None where that is no finite number); ``relative``: to the largest element; ``why``: in words."""

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
    """``compared``: tensors by kind; ``differences``: all of the first step that has any. With kernels="inductor", ``equal`` is
    within rounding, and ``largest_relative`` is by kind. Bytes: ``memory_bytes`` the budget, ``resident_bytes`` what the plan
    says the step takes without one (None where memory was given), ``peak_device_bytes`` measured."""

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
        what = ", ".join(f"{kind} {count:,}" for kind, count in self.compared.items() if count)
        budget = f"device memory {gib(self.memory_bytes)}, measured peak {gib(self.peak_device_bytes)}"
        if self.resident_bytes:
            budget += f", everything resident {gib(self.resident_bytes)}"
        lines = [f"compared tensors of {self.steps} steps: {what}", f"  {budget}", f"  reference: {self.reference}"]
        lines += [f"  note: {note}" for note in self.notes]
        if self.kernels == "inductor":
            told = ", ".join(f"{kind} {value:.2g}" for kind, value in self.largest_relative.items())
            lines.append(f"  largest relative differences: {told}")
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
    kernels: str = "eager",
    device: str | torch.device | None = None,
    seed: int = 0,
    tell: Progress = no_progress,
) -> Verification:
    """Train copies of a model plainly and compiled for a few steps, and compare what they make.

    model      a module (which stays as it is), a factory of (batch, seq) that returns (module, keyword arguments), or a
               built-in shape; its call returns the loss, or something with a ``loss``
    data       the keyword arguments of a module
    memory     device bytes for the compiled one; default half of what the plan says the step takes with everything resident,
               or the least that works where that is more
    update     ``"backward"``: there are no gradients to compare, the weights say it

    The other options are ``compile``'s. Both are stepped by AdamW on the same data, with the same seed and threads, one after
    the other within each step, so that nothing but two models is held. Compared are loss, gradients, the generator's state,
    buffers, stepped weights and masters. Raises ValueError, and what ``compile`` raises.
    """
    if steps < 1:
        raise ValueError(f"expected steps of 1 or more, found {steps}")
    options = (parse_bytes(memory), batch, seq, update, max_grad_norm, accumulate, kernels, seed)
    asked = Asked(choose(device), precision_named(precision), *options)
    where = asked.device.where
    state, before = torch.get_rng_state(), generator_state(str(where))
    try:
        with deterministic(where):
            return _verified(asked, model, data, steps, tell)
    finally:
        torch.set_rng_state(state)
        set_generator_state(str(where), before)


def _verified(asked: Asked, model: Any, data: Mapping[str, Any] | None, steps: int, tell: Progress) -> Verification:
    what, where = subject(asked, model, data, tell), str(asked.device.where)
    compiled, plain, seen = Compiled(asked, what), None, Seen()
    torch.manual_seed(asked.seed)
    state = generator_state(where)
    for step in range(1, steps + 1):
        tell("compiled step", 2 * step - 2, 2 * steps)
        found: Values = {"loss": {"": compiled.forward_backward()}, "gradient": compiled.gradients()}
        found["generator"] = {"state": generator_state(where)}
        if plain is None:  # now it is known where parameters are at home
            plain = Plain(asked, what, [parameter.device for parameter in compiled.model.parameters()])
        tell("plain step", 2 * step - 1, 2 * steps)
        set_generator_state(where, state)
        wanted: Values = {"loss": {"": plain.forward_backward()}, "gradient": plain.gradients()}
        if asked.accumulate > 1 and not torch.equal(generator_state(where), state):
            raise ValueError(
                f"accumulate={asked.accumulate}: the model draws random numbers, which are drawn region by region then and not "
                "micro-batch by micro-batch; set its dropout to 0 to verify it, or leave accumulate out"
            )
        state = generator_state(where)
        wanted["generator"] = {"state": state}
        if asked.update == "backward":  # the compiled run keeps none
            del wanted["gradient"]
        differences = seen.differing(wanted, found, step)
        compiled.step()
        plain.step()
        differences += seen.differing(plain.kept(), compiled.kept(), step)
        if asked.kernels == "inductor":
            differences = [difference for difference in differences if _beyond(difference, compiled.model)]
        if differences:
            break
    assert plain is not None
    return Verification(
        equal=not differences,
        kernels=asked.kernels,
        steps=step,
        compared=seen.counts,
        differences=tuple(differences),
        largest_relative=seen.largest,
        memory_bytes=compiled.limit,
        resident_bytes=what.resident_bytes,
        peak_device_bytes=compiled.model.memory_report()["peak_device_bytes"],
        reference=plain.about(),
        notes=tuple(seen.notes),
    )


@contextlib.contextmanager
def deterministic(where: torch.device) -> Iterator[None]:
    """On a GPU: sums in one order, for both."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(before or where.type != "cpu", warn_only=warned or not before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def _beyond(found: Difference, model: nn.Module) -> bool:
    """Whether it is more than rounding. What is no number is a difference all the same."""
    if found.relative is None:
        return True
    eps = max((torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()), default=0.0)
    tells = found.kind == "loss" or (found.kind == "gradient" and found.step == 1)
    return tells and found.relative > max(_ROUNDINGS * eps, _SUMS)


Values = dict[str, dict[str, Tensor | None]]


class Seen:
    """What has been compared. ``counts``: tensors by kind; ``largest``: relative difference by kind; ``notes``: in order."""

    def __init__(self) -> None:
        self.counts, self.largest, self.notes = dict.fromkeys(_KINDS, 0), dict[str, float](), dict[str, None]()

    def differing(self, wanted: Values, found: Values, step: int) -> list[Difference]:
        """Strides that differ are noted: they are no bits of a value."""
        made = []
        for kind, names in wanted.items():
            for name, tensor in names.items():
                other = found[kind].get(name)
                if tensor is None and other is None:
                    continue
                self.counts[kind] += 1
                if tensor is None or other is None:
                    there = "compiled" if tensor is None else "plain"
                    made.append(Difference(kind, name, step, why=f"only the {there} run has one"))
                    continue
                difference = difference_of(kind, name, step, tensor.detach(), other.detach())
                if difference is not None:
                    made.append(difference)
                    if difference.relative is not None:
                        self.largest[kind] = max(self.largest.get(kind, 0.0), difference.relative)
                elif _strides(tensor) != _strides(other):
                    strides = f"strides {tuple(other.stride())}, and {tuple(tensor.stride())} in plain PyTorch"
                    self.notes[f"the {kind} {name} has {strides}"] = None
        return made


def difference_of(kind: str, name: str, step: int, wanted: Tensor, found: Tensor) -> Difference | None:
    """None where dtype, shape and every bit are equal: NaNs of the same bits are equal, -0 and 0 are not."""
    of = wanted.numel()
    for what, one, other in (("dtype", wanted.dtype, found.dtype), ("shape", tuple(wanted.shape), tuple(found.shape))):
        if one != other:
            return Difference(kind, name, step, of=of, why=f"{what} {one} in plain PyTorch, {other} compiled")
    found = found.to(wanted.device)
    unlike = _bits(wanted) != _bits(found)
    if not bool(unlike.any()):
        return None
    elements = min(of, int(unlike.sum()))
    gap, size = (wanted.double() - found.double()).abs(), float(wanted.double().abs().max())
    largest = float(gap.max())
    relative = largest / size if math.isfinite(largest) and size > 0 else None
    why = f"{elements:,} of {of:,} elements, by at most {largest:.3g}"
    return Difference(kind, name, step, elements, of, largest if math.isfinite(largest) else None, relative, why)


def _bits(tensor: Tensor) -> Tensor:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(whole[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _strides(tensor: Tensor) -> list[int]:
    """Those that say where an element is."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
