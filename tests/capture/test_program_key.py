"""An equal model is traced once in a process, and anew after any setting that a trace depends on has changed."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mtcompile
from mtcompile import compiler, torch_private
from mtcompile.cached.remembered import Remembered
from mtcompile.capture.joint import joint_graph


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """An entry per trace; nothing is remembered at first."""
    monkeypatch.setenv("MT_CACHE", str(tmp_path))
    if torch_private.settings_of_traces(torch.device("cpu")) is None:
        pytest.skip("a test before has left functions of torch's replaced or implemented: nothing is remembered then")
    traces: list[int] = []
    monkeypatch.setattr(compiler, "joint_graph", lambda *args: (traces.append(1), joint_graph(*args))[1])
    return traces


class Attention(nn.Module):
    """Attention in bf16 with a mask, whose plain kernel may sum in 16 bits; sums, norms and products beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(*size)) for size in ((32, 4), (4, 32), (32, 2)))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 8, 3, 2, 16).permute(2, 0, 3, 1, 4).bfloat16()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)
        y = self.norm(self.out(y.float().transpose(1, 2).reshape(2, 8, 32)))
        rows = torch.einsum("nd,dr,re,eo->no", y.flatten(0, 1), self.a, self.b, self.c)
        return (
            torch.square(rows).mean()
            + y.sinc().mean()
            + F.pad(y, (2, 2), mode="reflect").sum() * torch.ones(()).double().float()
        )


X, MASK = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0)), torch.ones(8, 8, dtype=torch.bool).tril()


def results(model: nn.Module) -> list[Tensor]:
    """The loss, the gradients, and where the generator is then."""
    torch.manual_seed(1)
    loss = model(X, MASK)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), torch.get_rng_state()]


