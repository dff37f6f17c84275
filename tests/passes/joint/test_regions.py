"""Where a step is cut into blocks, by the modules of the model."""

from __future__ import annotations

import torch
from torch import nn

from tests.helpers.tracing import trace


class Layer(nn.Module):
    """A layer whose own products are elements of a list, as those of many models are."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
        )
        self.gate = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.mlp(h) * torch.sigmoid(self.gate(h))


class Staged(nn.Module):
    """Layers in stages, each with something between them."""

    def __init__(self, stages: int, layers: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Layer() for _ in range(layers)) for _ in range(stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for layer in stage:
                x = layer(x)
            x = x * 2
        return x.square().mean()


def blocks(model: nn.Module) -> tuple[str, ...]:
    return trace(model, {"x": torch.randn(4, 16)}).step.meta["blocks"]


def test_the_layers_of_a_few_stages_are_blocks() -> None:
    expected = {f"stages.{stage}.{layer}" for stage in range(2) for layer in range(4)}
    assert expected <= set(blocks(Staged(stages=2, layers=4)))


def test_a_stage_among_many_is_cut_only_if_it_is_much_larger() -> None:
    model = Staged(stages=13, layers=2)
    assert {f"stages.{stage}" for stage in range(13)} <= set(blocks(model))
    model.stages[5].extend(Layer() for _ in range(8))
    cut = set(blocks(model))
    assert {f"stages.5.{layer}" for layer in range(10)} <= cut and {
        f"stages.{stage}" for stage in range(13) if stage != 5
    } <= cut


def test_a_list_within_layers_does_not_cut_them() -> None:
    assert {f"stages.0.{layer}" for layer in range(8)} <= set(blocks(Staged(stages=1, layers=8)))
    flat = Staged(stages=1, layers=14)
    flat.stages = nn.ModuleList(nn.ModuleList([layer]) for layer in flat.stages[0])
    assert {f"stages.{stage}" for stage in range(14)} <= set(blocks(flat))
