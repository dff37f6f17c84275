"""Training at changing shapes: where everything fits, one program serves all of them; results and memory are as promised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile.torch_private import cpu_allocator_peak
from tests.execution.plain.models import new, programs, texts
from tests.helpers.training import adamw, train


def same_steps(memory: int | str, batches: list[Tensor]) -> nn.Module:
    """Trains with and without mtcompile, and compares all of it. Returns the compiled model."""
    plain, model = new(), new()
    optimizers = adamw(plain.parameters()), adamw(model.parameters())
    mtcompile.compile(model, memory=memory, optimizer=optimizers[1])
    for batch in batches:
        states = []
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            torch.manual_seed(3)
            rows = train(each, optimizer, {"tokens": batch}, steps=1)
            states.append([*rows[0], *(b.clone() for b in each.buffers()), torch.get_rng_state()])
        assert all(map(torch.equal, *states))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(30, marks=pytest.mark.long)])
def test_one_program_serves_all_lengths_where_everything_fits(count: int) -> None:
    model = same_steps("64MiB", texts(count))
    assert programs(model) == 1
    assert model.plan.all_resident  # type: ignore[union-attr]
    report = model.memory_report()  # type: ignore[operator]
    assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= 64 << 20


@pytest.mark.slow
def test_what_a_step_takes_is_within_what_it_was_given() -> None:
    model = mtcompile.compile(new(), memory="64MiB")
    longest, *shorter = sorted(texts(6), key=lambda batch: -batch.numel())
    model(longest).backward()
    session = model._mt_model.session
    model.zero_grad()
    for batch in shorter:
        held = session.held_nbytes()
        with cpu_allocator_peak() as peak:
            loss = model(batch)
            reserved = session.held_nbytes() - held
            loss.backward()
        del loss
        model.zero_grad()
        assert peak.nbytes is not None
        assert peak.nbytes <= reserved
        assert session.held_nbytes() == held
    assert programs(model) == 1


@pytest.mark.long
def test_a_tight_budget_plans_each_shape_by_one_search() -> None:
    batches = [torch.arange(2 * length).view(2, length) % 64 for length in (48, 40, 44, 30)]
    with pytest.raises(mtcompile.BudgetError) as error:
        mtcompile.compile(new(), memory=1)(batches[0])
    budget = int(1.2 * error.value.minimum_bytes)
    model = same_steps(budget, batches)
    assert programs(model) == 4
    assert len(model._mt_model.session._searched) == 1
    assert model.memory_report()["peak_device_bytes"] <= budget  # type: ignore[operator]


@pytest.mark.slow
def test_steps_without_a_program_may_wait_beside_others() -> None:
    plain, model = new(tied=False).eval(), new(tied=False).eval()
    mtcompile.compile(model, memory="64MiB")
    batches = sorted(texts(5), key=lambda batch: -batch.numel())
    for each in (plain, model):
        (each(batches[0]) - each(batches[1])).backward()
        losses = [each(batch) for batch in batches[2:]]
        for loss in reversed(losses):
            loss.backward(retain_graph=True)
        losses[0].backward()
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.slow
def test_a_plain_step_waits_while_a_planned_one_changes_statistics() -> None:
    plain, model = new(), new()
    mtcompile.compile(model, memory="64MiB")
    long, short = torch.arange(20).view(2, 10), torch.arange(12).view(2, 6)
    for each in (plain, model):
        torch.manual_seed(0)
        each(long).backward()
        waiting = each(short)
        each(long)
        waiting.backward()
    assert programs(model) == 1
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), model.parameters(), strict=True))
    assert all(map(torch.equal, plain.buffers(), model.buffers()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [pytest.param({"update": "backward"}, marks=pytest.mark.long), {"policy": "checkpoint-all"}], ids=str
)
def test_steps_that_a_plan_changes_are_planned_at_each_shape(options: dict[str, str]) -> None:
    model = new()
    optimizer = adamw(model.parameters())
    mtcompile.compile(model, memory="64MiB", optimizer=optimizer, **options)
    for batch in texts(2):
        train(model, optimizer, {"tokens": batch}, steps=1)
    assert programs(model) == 2


def test_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtcompile.capture.dynamo._MOST_PROGRAMS", 2)
    plain, model = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    mtcompile.compile(model, memory="1MiB", policy="checkpoint-all")
    with pytest.warns(UserWarning, match="has made 2 programs for this model"):
        for rows in (1, 2, 3, 4, 5, 1, 3):
            x = torch.linspace(-1, 1, 4 * rows).view(rows, 4)
            for each in (plain, model):
                each.zero_grad()
                each(x).sum().backward()
            assert all(
                torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), model.parameters(), strict=True)
            )
            assert programs(model) <= 2
