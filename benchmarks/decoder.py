"""Decoders of the shapes that are trained today (Qwen2.5, Qwen3, Llama 3), in plain PyTorch with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class Shape:
    """``tied``: the head's weight is the embedding's."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128
    tied: bool = False
    dtype: torch.dtype = torch.bfloat16

    def shortened(self, layers: int) -> Shape:
        return replace(self, layers=layers)


SHAPES = {
    "gpt-11m": Shape(320, 1280, 6, 5, 5, 2048, head_dim=64, dtype=torch.float32),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 151936, tied=True),
    "qwen2.5-7b": Shape(3584, 18944, 28, 28, 4, 152064),
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "qwen3-14b": Shape(5120, 17408, 40, 40, 8, 151936),
}


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
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """``recompute``: every block under torch.utils.checkpoint. ``loss_chunks``: the head and its loss in so many pieces,
    each recomputed in the backward, so that whole-batch logits never exist."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.recompute, self.loss_chunks = shape, False, 1
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        place = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        even = torch.arange(0, self.shape.head_dim, 2, device=tokens.device, dtype=torch.float32)
        angle = torch.cat([torch.outer(place, 1e6 ** (-even / self.shape.head_dim))] * 2, -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for block in self.blocks:
            x = self._run(block, x, cos, sin) if self.recompute else block(x, cos, sin)
        x, targets = self.norm(x).flatten(0, 1), targets.flatten()
        if self.loss_chunks == 1:
            return F.cross_entropy(self.head(x).float(), targets)
        pieces = zip(x.chunk(self.loss_chunks), targets.chunk(self.loss_chunks), strict=True)
        return torch.stack([self._run(self._loss, h, t) for h, t in pieces]).sum() / targets.numel()

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")

    @staticmethod
    def _run(part: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        made: Tensor = checkpoint(part, *inputs, use_reentrant=False)
        return made


def build(shape: Shape, device: torch.device, seed: int = 0) -> Decoder:
    """On the host, its weights drawn on ``device``, which is faster; the same for the same device."""
    with torch.device("meta"):
        model = Decoder(shape).to(shape.dtype)
    model = model.to_empty(device="cpu")
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.empty(p.shape, dtype=p.dtype, device=device)
            p.copy_(drawn.normal_(0.0, 0.02, generator=generator) if p.dim() > 1 else drawn.fill_(1.0))
    return model.train()


def fake(shape: Shape) -> Decoder:
    """Without memory for its weights; under a FakeTensorMode."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        return Decoder(shape).train()
    finally:
        torch.set_default_dtype(before)


def text(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's sources, and each one's next."""
    need, data = batch * seq + 1, bytearray()
    for path in sorted(Path(__import__("os").__file__).parent.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= need:
            break
    whole = torch.frombuffer(bytearray((data * (need // len(data) + 1))[:need]), dtype=torch.uint8).long()
    return whole[:-1].view(batch, seq), whole[1:].view(batch, seq)


def counted(shape: Shape) -> tuple[int, int]:
    """Parameters, and those of them that are in matrix products (all but the embedding's, unless the head uses it)."""
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    block = shape.hidden * (2 * wide + 2 * narrow + 3 * shape.intermediate + 2)
    table = shape.vocabulary * shape.hidden
    every = shape.layers * block + table * (1 if shape.tied else 2) + shape.hidden
    return every, shape.layers * block + table


FORMULA = "6 N T + 6 L T S (heads x head size): N parameters in matrix products, L layers, T tokens, S length; causal attention"


def model_flops(shape: Shape, batch: int, seq: int) -> int:
    """By FORMULA, per step, whatever is recomputed."""
    tokens = batch * seq
    return 6 * counted(shape)[1] * tokens + 6 * shape.layers * tokens * seq * shape.heads * shape.head_dim
