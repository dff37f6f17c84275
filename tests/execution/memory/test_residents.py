"""Parameters that a first program keeps on the device: a program of another size leaves there what it has room for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mtcompile
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.planning.problem import DoesNotFit

pytestmark = pytest.mark.slow

_WORDS, _WIDTH, _BLOCKS = 600, 64, 3
_SLOW_LINK = Machine("slow link", flops=2e11, memory_gbps=100.0, h2d_gbps=1.0, d2h_gbps=1.0, host_gbps=0.5)


class Words(nn.Module):
    """Blocks between an embedding and a loss head whose logits are larger than everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(_WORDS, _WIDTH), nn.Linear(_WIDTH, _WORDS, bias=False)
        layers = (
            nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH)) for _ in range(_BLOCKS)
        )
        self.blocks = nn.ModuleList(layers)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = x + block(x)
        return cross_entropy(self.head(x).flatten(0, 1), words.roll(1, 1).flatten())


@pytest.fixture(autouse=True)
def _plans_quickly_for_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("known_machine", "speeds"):
        monkeypatch.setattr(f"mtcompile.execution.session.{name}", lambda *args: _SLOW_LINK)
    monkeypatch.setenv("MT_EFFORT", "normal")


def compiled(memory: str, chunks: int | str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options: dict[str, Any] = {"update": "backward", "loss_chunks": chunks, "fragments": None, "embeddings": "all"}
    return mtcompile.compile(model, memory=memory, optimizer=optimizer, device="cpu", **options), optimizer


def loss_of_step(training: tuple[Any, torch.optim.Optimizer], length: int) -> Tensor:
    model, optimizer = training
    words = torch.randint(0, _WORDS, (4, length), generator=torch.Generator().manual_seed(length))
    loss: Tensor = model(words)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def residents(model: Any) -> set[str]:
    return {block for block, tier in model._mt_model.session.parameters.tiers.items() if tier == "device"}


def test_another_length_keeps_them_on_the_device_where_a_finer_form_fits_beside_them() -> None:
    """Whole logits of the second length do not fit beside them; those in chunks do."""
    training = model, _ = compiled("3200KB", "auto")
    loss_of_step(training, 128)
    before, us = residents(model), model.plan.total_us
    assert len(before) > 2
    loss_of_step(training, 120)
    assert residents(model) == before and model.plan.total_us < us


def test_a_longer_step_sends_home_only_those_it_has_no_room_for_and_bits_stay_equal() -> None:
    training, wanted = compiled("3000KB", 16), compiled("1GiB", 16)
    model, on_device = training[0], []
    for length in (128, 224, 128):
        assert torch.equal(loss_of_step(training, length), loss_of_step(wanted, length))
        on_device.append(residents(model))
        assert model.memory_report()["peak_device_bytes"] <= 3000 * 1000
    assert on_device[0] > on_device[1] > set() and on_device[2] == on_device[1]
    assert all(map(torch.equal, model.parameters(), wanted[0].parameters()))


@pytest.mark.parametrize(("tier", "leave"), [("device", True), ("host", True), ("disk", False)])
def test_they_may_leave_where_the_device_or_the_host_lacks_room(tier: Any, leave: bool) -> None:
    """The host, as with them there, the device sends more of what blocks save there."""
    training = model, _ = compiled("2600KB", 16)
    loss_of_step(training, 128)
    door, before = model._mt_model.door, residents(model)
    assert before and door.give_up_residents(DoesNotFit(tier, 1, ())) == leave
    assert ("device" not in door.parameters.settled_tiers.values()) == leave and residents(model) == before
    assert not leave or not door.give_up_residents(DoesNotFit(tier, 1, ()))  # a second refusal is final


def test_a_step_that_fits_in_no_way_leaves_them_where_they_are() -> None:
    training = model, _ = compiled("2600KB", 16)
    loss_of_step(training, 128)
    before, version = residents(model), model._mt_model.session.parameters.version
    with pytest.raises(mtcompile.BudgetError):
        loss_of_step(training, 2048)
    assert before and residents(model) == before and not model._mt_model.session.parameters.residents_may_leave
    loss_of_step(training, 128)
    assert model._mt_model.session.parameters.version == version  # the first program still holds


def test_a_step_is_planned_in_chunks_unless_its_logits_have_room() -> None:
    for memory, in_chunks in (("3800KB", True), ("1GiB", False)):
        training = model, _ = compiled(memory, "auto")
        loss_of_step(training, 128)
        assert (" chunks" in str(model.plan)) == in_chunks


def test_of_those_that_may_leave_an_embedding_of_which_a_plan_takes_rows_does() -> None:
    training = model, _ = compiled("1GiB", 1)
    loss_of_step(training, 128)
    session = model._mt_model.session
    step = session.last.problem.step
    homes = step.meta["homes"]
    assert residents(model) == {*homes.values()}
    step.meta["rows"] = {"embed.weight": None}
    session.parameters.residents_may_leave = True
    _, fixed = session.door.constraints(step)
    assert fixed == {homes["embed.weight"]: "host"}
