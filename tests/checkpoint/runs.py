"""A training of a few steps, plain or compiled, that is saved and resumed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile import checkpoint


class Net(nn.Module):
    """Tied weights, buffers, dropout, and Python's and numpy's random numbers in its data."""

    def __init__(self, width: int = 24, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, width)
        self.norm: Any = norm(width)  # type: ignore[call-arg]
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.embedding(tokens)), 0.2)
        return nn.functional.cross_entropy(self.head(self.hidden(x).relu()), targets)


class Run:
    """A training of a few steps. ``options``: of compile; None for a plain run."""

    def __init__(self, options: dict[str, Any] | None = None, model: nn.Module | None = None) -> None:
        plain = model or Net()
        self.optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], 0.5)
        self.model: Any = plain
        if options is not None:
            self.model = mtcompile.compile(plain, optimizer=self.optimizer, **options)

    def step(self) -> Tensor:
        tokens = torch.tensor([random.randrange(32) for _ in range(8)])
        loss = self.model(tokens, torch.from_numpy(np.random.randint(0, 32, 8)))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()

    def save(self, folder: Path, step: int = 2, **options: Any) -> Path:
        others = {"scheduler": self.scheduler}
        return checkpoint.save(folder, self.model, self.optimizer, step=step, others=others, **options)

    def load(self, folder: Path) -> checkpoint.Loaded:
        return checkpoint.load(folder, self.model, self.optimizer, others={"scheduler": self.scheduler})

    def state(self) -> list[Tensor]:
        moments = [v for entry in self.optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
        return [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers(), *moments)]


def seeded() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "small": {"memory": "40KiB"},
    "resident": {"memory": "64MiB"},
    "backward": {"memory": "40KiB", "update": "backward"},
}
INDUCTOR = {"memory": "40KiB", "kernels": "inductor"}  # whose bits are its own
