"""The command line: ``mtcompile`` and its commands. What each does is behind it; here are its options and what it prints."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from mtcompile.cli import bench, explain, train, verify
from mtcompile.cli.common import (
    BAD,
    DOES_NOT_FIT,
    FINE,
    WIDTH,
    Accumulate,
    Batch,
    Commands,
    Host,
    Machine,
    Memory,
    Model,
    Precisions,
    Seq,
    Update,
    asked,
)
from mtcompile.cli.viz import viz

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Optimizer(str, Enum):
    adamw = "adamw"
    adam = "adam"
    sgd_momentum = "sgd-momentum"
    sgd = "sgd"


class Solve(str, Enum):
    batch = "batch"
    seq = "seq"
    memory = "memory"


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """Train models larger than the device's memory, with the bits of plain PyTorch.

    \b
    Examples:
      mtcompile plan llama-8b --batch 4 --seq 4096 --machine rtx4090
      mtcompile train gpt-11m --memory 64MiB --steps 50

    Exit codes: 0 fine, 1 failed while running, 2 something asked for is wrong, 3 does not fit, 4 doctor: something is bad,
    5 verify: different, 130 interrupted. MT_DEBUG=1 shows tracebacks. mtcompile COMMAND --help says more of each.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="measure less, in a few seconds")] = False,
    save: Annotated[Path | None, typer.Option(help="also write a machine file, for mtcompile plan --machine FILE")] = None,
    device: Annotated[str, typer.Option(help="cuda:1, cpu, ... (default: the GPU if there is one)")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Measure this machine, and say what its speeds mean for training and what would kill a run here.

    The speeds are remembered: mtcompile plan MODEL --machine this.

    \b
    Example:
      mtcompile doctor --quick --save mine.json

    Exit code 0: nothing is bad; 4: a limit is bad, and its row says what to do; 2: something asked for is wrong.
    """
    from rich.console import Console

    from mtcompile.machine import doctor as its
    from mtcompile.machine.device import choose

    if save is not None and save.suffix != ".json":
        raise ValueError(f"expected --save to name a .json file, found {save}")
    report = its.examine(choose(device or None), quick, lambda text: print(text, file=sys.stderr))
    if as_json:
        print(report.to_json(indent=1))
    else:
        its.show(report, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    if save is not None:
        its.save(report, save)
    raise typer.Exit(BAD if report.bad else FINE)


@app.command()
def plan(
    model: Model,
    batch: Batch = 1,
    seq: Seq = 2048,
    memory: Memory = "",
    host: Host = "",
    machine: Machine = "h200-sxm",
    precision: Annotated[Precisions, typer.Option(help="of weights and optimizer state; model: as it says")] = Precisions.model,
    optimizer: Annotated[Optimizer, typer.Option(help="whose state there is")] = Optimizer.adamw,
    update: Annotated[Update, typer.Option(help="after the backward, or as gradients arrive")] = Update.step,
    max_grad_norm: Annotated[
        float | None, typer.Option(help="with --update backward: clipped to it, so updates wait for all gradients")
    ] = None,
    run_ahead: Annotated[bool, typer.Option(help="with --update backward: updates go on behind the next forward")] = False,
    accumulate: Accumulate = 1,
    policy: Annotated[list[str] | None, typer.Option(help="compare with a fixed strategy, or all; may be repeated")] = None,
    solve: Annotated[Solve | None, typer.Option(help="plan the largest that fits; memory: the least that works")] = None,
    force: Annotated[bool, typer.Option(help="show the leanest plan though it does not fit")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Say what a training step will need and take, without allocating anything.

    A factory takes (batch, seq) and returns (module, keyword arguments); it is called where tensors take no memory.

    \b
    Example:
      mtcompile plan llama-8b --batch 4 --seq 4096 --machine rtx4090

    Exit code 0: it fits; 3: it does not; 2: something asked for is wrong.
    """
    from mtcompile.passes.planning.policies import POLICIES

    policies = tuple(POLICIES) if "all" in (policy or ()) else tuple(policy or ())
    options: dict[str, Any] = {
        "batch": batch,
        "seq": seq,
        "memory": memory,
        "host": host,
        "machine": machine,
        "precision": precision.value,
        "optimizer": optimizer.value,
        "update": update.value,
        "max_grad_norm": max_grad_norm,
        "run_ahead": run_ahead,
        "accumulate": accumulate,
        "policies": policies,
        "solve": solve.value if solve else None,
        "force": force,
    }
    made = asked(model, **options)
    print(made.to_json(indent=1) if as_json else made)
    raise typer.Exit(FINE if made.feasible else DOES_NOT_FIT)


explain.register(app)
app.command()(viz)
app.command()(verify.verify)
app.command()(train.train)
app.command()(bench.bench)
