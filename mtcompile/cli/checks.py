"""Checks arguments of commands before torch is imported, which takes seconds: what cannot work ends at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mtcompile.data.files import files_of
from mtcompile.data.folder import check_folder
from mtcompile.machine.known import check_machine
from mtcompile.models.shapes import check_config, check_factory, check_shape
from mtcompile.sizes import parse_bytes
from mtcompile.trainer.adapters import check_adapters
from mtcompile.trainer.methods import check_method


def check_at_once(model: str | None, options: Any) -> None:
    """Raises ValueError for names, files and sizes that cannot be right. ``options``: a dataclass of a command's options."""
    for name in ("memory", "host"):
        parse_bytes(getattr(options, name, None), name)
    if (machine := getattr(options, "machine", None)) is not None:
        check_machine(machine)
    trains = hasattr(options, "data")
    if trains:
        files_of(options.data or ())
        check_adapters(options, model or "")
        check_method(options, model or "")
    if model is not None:
        _check_model(model, trains)


def _check_model(text: str, trains: bool) -> None:
    path = Path(text)
    if text.endswith(".json"):
        check_config(path)
    elif ".py:" in text or text.endswith(".py"):
        check_factory(text)
    elif trains and (path.is_dir() or os.sep in text):
        check_folder(path)
    elif not (path / "config.json").is_file():
        check_shape(text)
