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
    public: Annotated[
        Path | None,
        typer.Option("--public-key", help="a file with the public Ed25519 key that must have signed it (PEM or OpenSSH)"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every byte of a checkpoint, and say what was trained on what.

    Compares the checkpoint's files with their checksums, and the weights and data that mtcompile train --save began with, where
    they still are, with the SHA-256 that the checkpoint names. This finds damage and mistakes. To find forgeries too, save with
    --signing-key and verify with --public-key.

    \b
    Example:
      mtcompile checkpoint verify run --public-key key.pub

    Exit code 0: the checkpoint is whole, and the weights and data that are still there are unchanged; 5: one has changed;
    2: damaged, signed by another key or by none, or no checkpoint.
    """
    from mtcompile.checkpoint.provenance import compared
    from mtcompile.checkpoint.signatures import public_key
    from mtcompile.checkpoint.verifying import verified
    from mtcompile.errors import CheckpointError

    expected = None if public is None else public_key(public)
    found, key = verified(folder)
    if expected not in (None, key):
        by = "none" if key is None else f"one by {key}"
        raise CheckpointError(
            f"{found.path}: expected a signature by the key in {public} ({expected}), found {by}. Do not trust it, or pass the "
            "right key"
        )
    told, files = found.provenance, list(compared(found.provenance))
    if as_json:
        rows = [{"kind": kind, "path": path, "found": outcome} for kind, path, outcome in files]
        whole = {"path": str(found.path), "step": found.step, "signed_by": key, "files": rows, "provenance": told}
        print(json.dumps(whole, indent=1))
    else:
        lines = [f"{found.path}: whole, step {found.step}"]
        if key is not None:
            lines.append(f"  signed by {key}" + ("" if public else ": check by --public-key that you know this key"))
        lines += [f"  {kind}: {path}: {outcome}" for kind, path, outcome in files]
        lines += [
            f"  new, not from a file: {', '.join(map(str, origin['new']))}"
            for origin in told.get("weights", [])
            if origin["new"]
        ]
        lines += [f"  {name}: {value}" for part in ("versions", "options") for name, value in told.get(part, {}).items()]
        lines += [f"  plan: {digest}" for digest in told.get("plans", [])]
        print("\n".join(printable(line).replace("\n", "\\n") for line in lines))  # a name may not look like another line
    raise typer.Exit(DIFFERENT if any(outcome == "different" for *_, outcome in files) else FINE)
