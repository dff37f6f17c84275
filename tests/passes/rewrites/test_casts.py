"""Casts move to the side of the link where fewer bytes cross, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile.passes import rewrite
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Plan, plan_from_json
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.proof.same_computation import SameComputationError, same_computation
from mtcompile.passes.step_graph import convert
from mtcompile.runtime.schedule import Instruction
from tests.helpers.decoder import adamw, batch, same, state
from tests.helpers.decoder import small_decoder as made
from tests.helpers.models import Straight
from tests.helpers.tracing import trace

pytestmark = pytest.mark.slow  # it compiles many models

TIGHT = "600KiB"
# The link is the wall, so that casts are worth the host's time; and the other way round.
SLOW_LINK = Machine(flops=1e12, memory_gbps=100, h2d_gbps=0.05, d2h_gbps=0.05, host_gbps=20, issue_us=1)
SLOW_HOST = replace(SLOW_LINK, h2d_gbps=20, d2h_gbps=20, host_gbps=0.05)
BOTH_SLOW = replace(SLOW_LINK, h2d_gbps=0.3, d2h_gbps=0.3, host_gbps=0.5, issue_us=0.2)


def compiled(machine: Machine | None = SLOW_LINK, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = made() if model is None else model
    optimizer = adamw(model.parameters())
    options = {"memory": TIGHT, "device": "cpu", "throttle": machine} | options
    return mtcompile.compile(model, optimizer=optimizer, **options), optimizer


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[Tensor]:
    losses = []
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step + 1 < steps:
            optimizer.zero_grad()
    return losses


def copied(model: Any, role: str) -> dict[str, list[int]]:
    """Bytes of each copy of such a value to or from home as it lies there ("home"), and to or from a slot ("placed")."""
    found: dict[str, list[int]] = {"home": [], "placed": []}
    buffers = model.schedule.buffers
    for i in model.schedule.instructions:
        for name in (*i.reads, *i.writes) if i.op == "copy" else ():
            if (buffers[name].tier, buffers[name].role) == ("host", role):
                found[buffers[name].kind].append(buffers[name].nbytes)
    return found


@pytest.mark.parametrize("update", ["step", pytest.param("backward", marks=pytest.mark.long)])
def test_under_autocast_fp32_weights_cross_as_bf16_and_so_do_their_gradients(
    update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    plain = made()
    bound = adamw(plain.parameters())
    losses = train(plain, bound)
    model, optimizer = compiled(update=update)
    assert all(map(torch.equal, losses, train(model, optimizer)))
    assert same(state(plain, bound), state(model, optimizer))
    if update == "step":
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]
    halves = {2 * p.numel() for p in model.parameters() if p.dim() == 2}
    embedding = 4 * model.embed.weight.numel()  # it is looked up as it is
    for role in ("param", "grad"):
        sizes = copied(model, role)
        assert sizes["placed"] and set(sizes["placed"]) <= {*halves, *(embedding,) * (update == "backward"), 256, 448}
        if update == "step":
            assert [nbytes for nbytes in sizes["home"] if nbytes > 1024] in ([], [embedding]), f"{role}s that cross in fp32"
    report = model.memory_report()
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= report["budget_device_bytes"]


def test_casts_stay_where_the_host_is_the_wall() -> None:
    model, optimizer = compiled(SLOW_HOST)
    train(model, optimizer, 1)
    assert not model.plan.narrow and not [i for i in model.schedule.instructions if i.queue == "host"]


def test_without_autocast_nothing_is_cast() -> None:
    model, _ = compiled()
    model(**batch(0)).backward()
    assert not [i for i in model.schedule.instructions if i.queue == "host"]


def assert_alike(plain: nn.Module, model: Any, x: Tensor) -> None:
    """Losses and gradients of both are the same bits."""
    wanted, found = plain(x), model(x)
    wanted.backward()
    found.backward()
    assert torch.equal(wanted, found)
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]


class Halved(nn.Module):
    """Weights are read in bf16; ``both``: and in fp32 too."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            made = (x.to(torch.bfloat16) @ layer.weight.to(torch.bfloat16)).float()
            x = x + (made * layer.weight.square().sum() if self.both else made)
        return x.square().mean()


