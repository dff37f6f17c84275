"""Rows of embeddings that no batch names: never read, never fetched, whatever the plan; and nothing else is taken for one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mtcompile
from mtcompile.capture.tracing import Traced
from mtcompile.execution.compiled import retimed
from mtcompile.execution.memory.fragments import homes_off_device
from mtcompile.passes import rewrite
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.rows import fetched_by_rows, read_by_rows
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts.form import in_rows
from mtcompile.passes.graph_json import graph_from_json, graph_to_json
from mtcompile.passes.joint.build import build
from mtcompile.passes.plan import Plan, Updates
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.evaluate import evaluate
from mtcompile.passes.planning.figures.evaluator import Figures
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.proof.same_computation import SameComputationError, same_computation
from mtcompile.passes.step_graph import calls, offload_rows, prefetch_rows
from mtcompile.runtime.devices.cpu import CpuMemory
from mtcompile.runtime.schedule import Instruction, Schedule
from mtcompile.runtime.verify import ScheduleError, verify
from mtcompile.torch_private import without_memory
from tests.helpers.proof.corrupt import mutants
from tests.helpers.proof.every_way import equal_in_every_way
from tests.helpers.proof.oracle import why_unsafe
from tests.helpers.tracing import lowered, trace
from tests.passes.planning.drawn_plans import varied

pytestmark = pytest.mark.slow  # it traces models


class Words(nn.Module):
    """An embedding of many words, looked up twice, in front of two layers."""

    def __init__(self, words: int = 64, width: int = 8, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width, **options)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        x = self.embed(tokens.view(-1)).view(*tokens.shape, -1) + self.embed(others.t()[:1]).transpose(0, 1)
        return self.layers(x).logsumexp(-1).mean()


def batch(number: int = 0, words: int = 64) -> dict[str, Tensor]:
    """Some tokens are named twice, and one is the padding of some tests (3)."""
    drawn = torch.randint(0, words, (4, 4), generator=torch.Generator().manual_seed(number))
    drawn[0], drawn[1, 0] = drawn[2], 3
    return {"tokens": drawn, "others": drawn.flip(0).contiguous()}


@functools.cache
def traced_words() -> Traced:
    torch.manual_seed(0)
    traced = trace(Words(padding_idx=3, scale_grad_by_freq=True), batch())
    return replace(traced, step=build(traced.joint))


@functools.cache
def traced_rows() -> Traced:
    traced = traced_words()
    joint = in_rows(traced.joint, "used")
    assert joint is not None
    return replace(traced, joint=joint, step=build(joint))


def by_rows(schedule: Schedule) -> list[Instruction]:
    return [instruction for instruction in schedule.instructions if instruction.rows]


# ------------------------------------------------------------------------------------------------------- what is fetched


def steps_of(model: nn.Module, optimizer: Any, after: Callable[[], Any], backwards: int) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and weights of steps on batches that name other rows each; and gradients, where they stay."""
    log, grads = [], []
    for number in range(3):
        for part in range(backwards):
            loss = model(**batch(10 * number + part, 4096))
            loss.backward()
            log.append(loss.detach())
        grads += [p.grad.clone() for p in model.parameters() if type(p.grad) is torch.Tensor]
        optimizer.step()
        optimizer.zero_grad()
        log += [p.detach().clone() for p in model.parameters()]
        after()
    return log, grads


WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "by step()": ({}, 1),
    "two backwards": ({}, 2),
    "in the backward": ({"update": "backward", "run_ahead": True}, 1),
    "micro-batches": ({"accumulate": 2}, 1),
    "masters": ({"update": "backward", "precision": "bf16-master32"}, 1),
}


