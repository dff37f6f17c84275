"""``mtcompile verify``: whether training here gives the bits of plain PyTorch."""

from __future__ import annotations

from typing import Annotated

import typer

from mtcompile.cli.common import DIFFERENT, FINE, Model, progress_bar
from mtcompile.cli.options import ComparisonOptions, Json, values


def verify(
    model: Model,
    options: ComparisonOptions,
    steps: Annotated[int, typer.Option(min=1, help="training steps to compare")] = 3,
    as_json: Json = False,
) -> None:
    """Train a model plainly and compiled on this machine, and compare every bit.

    Compares losses, gradients, buffers, stepped weights and the random generator's state of a few steps, and names the first
    difference. Both models are in memory at once: take a small model, or a few layers of a large one. A factory takes
    (batch, seq) and returns (module, keyword arguments); calling the module returns its loss.

    \b
    Example:
      mtcompile verify gpt-11m --memory 64MiB --update backward --max-grad-norm 1

    Exit code 0: equal; 5: different; 2: invalid argument or file; 3: it does not fit; 1: a step failed.
    """
    from mtcompile.models.loading import model_named
    from mtcompile.parity.verification import verify

    with progress_bar("verifying") as progress:
        verification = verify(model_named(model), steps=steps, progress=progress, **values(options))
    print(verification.to_json(indent=1) if as_json else verification)
    raise typer.Exit(FINE if verification.equal else DIFFERENT)
