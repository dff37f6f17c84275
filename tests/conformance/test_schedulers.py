"""Learning-rate schedulers of torch set the same rates and lead to the same bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import lr_scheduler, swa_utils

from tests.conformance.loops import Log, Mlp, Prepare, adamw, assert_same_bits, sgd, step

pytestmark = pytest.mark.slow  # it compiles many models


def _sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def _chained(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.2, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=6),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.7**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "SequentialLR": _sequential,
    "ChainedScheduler": _chained,
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=3),
}
NO_SCHEDULERS = {"LRScheduler": "the base class of the others"}


def test_every_scheduler_of_torch_is_tested_or_excepted() -> None:
    modules = (lr_scheduler, swa_utils)
    classes = {n for m in modules for n, c in vars(m).items() if inspect.isclass(c) and issubclass(c, lr_scheduler.LRScheduler)}
    classes = {name for name in classes if not name.startswith("_")}
    assert classes == SCHEDULERS.keys() | NO_SCHEDULERS.keys()


@pytest.mark.parametrize(
    ("name", "attached"),
    [*((name, "before") for name in SCHEDULERS), *((name, "after") for name in ("OneCycleLR", "StepLR", "SequentialLR"))],
)
def test_every_scheduler_sets_the_same_rates(name: str, attached: str) -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        optimizer = sgd(model.parameters())
        scheduler = SCHEDULERS[name](optimizer) if attached == "before" else None
        model = prepare(model, optimizer)
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        for _ in range(5):
            loss = step(model, optimizer, log)
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(loss)
            else:
                scheduler.step()
            log.append([{k: group[k] for k in ("lr", "momentum")} for group in optimizer.param_groups])
        assert len({row[0]["lr"] for row in log if isinstance(row, list)}) > 1

    assert_same_bits(loop, Mlp)


def test_a_scheduler_may_be_attached_before_the_optimizer_is_bound() -> None:
    def loop(model: Any, prepare: Prepare, log: Log) -> None:
        model = prepare(model)
        optimizer = adamw(model.parameters())
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=6)
        if hasattr(model, "bind"):
            model.bind(optimizer)
        for _ in range(5):
            step(model, optimizer, log)
            scheduler.step()
            log.append([optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]])

    assert_same_bits(loop)
