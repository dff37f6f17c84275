"""Compares products in fragments with whole ones on the device: the same sums, but a library may add them up in another order.

Which order a kernel takes depends on shapes, layouts and threads, not on values. So random values tell: if their bits are
equal, all are. On CPUs, products in half precision were always equal; in fp32 they were for most sizes, in float64 for few.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import fx

from mtcompile.passes.cuts.fragments.cut import Cut, Weight, cuts_of
from mtcompile.passes.cuts.fragments.linear import Linear
from mtcompile.passes.cuts.fragments.stacked import Stacked

aten: Any = torch.ops.aten


_COPIES = 2  # of a product's operands and results at a time


def has_same_bits(
    joint: fx.GraphModule, cut: Cut, device: torch.device, limit: int | None = None, untold: bool = False
) -> bool:
    """Tells whether the products of all weights that ``cut`` cuts have the bits of whole ones on a device. ``untold``: the
    answer for those that take more than ``limit`` bytes of an accelerator, or more than there is. A cut that splits sums need
    not."""
    if cut.splits:
        return True
    generator, known = torch.Generator().manual_seed(0), dict[Any, bool]()
    for weight, rows in cuts_of(joint, cut):
        products = _products(weight)
        key = (tuple(rows), *((str(each.target), *map(_layout, (each, *each.args))) for each in products))
        if key not in known:
            known[key] = untold
            tensors = [node.meta["val"] for each in products[:1] for node in (each, *each.args) if isinstance(node, fx.Node)]
            if limit is None or device.type == "cpu" or _COPIES * sum(val.nbytes for val in tensors) <= limit:
                with contextlib.suppress(torch.OutOfMemoryError):
                    known[key] = _is_same(weight, rows, device, generator)
        if not known[key]:
            return False
    return True


def _products(weight: Weight) -> list[fx.Node]:
    if isinstance(weight, Linear):
        return [weight.product, *([] if weight.for_weight is None else [weight.for_weight])]
    return [*weight.products, *([] if weight.gradient is None else [weight.gradient])]


def _layout(node: Any) -> object:
    val = node.meta["val"] if isinstance(node, fx.Node) else None
    return (val.shape, val.stride(), val.dtype) if isinstance(val, torch.Tensor) else None


def _is_same(weight: Weight, rows: list[tuple[int, int]], device: torch.device, generator: torch.Generator) -> bool:
    def drawn(node: fx.Node) -> torch.Tensor:
        """Values of a node, laid out as it is."""
        val = node.meta["val"]
        size = 1 + sum((extent - 1) * stride for extent, stride in zip(val.shape, val.stride(), strict=True))
        numbers = torch.randn(size, generator=generator).to(val.dtype).to(device)
        return numbers.as_strided(val.shape, val.stride())

    if isinstance(weight, Linear):
        *bias, x, turned = (drawn(node) for node in weight.product.args)  # type: ignore[arg-type]
        product: Any = weight.product.target
        whole = product(*bias, x, turned)
        parts = [product(*(b[start:end] for b in bias), x, turned[:, start:end]) for start, end in rows]
        if not torch.equal(whole, torch.cat(parts, 1)):
            return False
        if weight.for_weight is None:
            return True
        left, right = (drawn(node) for node in weight.for_weight.args)  # type: ignore[arg-type]
        return torch.equal(aten.mm(left, right), torch.cat([aten.mm(left[start:end], right) for start, end in rows]))
    products = _products(weight)
    if isinstance(weight, Stacked):
        for each in products:
            left, right = (drawn(node) for node in each.args)  # type: ignore[arg-type]
            if not torch.equal(aten.bmm(left, right), torch.cat([aten.bmm(left[s:e], right[s:e]) for s, e in rows])):
                return False
        return True
    count = len(weight.weight.meta["val"])
    for each in products:
        left, right = (drawn(node) for node in each.args[:2])  # type: ignore[arg-type]
        total = int(left.shape[0] if right.dim() == 3 else right.shape[0])
        ends = torch.tensor([math.ceil(total * (i + 1) / count) for i in range(count)], dtype=torch.int32, device=device)
        whole = aten._grouped_mm(left, right, ends)
        for start, end in rows:
            first = int(ends[start - 1]) if start else 0
            order = (torch.arange(total, device=device) + first).clamp(max=total - 1)
            own, last = ends[start:end] - first, int(ends[end - 1])
            if right.dim() == 3:
                part = aten._grouped_mm(left.index_select(0, order) if start else left, right[start:end], own)
                same = torch.equal(part[: last - first], whole[first:last])
            else:
                columns = left.t().index_select(0, order).t() if start else left
                part = aten._grouped_mm(columns, right.index_select(0, order) if start else right, own)
                same = torch.equal(part, whole[start:end])
            if not same:
                return False
    return True
