"""``mtcompile plan``: what a training step needs and how long it takes, before anything is allocated."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from mtcompile.cached.answers import Answer, keep_answer, key_of, known_answer
from mtcompile.cli.common import DOES_NOT_FIT, FINE, Model, ending_soon, forecast_of, told, with_process
from mtcompile.cli.options import Json, StepOptions, values

Solve = Literal["batch", "seq", "memory"]


def plan(
    model: Model,
    options: StepOptions,
    policy: Annotated[list[str] | None, typer.Option(help="compare with a fixed strategy, or all; may be repeated")] = None,
    solve: Annotated[Solve | None, typer.Option(help="plan the largest batch or seq that fits, or the least memory")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a host that train together, each with a batch of its own")] = 1,
    hosts: Annotated[int, typer.Option(min=1, help="hosts that train together, each with so many GPUs")] = 1,
    network: Annotated[float | None, typer.Option(help="GB/s between hosts, per direction (default: the machine's)")] = None,
    tokens: Annotated[str | None, typer.Option(help="tokens of the whole run, such as 1B: also say what the run costs")] = None,
    force: Annotated[bool, typer.Option(help="show the leanest plan even if it does not fit")] = False,
    as_json: Json = False,
) -> None:
    """Say whether a training step fits and how long it takes, without allocating anything.

    A factory takes (batch, seq) and returns (module, keyword arguments); it is called where tensors take no memory.

    \b
    Example:
      mtcompile plan llama-8b --batch 4 --seq 4096 --machine rtx4090

    Exit code 0: it fits; 3: it does not; 2: invalid argument or file.
    """
    more = {"solve": solve, "force": force, "gpus": gpus, "hosts": hosts, "network": network, "tokens": tokens}
    key = key_of(model, {**values(options), **more, "policy": policy})
    if (answer := known_answer(key)) is None:
        with ending_soon():
            from mtcompile.passes.planning.policies import POLICIES

            policies = tuple(POLICIES) if "all" in (policy or ()) else tuple(policy or ())
            forecast = with_process(forecast_of(model, options, policies=policies, advise=True, **more))
        answer = Answer(told(forecast), forecast.to_json(indent=1), forecast.feasible)
        keep_answer(key, answer)
    print(answer.as_json if as_json else answer.text)
    raise typer.Exit(FINE if answer.feasible else DOES_NOT_FIT)
