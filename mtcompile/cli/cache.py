"""``mtcompile cache``: what the cache on disk holds, and its clearing."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from mtcompile import knobs
from mtcompile.cached.kept import KINDS, clear, kept
from mtcompile.cli.options import Json
from mtcompile.reading import printable
from mtcompile.runtime.schedule import gib

Kind = Literal["answers", "chains", "inductor", "joints", "machines", "plans", "times"]


def cache(
    kind: Annotated[Kind | None, typer.Argument(help="this kind alone (default: all)", show_default=False)] = None,
    clears: Annotated[bool, typer.Option("--clear", help="delete what is listed")] = False,
    as_json: Json = False,
) -> None:
    """List what the cache on disk holds, or clear it: MT_CACHE says where it is.

    What is cleared is traced, planned, compiled or measured again when it is needed. Clear inductor while no other process
    compiles. A folder that TORCHINDUCTOR_CACHE_DIR names is torch's, and neither listed nor cleared.

    \b
    Example:
      mtcompile cache plans --clear

    Exit code 0: listed or cleared; 2: a file cannot be read or deleted.
    """
    folder = knobs.cache()
    found = [kept(Path(folder), each) for each in ([kind] if kind else KINDS)] if folder else []
    if clears:
        for each in found:
            clear(Path(folder), each.kind)
    if as_json:
        print(json.dumps({"folder": folder or None, "cleared": clears, "kinds": list(map(asdict, found))}, indent=1))
        return
    print(printable(f"{folder}{': cleared' if clears else ''}") if folder else "MT_CACHE=0: nothing is cached")
    for each in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.last_used)) if each.files else ""
        print(f"  {each.kind:9} {each.files:7,} files {gib(each.nbytes):>11}  {used:16}  {KINDS[each.kind]}")
