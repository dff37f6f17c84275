"""The models that are measured: GPTs without dropout, so that every peer computes the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class Case:
    """One model and batch. ``vocabulary``: rows of the embedding. ``shares``: budgets as shares of the plain peak beside the
    gradients, which every backward returns; None is no budget."""

    name: str
    layers: int
    width: int
    heads: int
    batch: int
    seq: int
    vocabulary: int = 1024
    shares: tuple[float | None, ...] = (None, 0.5, 0.25)


CPU = (
    Case("gpt-11m", layers=6, width=384, heads=6, batch=8, seq=128),
    Case("deep-narrow", layers=24, width=128, heads=4, batch=8, seq=128, shares=(None, 0.25)),
    # Two blocks: one alone holds more than half of what both do, so nobody fits into less.
    Case("short-wide", layers=2, width=768, heads=12, batch=12, seq=128, shares=(None, 0.75)),
)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """``recompute``: every block under torch.utils.checkpoint."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.recompute = False
        self.embed, self.place = nn.Embedding(case.vocabulary, case.width), nn.Embedding(case.seq, case.width)
        self.blocks = nn.ModuleList(Block(case.width, case.heads) for _ in range(case.layers))
        self.norm = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, case.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make(case: Case) -> tuple[Gpt, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(0, case.vocabulary, (2, case.batch, case.seq))
    return Gpt(case).train(), tokens[0], tokens[1]


def flops_per_step(case: Case) -> int:
    """6 N T for the matrix products, 6 L T S W for causal attention (half of 12), N without the embeddings."""
    tokens = case.batch * case.seq
    parameters = 12 * case.layers * case.width**2 + case.vocabulary * case.width
    return 6 * parameters * tokens + 6 * case.layers * tokens * case.seq * case.width


class Language(nn.Module):
    """Dropout, running statistics and tied weights. Subclasses may say what becomes of a layer's results (``after``)."""

    def __init__(self, layers: int = 2, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight
        make = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(make(width, 4, 2 * width, 0.1, batch_first=True) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)

    def after(self, h: Tensor) -> Tensor:
        return h

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = self.after(layer(h))
        return F.cross_entropy(self.head(self.norm(h.flatten(0, 1))), tokens.flatten())
