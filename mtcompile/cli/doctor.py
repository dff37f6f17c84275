"""``mtcompile doctor``: what this machine can do, and what would kill a run here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mtcompile.cli.common import BAD, FINE, console
from mtcompile.cli.options import Device, Json


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="measure less, in a few seconds")] = False,
    save: Annotated[Path | None, typer.Option(help="also write a machine file, for mtcompile plan --machine FILE")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure this machine. Say what its speeds mean for training, and what would kill a run here.

    The speeds are cached: mtcompile plan MODEL --machine this uses them.

    \b
    Example:
      mtcompile doctor --quick --save mine.json

    Exit code 0: nothing is bad; 4: a limit is bad, and its row says what to do; 2: invalid argument or file.
    """
    from mtcompile.machine.device import choose
    from mtcompile.machine.doctor import examine, show
    from mtcompile.machine.doctor import save as save_machine

    if save is not None and save.suffix != ".json":
        raise ValueError(f"expected --save to name a .json file, found {save}")
    report = examine(choose(device), quick, lambda text: print(text, file=sys.stderr))
    if as_json:
        print(report.to_json(indent=1))
    else:
        show(report, console())
    if save is not None:
        save_machine(report, save)
    raise typer.Exit(BAD if report.bad else FINE)
