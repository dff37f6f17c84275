"""torch.profiler shows the blocks of a compiled model by name; without a profiler nothing is named, and bits are the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import mtcompile
from mtcompile.torch_private import profiler_runs
from tests.helpers.stacks import BLOCKS, stack


@pytest.mark.slow
def test_blocks_are_shown_by_name_and_results_are_the_same() -> None:
    plain, data = stack()
    optimizers = []
    models = plain, mtcompile.compile(copy.deepcopy(plain), memory="200KiB")
    for model in models:
        optimizers.append(torch.optim.SGD(model.parameters(), 0.1))
    losses: list[list[torch.Tensor]] = [[], []]
    assert not profiler_runs()
    for step in range(3):
        for model, optimizer, seen in zip(models, optimizers, losses, strict=True):
            with profile(activities=[ProfilerActivity.CPU], record_shapes=step == 2) as profiled:
                assert profiler_runs()
                loss = model(**data)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().clone())
            names = {event.key for event in profiled.key_averages()}
        for block in range(BLOCKS):
            assert f"layers.{block} forward" in names
            assert {f"layers.{block} backward", f"layers.{block} backward (recompute)"} & names
    assert all(torch.equal(one, other) for one, other in zip(*losses, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


def test_operations_are_within_their_block() -> None:
    plain, data = stack()
    model = mtcompile.compile(plain, memory="10MiB")
    model(**data).backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function("step"):
        model(**data).backward()
    blocks = [event for event in profiled.events() if event.name == "layers.2 forward"]
    assert len(blocks) == 1
    inside = {event.name for event in profiled.events() if _within(event.time_range, blocks[0].time_range)}
    assert any(name.startswith("aten::") for name in inside)


@pytest.mark.slow
def test_copies_are_shown_where_all_threads_are_profiled() -> None:
    plain, data = stack()
    model = mtcompile.compile(plain, memory="200KiB")
    model(**data).backward()
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every) as profiled:
        model(**data).backward()
    assert {"prefetch layers.2", "offload layers.2", "layers.2 forward"} <= {event.key for event in profiled.key_averages()}


def _within(inner: object, outer: object) -> bool:
    return outer.start <= inner.start and inner.end <= outer.end  # type: ignore[attr-defined]


def test_nothing_is_named_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*_: object) -> None:
        raise AssertionError("no profiler runs")

    monkeypatch.setattr("mtcompile.execution.runner.named", named)
    model, data = stack()
    mtcompile.compile(model, memory="10MiB")(**data).backward()
