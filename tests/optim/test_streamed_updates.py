"""Updates on the device of parameters whose home is the host: the host's bits, proven, and within the plan's bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile import checkpoint
from mtcompile.errors import StepError
from mtcompile.models.decoders import Decoder
from mtcompile.models.shapes import Shape
from mtcompile.passes import rewrite
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets, streamable
from mtcompile.passes.plan import Decision, Plan, Updates
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.proof.same_computation import SameComputationError
from mtcompile.passes.proof.schedule import Given, check_schedule
from mtcompile.passes.step_graph import calls, fetch_state, streamed_state, update
from tests.helpers.decoder import batch, same, state
from tests.helpers.tracing import lowered
from tests.passes.planning.drawn_plans import chain

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error:the device peak was")]

# The host's cores update far slower than its memory and the link are.
SLOW_HOST = Machine(flops=1e10, memory_gbps=4.0, h2d_gbps=2.0, d2h_gbps=2.0, host_gbps=8.0, update_gbps=0.1, issue_us=20.0)
Optimizer = Callable[..., torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def compiled(streams: bool = True, optimizer: Optimizer = adamw, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A decoder with fp32 masters; its plan streams, or the host is fast and updates all."""
    torch.manual_seed(0)
    model: nn.Module = Decoder(Shape(64, 160, 4, 2, 1, 256, head_dim=32, dtype=torch.float32)).train()
    bound = optimizer(model.parameters())
    machine = SLOW_HOST if streams else replace(SLOW_HOST, host_gbps=100.0, update_gbps=0.0)
    options = {"memory": "900KiB", "throttle": machine, "update": "backward", "precision": "bf16-master32"} | options
    return mtcompile.compile(model, optimizer=bound, device="cpu", effort="normal", **options), bound


