"""A GPU that fails for good: the first error is the one that is told, then and later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.execution import runner

pytestmark = pytest.mark.slow  # it compiles models


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_first_cause_is_told(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = mtcompile.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), memory="1MiB")
    model(torch.randn(2, 4)).sum().backward()
    execute, ended = runner.execute, [False]

    def failing(prepared: Any, *args: Any) -> Any:
        if prepared.phase == phase:
            ended[0] = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")
        return execute(prepared, *args)

    def set_state(*args: Any) -> None:
        if ended[0]:
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(runner, "execute", failing)
    monkeypatch.setattr(runner, "set_generator_state", set_state)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        model(torch.randn(2, 4)).sum().backward()
    for _ in range(2):
        with pytest.raises(
            mtcompile.MtcompileError, match=rf"the GPU failed in a {phase}.*illegal memory access(.|\n)*start again"
        ):
            model(torch.randn(2, 4))
