"""Torch's module database as subjects: every sample in train mode, bare and between two linear layers."""

from __future__ import annotations

import functools
import sys
import types
import unittest
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.coverage.compare import NotBuilt, Subject

BARE, BETWEEN = "bare", "between two linear layers"


@functools.cache
def database() -> dict[str, Any]:
    """Returns torch's own descriptions of its modules, by name. Importing them needs a package of test expectations, of
    which they use nothing but the name of one class."""
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


def samples(name: str) -> list[Any]:
    """Returns a module's samples, the same at every call."""
    torch.manual_seed(0)
    info = database()[name]
    found = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    return [sample for sample in found if sample.forward_input is not None]


def entries() -> list[str]:
    """Returns ``nn.Linear/0/bare``, ...: the first samples of all modules, then the second ones."""
    counts = {name: len(samples(name)) for name in database()}
    most = max(counts.values())
    return [f"{n}/{i}/{form}" for i in range(most) for form in (BARE, BETWEEN) for n, count in counts.items() if i < count]


def build(entry: str) -> Subject:
    """Builds an entry's model with seeded weights. Raises NotBuilt where no linear layer fits before or behind it."""
    name, index, form = entry.split("/")
    info, sample = database()[name], samples(name)[int(index)]
    torch.manual_seed(1)
    constructor, call = sample.constructor_input, sample.forward_input
    module = info.module_cls(*constructor.args, **constructor.kwargs).train()
    given = [*map(str, constructor.args), *(f"{name}={value}" for name, value in constructor.kwargs.items())]
    about = " ".join(" ".join([sample.desc, *given]).split())[:100]
    if form == BARE:
        return Subject(module, tuple(call.args), dict(call.kwargs), about=about, searched=index == "0")
    return between(Subject(module, tuple(call.args), dict(call.kwargs), about=about, searched=False))


class Between(nn.Module):
    """A module whose first argument comes from a linear layer and whose first output goes to another."""

    def __init__(self, before: nn.Linear, module: nn.Module, behind: nn.Linear, first: str | None) -> None:
        super().__init__()
        self.before, self.module, self.behind, self.first = before, module, behind, first

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.first is None:
            output = self.module(self.before(args[0]), *args[1:], **kwargs)
        else:
            output = self.module(*args, **{**kwargs, self.first: self.before(kwargs[self.first])})
        return self.behind(output[0] if isinstance(output, tuple) else output)  # type: ignore[no-any-return]


def between(bare: Subject) -> Subject:
    """Returns the subject's module between two linear layers, wide as its first argument and its first output."""
    first = None if bare.args else next(iter(bare.kwargs), None)
    value = bare.args[0] if bare.args else bare.kwargs.get(first or "")
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim == 0:
        raise NotBuilt("its first argument is not a tensor of features")
    state = torch.get_rng_state()
    with torch.no_grad():
        output = bare.module(*bare.args, **bare.kwargs)  # lazy modules get their weights here
    torch.set_rng_state(state)
    output = output[0] if isinstance(output, tuple) else output
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim == 0:
        raise NotBuilt("its output is not a tensor of features")
    before, behind = nn.Linear(value.shape[-1], value.shape[-1]), nn.Linear(output.shape[-1], 3)
    return replace(bare, module=Between(before, bare.module, behind, first).train())
