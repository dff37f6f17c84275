"""Slices without rows: never read, never fetched, whatever the plan; and nothing else is taken for one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import mtcompile
from mtcompile.capture.tracing import Traced
from mtcompile.passes import rewrite
from mtcompile.passes.analysis.slices import read_by_slices
from mtcompile.passes.graph_json import graph_from_json, graph_to_json
from mtcompile.passes.joint.build import InputHomes, build
from mtcompile.passes.plan import Plan
from mtcompile.passes.proof.same_computation import SameComputationError, same_computation
from mtcompile.passes.step_graph import calls, inputs_of, prefetch_slices, results
from mtcompile.runtime.devices.cpu import CpuMemory
from mtcompile.runtime.schedule import Instruction, Schedule, ScheduleFormatError, from_json
from mtcompile.runtime.trace import Record, Trace, moved_nbytes
from mtcompile.runtime.verify import ScheduleError, verify
from mtcompile.torch_private import without_memory
from tests.helpers.models import Experts, Mixture
from tests.helpers.proof.corrupt import mutants
from tests.helpers.proof.every_way import equal_in_every_way
from tests.helpers.proof.oracle import why_unsafe
from tests.helpers.tracing import lowered, trace

pytestmark = pytest.mark.slow  # it traces models


@functools.cache
def traced_mixture() -> Traced:
    torch.manual_seed(0)
    traced = trace(Mixture(2, experts=8, active=2).bfloat16(), {"tokens": torch.tensor([[3, 3, 5]])})
    return replace(traced, step=build(traced.joint, input_homes=InputHomes(experts="used")))


def rewritten() -> tuple[Traced, fx.GraphModule, Schedule]:
    traced, plan = traced_mixture(), Plan(lookahead=1)
    step = rewrite(traced.step, plan)
    step.recompile()
    return traced, step, lowered(step, plan)


def by_slices(schedule: Schedule) -> list[Instruction]:
    return [instruction for instruction in schedule.instructions if instruction.ends]


# ------------------------------------------------------------------------------------------------------- what is fetched


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], Any]) -> list[Tensor]:
    """Losses, gradients and weights of steps on batches that choose other experts each."""
    log = []
    for token in (1, 7, 30, 1):
        loss = model(torch.full((2, 3), token))
        loss.backward()
        log += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        log += [p.detach().clone() for p in model.parameters()]
        after()
    return log


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("experts", ["used", pytest.param("all", marks=pytest.mark.long)])
def test_of_64_experts_the_4_that_are_used_are_fetched(experts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_CHECK", "1")  # what is not fetched holds NaN
    torch.manual_seed(0)
    model = Mixture(2).bfloat16()
    plain = copy.deepcopy(model)
    expected = steps_of(plain, adamw(plain), lambda: None)
    for layer in plain.layers:
        assert [len(used) for used in layer[1].used] == [4] * 4 and len(set(layer[1].used)) >= 3
    trained, least = copy.deepcopy(model), smallest_budget(model, experts)
    optimizer = adamw(trained)
    compiled = mtcompile.compile(trained, memory=least, optimizer=optimizer, experts=experts, fragments=None)
    reports: list[dict[str, Any]] = []
    actual = steps_of(compiled, optimizer, lambda: reports.append(compiled.memory_report()))
    assert all(map(torch.equal, expected, actual))
    assert all(r["peak_device_bytes"] <= r["planned_peak_device_bytes"] <= least for r in reports)
    expert = sum(p[0].numel() * p.element_size() for p in (plain.layers[0][1].up, plain.layers[0][1].down))
    spared = 2 * 2 * expert * (64 - 4) if experts == "used" else 0  # in two layers, in the forward and in the backward
    assert [r["planned_fetched_bytes"] - r["fetched_bytes"] for r in reports] == [spared] * 4
    assert reports[0]["planned_fetched_bytes"] >= 2 * 2 * expert * 64


def smallest_budget(model: nn.Module, experts: str = "used") -> int:
    trained = copy.deepcopy(model)
    compiled = mtcompile.compile(trained, memory=1, optimizer=adamw(trained), experts=experts, fragments=None)
    with pytest.raises(mtcompile.BudgetError) as caught:
        compiled(torch.zeros(2, 3, dtype=torch.int64))
    return int(caught.value.minimum_bytes)


@pytest.mark.long
def test_a_used_expert_that_is_left_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: what is not fetched is NaN, and a product with it too."""
    monkeypatch.setenv("MT_CHECK", "1")
    plain = CpuMemory._slices_with_rows
    monkeypatch.setattr(CpuMemory, "_slices_with_rows", lambda memory, ends: plain(memory, ends)[1:])
    torch.manual_seed(0)
    model = Mixture(2).bfloat16()
    compiled = mtcompile.compile(model, memory=smallest_budget(model), optimizer=adamw(model), experts="used", fragments=None)
    assert compiled(torch.ones(2, 3, dtype=torch.int64)).isnan()


