"""``mtcompile checkpoint verify``: whether a checkpoint is whole, and what was trained on what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mtcompile.cli.common import DIFFERENT, FINE
from mtcompile.cli.options import Json
from mtcompile.reading import printable

checkpoint = typer.Typer(help="Look at checkpoints.", no_args_is_help=True)


@checkpoint.callback()
def commands() -> None:
    """Look at checkpoints."""


@checkpoint.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="a checkpoint, or a folder of checkpoints: the one that was saved last")],
    as_json: Json = False,
) -> None:
    """Read every byte of a checkpoint, and say what was trained on what.

    Compares the checkpoint's files with their checksums, and the weights and data that mtcompile train --save began with, where
    they still are, with the SHA-256 that the checkpoint names. This finds damage and mistakes; a checkpoint can be forged.

    \b
    Example:
      mtcompile checkpoint verify run

    Exit code 0: the checkpoint is whole, and no file is another one; 5: a file is another one; 2: damaged or no checkpoint.
    """
    from mtcompile.checkpoint.provenance import compared
    from mtcompile.checkpoint.reading import verified

    found = verified(folder)
    told, files = found.provenance, list(compared(found.provenance))
    if as_json:
        rows = [{"kind": kind, "path": path, "found": outcome} for kind, path, outcome in files]
        print(json.dumps({"path": str(found.path), "step": found.step, "files": rows, "provenance": told}, indent=1))
    else:
        lines = [f"{found.path}: whole, step {found.step}"]
        lines += [f"  {kind}: {path}: {outcome}" for kind, path, outcome in files]
        lines += [f"  new, not from a file: {', '.join(origin['new'])}" for origin in told.get("weights", []) if origin["new"]]
        lines += [f"  {name}: {value}" for part in ("versions", "options") for name, value in told.get(part, {}).items()]
        lines += [f"  plan: {digest}" for digest in told.get("plans", [])]
        print(printable("\n".join(lines)))
    raise typer.Exit(DIFFERENT if any(outcome == "different" for *_, outcome in files) else FINE)
