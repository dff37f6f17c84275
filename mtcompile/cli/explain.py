"""``mtcompile explain``, ``mtcompile trace`` and ``mtcompile graph``: a plan looked at from near."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mtcompile.cli.common import WIDTH, Accumulate, Batch, Host, Machine, Memory, Model, Seq, planned

Precision = Annotated[str, typer.Option(help="model, fp32, bf16-master32 or bf16")]
Optimizer = Annotated[str, typer.Option(help="adamw, adam, sgd-momentum or sgd")]
Update = Annotated[str, typer.Option(help="step: after the backward; backward: as gradients arrive")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (explain, trace, graph):
        app.command()(command)


def explain(
    model: Model,
    name: Annotated[str, typer.Argument(help="a parameter, module or block such as layers.3.mlp; none: the whole plan")] = "",
    batch: Batch = 1,
    seq: Seq = 2048,
    memory: Memory = "",
    host: Host = "",
    machine: Machine = "h200-sxm",
    precision: Precision = "model",
    optimizer: Optimizer = "adamw",
    update: Update = "step",
    accumulate: Accumulate = 1,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Say where the values of a part of a model live and when, why, and what else could be done. Without a name, show the plan.

    \b
    Example:
      mtcompile explain llama-8b blocks.3 --seq 4096 --machine rtx4090

    Exit code 0; 3: the step does not fit; 2: something asked for is wrong.
    """
    from rich.console import Console

    from mtcompile.report.explain import explain as explained
    from mtcompile.report.tables import plan_tables

    made = planned(model, **_options(locals()))
    assert made.planned is not None and made.problem is not None
    if name:
        found = explained(made.planned, made.problem, name)
        print(found.to_json(indent=1) if as_json else found)
    elif as_json:
        print(made.planned.plan.to_json(indent=1))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        console.print(plan_tables(made.planned.plan, made.planned.schedule))


def trace(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="a .json file for ui.perfetto.dev or chrome://tracing")],
    batch: Batch = 1,
    seq: Seq = 2048,
    memory: Memory = "",
    host: Host = "",
    machine: Machine = "h200-sxm",
    precision: Precision = "model",
    optimizer: Optimizer = "adamw",
    update: Update = "step",
    accumulate: Accumulate = 1,
) -> None:
    """Write when each instruction of the planned step is predicted to run, and the memory it takes, as a trace.

    \b
    Example:
      mtcompile trace llama-8b --machine rtx4090 -o step.json

    Exit code 0; 3: the step does not fit; 2: something asked for is wrong.
    """
    from mtcompile.report.chrome_trace import write
    from mtcompile.runtime.sim import simulate

    if output.suffix != ".json":
        raise ValueError(f"expected --output to name a .json file, found {output}")
    made = planned(model, **_options(locals()))
    assert made.planned is not None
    write(output, made.planned.schedule, simulate(made.planned.schedule), made.model)
    print(f"wrote {output}: open it at https://ui.perfetto.dev or chrome://tracing")


def graph(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="a .dot or .svg file; .txt: every stage of the step as text")],
    fold: Annotated[bool, typer.Option("--fold", help="draw neighbouring blocks that are alike once")] = False,
    batch: Batch = 1,
    seq: Seq = 2048,
    memory: Memory = "",
    host: Host = "",
    machine: Machine = "h200-sxm",
    precision: Precision = "model",
    optimizer: Optimizer = "adamw",
    update: Update = "step",
    accumulate: Accumulate = 1,
) -> None:
    """Draw the planned step: its regions by block and phase, with every copy, update, cast and recomputation.

    \b
    Example:
      mtcompile graph llama-8b --machine rtx4090 --fold -o step.svg

    Exit code 0; 3: the step does not fit; 2: something asked for is wrong.
    """
    from mtcompile.report.dot import dot, render
    from mtcompile.report.stages import print_readable

    if output.suffix not in (".dot", ".svg", ".txt"):
        raise ValueError(f"expected --output to name a .dot, .svg or .txt file, found {output}")
    made = planned(model, **_options(locals()))
    assert made.planned is not None
    if output.suffix == ".txt":
        output.write_text(print_readable(made) + "\n")
    else:
        render(dot(made.planned.step, fold), output)
    print(f"wrote {output}")


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Of a command's arguments, those that ``mtcompile.plan`` takes."""
    names = ("batch", "seq", "memory", "host", "machine", "precision", "optimizer", "update", "accumulate")
    return {name: given[name] for name in names}
