"""The attention layers of torch.nn have faster kernels for evaluation: a call takes those of a plain run, or is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

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


@pytest.mark.parametrize("options", [{}, pytest.param({"mask_check": False}, marks=pytest.mark.long)])
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


class Causal(nn.Module):
    """``limit``: parts the forward, which looks at its result."""

    def __init__(self, limit: float | None = None) -> None:
        super().__init__()
        self.project, self.limit = nn.Linear(16, 48), limit

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(2, 64, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        loss = scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()
        return loss * 2 if self.limit is not None and loss.item() > self.limit else loss


@pytest.mark.parametrize("limit", [None, 1e9], ids=["whole", "in parts"])
def test_a_call_takes_the_backend_that_is_chosen_around_it(limit: float | None) -> None:
    torch.manual_seed(0)
    plain, x = Causal(limit), torch.randn(2, 64, 16)
    compiled = mtcompile.compile(copy.deepcopy(plain), memory="64MiB")
    flash, products = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
    different = []
    for backend in (flash, products, flash):
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parts
            gradients = [torch.autograd.grad(model(x), list(model.parameters())) for model in (plain, compiled)]
        assert all(map(torch.equal, *gradients)), backend
        different.append(gradients[0][0])
    assert not torch.equal(different[0], different[1]), "the two backends round differently, or this shows nothing"


def test_the_plan_names_the_backend() -> None:
    model = mtcompile.compile(Causal(), memory="64MiB")
    model(torch.randn(2, 64, 16)).backward()
    assert "attention by flash" in model.plan.numerics
