"""Values that operations make are those of torch's own functions for the device "meta", or left to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mtcompile.passes.joint import shapes
from mtcompile.passes.joint.shapes import result_of

aten = torch.ops.aten


def layouts(*shape: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """Values of a shape in different places: in row-major order, turned, a part of another one, one row repeated."""
    yield torch.empty(shape, dtype=dtype, device="meta")
    for dims in itertools.islice(itertools.permutations(range(len(shape))), 1, None, 3):
        turned = torch.empty([shape[dim] for dim in dims], dtype=dtype, device="meta")
        yield turned.permute([dims.index(dim) for dim in range(len(shape))])
    yield torch.empty((*shape[:-1], shape[-1] + 3), dtype=dtype, device="meta")[..., : shape[-1]]
    yield torch.empty((1, *shape[1:]), dtype=dtype, device="meta").expand(shape)


def fit(size: int, other: int) -> bool:
    return size == other or 1 in (size, other)


def layout(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(layout, value))
    return tuple(value.shape), value.stride(), value.dtype, value.untyped_storage().nbytes()


def check(target: Any, *args: Any) -> None:
    assert layout(result_of(target, args, {})) == layout(target(*args)), (target, args)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 3), (2, 3, 4), (2, 3, 4, 5), (1, 3, 4, 5), (2, 3, 1, 5)], ids=str)
def test_values_of_operations_on_each_element(shape: tuple[int, ...]) -> None:
    for x in layouts(*shape):
        for target in (aten.neg.default, aten.rsqrt.default, aten.cos.default, aten.sin.default, aten.silu.default):
            check(target, x)
        for target in (aten.add.Scalar, aten.mul.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar, aten.add.Tensor):
            check(target, x, 2)
            check(target, x, 1.0)
        check(aten.pow.Scalar, 2.0, x)
        check(aten.mean.dim, x, [-1], True)
        check(aten.sum.dim_IntList, x, [0])
        check(aten._log_softmax.default, x, -1, False)
        check(aten._log_softmax_backward_data.default, x, x, -1, torch.float32)
        others = *layouts(*shape), *layouts(*shape, dtype=torch.bfloat16), *layouts(*shape[1:], 1), *layouts(shape[-1])
        for y in (*others, torch.empty((), device="meta"), torch.empty((), dtype=torch.bfloat16, device="meta")):
            for target in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor):
                if y.dim() <= x.dim() and all(map(fit, x.shape[::-1], y.shape[::-1])):
                    check(target, x, y)
                    check(target, y, x)
            if y.shape == x.shape:
                check(aten.cat.default, [x, y], -1)


def test_values_of_integers_and_of_other_devices_are_left_to_torch() -> None:
    check(aten.add.Tensor, torch.empty(3, dtype=torch.int64, device="meta"), torch.empty(3, device="meta"))
    check(aten.div.Tensor, torch.empty(3, dtype=torch.int64, device="meta"), 2)
    assert result_of(aten.add.Tensor, (torch.ones(2), 1), {}).tolist() == [2, 2]


def test_values_of_counts() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool):
        for x in (*layouts(2, 3, 4, dtype=dtype), torch.empty((), dtype=dtype, device="meta")):
            for target in (aten.ne.Scalar, aten.eq.Scalar):
                check(target, x, 0)
            check(aten.sum.default, x)
            check(aten.masked_fill.Scalar, x, torch.empty(x.shape, dtype=torch.bool, device="meta"), 0)


def test_values_of_losses_and_attention() -> None:
    x, target = torch.empty((6, 4), device="meta"), torch.empty(6, dtype=torch.int64, device="meta")
    for reduction in (0, 1, 2):
        check(aten.nll_loss_forward.default, x, target, None, reduction, -100)
        loss, total = aten.nll_loss_forward.default(x, target, None, reduction, -100)
        check(aten.nll_loss_backward.default, loss, x, target, None, reduction, -100, total)
    for dtype in (torch.float32, torch.bfloat16):
        for query in layouts(2, 3, 4, 5, dtype=dtype):
            check(aten._scaled_dot_product_flash_attention_for_cpu.default, query, query, query, 0.0, True)


def test_rules_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they know is not asked of torch."""
    known = []
    rules = {target: lambda *args, rule=rule: known.append(rule(*args)) or known[-1] for target, rule in shapes._RULES.items()}
    monkeypatch.setattr(shapes, "_RULES", rules)
    for x in layouts(2, 3, 4):
        result_of(aten.mul.Tensor, (x, 2.0), {})
    assert len(known) == 5 and all(value is not None for value in known)
