"""Adapters on a base in 4 bits: bits as plain, and the base crosses the link in its 4 bits and is never sent home."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mtcompile
from mtcompile.models import decoders
from mtcompile.models.shapes import SHAPES

WIDTH, BLOCK = 64, 32


class Packed(nn.Parameter):
    """Two 4-bit codes a byte, as bitsandbytes' parameters are: a subclass that has its scales as an attribute."""

    quant_state: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        copied = Packed(self.data.clone(), requires_grad=False)
        copied.quant_state = copy.deepcopy(self.quant_state, memo)
        memo[id(self)] = copied
        return copied


def packed(weight: Tensor) -> Packed:
    blocks = weight.reshape(-1, BLOCK)
    scales = blocks.abs().amax(1)
    codes = ((blocks / scales[:, None]) * 7 + 8).round().clamp(0, 15).to(torch.uint8).reshape(-1, 2)
    parameter = Packed((codes[:, 0] * 16 + codes[:, 1])[:, None], requires_grad=False)
    parameter.quant_state = SimpleNamespace(scales=scales, shape=weight.shape)
    return parameter


def unpacked(data: Tensor, state: Any) -> Tensor:
    codes = torch.stack((data // 16, data % 16), -1).reshape(-1, BLOCK)
    return ((codes.float() - 8) / 7 * state.scales[:, None]).reshape(state.shape)


class Multiply(torch.autograd.Function):
    """Multiplies with a weight that exists in full only within the forward and within the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, data: Tensor, state: Any) -> Tensor:
        ctx.save_for_backward(data)
        ctx.state = state
        return F.linear(x, unpacked(data, state))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ unpacked(ctx.saved_tensors[0], ctx.state), None, None


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = packed(torch.randn(WIDTH, WIDTH) / 8)
        self.lora_a, self.lora_b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = Multiply.apply(x, self.weight, self.weight.quant_state)  # type: ignore[no-untyped-call]
        return x + torch.tanh(base + self.lora_b(self.lora_a(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def train(model: Any, call: Any, steps: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, 1e-2), []
    for _ in range(steps):
        loss = call(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses, trained


def assert_streamed_in_four_bits(model: Any, plain: Any, call: Any, least: int) -> None:
    """``least``: bytes in 4 bits that must be at home on the host and cross the link in each phase."""
    seen = [train(each, call) for each in (plain, model)]
    assert all(torch.equal(one, other) for pair in zip(*seen, strict=True) for one, other in zip(*pair, strict=True))
    schedule = model.schedule
    copies = [(i, schedule.buffers[i.writes[0]]) for i in schedule.instructions if i.op == "copy"]
    assert not any(i.queue == "d2h" and buffer.role == "param" for i, buffer in copies)
    weights = sum(p.nbytes for p in model.parameters())
    for phase in ("forward", "backward"):
        crossed = sum(i.nbytes for i, buffer in copies if (i.queue, i.phase, buffer.role) == ("h2d", phase, "param"))
        assert least <= crossed <= 2 * weights  # never as many bytes as the base would take in bf16, let alone fp32
    frozen = [p for p in model.parameters() if p.dtype == torch.uint8]
    assert frozen and all(p.quant_state is not None and p.grad is None for p in frozen)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.slow
def test_a_parameter_subclass_in_four_bits_is_streamed_as_it_is() -> None:
    torch.manual_seed(0)
    plain, x = Model(), torch.randn(8, WIDTH)
    with pytest.raises(mtcompile.BudgetError) as caught:
        mtcompile.compile(copy.deepcopy(plain), memory=1)(x)
    model = mtcompile.compile(copy.deepcopy(plain), memory=caught.value.minimum_bytes)
    packed_nbytes = sum(p.nbytes for p in plain.parameters() if p.dtype == torch.uint8)
    assert packed_nbytes == 4 * WIDTH * WIDTH // 2
    assert_streamed_in_four_bits(model, plain, lambda each: each(x), packed_nbytes)
    planned = mtcompile.plan(plain, {"x": x}, memory="1MiB")
    adapters = sum(p.nbytes for p in plain.parameters() if p.requires_grad)
    assert planned.feasible and planned.state_bytes == pytest.approx(packed_nbytes + 4 * adapters, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=pytest.mark.long)])
def test_adapters_of_peft_on_a_base_of_bitsandbytes(tmp_path: Path, nested: bool) -> None:
    pytest.importorskip("bitsandbytes")
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 256}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False)).save_pretrained(tmp_path)
    four = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=nested
    )

    def build() -> Any:
        base = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path, quantization_config=four, device_map="cpu", dtype=torch.bfloat16
        )
        torch.manual_seed(1)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()

    tokens = torch.randint(256, (2, 16))
    model = mtcompile.compile(build(), memory="310KiB")
    assert_streamed_in_four_bits(model, build(), lambda each: each(input_ids=tokens, labels=tokens).loss, 30_000)
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_a_base_in_four_bits_is_planned_in_them() -> None:
    with pytest.raises(ValueError, match="expected base_bits=4 with lora="):
        mtcompile.plan("gpt-11m", base_bits=4)
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is an extra: pip install mtcompile[qlora]")
    options: dict[str, Any] = {"batch": 1, "seq": 64, "memory": "1GiB", "host": "4GiB", "precision": "bf16", "lora": 4}
    full, four = (mtcompile.plan("gpt-11m", base_bits=bits, **options) for bits in (None, 4))
    assert full.feasible and four.feasible and full.parameters == four.parameters
    blocks = sum(p.numel() for p in decoders.fake(SHAPES["gpt-11m"]).blocks.parameters() if p.dim() == 2)
    assert full.state_bytes - four.state_bytes == 2 * blocks - blocks // 2
