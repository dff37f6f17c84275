"""Recurrent layers: the bits of a plain run at three budgets, within the planned bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mtcompile
from tests.helpers.training import assert_plain_at_three_budgets

pytestmark = pytest.mark.slow  # it compiles many models


class Language(nn.Module):
    """A language model whose recurrent layer is ``layer``."""

    def __init__(self, layer: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 24)
        self.recurrent = layer(24, 32, num_layers=2, dropout=0.1, **options)
        self.head = nn.LazyLinear(40)
        self.head(self.recurrent(torch.zeros(2, 2, 24))[0])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        output, _ = self.recurrent(self.embedding(tokens))
        return F.cross_entropy(self.head(output).flatten(0, 1), targets.flatten())


class Classifier(nn.Module):
    """Reads the last states of both directions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = nn.LSTM(6, 16, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        output, (hidden, cell) = self.recurrent(x)
        states = torch.cat([hidden[0], hidden[1], cell[0], cell[1]], 1)
        return F.cross_entropy(self.head(states), labels) + output.square().mean()


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randint(0, 40, (2, 7, 3), generator=generator)
    return {"tokens": first, "targets": second}


LAYERS = {
    "LSTM": (nn.LSTM, {}),
    "LSTM, both ways, batch first": (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    "LSTM without bias": (nn.LSTM, {"bias": False}),
    "GRU": (nn.GRU, {"bidirectional": True}),
    "RNN": (nn.RNN, {"nonlinearity": "relu"}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != "LSTM, both ways, batch first")) for n in LAYERS]
)
def test_language_models(name: str) -> None:
    layer, options = LAYERS[name]
    assert_plain_at_three_budgets(Language(layer, **options), tokens())


def test_gradients_through_last_states() -> None:
    generator = torch.Generator().manual_seed(1)
    data = {"x": torch.randn(3, 3, 6, generator=generator), "labels": torch.tensor([0, 2, 1])}
    assert_plain_at_three_budgets(Classifier(), data)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = nn.LSTM(6, 16)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, state = self.recurrent(x, state)
        return output.square().mean(), state


def test_states_from_call_to_call_and_evaluation() -> None:
    """Truncated backpropagation through time, with an evaluation in between."""
    plain, model = Stateful(), Stateful()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    compiled: Any = mtcompile.compile(model, memory="64MiB", optimizer=optimizers[1])
    rows: list[list[Tensor]] = [[], []]
    for one, optimizer, row in zip((plain, compiled), optimizers, rows, strict=True):
        torch.manual_seed(2)
        state = (torch.zeros(1, 2, 16), torch.zeros(1, 2, 16))
        for _ in range(3):
            loss, state = one(torch.randn(4, 2, 6), tuple(s.detach() for s in state))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            one.eval()
            with torch.no_grad():
                row += [loss.detach(), *state, one(torch.ones(4, 2, 6), state)[0]]
            one.train()
    assert all(map(torch.equal, *rows))
