"""The norm of gradients, put together from those of each: bit for bit that of ``clip_grad_norm_``."""

from __future__ import annotations

import itertools

import pytest
import torch

from mtcompile.torch_private import gradient_norm, total_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


@pytest.mark.parametrize("order", itertools.permutations(DTYPES, 3), ids=str)
def test_the_norm_of_all_is_that_of_torch(order: tuple[torch.dtype, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 3, *range(300, 320)):
        gradients = [torch.randn(7, generator=generator).mul(10.0 ** (i % 4)).to(order[i * i % 3]) for i in range(count)]
        norms = [gradient_norm(gradient) for gradient in gradients]
        actual, expected = total_norm(norms, gradients), torch.nn.utils.get_total_norm(gradients)
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)
