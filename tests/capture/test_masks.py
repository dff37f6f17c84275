"""Attention masks of Transformers models are a plain run's: none where nothing is packed, and the right one elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile

pytestmark = pytest.mark.slow  # it compiles many models

pytest.importorskip("transformers.masking_utils")


def model() -> nn.Module:
    """Fewer heads of keys than of queries: with a mask, their gradients are added in another order."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))


class Wrapped(nn.Module):
    """A model that calls its positions something else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, tokens: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
        loss: torch.Tensor = self.inner(input_ids=tokens, labels=tokens, position_ids=where).loss
        return loss


TOKENS = torch.randint(100, (2, 48), generator=torch.Generator().manual_seed(1))
PACKED = torch.cat((torch.arange(16), torch.arange(32))).expand(2, -1).contiguous()


def step(call: Any, parameters: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    loss = call(*inputs)
    loss.backward()
    results = [loss.detach(), *(p.grad for p in parameters)]
    for parameter in parameters:
        parameter.grad = None
    return results


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_nothing_packed_is_seen_without_a_mask() -> None:
    plain = Wrapped()
    compiled = mtcompile.compile(copy.deepcopy(plain))
    expected = step(plain, list(plain.parameters()), TOKENS)
    assert same(expected, step(compiled, list(compiled.parameters()), TOKENS))


def test_positions_that_are_passed_are_looked_at() -> None:
    plain = Wrapped()
    compiled = mtcompile.compile(copy.deepcopy(plain))
    parameters, copies = list(plain.parameters()), list(compiled.parameters())
    whole, packed = step(plain, parameters, TOKENS), step(plain, parameters, TOKENS, PACKED)
    assert not torch.equal(whole[0], packed[0])
    assert same(whole, step(compiled, copies, TOKENS))
    assert same(packed, step(compiled, copies, TOKENS, PACKED))
    assert same(whole, step(compiled, copies, TOKENS))
