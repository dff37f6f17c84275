"""``mtcompile bench``: what a model's steps take on this machine, plain and compiled."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from mtcompile.cli.common import Model, progress_bar
from mtcompile.cli.options import ComparisonOptions, Json, values


def bench(
    model: Model,
    options: ComparisonOptions,
    steps: Annotated[int, typer.Option(min=1, help="timed steps of each model, after two warm-up steps")] = 5,
    as_json: Json = False,
) -> None:
    """Time training steps of a model on this machine, plain and compiled in turn.

    A step is forward, backward, clipping and AdamW. Figures are medians; other programs on the machine distort them. On the
    emulated device, a copy takes as long as a copy within host memory. Both models are in memory at once.

    \b
    Example:
      mtcompile bench gpt-11m --batch 4 --memory 100MiB

    Exit code 0: measured; 2: invalid argument or file; 3: the compiled model does not fit; 1: a step failed.
    """
    from mtcompile.parity.benchmark import benchmark
    from mtcompile.parity.workload import setup_of

    setup = setup_of(**values(options))
    with progress_bar("measuring") as progress:
        figures = benchmark(model, setup, steps, progress)
    print(json.dumps(asdict(figures), indent=1) if as_json else figures)
