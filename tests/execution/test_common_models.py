"""Models that everybody has train with the bits of a plain run at three budgets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mtcompile
from tests.helpers.training import adamw, assert_plain_at_three_budgets, compiled_run, same, train

pytestmark = pytest.mark.slow  # they compile each model several times

WIDTH = 16


class Translating(nn.Module):
    """``nn.Transformer`` with a causal mask, and padding in both texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)
        self.transformer = nn.Transformer(WIDTH, 2, 1, 2, 2 * WIDTH, 0.1, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = {"src_key_padding_mask": source == 0, "tgt_key_padding_mask": target == 0}
        out = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True, **padding)
        return F.cross_entropy(self.head(out).flatten(0, 1), target.flatten(), ignore_index=0)


class Speech(nn.Module):
    """A recogniser: convolution, recurrent layer, and the CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lstm = nn.Conv1d(8, WIDTH, 3, stride=2), nn.LSTM(WIDTH, WIDTH, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 12)

    def forward(self, sound: Tensor, letters: Tensor, lengths: Tensor) -> Tensor:
        h = F.relu(self.conv(sound)).permute(2, 0, 1)
        log_probs = self.head(self.lstm(h)[0]).log_softmax(2)
        frames = torch.full((sound.shape[0],), h.shape[0], dtype=torch.long)
        return F.ctc_loss(log_probs, letters, frames, lengths)


class Packed(nn.Module):
    """A recurrent layer over packed sequences, whose lengths are Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [7, 5, 2], batch_first=True)
        output, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.head(output).square().mean()  # type: ignore[no-any-return]


def numbers(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


def words(*size: int) -> Tensor:
    tokens = torch.randint(1, 30, size, generator=torch.Generator().manual_seed(2))
    tokens[0, -2:] = 0
    return tokens


MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "nn.Transformer": (Translating, {"source": words(3, 6), "target": words(3, 5)}),
    "speech": (Speech, {"sound": numbers(2, 8, 31), "letters": words(2, 4) % 11 + 1, "lengths": torch.tensor([4, 2])}),
}


@pytest.mark.parametrize("name", [pytest.param("nn.Transformer", marks=pytest.mark.long), "speech"])
def test_bits_are_equal_at_three_budgets(name: str) -> None:
    make, data = MODELS[name]
    torch.manual_seed(0)
    assert_plain_at_three_budgets(make(), data)


@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")  # packing is Python's
def test_packed_sequences_are_equal_at_three_budgets() -> None:
    torch.manual_seed(0)
    model, data, least = Packed(), {"x": numbers(3, 7, 8)}, 1
    plain = copy.deepcopy(model)
    expected = train(plain, adamw(plain.parameters()), data)
    while True:  # the errors name what each part needs
        try:
            compiled_run(model, data, least)
            break
        except mtcompile.BudgetError as error:
            assert error.minimum_bytes > least
            least = error.minimum_bytes
    for memory in (None, 2 * least, least):
        actual, report, _ = compiled_run(model, data, memory)
        assert same(expected, actual)
        assert memory is None or 0 < report["peak_device_bytes"] <= memory
