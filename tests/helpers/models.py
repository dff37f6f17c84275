"""Small models that several files of tests train, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(images).mean((2, 3))), labels)


class Small(nn.Module):
    """Blocks with dropout and a norm: weights, random numbers and, with batch norm, buffers all change in a step."""

    def __init__(self, blocks: int = 2, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), norm(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32)) for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Tied(nn.Module):
    """Tied weights and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


class Chain(nn.Module):
    """One long chain without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 16, 16) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(24):
            x = torch.sin(x @ self.weight[index]) + x.square() * 0.01
        return x.square().mean()


class Constants(nn.Module):
    """Two constants that differ only in value, and GELUs of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            shift = torch.tensor([1.0, 2.0]) if index % 2 else torch.tensor([3.0, 4.0])
            x = F.gelu(layer(x), approximate="tanh" if index < 2 else "none") + shift.repeat(4)
        return x.square().mean()


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0)
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    )


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def labels(count: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(3))


CASES: dict[str, Any] = {
    "llama": (_llama, _tokens),
    "gpt2": (_gpt2, _tokens),
    "t5": (_t5, _tokens),
    "cnn": (Cnn, lambda: {"images": floats(4, 3, 8, 8), "labels": labels(5, 4)}),
    "tied": (Tied, lambda: {"tokens": labels(40, 12), "labels": labels(40, 12)}),
    "chain": (Chain, lambda: {"x": floats(8, 16)}),
    "constants": (Constants, lambda: {"x": floats(6, 8)}),
}


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    factory, data = CASES[name]
    return factory().train(), data()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, layers: int = 12, breaks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(layers))
        self.head = nn.Linear(32, 50)
        self.breaks = breaks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in self.breaks:
                torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def tokens(batch: int) -> torch.Tensor:
    return torch.randint(0, 50, (batch, 24), generator=torch.Generator().manual_seed(batch))


def tower(batch: int, seq: int) -> Any:
    """A factory of (batch, seq): rows by features that attend to each other."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                h = torch.tanh(layer(x))
                x = x + torch.softmax(h @ h.transpose(1, 2), -1) @ h
            return x.square().mean()

    return Tower(), {"x": torch.randn(batch, seq, 64)}


class Experts(nn.Module):
    """A mixture in which each token chooses ``active`` experts. ``used``: which were chosen, by call of the plain model."""

    def __init__(self, width: int, experts: int, active: int) -> None:
        super().__init__()
        self.active, self.used = active, list[tuple[int, ...]]()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) / 4)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x.flatten(0, 1))
        scores, experts = self.router(tokens).float().softmax(-1).topk(self.active, -1)
        chosen, order = experts.flatten().sort(stable=True)
        ends = F.one_hot(chosen, len(self.up)).sum(0).cumsum(0).to(torch.int32)
        if not torch.compiler.is_compiling():
            self.used.append(tuple(chosen.unique().tolist()))
        rows = F.silu(F.grouped_mm(tokens[order // self.active], self.up.transpose(-2, -1), offs=ends))
        rows = F.grouped_mm(rows, self.down.transpose(-2, -1), offs=ends) * scores.flatten()[order, None].to(x.dtype)
        return x + torch.zeros_like(tokens).index_add(0, order // self.active, rows).view_as(x)


class Mixture(nn.Module):
    """Experts between linear layers, and a loss of tokens."""

    def __init__(self, layers: int, experts: int = 64, active: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), Experts(width, experts, active)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


class Straight(nn.Module):
    """Weights that the forward only casts, for its backward. The value of the first one is read nowhere."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight.to(torch.bfloat16))
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            (x, weight), grad = ctx.saved_tensors, grads[0].to(torch.bfloat16)
            return (grad @ weight.t()).float(), (x.to(torch.bfloat16).t() @ grad).float()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(6))
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(self.Function.apply(x, weight) + self.linear(x))
        return x.square().mean()
