"""``mtcompile merge``: an adapter and its base as one plain folder of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtcompile.cli.options import path_given


def merge(
    adapter: Annotated[
        Path,
        typer.Argument(
            parser=path_given,
            metavar="ADAPTER",
            help="a folder of PEFT; or one that train --lora --save wrote: its last checkpoint",
        ),
    ],
    out: Annotated[Path, typer.Argument(parser=path_given, metavar="OUT", help="a new folder for the merged weights")],
    base: Annotated[
        Path | None,
        typer.Option(
            parser=path_given, metavar="PATH", help="the folder of the base (default: the one that adapter_config.json names)"
        ),
    ] = None,
) -> None:
    """Merge a LoRA or DoRA adapter into its base: a folder that from_pretrained of Transformers loads without PEFT.

    PEFT computes the weights, in memory and in the dtype of the base. The folder appears when it is whole.

    \b
    Example:
      mtcompile merge run merged

    Exit code 0: merged; 2: invalid argument or file; 3: too little memory.
    """
    from mtcompile.trainer.merging import merge as merge_folders

    adapter, base = merge_folders(adapter, out, base)
    print(f"{adapter} merged into {base}: {out}")