@pytest.mark.parametrize("way", [way if way == "by step()" else pytest.param(way, marks=pytest.mark.long) for way in WAYS])
def test_only_the_rows_that_a_batch_names_cross_the_link(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of all rows; AdamW goes on changing the others, by their moments and by weight decay."""
    monkeypatch.setenv("MT_CHECK", "1")  # what is not fetched holds NaN
    options, backwards = WAYS[way]
    torch.manual_seed(0)
    model = Words(4096, 64, padding_idx=3)
    logs, copied = {}, {}
    moved: dict[str, list[dict[str, Any]]] = {"all": [], "used": []}
    for embeddings, reports in moved.items():
        trained = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        given: dict[str, Any] = {"embeddings": embeddings, "policy": "megatrain", **options}
        compiled = mtcompile.compile(trained, memory="8MiB", optimizer=optimizer, **given)

        def report(reports: list[dict[str, Any]] = reports, compiled: Any = compiled) -> None:
            reports.append(compiled.memory_report())

        logs[embeddings] = steps_of(compiled, optimizer, report, backwards)
        last = compiled._mt_model.session.last
        again = [each.time_us for each in retimed(last, last.problem.machine) if each.rows]
        assert again == [each.time_us for each in by_rows(last.schedule)] and bool(again) == (embeddings == "used")
        copied[embeddings] = sum(i.nbytes for i in compiled.schedule.instructions if i.queue == "d2h")
    for one, other in zip(logs["all"], logs["used"], strict=True):
        assert len(one) == len(other) and all(map(torch.equal, one, other))
    if way not in ("masters", "micro-batches"):
        plain = copy.deepcopy(model)
        log, grads = steps_of(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), lambda: None, backwards)
        assert all(map(torch.equal, log, logs["used"][0]))
        assert "update" in options or all(map(torch.equal, grads, logs["used"][1]))
    for whole, rows in zip(moved["all"], moved["used"], strict=True):
        assert rows["peak_device_bytes"] <= rows["planned_peak_device_bytes"]
        assert whole["fetched_bytes"] == whole["planned_fetched_bytes"] > 2**19
        assert rows["fetched_bytes"] < rows["planned_fetched_bytes"] < 2**16
    assert copied["used"] < 2**16 < 2**19 < copied["all"]


@pytest.mark.long
def test_a_row_that_is_left_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: what is not fetched is NaN, and so is the loss."""
    monkeypatch.setenv("MT_CHECK", "1")
    plain = CpuMemory._index
    monkeypatch.setattr(CpuMemory, "_index", lambda memory, name: plain(memory, name).flatten()[:1])
    options: dict[str, Any] = {"memory": "1MiB", "policy": "megatrain", "embeddings": "used"}
    assert mtcompile.compile(Words(), **options)(**batch()).isnan()


@pytest.mark.long
def test_rows_are_left_out_by_themselves_only_where_that_is_sure_to_spare_much() -> None:
    def by_rows(words: int, tokens: int, embeddings: str = "auto") -> int:
        with without_memory():
            data = {name: torch.zeros(1, tokens, dtype=torch.int64) for name in ("tokens", "others")}
            joint = trace(Words(words, 512), data).joint
        return len(fetched_by_rows(joint, embeddings))

    assert by_rows(64, 8) == 0 and by_rows(64, 8, "used") == 1  # a small one is not worth its copies
    assert by_rows(32768, 8) == 1 and by_rows(32768, 8, "all") == 0
    assert by_rows(32768, 1024) == 0  # each row is a copy of its own


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="expected embeddings to be one of auto, used, all, found 'some'"):
        mtcompile.compile(nn.Linear(2, 2), embeddings="some")


# -------------------------------------------------------------------------------------------------------- what is proven


def test_every_plan_keeps_the_bits_without_the_other_rows() -> None:
    """By interpretation after each pass, and on the emulated device and in every order of a GPU's streams, poisoned."""
    copies = {"h2d": 0, "d2h": 0}
    for schedule in equal_in_every_way(traced_rows(), traced_words()):
        for each in by_rows(schedule):
            copies[each.queue] += 1
    assert min(copies.values()) >= 3


