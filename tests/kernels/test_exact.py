"""``kernels="exact"``: the bits of plain PyTorch, with most elementwise work fused by Inductor."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.kernels.chains import build
from mtcompile.models.decoders import Decoder
from mtcompile.models.shapes import Shape

pytestmark = pytest.mark.slow  # Inductor compiles a few chains of each model

BF16 = torch.bfloat16


class Autocast(nn.Module):
    """A model under autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            return self.model(tokens, targets)


class Patches(nn.Module):
    """A vision transformer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(torch.randn(64, width) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.place
        for layer in range(2):
            heads = self.qkv[layer](self.norms[2 * layer](x)).view(len(x), 64, 3, 2, -1).permute(2, 0, 3, 1, 4)
            x = x + nn.functional.scaled_dot_product_attention(*heads.unbind()).transpose(1, 2).flatten(2)
            x = x + self.down[layer](nn.functional.gelu(self.up[layer](self.norms[2 * layer + 1](x))))
        return nn.functional.cross_entropy(self.head(x.mean(1)).float(), labels)


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.Conv2d(3 * width, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, count * width) for count in (1, 2, 2, 1))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, images: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        fine = nn.functional.silu(self.norms[0](self.first(images)))
        coarse = nn.functional.silu(self.norms[1](self.down(fine)))
        coarse = coarse + nn.functional.silu(self.norms[2](self.middle(coarse)))
        wide = nn.functional.interpolate(coarse, scale_factor=2.0)
        both = nn.functional.silu(self.norms[3](self.up(torch.cat([wide, fine], 1))))
        return (self.last(both) - wanted).float().square().mean()


def decoder(dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    torch.set_default_dtype(dtype)
    try:
        model = Decoder(Shape(128, 384, 2, 4, 2, 256, head_dim=32, dtype=dtype))
    finally:
        torch.set_default_dtype(torch.float32)
    return model, {"tokens": torch.randint(256, (2, 64)), "targets": torch.randint(256, (2, 64))}


def case(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    if name == "decoder-bf16":
        return decoder(BF16)
    if name == "decoder-fp32":
        return decoder(torch.float32)
    if name == "decoder-autocast":
        model, data = decoder(torch.float32)
        return Autocast(model), data
    dtype = BF16 if name.endswith("bf16") else torch.float32
    images = torch.randn(4, 3, 32, 32, dtype=dtype)
    if name.startswith("vit"):
        return Patches().to(dtype), {"images": images, "labels": torch.randint(10, (4,))}
    return UNet().to(dtype), {"images": images, "wanted": torch.randn(4, 3, 32, 32, dtype=dtype)}


def fused_percent(model: Any) -> int:
    (found,) = (match for note in model.plan.notes if (match := re.search(r"fused are (\d+)% of the bytes", note)))
    return int(found.group(1))


_LONG = pytest.mark.long
_EVERY = [("1GiB", "step"), (None, "step"), ("1GiB", "backward"), (None, "backward")]
CASES = [
    ("decoder-bf16", 80, _EVERY[1:3]),
    pytest.param("decoder-bf16", 80, _EVERY, marks=_LONG),
    pytest.param("decoder-fp32", 70, _EVERY, marks=_LONG),
    pytest.param("decoder-autocast", 70, _EVERY, marks=_LONG),
    pytest.param("vit-bf16", 20, _EVERY, marks=_LONG),
    pytest.param("unet-bf16", 20, _EVERY, marks=_LONG),
]


@pytest.mark.parametrize(("name", "percent", "ways"), CASES)
def test_exact_kernels_have_the_bits_of_plain_pytorch(name: str, percent: int, ways: list[tuple[str | None, Any]]) -> None:
    """Losses, gradients and stepped weights, with room for all and with half of that, updates after and in the backward."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a chain that differs, a peak above the plan
        for memory, update in ways:
            model, data = case(name)
            verified = mtcompile.verify(model, data, memory=memory, update=update, kernels="exact", steps=2)
            assert verified.equal, str(verified)
            assert verified.compared["loss"] == 2 and verified.compared["weight"]
    model, data = case(name)
    compiled = mtcompile.compile(model, memory="1GiB", kernels="exact")
    compiled(**data).backward()
    assert fused_percent(compiled) >= percent
    report = compiled.memory_report()
    assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= 1 << 30
    eager = mtcompile.compile(case(name)[0], memory="1GiB")
    eager(**data).backward()
    assert compiled.plan.numerics == eager.plan.numerics
    assert report["planned_peak_device_bytes"] <= 1.02 * eager.memory_report()["planned_peak_device_bytes"]


@pytest.mark.long
def test_the_smallest_budget_of_eager_kernels_is_kept() -> None:
    model, data = case("decoder-bf16")
    with pytest.raises(mtcompile.BudgetError) as refused:
        mtcompile.compile(model, memory="1KiB")(**data)
    memory = refused.value.minimum_bytes
    compiled = mtcompile.compile(case("decoder-bf16")[0], memory=memory, kernels="exact")
    compiled(**data).backward()
    report = compiled.memory_report()
    assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= memory


@pytest.mark.long
def test_chains_are_shown_once_for_all_runs_and_again_under_mt_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_CACHE", str(tmp_path))
    shown = list[Any]()
    differences = build.first_difference
    monkeypatch.setattr(build, "first_difference", lambda *of: shown.append(of[0]) or differences(*of))
    counts = []
    for check in ("0", "0", "1"):
        monkeypatch.setenv("MT_CHECK", check)
        model, data = case("decoder-bf16")
        mtcompile.compile(model, memory="1GiB", kernels="exact")(**data).backward()
        counts.append(len(shown))
        shown.clear()
    assert counts[0] == counts[2] > 0 and counts[1] == 0
