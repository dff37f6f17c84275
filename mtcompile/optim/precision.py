"""Precision by name: what of a parameter is kept where, in which dtype, and the contract in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Tensors of optimizer state, as large as the parameter.
MOMENTS = {"adamw": 2, "adam": 2, "sgd-momentum": 1, "sgd": 0}


@dataclass(frozen=True, slots=True)
class Precision:
    """``weights``: dtype of the parameters that are computed with; None: as the module's. ``split``: beside a bf16 weight
    there is a 16-bit remainder, the two being an fp32 master; optimizer state is fp32 then, else of the weights' dtype."""

    name: str
    weights: torch.dtype | None
    split: bool = False

    def state_copies(self, optimizer: str) -> float:
        """Bytes kept for a parameter beside its weight and gradient, in sizes of the weight."""
        return 1.0 + 2.0 * MOMENTS[optimizer] if self.split else float(MOMENTS[optimizer])

    def contract(self) -> str:
        if self.split:
            return (
                "bf16 weights and gradients, accumulated in fp32 where there are several; 16-bit remainders that make the "
                "weights exact fp32 masters (rounded half away from zero); fp32 optimizer state and update, by mtcompile's "
                "written formula"
            )
        kept = "as the module's" if self.weights is None else str(self.weights).removeprefix("torch.")
        warning = "; updates below bf16 resolution are lost" if self.weights == torch.bfloat16 else ""
        return f"dtypes of weights, gradients and optimizer state {kept}; updates by the optimizer itself{warning}"


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
    """Raises ValueError."""
    if name not in PRECISIONS:
        raise ValueError(f"expected precision to be one of {', '.join(PRECISIONS)}, found {name!r}")
    return PRECISIONS[name]
