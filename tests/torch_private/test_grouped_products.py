"""grouped_mm is traced in each dtype that it runs in, with the shapes and strides that it gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import mtcompile
from mtcompile.torch_private import tracing_wide_grouped_products
from tests.helpers.models import Mixture
from tests.helpers.training import adamw, same, train

pytestmark = pytest.mark.slow  # it compiles a model

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def operands(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    rows, weights = torch.randn(8, 16).to(dtype), torch.randn(4, 16, 24).to(dtype)
    return [
        (rows, weights),
        (rows, torch.randn(4, 24, 16).to(dtype).transpose(1, 2)),
        (rows.t(), torch.randn(8, 24).to(dtype)),
        (weights.transpose(1, 2), torch.randn(16, 8).to(dtype)),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_and_strides_are_those_of_a_run(dtype: torch.dtype) -> None:
    tracing_wide_grouped_products()
    ends = torch.tensor([2, 2, 5, 8], dtype=torch.int32)
    for one, other in operands(dtype):
        expected = F.grouped_mm(one, other, offs=ends)
        with FakeTensorMode() as mode:
            fake = F.grouped_mm(mode.from_tensor(one), mode.from_tensor(other), offs=mode.from_tensor(ends))
        assert (fake.shape, fake.stride(), fake.dtype) == (expected.shape, expected.stride(), expected.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_that_do_not_fit_are_refused_as_in_a_run(dtype: torch.dtype) -> None:
    tracing_wide_grouped_products()
    rows, weights = operands(dtype)[0]
    ends = torch.tensor([2, 2, 5, 8], dtype=torch.int32)
    wrong = [
        (rows[:, :8].contiguous(), weights, ends),
        (rows, weights[:3], ends),
        (rows, weights, ends.long()),
        (rows, weights, None),
        (torch.randn(8, 17).to(dtype), torch.randn(4, 17, 16).to(dtype), ends),
        (rows, weights.double(), ends),
    ]
    for one, other, offs in wrong:
        with pytest.raises((RuntimeError, ValueError)):
            F.grouped_mm(one, other, offs=offs)
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises((RuntimeError, ValueError)):
            F.grouped_mm(one, other, offs=offs)


@pytest.mark.filterwarnings("error:the forward is compiled in parts")
def test_experts_in_fp32_are_captured_in_one_graph() -> None:
    torch.manual_seed(0)
    plain, data = Mixture(1, experts=8, active=2), {"tokens": torch.tensor([[3, 1, 3, 30]])}
    model = copy.deepcopy(plain)
    optimizer = adamw(model.parameters())
    compiled = mtcompile.compile(model, memory="1GiB", optimizer=optimizer)
    assert same(train(plain, adamw(plain.parameters()), data), train(compiled, optimizer, data))
