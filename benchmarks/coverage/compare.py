"""One model trained plainly and under mtcompile at three budgets: a verdict on every bit that training leaves behind."""

from __future__ import annotations

import contextlib
import os
import random
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

EQUAL, NAMED, REFUSED, WRONG, INTERNAL, EXCLUDED = "equal", "named", "refused", "WRONG", "INTERNAL", "excluded"
_CONDITIONAL = ("with a loss term on it outside", "if used outside")  # what plans name, and no entry does
ROOMY_BYTES = 1 << 30
ROOMY, MIDDLE, SMALLEST = BUDGETS = ("roomy", "middle", "smallest")
_STEPS = 2  # the first of a program is measured, the second is as all that follow
_ROOT = Path(__file__).parents[2]


class NotBuilt(Exception):
    """Raised when plain PyTorch cannot build a model or train it; the message says why."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in train mode and one call of it. ``about``: how it was built; ``autocast``: whether to compute in bf16;
    ``searched``: whether its plans are searched, or the fixed ones (seconds faster) at the least memory that each needs."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    autocast: bool = False
    about: str = ""
    searched: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """``verdict``: one of the words above; ``reason``: which tensors differ, or the error; ``where``: budget and phase."""

    verdict: str
    reason: str = ""
    where: str = ""


Build = Callable[[], Subject]


def judge(build: Build, budgets: Collection[str] = BUDGETS) -> Verdict:
    """Compares the subject that ``build`` makes, each time with the same weights and inputs, with itself compiled."""
    import mtcompile

    try:
        plain = train(build())
        again = train(build())
    except Exception as error:
        return Verdict(EXCLUDED, f"plain PyTorch: {_sentence(error)}")
    if not any(name.startswith("gradient") for name in plain):
        return Verdict(EXCLUDED, "plain PyTorch: nothing gets a gradient")
    if differing := differences(plain, again):
        return Verdict(EXCLUDED, f"plain PyTorch differs from itself: {', '.join(differing[:4])}")
    try:
        peak, verdict = _at(build, plain, ROOMY, ROOMY_BYTES, "fastest")
        for name, (memory, policy) in ({} if verdict else _tight(build, peak, budgets)).items():
            try:
                verdict = verdict or _at(build, plain, name, memory, policy)[1]
            except mtcompile.BudgetError as error:  # a gradient that arrives with other strides is another program
                verdict = _at(build, plain, name, error.minimum_bytes, policy)[1]
    except mtcompile.BudgetError as error:
        return Verdict(INTERNAL, f"refused at the memory that it named: {_sentence(error)}")
    return verdict or Verdict(EQUAL)


def _tight(build: Build, peak: int, budgets: Collection[str]) -> dict[str, tuple[int, str]]:
    """Returns the budgets below ``peak``, by name: bytes, and the policy that plans within them."""
    if not build().searched:
        policies = {SMALLEST: "offload-all", MIDDLE: "checkpoint-all"}
        return {name: (_smallest(build, policies[name]), policies[name]) for name in policies if name in budgets}
    smallest = _smallest(build, "fastest") if set(budgets) - {ROOMY} else 0
    memory = {SMALLEST: smallest, MIDDLE: (smallest + peak) // 2}
    return {name: (memory[name], "fastest") for name in memory if name in budgets}


def _at(build: Build, plain: Mapping[str, Any], name: str, memory: int, policy: str) -> tuple[int, Verdict | None]:
    """Trains the subject within ``memory`` bytes. Returns its peak, and a verdict if its results are not ``plain``."""
    import mtcompile

    phase = ["compile"]
    try:
        subject = build()
        model = mtcompile.compile(subject.module, memory=memory, device="cpu", policy=policy)
        results = train(replace(subject, module=model), phase)
        peak = model.memory_report()["planned_peak_device_bytes"]
    except mtcompile.BudgetError:
        raise
    except mtcompile.MtcompileError as error:
        early = phase[0] in ("compile", "forward")
        return 0, Verdict(REFUSED if early else INTERNAL, _sentence(error), f"{name}, {phase[0]}")
    except Exception as error:
        return 0, Verdict(INTERNAL, f"{_sentence(error)} [{_place(error)}]", f"{name}, {phase[0]}")
    differing = differences(plain, results)
    if not differing:
        return peak, None
    if (named := _named(model.plan.numerics)) and all(each.startswith("gradient") for each in differing):
        return peak, Verdict(NAMED, f"the plan says so: {named}", name)
    return peak, Verdict(WRONG, ", ".join(differing[:6]), name)


def _named(numerics: str) -> str:
    """Returns what a plan's numerics except, as far as it concerns a model that is trained alone."""
    clauses = numerics.partition(" except ")[2].split(" and (")
    return " and ".join(clause.strip("()") for clause in clauses if clause and not clause.strip("()").startswith(_CONDITIONAL))


