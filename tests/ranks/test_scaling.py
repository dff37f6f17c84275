"""Forecasts of several ranks: what they share, and what keeps them from more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mtcompile
from mtcompile.forecast.result import Forecast
from mtcompile.machine.presets import named
from mtcompile.runtime.verify import verify

MACHINE = named("rtx4090")


def forecast(machine: Any = MACHINE, update: str = "backward", **ranks: Any) -> Forecast:
    from tests.ranks.reference import Model, batches

    ids, labels = batches(1, 1)[0][0]
    return mtcompile.plan(Model, {"ids": ids, "labels": labels}, memory="200KB", machine=machine, update=update, **ranks)


@pytest.mark.slow
def test_ranks_of_a_host_share_its_memory() -> None:
    alone, four = forecast(), forecast(gpus=4)
    assert alone.scaling is None and four.scaling is not None and four.planned is not None
    assert four.tokens == 4 * alone.tokens and four.scaling.alone_us == pytest.approx(alone.step_time_us)
    assert four.step_time_us > alone.step_time_us and 0 < four.scaling.speedup < 4
    assert four.scaling.host_bytes == four.peak_bytes["host"] == sum((four.ledger or {})["host"].values())
    assert four.peak_bytes["host"] == 4 * four.planned.schedule.peak_nbytes["host"]
    of_one, of_four = (each.ledger or {} for each in (alone, four))
    for part in ("weights", "optimizer"):  # once for all of them
        assert of_one["host"][part] <= of_four["host"][part] <= of_one["host"][part] + 4 * four.parameters
    verify(four.planned.schedule)
    network = [i for i in four.planned.schedule.instructions if i.work == "collective"]
    gradients = sum(i.nbytes for i in four.planned.schedule.instructions if i.work == "offload" and i.phase == "backward")
    assert 0 < sum(i.nbytes for i in network) <= gradients


@pytest.mark.slow
def test_gradients_that_wait_for_the_step_are_of_each_rank() -> None:
    two = forecast(gpus=2, update="step")
    assert two.ledger is not None and two.planned is not None
    host = two.ledger["host"]
    assert 4 * two.parameters <= host["weights"] < 4.2 * two.parameters  # once for both
    trained = host["optimizer"] / 2  # exp_avg and exp_avg_sq, once for both
    assert 2 * trained <= host["gradients"] < 3.25 * trained  # one each, tied ones in two parts, and of a block that arrives
    assert two.peak_bytes["host"] == sum(host.values()) == 2 * two.planned.schedule.peak_nbytes["host"]
    hosts, slow = forecast(hosts=2, update="step"), forecast(hosts=2, network=0.001, update="step")
    assert hosts.ledger is not None and hosts.ledger["host"]["optimizer"] < 0.6 * host["optimizer"]  # a part on each
    gathered = trained / 2 / 0.001 / 1e3  # µs in which a host gets the weights that the other one has updated
    assert slow.update_us - hosts.update_us == pytest.approx(gathered, rel=0.05)


@pytest.mark.slow
def test_ranks_cut_a_model_alike_whatever_their_batches() -> None:
    from tests.ranks.reference import Model

    def blocks(rows: int, gpus: int) -> tuple[str, ...]:
        ids = torch.zeros(rows, 16, dtype=torch.int64)
        planned = mtcompile.plan(Model, {"ids": ids, "labels": ids}, memory="4GB", machine=MACHINE, gpus=gpus).planned
        assert planned is not None
        return tuple(planned.step.meta["blocks"])

    assert blocks(1, gpus=2) == blocks(64, gpus=2)
    assert blocks(1, gpus=1) != blocks(64, gpus=1)  # one rank cuts by the sizes of its batch


@pytest.mark.long
def test_a_slow_network_and_slow_host_memory_are_named() -> None:
    slow = forecast(hosts=2, network=0.001)
    assert slow.scaling is not None and slow.scaling.limited_by == "the network between hosts (0.001 GB/s)"
    narrow = forecast(replace(MACHINE, name="narrow", host_gbps=0.5), gpus=2)
    assert narrow.scaling is not None and "whose 0.5 GB/s 2 ranks share" in narrow.scaling.limited_by
    assert "2 ranks on one host" in str(narrow)


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"hosts": 0}, {"network": -1.0}, {"gpus": 2, "solve": "memory"}])
def test_what_cannot_be_planned_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expect"):
        forecast(**wrong)
