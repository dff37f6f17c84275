"""The sizes of optimizer state are those that optimizers allocate: classes of torch.optim, and classes from elsewhere."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from mtcompile.optim.precision import precision_named
from mtcompile.optim.state_sizes import (
    FORECAST_STATES,
    STATES,
    average_copies,
    master_state_nbytes,
    optimizer_named,
    state_copies,
    state_nbytes,
)
from mtcompile.runtime.schedule import placed

MODEL, MASTERS = precision_named("model"), precision_named("bf16-master32")
OPTIONS: dict[str, Any] = {
    "Muon": {"ns_steps": 1},  # each takes matrix products
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "SGD": {"lr": 0.01, "momentum": 0.9},
}
CLASSES = sorted({*STATES, "ASGD", "Adadelta", "Adafactor", "Muon", "Rprop"})


class ScheduleFree(torch.optim.Optimizer):
    """Keeps the averaged weights, and attributes beside its groups, as optimizers from elsewhere do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "kept": 3})
        self.name, self.all = "free", [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.name == "free"
        for group in self.param_groups:
            for p in group["params"]:
                assert any(p is each for each in self.all)
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("averages", [torch.zeros_like(p) for _ in range(group["kept"])])
                    if float(p.abs().sum()) > 0:  # looks at values
                        state["norms"] = p.flatten(1).norm(dim=1) if p.dim() > 1 else p.norm()
                    p.sub_(p.grad, alpha=group["lr"])


class Rows(torch.optim.Optimizer):
    """Keeps a quantized moment and a scale per row, and takes its options when it is made."""

    def __init__(self, params: Any, *, bits: int) -> None:
        super().__init__(params, {"lr": 0.1, "bits": bits})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p] = {"moment": torch.zeros_like(p, dtype=torch.uint8), "scale": p.new_zeros(p.shape[0])}


def parameters() -> dict[str, nn.Parameter]:
    frozen = nn.Parameter(torch.randn(3, 300), requires_grad=False)
    return {"weight": nn.Parameter(torch.randn(1100, 1000)), "small": nn.Parameter(torch.randn(40, 7)), "frozen": frozen}


def kept(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> dict[str, int]:
    def nbytes(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return placed(value.nbytes) if value.dim() else 0
        return sum(map(nbytes, value)) if isinstance(value, list) else 0

    entries = {name: optimizer.state.get(p) for name, p in named.items()}
    return {name: sum(map(nbytes, entry.values())) for name, entry in entries.items() if entry}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CLASSES, "ScheduleFree", "Rows", "amsgrad"])
def test_what_is_counted_before_a_step_is_what_is_there_after_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    named = parameters()
    trained = [named["weight"], named["small"]]
    if name in CLASSES:
        optimizer = getattr(torch.optim, name)(trained, **OPTIONS.get(name, {}))
    else:
        others: dict[str, Any] = {"ScheduleFree": lambda: ScheduleFree(trained), "Rows": lambda: Rows(trained, bits=8)}
        optimizer = others.get(name, lambda: torch.optim.AdamW(trained, amsgrad=True))()
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    before, had = [p.detach().clone() for p in trained], kept(optimizer, named)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # it replaces optimizer.step
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook was called"))
    with caplog.at_level(logging.WARNING):
        counted = state_nbytes(optimizer, named)
    assert not caplog.records
    assert all(torch.equal(one, other) for one, other in zip(before, trained)) and kept(optimizer, named) == had
    optimizer._optimizer_step_pre_hooks.clear()
    optimizer.step()
    real = kept(optimizer, named)
    more = counted["weight"] - real["weight"]  # with a step that looks at values, the matrix is too large to be stepped whole
    assert counted.keys() == real.keys() and 0 <= more < 5 * placed(1) and counted["small"] == real["small"]
    assert more == 0 or name in ("ASGD", "Adafactor", "ScheduleFree")
    assert state_nbytes(optimizer, named) == real  # what is there is counted as it is


def test_a_step_that_cannot_be_measured_counts_as_adam() -> None:
    class Alone(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("only on its own machine")

    named = parameters()
    for optimizer in (None, Alone([named["weight"], named["small"]])):
        counted = state_nbytes(optimizer, named)
        assert counted == {name: 2 * placed(named[name].nbytes) for name in ("weight", "small")}
        assert average_copies(counted, named) == 2


def test_lbfgs_counts_its_history() -> None:
    named = {"only": nn.Parameter(torch.randn(1000))}
    counted = state_nbytes(torch.optim.LBFGS(named.values(), history_size=5), named)["only"]
    assert counted >= (2 * 5 + 2) * 4000


def test_masters_add_a_remainder_and_fp32_state() -> None:
    named = {"a": nn.Parameter(torch.ones(1 << 12).bfloat16()), "frozen": nn.Parameter(torch.ones(8), requires_grad=False)}
    for optimizer, states in ((torch.optim.AdamW([named["a"]]), 2), (torch.optim.SGD([named["a"]], lr=1.0), 0), (None, 2)):
        assert master_state_nbytes(optimizer, named, [id(named["a"])]) == {"a": placed(2 << 12) * (1 + 2 * states)}


@pytest.mark.parametrize(("name", "plain", "masters"), [("adamw", 2, 5), ("adam", 2, 5), ("sgd-momentum", 1, 3), ("sgd", 0, 1)])
def test_forecasts_count_by_name(name: str, plain: float, masters: float) -> None:
    assert (state_copies(MODEL, name), state_copies(MASTERS, name)) == (plain, masters)


def test_classes_of_torch_are_found_by_name() -> None:
    assert isinstance(optimizer_named("muon")([nn.Parameter(torch.ones(2, 2))]), torch.optim.Muon)
    with pytest.raises(ValueError, match="did you mean adafactor"):
        optimizer_named("adafacto")
    assert not {"optimizer"} & set(FORECAST_STATES)


def test_a_class_that_takes_matrices_only_is_given_those() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = optimizer_named("muon")([matrix, vector])
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(matrix)]
    with pytest.raises(ValueError, match="2D"):
        optimizer_named("muon")([vector])
