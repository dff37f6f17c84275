"""Compares products with fragments of a weight with those of the whole, on the device: a library may sum in another order for
another shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mtcompile.passes.cuts.fragments.cut import Cut, in_rows_of
from mtcompile.passes.cuts.fragments.linear import Linear
from mtcompile.passes.generators import rng_preserved

_COPIES = 2  # of weight, output and input at a time: operands and results, whole and in part


def differing(joint: fx.GraphModule, cut: Cut, where: torch.device, limit: int | None) -> list[str]:
    """Returns the weights of a joint graph whose outputs or weight gradients have other bits on ``where`` if they are cut, by
    the present number of threads. Weights whose products take more than ``limit`` bytes, or more than there is, are not
    compared."""
    names, known = list[str](), dict[Any, bool]()
    with rng_preserved(str(where)), torch.no_grad():
        for weight, rows in in_rows_of(joint, cut):
            if not isinstance(weight, Linear):
                continue  # each matrix of a stack is a product of its own
            operands: Any = weight.product.args
            x, w = operands[-2].meta["val"], weight.weight.meta["val"]
            key = (x.shape, w.shape, w.dtype, tuple(rows), weight.product.target, weight.gradient is None)
            if limit is not None and _COPIES * (w.nbytes + weight.product.meta["val"].nbytes + x.nbytes) > limit:
                continue
            if key not in known:
                try:
                    known[key] = _same_bits(weight, rows, where)
                except torch.OutOfMemoryError:  # other programs' parameters may be there
                    known[key] = True
            if not known[key]:
                names.append(weight.spec.name)
    return names


def _same_bits(weight: Linear, rows: Sequence[tuple[int, int]], where: torch.device) -> bool:
    def random(val: Any) -> Tensor:
        return torch.randn(tuple(val.shape), dtype=val.dtype, device=where)

    operands: Any = weight.product.args
    product: Any = weight.product.target
    *bias, x = (random(each.meta["val"]) for each in operands[:-1])
    w = random(weight.weight.meta["val"])
    whole = product(*bias, x, w.t())
    for start, end in rows:
        if not torch.equal(whole[:, start:end], product(*(each[start:end] for each in bias), x, w[start:end].t())):
            return False
    if weight.gradient is None:
        return True
    del w, whole
    turned = random(weight.product.meta["val"]).t()
    gradient = turned @ x
    return all(torch.equal(gradient[start:end], turned[start:end] @ x) for start, end in rows)
