"""FLOPs of operations for which torch has no formula, or one that counts too many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mtcompile.capture.tracing import trace
from mtcompile.passes.analysis.cost import node_flops
from mtcompile.passes.step_graph import kernel_of, regions

BATCH, HEADS, TOKENS, SIZE = 2, 4, 64, 8


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.project = causal, nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(BATCH, TOKENS, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal).sum()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_on_a_cpu_too(causal: bool) -> None:
    """Two products in the forward and five in the backward; a causal one looks at half of the positions."""
    step = trace(Attention(causal), {"x": torch.zeros(BATCH, TOKENS, HEADS * SIZE)}).step
    nodes = [node for region in regions(step) for node in kernel_of(step, region).graph.nodes]
    flops = [node_flops(node) for node in nodes if "attention" in str(node.target)]
    product = 2 * BATCH * HEADS * TOKENS * TOKENS * SIZE // (1 + causal)
    assert flops == [2 * product, 5 * product]
