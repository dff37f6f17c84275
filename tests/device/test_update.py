"""The update kernels on a GPU: the host's bits."""

from __future__ import annotations

import pytest
import torch

from mtcompile.runtime.optim import device_kernels
from tests.helpers.updates import UPDATES, assert_same_bits, cases, edge_operands, needs_triton, random_operands, run


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton launches its kernels on GPUs only")
@cases([name for name in UPDATES if UPDATES[name][0] in ("adamw", "sgd")])
def test_updates_on_the_gpu_give_the_bits_of_the_host(device: torch.device, name: str, layout: str) -> None:
    states = UPDATES[name][1]
    for parts in (edge_operands(states), random_operands(10**6 + 3, states)):
        results = run(name, layout, [part.to(device) for part in parts], where=device_kernels)
        assert_same_bits([result.cpu() for result in results], run(name, layout, parts))
