"""``mtcompile.verify`` and ``mtcompile bench`` on a device with memory of its own, where weights may be updated on the host.

And Triton's kernels on a GPU: updates give the bits of the host.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mtcompile
from mtcompile.models.shapes import SHAPES
from mtcompile.parity.benchmark import benchmark
from mtcompile.parity.workload import setup_of
from mtcompile.runtime.optim import device_kernels
from tests.device.models import make
from tests.helpers.updates import STATES, UPDATES, assert_same_bits, cases, edge_operands, needs_triton, random_operands, run

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton launches its kernels on GPUs only")


@pytest.mark.parametrize(
    "options",
    [{}, {"update": "backward", "max_grad_norm": 0.5}, {"precision": "bf16-master32", "max_grad_norm": 0.5}],
    ids=["step", "backward", "masters"],
)
@pytest.mark.parametrize("memory", [None, pytest.param("1GiB", marks=pytest.mark.long)])
def test_plain_and_compiled_are_equal(memory: str | None, options: dict[str, Any], device: torch.device) -> None:
    module, data = make("decoder" if "precision" in options else "dropping")
    comparison = mtcompile.verify(module, data, memory=memory, device=device, **options)
    assert comparison.equal, str(comparison)
    assert str(device) in comparison.reference and comparison.compared["weight"] > 0


def test_both_are_measured(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "gpt-11m", SHAPES["gpt-11m"].shortened(2))
    setup = setup_of(device, "model", 64 * 2**20, batch=1, seq=16)
    measurement = benchmark("gpt-11m", setup, 1, lambda text, done, of: None)
    assert measurement.plain is not None and measurement.time_ratio is not None and measurement.device == str(device)
    assert 0 < measurement.compiled.peak_device_bytes <= 64 * 2**20  # type: ignore[operator]


@needs_triton
@needs_gpu
@cases([name for name in UPDATES if UPDATES[name].kind != "adam"])
def test_updates_on_the_gpu_give_the_bits_of_the_host(device: torch.device, name: str, layout: str) -> None:
    for parts in (edge_operands(STATES[name]), random_operands(10**6 + 3, STATES[name])):
        results = run(name, layout, [part.to(device) for part in parts], kernels=device_kernels)
        assert_same_bits([result.cpu() for result in results], run(name, layout, parts))
