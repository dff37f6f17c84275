"""Decoders of the sizes that are trained today, by name: for plans before there is a model, and for benchmarks.

Plain PyTorch: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, cross-entropy of the next token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtcompile.models.shapes import Shape


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, wide, narrow = shape, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.before, self.between = nn.RMSNorm(shape.hidden, eps=1e-6), nn.RMSNorm(shape.hidden, eps=1e-6)
        self.q, self.k, self.v = (nn.Linear(shape.hidden, n, bias=False) for n in (wide, narrow, narrow))
        self.o = nn.Linear(wide, shape.hidden, bias=False)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        h = self.before(x)
        q, k, v = (project(h).view(batch, seq, -1, self.shape.head_dim).transpose(1, 2) for project in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shape.heads != self.shape.kv_heads)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, seq, -1))
        h = self.between(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Decoder(nn.Module):
    """Maps tokens and the tokens that follow them, both of shape (batch, seq), to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        position = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        even = torch.arange(0, self.shape.head_dim, 2, device=tokens.device, dtype=torch.float32)
        angle = torch.cat([torch.outer(position, 1e6 ** (-even / self.shape.head_dim))] * 2, -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = self.run_block(block, x, cos, sin)
        return self.loss(self.norm(x).flatten(0, 1), targets.flatten())

    def run_block(self, block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out: Tensor = block(x, cos, sin)
        return out

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets)


def fake(shape: Shape) -> Decoder:
    """Builds a decoder in the shape's dtype. Under a FakeTensorMode its weights take no memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.torch_dtype)
    try:
        return Decoder(shape).train()
    finally:
        torch.set_default_dtype(before)


def initial_values(parameter: nn.Parameter) -> Tensor:
    """Returns what training starts from, as in the published models: normal with a deviation of 0.02; norms: ones."""
    values = torch.empty(parameter.shape, dtype=parameter.dtype)
    return values.normal_(std=0.02) if parameter.dim() > 1 else values.fill_(1.0)


def parameter_counts(shape: Shape) -> tuple[int, int]:
    """Returns the number of parameters, and of those in matrix products: all but the embedding's, unless the head uses it."""
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    block = shape.hidden * (2 * wide + 2 * narrow + 3 * shape.intermediate + 2)
    table = shape.vocabulary * shape.hidden
    every = shape.layers * block + table * (1 if shape.tied else 2) + shape.hidden
    return every, shape.layers * block + table


FORMULA = "6 N T + 6 L T S (heads x head size): N parameters in matrix products, L layers, T tokens, S length; causal attention"


def model_flops(shape: Shape, batch: int, seq: int) -> int:
    """Returns the FLOPs of a step by FORMULA; recomputation does not count."""
    tokens = batch * seq
    return 6 * parameter_counts(shape)[1] * tokens + 6 * shape.layers * tokens * seq * shape.heads * shape.head_dim
