"""What chooses kernels is settled before it is read: reading it twice, around a step, gives the same."""

from __future__ import annotations

import pytest
import torch

from mtcompile.torch_private import kernel_choices

CUDNN_FIRST = [3, 1, 2, 0]  # as torch orders its backends of attention on an H100, where one is first chosen


def test_the_order_of_attentions_backends_is_settled_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch._C._get_sdp_priority_order()
    chosen: list[torch.device] = []

    def choose(q: torch.Tensor, *others: torch.Tensor) -> int:
        chosen.append(q.device)
        torch._C._set_sdp_priority_order(CUDNN_FIRST)
        return 0

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    device = torch.device("meta", 5)
    try:
        first = kernel_choices(device)
        choose(torch.empty(1, device=device))  # as a step does
        assert kernel_choices(device) == first
        assert first[1][: len(CUDNN_FIRST)] == tuple(CUDNN_FIRST)
        assert chosen[0].type == device.type
    finally:
        torch._C._set_sdp_priority_order(before)


def test_a_cpu_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert kernel_choices(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a GPU that is not here")
def test_a_gpu_that_is_not_here_can_be_traced_for() -> None:
    assert kernel_choices(torch.device("cuda", 3))
