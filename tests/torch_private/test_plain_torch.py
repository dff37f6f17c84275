"""A trace takes the ways through torch that a plain run takes: the same operations, and so the same bits."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mtcompile
from mtcompile.torch_private import plain_torch
from tests.helpers.training import assert_plain, compiled_whole

pytestmark = pytest.mark.slow  # it compiles many models

aten = torch.ops.aten


class Resized(nn.Module):
    """Position embeddings that are resized, as in vision transformers: one for each way."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.ParameterDict({name: torch.randn(1, 8, *[4] * len(size)) for name, (size, _) in RESIZED.items()})

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        modes = {name: name.partition("_")[0] for name in RESIZED}
        total = torch.zeros(())
        for name, (size, options) in RESIZED.items():
            resized = F.interpolate(self.positions[name], size=size, mode=modes[name], **options)
            total = total + (scale[: resized.numel()].view(resized.shape) * resized).square().sum()
        return total


RESIZED: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "nearest": ((7, 7), {}),
    "nearest-exact": ((7,), {}),
    "linear": ((7,), {}),
    "bilinear": ((7, 7), {}),
    "bilinear_smoothed": ((3, 3), {"antialias": True}),
    "bicubic": ((7, 7), {"align_corners": False}),
    "bicubic_smoothed": ((3, 3), {"antialias": True}),
    "trilinear": ((5, 6, 7), {}),
    "area": ((3, 3), {}),
}


def test_resizing() -> None:
    torch.manual_seed(0)
    assert_plain(Resized(), torch.randn(2048))


@pytest.mark.parametrize("layer", [*(pytest.param(each, marks=pytest.mark.long) for each in (nn.RNN, nn.GRU)), nn.LSTM])
def test_recurrent_layers(layer: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layer(12, 20, num_layers=2, bidirectional=True, dropout=0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output, _ = self.layers(x)
            return output.square().sum()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    x = torch.randn(4, 3, 12)
    assert_plain(Recurrent(), x)
    with torch.backends.mkldnn.flags(enabled=False):
        assert_plain(Recurrent(), x)


class Upsampled(nn.Module):
    """Attention, a residual and an upsampling, as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(24, 16, 1)
        self.query, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.up = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.shortcut(images)
        batch, channels, height, width = x.shape
        tokens = self.out(torch.tanh(self.query(x.view(batch, channels, height * width).transpose(1, 2))))
        x = tokens.transpose(-1, -2).reshape(batch, channels, height, width) + x
        return self.up(F.interpolate(x, scale_factor=2.0, mode="nearest")).pow(2).mean()


@pytest.mark.parametrize("policy", ["resident", "checkpoint-all"])
def test_a_convolutions_bias_before_an_upsampling(policy: str) -> None:
    torch.manual_seed(0)
    assert_plain(Upsampled(), torch.randn(2, 24, 8, 8), policy=policy)


LABELS = torch.tensor([[3, 1, -1, 0, 0, 0, 0, 0, 0, 0]] * 6)
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, torch.arange(6)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, LABELS),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "pad_sequence": lambda x: nn.utils.rnn.pad_sequence([x[0], x[1, :3], x[2]]),
    "one_hot": lambda x: x * F.one_hot(torch.arange(6), 10),
    "dropout": lambda x: F.dropout(x, 0.3),
    "stft": lambda x: torch.stft(x.reshape(1, -1), 16, window=torch.hann_window(16), return_complex=True).abs(),
}


class Applied(nn.Module):
    """Each function, of a linear layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(16, 10) for name in FUNCTIONS})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for name, function in FUNCTIONS.items():
            total = total + function(self.layers[name](x)).square().mean()
        return total


def test_functions_that_torch_writes_in_python_for_traces() -> None:
    torch.manual_seed(0)
    assert_plain(Applied(), torch.randn(6, 16))


def test_torchs_own_kernels_are_back_after_a_trace() -> None:
    before = {operator: dict(operator.py_kernels) for operator in plain_torch._operators()}
    with plain_torch.plain_kernels():
        assert not aten.upsample_bicubic2d.vec.py_kernels.keys() & set(plain_torch._COMPOSED)
        with plain_torch.plain_kernels():
            pass
        assert not aten.upsample_bicubic2d.vec.py_kernels.keys() & set(plain_torch._COMPOSED)
    assert before[aten.upsample_bicubic2d.vec]
    assert {operator: dict(operator.py_kernels) for operator in plain_torch._operators()} == before


class Asking(nn.Module):
    """Asks in every way that there is whether it is compiled, and computes something else then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for asked in (torch.compiler.is_compiling(), torch.compiler.is_dynamo_compiling(), torch._dynamo.is_compiling()):
            x = x.cos() if asked else x.sin()
        return x.cos().sum() if is_being_compiled() else x.sin().sum()


def is_being_compiled() -> bool:
    return torch.compiler.is_compiling()


def test_code_that_asks_takes_the_branch_of_a_plain_run() -> None:
    torch.manual_seed(0)
    model = Asking()
    assert "told" not in assert_plain(model, torch.randn(4, 8)).plan.numerics
    torch.compiler.reset()
    told = torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 8))
    assert torch.equal(told, model.layer(torch.ones(1, 8)).cos().cos().cos().cos().sum())  # elsewhere Dynamo answers as ever


class Looking(nn.Module):
    """Looks at its weights in a plain run, which cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Asking(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if not is_being_compiled() and bool((self.last.weight > 9).any()) else 1.0
        return self.last(x).square().sum() * scale + self.first(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Looking()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_the_contract_names_a_branch_that_could_not_be_the_plain_runs() -> None:
    torch.manual_seed(0)
    numerics = assert_plain(Nested(), torch.randn(4, 8)).plan.numerics
    assert f"except (inner at {__file__}:" in numerics and "inner.first" not in numerics
    line = int(numerics.partition(f"{__file__}:")[2].partition(":")[0])
    assert "is_being_compiled()" in linecache.getline(__file__, line)


class Unsupported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) if torch.compiler.is_compiling() else self.layer(x) * 2
        return x.sum() if bool(x.isnan().any()) else x.square().sum()


def test_what_cannot_be_captured_either_way_is_refused() -> None:
    with pytest.raises(mtcompile.CaptureError, match="isnan"):
        compiled_whole(Unsupported())(torch.randn(4, 8))


def fused(x: torch.Tensor) -> torch.Tensor:
    a, b, c = x.unbind(1)
    total = torch.addcdiv(a, b, c, value=0.3) + torch.addcmul(a, b, c, value=0.3)
    return total + (a * 1).addcmul_(b, c, value=0.7) + (a * 1).addcdiv_(b, c, value=0.7)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(200, 3) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused(self.weight * x).sum()


def test_calls_that_dynamo_would_rewrite() -> None:
    torch.manual_seed(0)
    assert_plain(Fused(), torch.rand(200, 3) + 1)


def test_mamba() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 96, "state_size": 8, "time_step_rank": 4}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, use_cache=False)).train()
    assert_plain(Losing(model), torch.randint(0, 96, (2, 16)))


class Losing(nn.Module):
    """The loss of a language model on its own input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss
