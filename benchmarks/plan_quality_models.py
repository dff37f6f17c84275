"""Models of other kinds than decoders, at sizes that are trained today, for plans of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import models
from mtcompile.models.decoders import Block
from mtcompile.models.shapes import Shape


class Vit(nn.Module):
    """A vision transformer of 8 billion parameters, on 224 x 224 images in patches of 14."""

    def __init__(self, width: int = 4096, layers: int = 40, heads: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, width, 14, 14)
        self.place = nn.Parameter(torch.zeros(1, 256, width))
        self.blocks = nn.ModuleList(models.Block(width, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class UnetBlock(nn.Module):
    """Two convolutions and what goes around them."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, before), nn.GroupNorm(32, after)
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.around = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        out: Tensor = self.around(x) + self.conv2(F.silu(self.norm2(h)))
        return out


class Unet(nn.Module):
    """A U-Net of about 2.5 billion parameters on latents of 64 x 64: its blocks differ in size by level, and values of the way
    down wait for the way up."""

    def __init__(self, widths: tuple[int, ...] = (512, 1024, 2048, 2048), deep: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for level, width in enumerate(widths):
            before = widths[max(0, level - 1)]
            self.down.append(nn.ModuleList(UnetBlock(width if i else before, width) for i in range(deep)))
        for level in reversed(range(len(widths))):
            width, after = widths[level], widths[max(0, level - 1)]
            self.up.append(nn.ModuleList(UnetBlock(2 * width, after if i + 1 == deep else width) for i in range(deep)))
        self.norm, self.last = nn.GroupNorm(32, widths[0]), nn.Conv2d(widths[0], 4, 3, padding=1)

    def forward(self, latents: Tensor, noise: Tensor) -> Tensor:
        x, waiting = self.first(latents), []
        for level, blocks in enumerate(self.down):
            if level:
                x = F.avg_pool2d(x, 2)
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x)
                waiting.append(x)
        for level, blocks in enumerate(self.up):
            if level:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            for block in blocks:  # type: ignore[attr-defined]
                x = block(torch.cat([x, waiting.pop()], 1))
        return F.mse_loss(self.last(F.silu(self.norm(x))), noise)


class Experts(nn.Module):
    """Each expert computes the tokens that score it highest, as many for each."""

    def __init__(self, width: int, hidden: int, experts: int, active: int) -> None:
        super().__init__()
        self.experts, self.active = experts, active
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.zeros(experts, width, hidden))
        self.gate = nn.Parameter(torch.zeros(experts, width, hidden))
        self.down = nn.Parameter(torch.zeros(experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).softmax(-1).T.topk(tokens.shape[0] * self.active // self.experts, -1)
        taken = tokens[chosen]
        made = torch.bmm(F.silu(torch.bmm(taken, self.gate)) * torch.bmm(taken, self.up), self.down) * scores.unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, chosen.flatten(), made.flatten(0, 1)).view_as(x)


class MoeBlock(nn.Module):
    def __init__(self, shape: Shape, experts: int, active: int) -> None:
        super().__init__()
        self.dense = Block(Shape(shape.hidden, shape.hidden // 4, 1, shape.heads, shape.kv_heads, 1))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.experts = Experts(shape.hidden, shape.intermediate, experts, active)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.dense(x, cos, sin)
        out: Tensor = x + self.experts(self.norm(x))
        return out


class Moe(nn.Module):
    """A decoder whose blocks have experts."""

    def __init__(self, shape: Shape, experts: int, active: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(MoeBlock(shape, experts, active) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.hidden, eps=1e-6), nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = (torch.ones(tokens.shape[1], self.shape.head_dim, dtype=x.dtype, device=x.device) for _ in range(2))
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x).flatten(0, 1)).float(), targets.flatten())


def _text(model: Callable[[], nn.Module]) -> Callable[[int, int], tuple[nn.Module, dict[str, Any]]]:
    def of(batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        return model(), {"tokens": tokens, "targets": tokens}

    return of


def _vit(batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
    data = {"images": torch.zeros(batch, 3, 224, 224, dtype=torch.bfloat16), "labels": torch.zeros(batch, dtype=torch.int64)}
    return Vit(), data


def _unet(batch: int, seq: int) -> tuple[nn.Module, dict[str, Any]]:
    latents = torch.zeros(batch, 4, 64, 64, dtype=torch.bfloat16)
    return Unet(), {"latents": latents, "noise": latents}


# name -> (built-in shape or a function of (batch, seq), batch, seq)
MODELS: dict[str, tuple[Any, int, int]] = {
    "qwen2.5-7b": ("qwen2.5-7b", 8, 2048),
    "llama-8b": ("llama-8b", 8, 2048),
    "llama-70b": ("llama-70b", 4, 2048),
    "vit-8b": (_vit, 64, 0),
    "unet": (_unet, 32, 0),
    "moe-8": (_text(lambda: Moe(Shape(4096, 14336, 8, 32, 8, 32000), 8, 2)), 8, 2048),
    "moe-64": (_text(lambda: Moe(Shape(2048, 1408, 16, 16, 16, 102400), 64, 6)), 8, 2048),
}
