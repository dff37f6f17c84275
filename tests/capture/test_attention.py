"""The attention layers of torch.nn have faster kernels for evaluation: a call takes those of a plain run, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile

pytestmark = pytest.mark.slow  # it compiles many models

PADDED = torch.tensor([[False, False, True, True, True], [False] * 5, [False] * 4 + [True]])
WITH_A_GAP = torch.tensor([[False, True, False, False, False], [False] * 5, [False] * 5])
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


class Model(nn.Module):
    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def attention() -> nn.Module:
    return nn.MultiheadAttention(8, 2, batch_first=True)


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, **options)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "attention": (attention, lambda layer, x: layer(x, x, x)[0]),
    "padded attention": (attention, lambda layer, x: layer(x, x, x, key_padding_mask=PADDED)[0]),
    "causal attention": (attention, lambda layer, x: layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]),
    "attention and its weights": (attention, lambda layer, x: layer(x, x, x, key_padding_mask=PADDED, attn_mask=CAUSAL)[1]),
    "padded block": (block, lambda layer, x: layer(x, src_key_padding_mask=PADDED)),
    "causal block": (block, lambda layer, x: layer(x, src_mask=CAUSAL)),
    "encoder": (encoder, lambda layer, x: layer(x)),
    "encoder of a mask with a gap": (encoder, lambda layer, x: layer(x, src_key_padding_mask=WITH_A_GAP)),
    "dense encoder": (lambda: encoder(enable_nested_tensor=False), lambda layer, x: layer(x, src_key_padding_mask=PADDED)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_evaluation_has_the_bits_of_a_plain_run(kind: str) -> None:
    torch.manual_seed(0)
    make, call = LAYERS[kind]
    model = Model(make(), call).eval()
    called = compiled(copy.deepcopy(model))
    for seed in range(3):
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            assert torch.equal(called(x), model(x))


def compiled(model: nn.Module) -> Any:
    return mtcompile.compile(model, memory="64MiB", device="cpu")


@pytest.mark.parametrize("options", [{}, {"mask_check": False}])
def test_an_encoder_packs_its_tokens_in_evaluation_as_in_a_plain_run(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Model(encoder(**options), lambda layer, x: layer(x, src_key_padding_mask=PADDED))
    model = compiled(copy.deepcopy(plain))
    x = torch.randn(3, 5, 8)
    model(x).sum().backward()
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), plain(x))  # where gradients flow, torch packs nothing


def test_an_encoder_asks_about_the_mask_of_each_call() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    called, x = compiled(copy.deepcopy(model)), torch.randn(3, 5, 8)
    with torch.no_grad():
        for mask in (WITH_A_GAP, PADDED, WITH_A_GAP):
            assert torch.equal(called(x, src_key_padding_mask=mask), model(x, src_key_padding_mask=mask))