def is_plain(model: nn.Module) -> bool:
    ours = mtcompile.compile(copy.deepcopy(model), memory="64MiB", device="cpu")
    return all(map(torch.equal, results(copy.deepcopy(model)), results(ours)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Attention()


def test_an_equal_model_is_traced_once_whatever_its_budget(traced: list[int], model: nn.Module) -> None:
    expected = results(copy.deepcopy(model))
    for memory in ("64MiB", "100KiB", "64MiB"):
        ours = mtcompile.compile(copy.deepcopy(model), memory=memory, device="cpu")
        assert all(map(torch.equal, expected, results(ours)))
    assert len(traced) == 1


def test_an_equal_model_is_traced_once_where_vmap_was_called(traced: list[int], model: nn.Module) -> None:
    """At its first call, torch implements some of its operations for it."""
    torch.vmap(torch.sin)(torch.zeros(2, 2))
    assert is_plain(model) and is_plain(model) and len(traced) == 1


def test_nothing_is_remembered_where_there_is_no_cache(
    traced: list[int], model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MT_CACHE", "0")
    assert is_plain(model) and is_plain(model) and len(traced) == 2


@contextlib.contextmanager
def changed(get: Callable[[], Any], change: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    change(value)
    try:
        yield
    finally:
        change(before)


@contextlib.contextmanager
def implemented(operation: str, key: str, call: Callable[..., Any]) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl(operation, call, key, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def replaced(owner: Any, name: str, value: Any) -> Any:
    return mock.patch.object(owner, name, value)  # which leaves no copy behind of what a class inherits


_sdp, _einsum = torch.backends.cuda, torch.backends.opt_einsum
SETTINGS: dict[str, Callable[[], Any]] = {
    "sums in 16 bits": lambda: changed(
        _sdp.fp16_bf16_reduction_math_sdp_allowed, _sdp.allow_fp16_bf16_reduction_math_sdp, True
    ),
    "no flash attention": lambda: changed(_sdp.flash_sdp_enabled, _sdp.enable_flash_sdp, False),
    **({"no opt_einsum": lambda: replaced(_einsum, "enabled", False)} if _einsum.is_available() else {}),
    "deterministic": lambda: changed(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "precision": lambda: changed(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "default dtype": lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "two threads": lambda: changed(torch.get_num_threads, torch.set_num_threads, 2),
    "anomalies": lambda: torch.autograd.detect_anomaly(check_nan=False),
}
BY_THE_USER: dict[str, Callable[[], Any]] = {
    "an operation": lambda: implemented("square", "CompositeImplicitAutograd", lambda x: x * 3),
    "the same line, other code": lambda: implemented("square", "CompositeImplicitAutograd", lambda x: x * 5),
    "a cast": lambda: implemented("square", "AutocastCPU", lambda x: x.double().mul(3).float()),
    "a function": lambda: replaced(torch, "square", lambda x: x * 7),
    "a function that another calls": lambda: replaced(torch, "layer_norm", lambda x, *_: x * 2),
    "a method": lambda: replaced(torch.Tensor, "sinc", lambda x: x * 4),
}


def some_long(names: Iterable[str], *always: str) -> list[Any]:
    """All names; those not in ``always`` are tried in make long."""
    return [pytest.param(name, marks=() if name in always else pytest.mark.long) for name in names]


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Please use the new API settings")
@pytest.mark.parametrize("setting", some_long(SETTINGS, "deterministic", "autocast"))
def test_a_changed_setting_has_a_trace_of_its_own(setting: str, traced: list[int], model: nn.Module) -> None:
    assert is_plain(model)
    with SETTINGS[setting]():
        assert is_plain(model)
        count = len(traced)  # under autocast, the backward is another
        assert is_plain(model) and len(traced) == count > 1
    assert is_plain(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", some_long(BY_THE_USER, "a cast", "a function"))
def test_what_the_user_has_changed_in_torch_is_never_remembered(what: str, traced: list[int], model: nn.Module) -> None:
    assert is_plain(model)
    for _ in range(2):
        before = len(traced)
        with BY_THE_USER[what](), torch.autocast("cpu", dtype=torch.bfloat16, enabled=what == "a cast"):
            assert is_plain(model) and len(traced) > before


def test_a_precision_that_torch_no_longer_tells_in_the_old_way_raises_nothing(traced: list[int], model: nn.Module) -> None:
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with changed(lambda: matmul.fp32_precision, lambda new: setattr(matmul, "fp32_precision", new), "bf16"):
        assert is_plain(model)
    assert is_plain(model) and len(traced) == 2


class Held(nn.Module):
    """Reads a small tensor that is no buffer; calls what the user has written."""

    def __init__(self, scale: float, call: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale, self.call = nn.Linear(4, 4), torch.tensor([scale, 1.0, 2.0, 3.0]), call

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return (
            self.call(self.linear(x[0, :, :4])) * self.scale + torch.tensor([1.0, float("inf"), -0.0, 2.0]).neg().exp()
        ).sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3


class OtherBackward(Doubled):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 5


def test_models_that_call_something_else_share_nothing(traced: list[int]) -> None:
    """What a model holds is an input: models that differ in that alone are traced once."""
    for held, count in ((Held(1.0), 1), (Held(2.0), 1), (Held(1.0, torch.sin), 2), (Held(1.0, Doubled.apply), 3)):
        assert is_plain(held) and len(traced) == count
    assert is_plain(Held(1.0, Doubled.apply)) and len(traced) == 3
    assert is_plain(Held(1.0, OtherBackward.apply)) and len(traced) == 4


def test_a_model_is_free_when_its_user_lets_it_go(traced: list[int], model: nn.Module) -> None:
    ours = mtcompile.compile(copy.deepcopy(model), memory="64MiB", device="cpu")
    results(ours)
    alive, weight = weakref.ref(ours), weakref.ref(next(ours.parameters()))
    del ours
    torch.compiler.reset()
    gc.collect()
    assert alive() is None and weight() is None and len(traced) == 1


def test_those_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MT_CACHE", str(tmp_path / "one"))
    texts = Remembered[str](10, len)
    for key in ("a", "b"):
        texts.put(key, key * 4)
    texts.put(None, "nothing")
    assert texts.get("a") == "aaaa" and texts.get(None) is None
    texts.put("c", "cccc")
    assert (texts.get("a"), texts.get("b"), texts.get("c")) == ("aaaa", None, "cccc")
    texts.put("d", "d" * 11)  # more than there is room for
    assert not any(map(texts.get, "abcd"))
    texts.put("e", "e")
    for folder in ("two", "0"):
        monkeypatch.setenv("MT_CACHE", folder)
        assert texts.get("e") is None


IN_A_PROCESS = """
import hashlib, sys
import torch
if sys.argv[1] == "patched":
    square = torch.square
    torch.square = lambda x: square(x) * 3
import mtcompile
from mtcompile import compiler
from mtcompile.capture import joint

traces = []
compiler.joint_graph = lambda *args: (traces.append(1), joint.joint_graph(*args))[1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU())
ours = mtcompile.compile(model, memory="1MiB", device="cpu")
loss = ours(torch.ones(4, 8)).square().mean()
loss.backward()
bits = b"".join(p.grad.numpy().tobytes() for p in ours.parameters())
print(len(traces), hashlib.sha256(bits).hexdigest())
"""


@pytest.mark.slow
def test_a_second_process_traces_nothing_unless_it_patches_torch_first(tmp_path: Path) -> None:
    def run(how: str, seed: str) -> list[str]:
        environment = {**os.environ, "MT_CACHE": str(tmp_path), "PYTHONHASHSEED": seed}
        return subprocess.check_output([sys.executable, "-c", IN_A_PROCESS, how], env=environment, text=True).split()

    (first, bits), (second, again), (patched, of_patched) = run("plain", "1"), run("plain", "2"), run("patched", "3")
    assert (first, second, patched) == ("1", "0", "1")
    assert bits == again == of_patched
