"""The command line ``mtcompile``: each command's options and output are in a file of its own, its work is elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

import mtcompile
from mtcompile.cli.bench import bench
from mtcompile.cli.cache import cache
from mtcompile.cli.checkpoint import checkpoint
from mtcompile.cli.common import Commands
from mtcompile.cli.doctor import doctor
from mtcompile.cli.explain import explain, graph, trace
from mtcompile.cli.merge import merge
from mtcompile.cli.options import flattened
from mtcompile.cli.plan import plan
from mtcompile.cli.train import train
from mtcompile.cli.verify import verify
from mtcompile.cli.viz import viz

app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"mtcompile {mtcompile.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """Train models larger than the device's memory, with results bit-identical to plain PyTorch.

    \b
    Examples:
      mtcompile plan llama-8b --batch 4 --seq 4096 --machine rtx4090
      mtcompile train gpt-11m --memory 64MiB --steps 50

    Exit codes: 0 success, 1 failed while running, 2 invalid argument or file, 3 does not fit, 4 doctor: a limit is bad,
    5 verify: different, 130 interrupted. MT_DEBUG=1 shows tracebacks. mtcompile COMMAND --help explains each command.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command()(doctor)
for command in (plan, explain, trace, graph, viz, verify, train, bench):
    app.command()(flattened(command))
app.command()(merge)
app.add_typer(checkpoint, name="checkpoint")
app.command()(cache)
