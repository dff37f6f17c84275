"""The built-in shapes by name, known before torch is imported: a command that names another one fails at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtcompile.errors import did_you_mean, nearest_file

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. ``tied``: the head's weight is the embedding's."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128
    tied: bool = False
    dtype: torch.dtype | str = "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype) if isinstance(self.dtype, str) else self.dtype

    def shortened(self, layers: int) -> Shape:
        return replace(self, layers=layers)


SHAPES = {
    "gpt-11m": Shape(320, 1280, 6, 5, 5, 2048, head_dim=64, dtype="float32"),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 151936, tied=True),
    "qwen2.5-1.5b": Shape(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": Shape(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": Shape(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": Shape(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": Shape(5120, 27648, 64, 40, 8, 152064),
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "llama-70b": Shape(8192, 28672, 80, 64, 8, 128256),
    "megatrain-120b": Shape(10240, 28672, 108, 80, 8, 128256),
    "qwen3-14b": Shape(5120, 17408, 40, 40, 8, 151936),
}


def check_shape(name: str) -> None:
    """Raises ValueError, with the most similar name, unless this is a built-in shape."""
    if name not in SHAPES:
        others = "a config.json or its folder, or file.py:factory"
        close = did_you_mean(name, SHAPES)
        raise ValueError(f"expected a model among {', '.join(SHAPES)}, or {others}, found {name!r}{close}")


def check_config(path: Path) -> None:
    """Raises ValueError, with the most similar name, unless there is such a file."""
    if not path.exists():
        raise ValueError(
            f"expected a Hugging Face config file with a model_type, found no such file: {path}{nearest_file(path)}"
        )


def check_factory(text: str) -> None:
    """Raises ValueError, with the most similar name, unless this is file.py:factory of a file that is there."""
    path = text.rpartition(":")[0]
    if text.endswith(".py"):
        raise ValueError(f"expected file.py:factory, found {text}: which function of it returns (module, keyword arguments)?")
    if not Path(path).exists():
        raise ValueError(f"expected file.py:factory, found no such file: {path}{nearest_file(path)}")
