"""Kernels whose operations read storages: operands lie in arenas, and the results are those of operands that stand alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.runtime.devices.arena import fills_storage, own_storage
from tests.helpers.training import equal_to_plain

pytestmark = pytest.mark.slow  # it compiles many models


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("queue", torch.zeros(16, 8))
        self.weight = nn.Parameter(torch.randn(40))
        self.place = 4


class WritesRows(Model):
    """A memory bank: rows of a buffer are replaced by what was just computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        loss = (h @ self.queue.clone().t()).pow(2).sum() + h.pow(2).sum()
        self.queue[self.place : self.place + 4] = h.detach()
        return loss


class WritesColumns(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, ::2] = 0
        x[1] = 2
        x.diagonal()[:] = 3
        return self.linear(x).pow(2).sum()


@torch.library.custom_op("mtcompile_tests::add_mean", mutates_args=("total",))
def add_mean(x: torch.Tensor, total: torch.Tensor) -> None:
    total.add_(x.mean(0))


class CustomOperation(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        add_mean(h.detach(), self.queue[3])
        add_mean(h.detach(), self.queue[5])
        return (h - self.queue[3] - self.queue[5]).pow(2).sum()


class ByPlace(Model):
    """Finds elements of a parameter and of an input by their place in the storage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.as_strided((4, 8), (2, 1), 3)
        return (self.linear(x) * weight * x.as_strided((4, 8), (4, 1), 1)).pow(2).sum()


@pytest.mark.parametrize("policy", ["megatrain", "checkpoint-all"])
@pytest.mark.parametrize("model", [WritesRows, WritesColumns, CustomOperation, ByPlace])
def test_an_operation_that_reads_storages_does_not_see_the_arena(model: type[Model], policy: str) -> None:
    torch.manual_seed(0)
    assert equal_to_plain(model(), {"x": torch.randn(4, 8)}, policy=policy)


def test_what_lies_outside_of_an_input_cannot_be_read_by_its_place() -> None:
    model = mtcompile.compile(ByPlace(), memory="1GiB")
    with pytest.raises(mtcompile.CaptureError, match="clone"):
        model(torch.randn(8, 8)[2:6])
    model(torch.randn(4, 8)).backward()
    with pytest.raises(mtcompile.CaptureError, match="clone"):
        model(torch.randn(8, 8)[2:6])


def test_a_storage_of_ones_own_holds_the_same_bytes_and_no_others() -> None:
    memory = torch.arange(64)
    part = memory[8:32].view(4, 6)[1:, :4]
    own = own_storage(part)
    assert torch.equal(own, part) and own.stride() == part.stride() and own.data_ptr() == part.data_ptr()
    assert fills_storage(own) and not fills_storage(part)
    own.zero_()
    assert memory.count_nonzero() == 63 - 12
