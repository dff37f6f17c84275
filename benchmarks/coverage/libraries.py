"""Models of torchvision, timm and diffusers as subjects, where these libraries are installed: the smallest of each file of
models, with random weights."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.compare import NotBuilt, Subject, train

LIBRARIES = ("torchvision", "timm", "diffusers")
_SMALL = re.compile(r"test|tiny|small|atto|nano|pico|femto|xxs|_xs|18|_t$|_s$|_0$|b0")
_MOST_CANDIDATES, _MOST_PARAMETERS = 6, 30_000_000
_SIZES = (64, 96, 224)
_BATCH = 2


def missing() -> list[str]:
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is None]


def entries() -> list[str]:
    """Returns ``timm/resnet``, ...: one for each file of models, or kind of them, of each library that is here."""
    names = {library: _NAMES[library]() for library in LIBRARIES if library not in missing()}
    return [f"{library}/{name}" for library, members in names.items() for name in members]


def build(entry: str) -> Subject:
    library, name = entry.split("/")
    return _BUILDS[library](name)


def _vision(make: Callable[..., nn.Module], name: str, entry: str, size: int) -> Subject:
    torch.manual_seed(1)
    module = make(name).train()
    torch.manual_seed(2)
    kind = zlib.crc32(entry.encode()) % 3
    pictures = torch.randn(_BATCH, 3, size, size)
    if kind == 2:
        module, pictures = module.to(torch.bfloat16), pictures.to(torch.bfloat16)
    about = ", ".join(filter(None, (name, ("", "autocast", "bf16 weights")[kind])))
    return Subject(module, (pictures,), autocast=kind == 1, about=about)


def _smallest(make: Callable[..., nn.Module], names: list[str], entry: str) -> Subject:
    """Builds the model of fewest parameters among the names that sound small, for the smallest picture that it takes."""
    candidates = sorted(names, key=lambda name: (not _SMALL.search(name), len(name), name))[:_MOST_CANDIDATES]
    size, name = _choice(make, tuple(candidates), entry)
    return _vision(make, name, entry, size)


@functools.cache
def _choice(make: Callable[..., nn.Module], names: tuple[str, ...], entry: str) -> tuple[int, str]:
    """Returns the side of the picture, and the model that trains with it."""
    problems, counts = [], {}
    for name in names:
        try:
            with torch.device("meta"):
                counts[name] = sum(p.numel() for p in make(name).parameters())
        except Exception as error:
            problems.append(f"{name}: {_short(error)}")
    for name in sorted(counts, key=lambda name: counts[name]):
        for size in _SIZES if counts[name] <= _MOST_PARAMETERS else ():
            try:
                train(_vision(make, name, entry, size), steps=1)
                return size, name
            except Exception as error:
                problems.append(f"{name}: {_short(error)}")
    raise NotBuilt("; ".join(problems[-2:]) or f"at least {min(counts.values()):,} parameters")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def _torchvision_files() -> dict[str, list[str]]:
    models = importlib.import_module("torchvision.models")
    files: dict[str, list[str]] = {}
    for name in models.list_models():
        if not name.startswith("quantized"):
            files.setdefault(models.get_model_builder(name).__module__.split(".")[-1], []).append(name)
    return files


def _torchvision_model(name: str) -> nn.Module:
    builder = importlib.import_module("torchvision.models").get_model_builder(name)
    without = {"weights_backbone": None} if "weights_backbone" in inspect.signature(builder).parameters else {}
    return builder(weights=None, **without)  # type: ignore[no-any-return]


def _timm_model(name: str) -> nn.Module:
    return importlib.import_module("timm").create_model(name, pretrained=False)  # type: ignore[no-any-return]


def _diffusion_models() -> dict[str, Callable[[Any], tuple[nn.Module, dict[str, Any]]]]:
    """Returns makers of (model, arguments) from the library's module."""
    wide: dict[str, Any] = {"block_out_channels": (32, 32), "norm_num_groups": 8}
    noise, times = torch.randn(_BATCH, 4, 16, 16), torch.tensor([3, 40])
    both = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    cross = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    context = torch.randn(_BATCH, 7, 32)
    coder = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return {
        "UNet2DModel": lambda d: (
            d.UNet2DModel(sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, **wide, **both),
            {"sample": noise, "timestep": times},
        ),
        "UNet2DConditionModel": lambda d: (
            d.UNet2DConditionModel(16, layers_per_block=1, cross_attention_dim=32, attention_head_dim=8, **wide, **cross),
            {"sample": noise, "timestep": times, "encoder_hidden_states": context},
        ),
        "AutoencoderKL": lambda d: (d.AutoencoderKL(in_channels=4, out_channels=4, **wide, **coder), {"sample": noise}),
        "VQModel": lambda d: (d.VQModel(4, 4, num_vq_embeddings=32, **wide, **coder), {"sample": noise}),
        "DiTTransformer2DModel": lambda d: (
            d.DiTTransformer2DModel(4, 8, num_layers=2, sample_size=16, norm_num_groups=8),
            {"hidden_states": noise, "timestep": times, "class_labels": torch.tensor([1, 2])},
        ),
    }  # fmt: skip


def _diffusion(name: str) -> Subject:
    torch.manual_seed(1)
    module, arguments = _diffusion_models()[name](importlib.import_module("diffusers"))
    return Subject(module.train(), kwargs=arguments, about=name)


_NAMES: dict[str, Callable[[], list[str]]] = {
    "torchvision": lambda: list(_torchvision_files()),
    "timm": lambda: list(importlib.import_module("timm").list_modules()),
    "diffusers": lambda: list(_diffusion_models()),
}
_BUILDS: dict[str, Callable[[str], Subject]] = {
    "torchvision": lambda name: _smallest(_torchvision_model, _torchvision_files()[name], f"torchvision/{name}"),
    "timm": lambda name: _smallest(_timm_model, importlib.import_module("timm").list_models(module=name), f"timm/{name}"),
    "diffusers": _diffusion,
}
