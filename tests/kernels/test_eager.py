"""Plans go by what each operation of a kernel takes; what runs is measured, and a plan that then does not fit is made again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import mtcompile
from mtcompile.kernels import eager, measure
from mtcompile.kernels.eager import EagerKernels
from mtcompile.passes.analysis.kernels import install
from tests.helpers.tracing import trace

CPU = torch.device("cpu")


class Layers(nn.Module):
    """Blocks of some equal operations, with a product, an attention and a norm that need memory inside."""

    def __init__(self, count: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(self.norm(x))
            x = x + nn.functional.scaled_dot_product_attention(h, h, h).softmax(-1)
        return x.pow(2).sum()


def test_planning_measures_each_operation_once_and_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    step, measured, whole = trace(Layers(4), {"x": torch.randn(2, 16, 32)}).step, list[str](), list[Any]()
    kernels, alone, run = EagerKernels(CPU), measure._alone, eager._measured_once
    kernels.known, kernels.alone = {}, eager.defaultdict(dict)
    monkeypatch.setattr(measure, "_alone", lambda node, device: measured.append(measure.alike(node)) or alone(node, device))
    monkeypatch.setattr(eager, "_measured_once", lambda kernel, device: whole.append(kernel) or run(kernel, device))
    bodies = list(step.children())
    planned = [kernels.workspace(kernel) for kernel in bodies]
    assert not whole and len(set(measured)) == len(measured) < sum(len(measure.allocating(kernel)) for kernel in bodies)
    assert [kernels.about(kernel, torch.get_num_threads()) for kernel in bodies] == planned and not whole
    actual = [run(kernel, CPU).workspace for kernel in bodies]
    assert all(most >= least for most, least in zip(planned, actual, strict=True)) and sum(planned) <= 1.01 * sum(actual) + 4096
    assert [kernels(kernel).workspace for kernel in bodies] == planned == [kernels.workspace(kernel) for kernel in bodies]


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """An operation that returns its operand, and does not say so."""
    return x


def test_a_result_that_shares_memory_with_an_operand_or_another_result_is_copied() -> None:
    graph, x = fx.Graph(), torch.randn(4, 4)
    node = graph.placeholder("x")
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2))
    results = [graph.call_function(unchanged, (value,)) for value in (node, doubled)]
    graph.output((results[0], doubled, results[1]))
    for each in (node, doubled, *results):
        each.meta["val"] = torch.empty(4, 4, device="meta")
    owner = nn.Module()
    kernel = owner.get_submodule(install(owner, {}, graph))
    made = EagerKernels(CPU)(kernel).call(x)
    assert torch.equal(made[0], x) and torch.equal(made[1], 2 * x) and torch.equal(made[2], 2 * x)
    assert len({tensor.untyped_storage().data_ptr() for tensor in (x, *made)}) == 4


def test_a_kernel_whose_results_hold_more_than_declared_is_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel, *_) = trace(Layers(1), {"x": torch.randn(2, 16, 32)}).step.children()
    kernels = EagerKernels(CPU)
    kernels.known, kernels.alone = {}, eager.defaultdict(dict)
    monkeypatch.setattr(measure, "_alone", lambda node, device: measure.Alone(1 << 30, as_declared=False))
    assert kernels.workspace(kernel) == kernels.measured(kernel) < 1 << 30 and not kernels.built  # it does not run


@pytest.mark.slow
@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_plan_whose_kernels_need_more_than_it_was_made_with_is_made_again(
    inductor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, layers = (16, 3) if inductor else (24, 6)
    x, options = torch.randn(2, 64, width), dict[str, Any](kernels="inductor" if inductor else "eager")
    with pytest.raises(mtcompile.BudgetError) as refusal:
        mtcompile.compile(Layers(layers, width), memory="1KiB", **options)(x)
    monkeypatch.setattr(eager, "composed", lambda kernel, alone: 0)
    plans = []
    for memory in (refusal.value.minimum_bytes, 2 * refusal.value.minimum_bytes, 2 * refusal.value.minimum_bytes):
        compiled = mtcompile.compile(Layers(layers, width), memory=memory, **options)
        compiled(x).backward()
        report = compiled.memory_report()
        assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= memory
        plans.append(compiled.plan)
    assert plans[1].decisions.identity == plans[2].decisions.identity and plans[1].peak_bytes == plans[2].peak_bytes
