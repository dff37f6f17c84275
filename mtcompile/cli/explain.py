"""``mtcompile explain``, ``mtcompile trace`` and ``mtcompile graph``: a closer look at a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtcompile.cli.common import Model, console, fitting_forecast
from mtcompile.cli.options import Json, StepOptions


def explain(
    model: Model,
    name: Annotated[str, typer.Argument(help="a parameter, module or block such as layers.3.mlp; none: the whole plan")] = "",
    *,
    options: StepOptions,
    as_json: Json = False,
) -> None:
    """Say where the values of a part of a model live, when and why, and what the alternatives cost.

    Without a name, show the whole plan as tables.

    \b
    Example:
      mtcompile explain llama-8b blocks.3 --seq 4096 --machine rtx4090

    Exit code 0: explained; 3: the step does not fit; 2: invalid argument or file.
    """
    from mtcompile.report.explain import explain as explanation_of
    from mtcompile.report.tables import plan_tables

    forecast, planned = fitting_forecast(model, options)
    if name:
        assert forecast.problem is not None
        explanation = explanation_of(planned, forecast.problem, name)
        print(explanation.to_json(indent=1) if as_json else explanation)
    elif as_json:
        print(planned.plan.to_json(indent=1))
    else:
        console().print(plan_tables(planned.plan, planned.schedule))


def trace(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="a .json file for ui.perfetto.dev or chrome://tracing")],
    options: StepOptions,
) -> None:
    """Write the predicted step as a trace for Perfetto: when each instruction runs, and the memory in use.

    \b
    Example:
      mtcompile trace llama-8b --machine rtx4090 -o step.json

    Exit code 0: written; 3: the step does not fit; 2: invalid argument or file.
    """
    from mtcompile.report.chrome_trace import write
    from mtcompile.runtime.sim import simulate

    if output.suffix != ".json":
        raise ValueError(f"expected --output to name a .json file, found {output}")
    forecast, planned = fitting_forecast(model, options)
    write(output, planned.schedule, simulate(planned.schedule), forecast.model)
    print(f"wrote {output}: open it at https://ui.perfetto.dev or chrome://tracing")


def graph(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="a .dot or .svg file; .txt: every stage of the step as text")],
    options: StepOptions,
    fold: Annotated[bool, typer.Option("--fold", help="draw equal neighbouring blocks once")] = False,
) -> None:
    """Draw the planned step: its regions by block and phase, with every copy, update, cast and recomputation.

    \b
    Example:
      mtcompile graph llama-8b --machine rtx4090 --fold -o step.svg

    Exit code 0: written; 3: the step does not fit; 2: invalid argument or file.
    """
    from mtcompile.report.dot import dot, render
    from mtcompile.report.stages import print_readable

    if output.suffix not in (".dot", ".svg", ".txt"):
        raise ValueError(f"expected --output to name a .dot, .svg or .txt file, found {output}")
    forecast, planned = fitting_forecast(model, options)
    if output.suffix == ".txt":
        output.write_text(print_readable(forecast) + "\n")
    else:
        render(dot(planned.step, fold), output)
    print(f"wrote {output}")
