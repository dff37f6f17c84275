"""Checks what a folder of weights must hold to be trained, beside the weights; imports no torch."""

from __future__ import annotations

from pathlib import Path

from mtcompile.reading import check_there


def check_folder(folder: Path) -> None:
    """Raises ValueError unless a folder is there, and holds a configuration and a tokenizer."""
    check_there(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"expected a folder with a config.json and weights, found no config.json in {folder}")
    check_tokenizer(folder)


def check_tokenizer(folder: Path) -> None:
    """Raises ValueError unless a folder holds a tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"expected a tokenizer.json in {folder}, found none: save the model's tokenizer there "
            "(tokenizer.save_pretrained), or fetch the file from where the weights came from"
        )
