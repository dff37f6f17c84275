"""Proves that a joint graph whose loss heads are in chunks of rows computes what the whole one does.

Where A[s:e] are rows of A, these are the rules beside those of ``parts``:

    log_softmax(v[s:e], 1)                           log_softmax(v, 1)[s:e], and so for its backward
    nll_loss_backward(g, p[s:e], y[s:e], mean, n)    nll_loss_backward(g, p, y, mean, n)[s:e]
    nll_loss(p[s:e], y[s:e], sum)                    part s:e of two sums: of the losses, and of the labels that count
    sum of losses / labels that count                nll_loss(p, y, mean)
    sum(A[s:e], 0)                                   part s:e of the sum sum(A, 0)

A sum in parts is rounded differently from the whole one; whoever asks for chunks asks for that.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mtcompile.passes.proof.cuts.numbering import Call, check_computed, check_same_tables
from mtcompile.passes.proof.cuts.parts import SUM, Parts
from mtcompile.passes.proof.values import Operand

aten: Any = torch.ops.aten
_MEAN, _SUM = 1, 2


def check_chunks(whole: fx.GraphModule, chunked: fx.GraphModule) -> None:
    """Raises SameComputationError unless ``chunked`` computes the results of ``whole``."""
    check_same_tables(whole, chunked, "inputs", "outputs")
    numbers = _Chunks()
    check_computed(numbers, whole, chunked, *numbers.uncut(whole))


class _Chunks(Parts):
    """Values in parts, and a loss, ``("mean loss", scores, labels, ignored)``; likewise the two sums that it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.rules |= {
            aten._log_softmax.default: self._each_row,
            aten._log_softmax_backward_data.default: self._each_row,
            aten.nll_loss_backward.default: self._loss_backward,
            aten.sum.dim_IntList: self._summed,
            aten.div.Tensor: self._divided,
            operator.getitem: self._item,
        }

    def _each_row(self, call: Call) -> int | None:
        """Numbers log_softmax(v, dim, ...), and its backward of (g, p, dim, ...), along another dimension than that of rows."""
        count = sum(type(arg) is Operand for arg in call.args)
        return self.of_parts(call, ([0] * count, 0)) if call.args[count] % len(call.layout.shape) else None

    def _summed(self, call: Call) -> int | None:
        return self.of_parts(call, ((0,), SUM)) if len(call.args) == 3 and call.args[1] == (0,) else None

    def _loss_backward(self, call: Call) -> int | None:
        mean = call.args[3] is None and call.args[4] == _MEAN
        return self.of_parts(call, ((None, 0, 0), 0)) if mean and not self.layouts[call.args[0].number].shape else None

    def _item(self, call: Call) -> int | None:
        """Numbers the results of nll_loss(p, y, None, reduction, ignored)."""
        key, item = call.keys[0], call.args[1]
        known = key[:1] == (aten.nll_loss_forward.default,) and key[3] is None and key[4] in (_MEAN, _SUM) and item in (0, 1)
        if not known:
            return None
        scores, labels, ignored = key[1].number, key[2].number, key[5]
        parts, span = (self.key(scores), self.key(labels)), ()
        if key[4] == _SUM and all(part[:2] == ("part", 0) for part in parts) and parts[0][3:] == parts[1][3:]:
            scores, labels, span = parts[0][2], parts[1][2], parts[0][3:]
        rows = self.layouts[labels].shape[:1]
        if not rows or self.layouts[scores].shape[:1] != rows:
            return None
        kind = "labels that count" if item else "losses" if key[4] == _SUM else "mean loss"
        whole = self.of((kind, scores, labels, ignored), call.layout)
        return self.sum(whole, *span, rows[0]) if span else whole

    def _divided(self, call: Call) -> int | None:
        one, other = call.keys
        alike = one[:1] == ("losses",) and other[:1] == ("labels that count",) and one[1:] == other[1:] and not call.kwargs
        return self.of(("mean loss", *one[1:]), call.layout) if alike else None