def _smallest(build: Build, policy: str) -> int:
    """Returns the budget that ``BudgetError`` names as the smallest that works."""
    import mtcompile

    subject = build()
    model = mtcompile.compile(subject.module, memory=1, device="cpu", policy=policy)
    try:
        with _autocast(subject):
            model(*_copied(subject.args), **_copied(subject.kwargs))
    except mtcompile.BudgetError as error:
        return error.minimum_bytes
    return 1


def train(subject: Subject, phase: list[str] | None = None, steps: int = _STEPS) -> dict[str, Any]:
    """Runs forward and backward ``steps`` times. Returns what they leave, by name. ``phase``: is told how far it came."""
    phase = [""] if phase is None else phase
    torch.manual_seed(1234)
    random.seed(1234)
    np.random.seed(1234)
    results: dict[str, Any] = {}
    for step in range(steps):
        args, kwargs = _copied(subject.args), _copied(subject.kwargs)
        phase[0] = "forward" if step == 0 else "second forward"
        with _autocast(subject):
            output = subject.module(*args, **kwargs)
            outputs = tensors(output)
            loss = _loss(output, outputs)
        phase[0] = "backward" if step == 0 else "second backward"
        loss.backward()
        results[f"loss {step}"] = loss.detach().clone()
        for name, value in outputs:
            results[f"output {name} {step}"] = value.detach().clone()
        for name, value in tensors((args, kwargs)):
            if value.grad is not None:
                results[f"gradient of input {name} {step}"] = value.grad.clone()
        for name, parameter in subject.module.named_parameters():
            if parameter.grad is not None:
                results[f"gradient {name} {step}"] = parameter.grad.clone()
                parameter.grad = None
    phase[0] = "afterwards"
    results |= {f"buffer {name}": buffer.detach().clone() for name, buffer in subject.module.named_buffers()}
    results["generator of torch"] = torch.get_rng_state()
    results["generator of Python"] = random.getstate()
    results["generator of numpy"] = str(np.random.get_state(legacy=False))
    return results


def _autocast(subject: Subject) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if subject.autocast else contextlib.nullcontext()


def _copied(value: Any) -> Any:
    """Copies the tensors in a call's arguments: leaves of autograd again, with the same strides."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {name: _copied(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_copied(member) for member in value)
    return value


def tensors(value: Any) -> list[tuple[str, Tensor]]:
    """Returns the tensors in nested outputs or arguments, by path."""
    return list(_tensors(value, ""))


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path or ".", value
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield from _tensors(member, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            yield from _tensors(member, f"{path}.{index}")


def _loss(output: Any, outputs: list[tuple[str, Tensor]]) -> Tensor:
    """Returns the model's own loss, or a weighted sum of all that its outputs have a gradient for."""
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad:
        return own.sum() if own.ndim else own
    parts = [value for _, value in outputs if value.requires_grad]
    if not parts:
        raise NotBuilt("no output requires a gradient")
    return torch.stack([_weighted(value) for value in parts]).sum()


def _weighted(value: Tensor) -> Tensor:
    """Returns the sum of a tensor's elements times weights that differ, so that no gradient is the same everywhere."""
    flat = (torch.view_as_real(value) if value.is_complex() else value).reshape(-1).float()
    return (flat * torch.linspace(0.5, 1.5, flat.numel())).sum()


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the names whose values differ in any bit that counts: NaN equals NaN."""
    absent = [f"{name} is missing" for name in one if name not in other]
    absent += [f"{name} is new" for name in other if name not in one]
    return absent + [name for name in one if name in other and not _equal(one[name], other[name])]


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _sentence(error: BaseException) -> str:
    """Returns an error's type and the beginning of its message on one line, without the folders of this machine."""
    text = " ".join(str(error).split())
    for folder in (_ROOT, Path(torch.__file__).parents[1], Path(os.__file__).parent):
        text = text.replace(f"{folder}/", "")
    return f"{type(error).__name__}: {text[:300]}".rstrip(": ")


def _place(error: BaseException) -> str:
    """Returns the last line of this project that an error passed through, and the line it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_ROOT) and "benchmarks" not in frame.filename]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in (frames[-1:] + own[-1:]))