def test_where_link_and_host_are_walls_some_weights_are_cast_at_home() -> None:
    """With the bits of the plain run, and faster than with all of them cast there, or none."""
    plain, x = Halved(), torch.randn(4, 64)
    model, _ = compiled(BOTH_SLOW, Halved(), memory="100KiB")
    assert_alike(plain, model, x)
    plan = model.plan
    assert plan.narrow and plan.wide and plan_from_json(plan.to_json()) == plan
    for role in ("param", "grad"):
        sizes = copied(model, role)
        assert 2 * 64 * 64 in sizes["placed"] and 4 * 64 * 64 in sizes["home"]
    candidates = Candidates(PlanningProblem(trace(Halved(), {"x": x}).step, BOTH_SLOW, Budgets()))
    others = [candidates.evaluate(replace(plan, narrow=narrow, wide=())).plan.total_us for narrow in (True, False)]
    assert candidates.evaluate(plan).plan.total_us < min(others)


def test_what_a_region_reads_in_both_widths_crosses_whole() -> None:
    plain = Halved(both=True)
    model, _ = compiled(model=Halved(both=True), memory="120KiB")
    x = torch.randn(4, 64)
    assert_alike(plain, model, x)
    assert 4 * 64 * 64 in copied(model, "param")["home"]


def waiting(instructions: Iterable[Instruction]) -> list[str]:
    """The casts of the forward that wait on the host for the backward."""
    instructions = list(instructions)
    cast = {name for i in instructions if i.work == "convert" and i.phase == "forward" for name in i.writes}
    return [name for i in instructions if i.op == "copy" and i.phase == "backward" for name in i.reads if name in cast]


@pytest.mark.parametrize("update", ["step", "backward"])
def test_what_the_host_has_cast_waits_there_for_the_backward(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not leave the device, and gradients are of the weights as the forward read them."""
    monkeypatch.setenv("MT_CHECK", "1")
    monkeypatch.setenv("MT_EFFORT", "quick")
    plain, x = Halved(), torch.randn(16, 64)
    bound = adamw(plain.parameters())
    with pytest.raises(mtcompile.BudgetError) as refused:  # kernels of other processors need more or less beside their operands
        compiled(model=Halved(), memory="16KiB", update=update)[0](x)
    model, optimizer = compiled(model=Halved(), memory=refused.value.minimum_bytes, update=update)
    for _ in range(3):
        wanted, found = plain(x), model(x)
        for loss, of, own in ((wanted, plain, bound), (found, model, optimizer)):
            if update == "step":  # else the update reads it
                with torch.no_grad():
                    of.layers[2].weight.mul_(1.5)
            loss.backward()
            own.step()
            own.zero_grad()
        assert torch.equal(wanted, found)
    assert same(state(plain, bound), state(model, optimizer))
    instructions = model.schedule.instructions
    assert waiting(instructions)  # how many differs with the workspace of a processor's kernels
    sent = [i for i in instructions if i.queue == "d2h" and i.phase == "forward"]
    assert all(nbytes != 2 * 64 * 64 for i in sent for nbytes in (model.schedule.buffers[name].nbytes for name in i.reads))
    report = model.memory_report()
    assert report["peak_host_bytes"] <= report["planned_peak_host_bytes"]


def stepped_like_plain(kind: type[nn.Module]) -> Any:
    """Steps a model once, and plain PyTorch's beside it; checks that both are equal. Returns the compiled one."""
    plain, x = kind(), torch.randn(16, 64)
    bound = adamw(plain.parameters())
    model, optimizer = compiled(model=kind(), memory="120KiB", update="backward")
    for own, of in ((plain, bound), (model, optimizer)):
        own(x).backward()
        of.step()
    assert same(state(plain, bound), state(model, optimizer))
    return model


def test_a_weight_that_is_only_cast_for_the_backward() -> None:
    assert waiting(stepped_like_plain(Straight).schedule.instructions)


def test_the_proof_knows_a_cast_from_another() -> None:
    traced = trace(Halved(), {"x": torch.randn(4, 64)})
    step = rewrite(traced.step, Plan())
    same_computation(traced.joint, step)
    nodes = [node for node in step.graph.nodes if node.target is convert]
    assert {node.meta["phase"] for node in nodes} == {"forward", "backward"}
    for node in nodes:
        kept = node.kwargs
        node.kwargs = {"casts": tuple({"dtype": torch.float16} for _ in kept["casts"])}  # type: ignore[union-attr]
        with pytest.raises(SameComputationError):
            same_computation(traced.joint, step)
        node.kwargs = kept


def test_gradients_that_leave_one_region_narrow_and_wide_are_updated_once_each() -> None:
    """Their weights come in alike, so their update was counted twice, and its schedule took another time than the plan said."""
    stepped_like_plain(Halved)