def test_experts_are_left_out_by_themselves_only_where_that_is_sure_to_spare_much() -> None:
    def sliced(width: int, tokens: int, experts: str = "auto") -> int:
        with without_memory():
            model = Experts(width, experts=64, active=2)
            joint = trace(model, {"x": torch.empty(1, tokens, width)}).joint
        return len(build(joint, input_homes=InputHomes(experts=experts)).meta["sliced"])

    assert sliced(16, 3) == 0 and sliced(16, 3, "used") == 2  # small ones are not worth a wait
    assert sliced(256, 3) == 2 and sliced(256, 3, "all") == 0
    assert sliced(256, 40) == 0  # they may all be used


def test_an_unknown_choice_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="expected experts to be one of auto, used, all, found 'some'"):
        mtcompile.compile(nn.Linear(2, 2), experts="some")


# -------------------------------------------------------------------------------------------------------- what is proven


def test_every_plan_keeps_the_bits_without_the_other_slices() -> None:
    """By interpretation after each pass, and on the emulated device and in every order of a GPU's streams, poisoned."""
    traced = traced_mixture()
    same_computation(traced.joint, traced.step)
    copies = sum(len(by_slices(schedule)) for schedule in equal_in_every_way(traced))
    assert copies >= 20


def test_a_read_of_other_slices_is_no_plain_computation() -> None:
    """Slices by the rows of another layer, and slices of what another operation reads too, give the step other numbers."""
    traced = traced_mixture()
    for case in ("other rows", "another reader"):
        step = rewrite(traced.step, Plan(lookahead=1))
        fetches = [call for call in calls(step) if call.target is prefetch_slices]
        if case == "other rows":
            other = next(call for call in fetches if call.args[-1] is not fetches[0].args[-1])
            other.args = (*other.args[:-1], fetches[0].args[-1])
        else:
            router = next(node for spec, node in inputs_of(step) if spec.name.endswith("1.1.router.weight"))
            whole = next(call for call in router.users if call.target is not prefetch_slices)
            whole.target, whole.args = prefetch_slices, (*whole.args, fetches[0].args[-1])
            fetches[0].append(whole)
            for item in reversed(results(whole)):
                whole.append(item)
        with pytest.raises(SameComputationError):
            same_computation(traced.joint, step)


def test_corrupted_schedules_with_slices_are_rejected() -> None:
    _, _, schedule = rewritten()
    unsafe = 0
    for _, mutant in mutants(schedule, 1, per_kind=2):
        if why_unsafe(mutant, walks=3, seed=1) is not None:
            unsafe += 1
            with pytest.raises(ScheduleError):
                verify(mutant)
    assert unsafe >= 30


def changed(schedule: Schedule, **fields: Any) -> Schedule:
    """The schedule with other fields of its first copy of slices."""
    place = schedule.instructions.index(by_slices(schedule)[0])
    rows = list(schedule.instructions)
    rows[place] = replace(rows[place], **fields)
    return replace(schedule, instructions=tuple(rows))