def candidates(clip: bool, streamed: int) -> Candidates:
    """Those of a step of equal layers with masters and AdamW."""
    updates = Updates(5.0, 1.0, held=clip, checked=not clip, streamed=streamed)
    return Candidates(PlanningProblem(chain(8, 64, 64), SLOW_HOST, Budgets(state_copies=5.0, updates=updates)))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0) -> list[Tensor]:
    losses = []
    for step in range(first, first + steps):
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def streamed(model: Any) -> list[str]:
    """The labels of the updates on the device of what is at home on the host."""
    return [i.label for i in model.schedule.instructions if i.queue == "d2h" and i.work == "update"]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(adamw, {}), (adamw, {"max_grad_norm": 0.5}), (adamw, {"run_ahead": True}), (momentum, {"max_grad_norm": 0.5})],
)
def test_bits_are_those_of_updates_on_the_host(
    optimizer: Optimizer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    host, of_host = compiled(False, optimizer, **options)
    losses = train(host, of_host)
    model, bound = compiled(True, optimizer, **options)
    assert all(map(torch.equal, losses, train(model, bound)))
    assert streamed(model) and not streamed(host)
    assert same(state(host, of_host), state(model, bound))
    assert same(mtcompile.master_parameters(host), mtcompile.master_parameters(model))
    report = model.memory_report()
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= report["budget_device_bytes"]
    if "max_grad_norm" in options:
        assert model.grad_norm == host.grad_norm


@pytest.mark.parametrize("options", [{}, {"run_ahead": True}])
def test_state_moves_once_to_where_copies_are_fast(options: dict[str, Any]) -> None:
    """And keeps its bits and its identity."""
    host, of_host = compiled(False, **options)
    losses = train(host, of_host)
    model, bound = compiled(**options)
    asked = list[int]()

    def reachable(nbytes: int) -> Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    model._mt_model.door.masters.reachable = reachable
    assert torch.equal(losses[0], train(model, bound, 1)[0]) and streamed(model)
    entries = {id(p): entry["exp_avg"] for p, entry in bound.state.items()}
    assert all(map(torch.equal, losses[1:], train(model, bound, 2, first=1)))
    assert len(asked) == 1  # what is not pinned then will not be later
    assert all(bound.state[p]["exp_avg"] is entries[id(p)] for p in bound.state)
    assert same(mtcompile.master_parameters(host), mtcompile.master_parameters(model))


def test_training_goes_on_from_a_save_where_the_host_updates(tmp_path: Any) -> None:
    """And the other way round: state is one, wherever it is updated."""
    host, of_host = compiled(False)
    losses = train(host, of_host, 4)
    for first, then in ((True, False), (False, True)):
        model, bound = compiled(first)
        train(model, bound, 2)
        checkpoint.save(tmp_path / str(first), model, bound, step=2)
        model, bound = compiled(then)
        checkpoint.load(tmp_path / str(first), model, bound)
        assert all(map(torch.equal, losses[2:], train(model, bound, 2, first=2)))
        assert bool(streamed(model)) == then
        assert same(mtcompile.master_parameters(host), mtcompile.master_parameters(model))


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_gradient_that_is_not_finite_changes_nothing(nonfinite: str) -> None:
    model, bound = compiled(nonfinite=nonfinite, max_grad_norm=0.5)
    train(model, bound, 1)
    assert streamed(model)
    before = {name: master.clone() for name, master in mtcompile.master_parameters(model).items()}
    loss = model(**batch(1)) * torch.inf
    if nonfinite == "stop":
        with pytest.raises(StepError, match="not finite"):
            loss.backward()
    else:
        with pytest.warns(UserWarning, match="not finite"):
            loss.backward()
    assert same(before, mtcompile.master_parameters(model))


def test_only_masters_are_streamed_and_only_with_gradients_of_one_backward() -> None:
    """Torch's own steps differ from one device to the other; and sums of gradients wait at home."""
    model, bound = compiled(precision="fp32")
    train(model, bound, 1)
    assert model.plan.updates.streamed == 0 and not streamed(model)
    step, budgets = chain(2, 16, 4), Budgets(updates=Updates(streamed=6))
    assert streamable(step, budgets) and not streamable(step, replace(budgets, sums=2))


def corrupted(change: Callable[[Any], None]) -> str:
    """What the proof says of a step that streams, once it was changed."""
    step, budgets = chain(2, 16, 4), Budgets(updates=Updates(5.0, 1.0, streamed=6))
    decisions = tuple(Decision("update", home, "device", 0) for home in streamable(step, budgets))
    plan = Plan(decisions, lookahead=1, updates=budgets.updates)
    rewritten = rewrite(step, plan)
    schedule = lowered(rewritten, plan, budgets=budgets)
    change(rewritten)
    with pytest.raises(SameComputationError) as error:
        check_schedule(rewritten, schedule, Given(plan, budgets))
    return str(error.value)


def test_the_proof_finds_state_of_other_parameters_and_too_few_bytes() -> None:
    def exchanged(step: Any) -> None:
        first, second = (call for call in calls(step) if call.target is fetch_state)
        first.args, second.args = second.args, first.args

    def fewer(step: Any) -> None:
        state = next(streamed_state(call) for call in calls(step) if call.target is update)
        assert state is not None
        state.meta["nbytes"] -= 64

    assert "to bring the state of" in corrupted(exchanged)
    assert "for state_" in corrupted(fewer)


@pytest.mark.parametrize("clip", [False, True])
def test_plans_with_a_slow_host_are_faster_for_it(clip: bool) -> None:
    both = [candidates(clip, copies) for copies in (6, 0)]
    most = both[1].resident.plan.peak_bytes["device"] // 3
    with_both, alone = (each.best(most, None).plan for each in both)
    assert 1.25 * with_both.total_us < alone.total_us
    assert any(map(with_both.streams, with_both.decisions.of_kind("update")))
    for plan in (with_both, alone):
        assert plan.certificate is not None and plan.certificate.bound_us <= plan.total_us
    assert "the device updates" in str(with_both) and "updates others meanwhile" in str(with_both)
