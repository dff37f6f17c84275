"""Values have a plain run's strides while they are traced, so that what is traced of them is what a plain run does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mtcompile
from tests.helpers.training import assert_plain

pytestmark = pytest.mark.slow  # it compiles many models


class Cells(nn.Module):
    """Recurrent cells, which change parts of a matrix in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.rnn = nn.GRUCell(8, 8), nn.LSTMCell(8, 8), nn.RNNCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.gru(x)
        hidden, cell = self.lstm(x)
        for _ in range(2):
            h = self.gru(x, h)
            hidden, cell = self.lstm(h, (hidden, cell))
        return (self.rnn(x, hidden) + cell).square().sum()


@pytest.mark.parametrize("policy", [pytest.param("resident", marks=pytest.mark.long), "checkpoint-all"])
def test_recurrent_cells(policy: str) -> None:
    torch.manual_seed(0)
    assert_plain(Cells(), torch.randn(4, 8), policy=policy)


def columns(x: torch.Tensor) -> torch.Tensor:
    return (x.transpose(0, -1).contiguous() * 2).transpose(0, -1)


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "split": lambda x: torch.cat([part.tanh_() for part in torch.unsafe_split(x.reshape(6, 36), 12, 1)]).view(x.shape),
    "mul_": lambda x: (x * 1).mul_(x.sum(-1, keepdim=True).expand_as(x).contiguous()).tanh_(),
}


class Columns(nn.Module):
    """Operations on columns, whose results are then put in rows: a copy or not, by how they are strided."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in OPERATIONS})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for name, operation in OPERATIONS.items():
            y = columns(operation(columns(self.layers[name](x)))).transpose(0, -1).contiguous().tanh()
            total = total + (y * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum()
        return total


def test_operations_on_columns_whose_results_are_put_in_rows() -> None:
    torch.manual_seed(0)
    assert_plain(Columns(), torch.randn(6, 6, 6))


class Conformer(nn.Module):
    """A normalization over channels between layers over the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(F.silu(x)).square().mean()


def test_batch_norm_over_the_channels_of_a_sequence() -> None:
    torch.manual_seed(0)
    assert_plain(Conformer(), torch.randn(3, 10, 8))


class Accumulated(Conformer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return (x[0].t() * 1).addmm_(x[1].t(), x[2, :, :10]).square().mean()


def test_a_product_that_is_added_to_columns_in_place_is_refused() -> None:
    with pytest.raises(mtcompile.CaptureError, match=r"addmm_.*row-major"):
        mtcompile.compile(Accumulated())(torch.randn(3, 10, 8))


class Positions(nn.Module):
    """Positions of an image, resized to what it already has. Their gradient comes in columns, and is seen as one image."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.convolution = nn.Parameter(torch.randn(1, 4, 32)), nn.Conv2d(3, 32, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.positions.reshape(1, 2, 2, -1).permute(0, 3, 1, 2)
        resized = nn.functional.interpolate(image, size=(2, 2), mode="bilinear").reshape(1, -1, 4).permute(0, 2, 1)
        return (self.convolution(x).flatten(2).transpose(1, 2) + resized).transpose(1, 2).pow(2).sum()


def test_a_view_of_one_image_has_the_strides_of_a_plain_run() -> None:
    torch.manual_seed(0)
    assert_plain(Positions(), torch.randn(2, 3, 4, 4))