def test_a_copy_of_slices_declares_what_it_reads() -> None:
    _, _, schedule = rewritten()
    first, *rest = by_slices(schedule)
    late = next(copy.ends for copy in rest if copy.ends != first.ends)
    with pytest.raises(ScheduleError, match=r"I1.*expected equal values"):
        verify(changed(schedule, reads=(*first.reads[:-1], late), ends=late))
    with pytest.raises(ScheduleError, match=r"I0.*expected pairs"):
        verify(changed(schedule, ends=""))
    with pytest.raises(ScheduleError, match=r"I0.*expected ends as the last read"):
        verify(changed(schedule, ends=first.reads[0]))
    with pytest.raises(ScheduleError, match=r"I1.*expected ends on tier device"):
        verify(changed(schedule, reads=(*first.reads[:-1], first.reads[0]), ends=first.reads[0]))
    with pytest.raises(ScheduleFormatError, match="expected ends as the last read"):
        from_json(changed(schedule, ends=first.reads[0]).to_json())
    assert f"slices by {first.ends}" in str(schedule)


def test_a_step_with_slices_is_written_and_read() -> None:
    _, step, _ = rewritten()
    again = graph_from_json(graph_to_json(step))
    assert again.meta["sliced"] == step.meta["sliced"] != ()
    assert [str(node) for node in again.graph.nodes] == [str(node) for node in step.graph.nodes]


# ----------------------------------------------------------------------------------------------------- what reads slices


def _grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, w, offs=ends)


READERS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], bool]] = {
    "rows by slices": (_grouped, True),
    "transposed slices": (lambda x, w, ends: _grouped(x, w.transpose(1, 2), ends), True),
    "twice": (lambda x, w, ends: _grouped(_grouped(x, w, ends), w.transpose(-1, -2), ends), True),
    "slices turned around": (lambda x, w, ends: _grouped(x, w.transpose(0, 1), ends), False),
    "other rows": (lambda x, w, ends: _grouped(_grouped(x, w, ends), w, ends.flip(0)), False),
    "a sum as well": (lambda x, w, ends: _grouped(x, w, ends) + w.sum(), False),
    "a product with zeros": (lambda x, w, ends: torch.bmm(torch.zeros(8, 8, 8, dtype=w.dtype), w), False),
    "returned": (lambda x, w, ends: (_grouped(x, w, ends), w.transpose(1, 2)), False),
    "chosen": (lambda x, w, ends: w[ends.long() % 2], False),
    "rows and slices are one": (lambda x, w, ends: _grouped(w[0], w, ends), False),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_read_by_slices(reader: str) -> None:
    function, expected = READERS[reader]
    x, w = torch.randn(8, 8).bfloat16(), torch.randn(8, 8, 8).bfloat16()
    ends = torch.arange(1, 9, dtype=torch.int32)
    graph = make_fx(function, tracing_mode="fake")(x, w, ends).graph
    _, weight, end = graph.find_nodes(op="placeholder")
    assert read_by_slices(graph) == ({weight: end} if expected else {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_result_depends_on_a_slice_without_rows(dtype: torch.dtype) -> None:
    """This holds what everything here rests on, forward and backward."""
    torch.manual_seed(0)
    ends, results = torch.tensor([0, 3, 3, 5, 5, 5, 8, 8], dtype=torch.int32), []
    x, w = torch.randn(8, 16), torch.randn(8, 16, 16)
    for garbage in (None, torch.nan, torch.inf):
        weight = w.clone()
        if garbage is not None:
            weight[[0, 2, 4, 5, 7]] = garbage
        rows, weight = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        out = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        out.float().square().sum().backward()
        assert weight.grad is not None and not weight.grad[[0, 2, 4, 5, 7]].any()
        results.append([out.detach(), rows.grad, weight.grad])
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


def test_moved_bytes_count_only_the_slices_that_moved() -> None:
    _, _, schedule = rewritten()
    place = schedule.instructions.index(by_slices(schedule)[0])
    record = Record(place, "h2d", 0.0, 1.0, share=0.25)
    assert moved_nbytes(schedule, Trace((record,), "measured"), "h2d") == schedule.instructions[place].nbytes // 4
