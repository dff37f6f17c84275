"""fp32 masters of a model that computes on a device with memory of its own."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.errors import StepError
from mtcompile.optim.backward.finite import nonfinite_flags
from mtcompile.runtime.optim.host_kernels import nonfinite
from tests.device.models import make
from tests.device.reference import on
from tests.helpers.training import adamw, loss_of


@pytest.mark.parametrize("precision", ["model", "bf16-master32"])
def test_resident_parameters_are_updated_in_the_backward(precision: str, device: torch.device) -> None:
    """Neighbours in one slab share no bytes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"update": "backward", "policy": "resident", "precision": precision}
    compiled = mtcompile.compile(model, optimizer=optimizer, device=device, **options)
    x = torch.randn(4, 16, device=device, dtype=next(compiled.parameters()).dtype)
    losses = []
    for _ in range(3):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    with pytest.raises(StepError, match=r"2.weight and 0.weight share|0.weight and 2.weight share"):
        model[2].weight.data = model[0].weight.data
        compiled(x)


def test_masters_are_updated_at_home_from_the_gradients_of_the_device(device: torch.device) -> None:
    """Every loss and gradient as the plain bf16 model on the device has them, and masters near those of torch's AdamW in
    fp32, fed the same gradients. Streamed, so that no parameter goes to a device with memory for all of them."""
    model, data = make("decoder")
    fp32 = copy.deepcopy(model)
    theirs, optimizer = adamw(fp32.parameters()), adamw(model.parameters())
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    options: Any = {"precision": "bf16-master32", "policy": "megatrain"}
    compiled = mtcompile.compile(model, optimizer=optimizer, device=device, **options)
    data = on(device, data)
    for _ in range(3):
        plain = copy.deepcopy(fp32).to(device)
        for (name, q), p in zip(plain.named_parameters(), compiled.parameters(), strict=True):
            q.data = p.detach().to(device, copy=True)
            assert p.dtype == torch.bfloat16 and p.device.type == "cpu", name
        loss, expected = loss_of(compiled(**data)), loss_of(plain(**data))
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        for p, q, r in zip(compiled.parameters(), plain.parameters(), fp32.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad.cpu())
            r.grad = p.grad.float()
        theirs.step()
        optimizer.step()
        optimizer.zero_grad()
    for name, master in mtcompile.master_parameters(compiled).items():
        expected = fp32.get_parameter(name).detach()
        assert not torch.equal(master, masters[name])
        assert (master - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_value_that_is_not_finite_is_found(dtype: torch.dtype, device: torch.device) -> None:
    """In the first and last element of large and small gradients, among others of another dtype and without elements."""
    largest = torch.finfo(dtype).max
    good = [
        torch.full((3, 70_001), largest, dtype=dtype),
        torch.zeros(0),
        torch.ones(1),
        torch.full((5, 7), -largest, dtype=dtype).t(),
    ]
    assert nonfinite([each.to(device) for each in good]) is None
    mixed = [*good, torch.ones(2, dtype=torch.float64)]
    order, flags = nonfinite_flags([each.to(device) for each in mixed])
    assert sorted(order) == [0, 2, 3, 4] and not flags.any()
    for position in (0, 2, 3):
        for bad in (math.inf, -math.inf, math.nan):
            for last in (False, True):
                gradients = [each.to(device, copy=True) for each in good]
                at = tuple(size - 1 if last else 0 for size in gradients[position].shape)
                gradients[position][at] = bad
                assert nonfinite(gradients) == position
                order, flags = nonfinite_flags(gradients)
                assert [order[place] for place, flag in enumerate(flags.tolist()) if flag == 1.0] == [position]
                gradients[3][2, 2] = math.nan
                assert nonfinite(gradients) == position