def test_rows_that_other_numbers_name_are_no_plain_computation() -> None:
    """A lookup of numbers that do not say which rows came, and a gradient in other rows, give the step other numbers."""
    traced = traced_rows()
    for target in (prefetch_rows, offload_rows):
        step = rewrite(traced.step, Plan(lookahead=1))
        call = next(call for call in calls(step) if call.target is target)
        call.args = call.args[:2]
        with pytest.raises(SameComputationError):
            same_computation(traced.joint, step)


def test_corrupted_schedules_with_rows_are_rejected() -> None:
    plan = Plan(lookahead=1)
    schedule = lowered(rewrite(traced_rows().step, plan), plan)
    unsafe = 0
    for _, mutant in mutants(schedule, 1, per_kind=2):
        if why_unsafe(mutant, walks=3, seed=1) is not None:
            unsafe += 1
            with pytest.raises(ScheduleError):
                verify(mutant)
    assert unsafe >= 15
    place = schedule.instructions.index(by_rows(schedule)[0])
    without = list(schedule.instructions)
    without[place] = replace(without[place], rows=without[place].rows[:1])
    with pytest.raises(ScheduleError, match=r"I0.*expected"):
        verify(replace(schedule, instructions=tuple(without)))


@pytest.mark.long
def test_a_step_with_rows_is_written_and_read() -> None:
    step = rewrite(traced_rows().step, Plan(lookahead=1))
    again = graph_from_json(graph_to_json(step))
    assert again.meta["rows"] == step.meta["rows"] != {} and again.meta["inputs"] == step.meta["inputs"]
    assert [str(node) for node in again.graph.nodes] == [str(node) for node in step.graph.nodes]


@pytest.mark.parametrize("updates", [None, Updates(), Updates(run_ahead=True)])
def test_figures_of_rows_are_those_of_the_schedule(updates: Updates | None) -> None:
    machine, rnd = Machine("slow link", 1e12, 100.0, 0.05, 0.05, issue_us=0.2, host_gbps=20.0), Random(3)
    step = traced_rows().step
    for _ in range(6):
        candidates = Candidates(PlanningProblem(step, machine, Budgets(updates=updates), fixed_homes=homes_off_device(step)))
        plan = varied(candidates, rnd)
        expected = evaluate(candidates.problem, plan).plan
        figures = candidates._evaluator.figures(plan)
        assert figures == Figures(expected.peak_bytes, expected.step_time_us, expected.update_us)


# ------------------------------------------------------------------------------------------------------- what reads rows


class Reading(nn.Module):
    """Reads an embedding in one way."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.read = nn.Parameter(torch.randn(16, 4)), read

    def forward(self, tokens: Tensor) -> Tensor:
        return self.read(tokens, self.weight).square().sum()


READERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "as they are": (F.embedding, True),
    "laid out anew": (lambda i, w: F.embedding(i.view(-1)[1:].unsqueeze(0).expand(2, -1), w), True),
    "turned around": (lambda i, w: F.embedding(i.flip(0), w), False),
    "widened": (lambda i, w: F.embedding(i[:2].to(torch.int64), w), True),
    "added up": (lambda i, w: F.embedding(i[:1], w) + F.embedding(i[1:2], w), True),
    "other numbers": (lambda i, w: F.embedding(i + 1, w), False),
    "constants": (lambda i, w: F.embedding(torch.arange(4), w), False),
    "tied to a head": (lambda i, w: F.embedding(i, w) @ w.t(), False),
    "with a norm of all": (lambda i, w: F.embedding(i, w) * w.norm(), False),
    "by indexing": (lambda i, w: w[i], False),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_read_by_rows(reader: str) -> None:
    read, expected = READERS[reader]
    joint = trace(Reading(read), {"tokens": torch.tensor([[1, 2, 3, 3], [4, 1, 2, 0], [5, 5, 5, 5]])}).joint
    assert bool(read_by_rows(joint)) == expected
