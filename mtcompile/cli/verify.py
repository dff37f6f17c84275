"""``mtcompile verify``."""

from __future__ import annotations

from typing import Annotated

import typer

from mtcompile.cli.common import DIFFERENT, FINE, Kernels, Precisions, Update, progress


def verify(
    model: Annotated[str, typer.Argument(help="a built-in shape (gpt-11m), a Hugging Face config.json or file.py:factory")],
    memory: Annotated[str, typer.Option(help="device bytes for the compiled one: 16GiB (default: half of all resident)")] = "",
    batch: Annotated[int, typer.Option(min=1, help="sequences per step")] = 2,
    seq: Annotated[int, typer.Option(min=1, help="tokens per sequence")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="training steps to compare")] = 3,
    precision: Annotated[Precisions, typer.Option(help="of weights and optimizer state; model: as it says")] = Precisions.model,
    update: Annotated[Update, typer.Option(help="after the backward, or as gradients arrive")] = Update.step,
    max_grad_norm: Annotated[float | None, typer.Option(help="clip the gradients to this norm, in both")] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="micro-batches that the batch is run as")] = 1,
    kernels: Annotated[Kernels, typer.Option(help="inductor: compared with rounding instead of bits")] = Kernels.eager,
    device: Annotated[str, typer.Option(help="cuda:1, cpu, ... (default: the GPU if there is one)")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Train a model plainly and compiled on this machine, and say whether every bit is equal.

    Losses, gradients, buffers, stepped weights and the random generator's state of a few steps are compared, or the first that
    differs is named. Both trainings are held at once: take a small model, or few layers of a large one. A factory takes
    (batch, seq) and returns (module, keyword arguments); the module's call returns its loss.

    \b
    Example:
      mtcompile verify gpt-11m --memory 64MiB --update backward --max-grad-norm 1

    Exit code 0: equal; 5: different; 2: something asked for is wrong; 3: it does not fit; 1: a step failed.
    """
    from mtcompile.models.loading import model_named
    from mtcompile.parity.verification import verify

    with progress("verifying") as tell:
        found = verify(
            model_named(model),
            memory=memory or None,
            batch=batch,
            seq=seq,
            steps=steps,
            precision=precision.value,
            update=update.value,
            max_grad_norm=max_grad_norm,
            accumulate=accumulate,
            kernels=kernels.value,
            device=device or None,
            tell=tell,
        )
    print(found.to_json(indent=1) if as_json else found)
    raise typer.Exit(FINE if found.equal else DIFFERENT)
