"""The decoders that are benchmarked, with what peers need to make them fit, and the text they are trained on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mtcompile.models.decoders import Decoder
from mtcompile.models.shapes import Shape


class Checkpointed(Decoder):
    """``recompute``: every block under torch.utils.checkpoint. ``loss_chunks``: the head and its loss in so many pieces,
    each recomputed in the backward, so that whole-batch logits never exist."""

    recompute, loss_chunks = False, 1

    def run_block(self, block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _again(block, x, cos, sin) if self.recompute else super().run_block(block, x, cos, sin)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        if self.loss_chunks == 1:
            return super().loss(x, targets)
        pieces = zip(x.chunk(self.loss_chunks), targets.chunk(self.loss_chunks), strict=True)
        return torch.stack([_again(self._summed, h, t) for h, t in pieces]).sum() / targets.numel()

    def _summed(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")


def _again(part: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    made: Tensor = checkpoint(part, *inputs, use_reentrant=False)
    return made


def build(shape: Shape, device: torch.device, seed: int = 0) -> Checkpointed:
    """On the host, its weights drawn on ``device``, which is faster; the same for the same device."""
    with torch.device("meta"):
        model = Checkpointed(shape).to(shape.torch_dtype)
    model = model.to_empty(device="cpu")
    if shape.tied:  # which that undoes
        model.head.weight = model.embed.weight
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.empty(p.shape, dtype=p.dtype, device=device)
            p.copy_(drawn.normal_(0.0, 0.02, generator=generator) if p.dim() > 1 else drawn.fill_(1.0))
    return model.train()


def text(batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's sources, and each one's next."""
    need, data = batch * seq + 1, bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= need:
            break
    whole = torch.frombuffer(bytearray((data * (need // len(data) + 1))[:need]), dtype=torch.uint8).long()
    return whole[:-1].view(batch, seq), whole[1:].view(batch, seq)
