"""Precisions by name: the dtypes of weights, gradients and optimizer state, and a description of each in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtcompile.errors import did_you_mean


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of one model's training. ``weights``: dtype of the parameters in computations; None: the module's own.
    ``split``: each bf16 weight has a 16-bit remainder, and the two together are an fp32 master; optimizer state is then fp32.
    Otherwise it has the weights' dtype."""

    name: str
    weights: torch.dtype | None
    split: bool = False

    def contract(self) -> str:
        """The contract in words, as plans print it."""
        if self.split:
            return (
                "bf16 weights and gradients, accumulated in fp32 where there are several; 16-bit remainders that make the "
                "weights exact fp32 masters (rounded half away from zero); fp32 optimizer state and update, by mtcompile's "
                "written formula"
            )
        dtype = "as the module's" if self.weights is None else str(self.weights).removeprefix("torch.")
        warning = "; updates below bf16 resolution are lost" if self.weights == torch.bfloat16 else ""
        return f"dtypes of weights, gradients and optimizer state {dtype}; updates by the optimizer itself{warning}"


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("model", None),
        Precision("fp32", torch.float32),
        Precision("bf16-master32", torch.bfloat16, split=True),
        Precision("bf16", torch.bfloat16),
    )
}


def precision_named(name: str) -> Precision:
    """Looks a precision up. Raises ValueError for an unknown name."""
    if name not in PRECISIONS:
        raise ValueError(
            f"expected precision to be one of {', '.join(PRECISIONS)}, found {name!r}{did_you_mean(name, PRECISIONS)}"
        )
    return PRECISIONS[name]
