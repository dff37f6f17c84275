"""A setting of torch's that changes between two calls changes what a compiled model computes, as it does plainly."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import mtcompile
from mtcompile.capture.joint import trace_settings

CPU = torch.device("cpu")


class Block(nn.Module):
    """Attention in bf16 by the plain backend, and a square, which torch composes of other operations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.project(x).bfloat16().unsqueeze(1)
        with sdpa_kernel(SDPBackend.MATH):
            x = x + F.scaled_dot_product_attention(q, q, q).float().squeeze(1)
        return x.square().mean()


def results(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def compare(settings: list[Callable[[], object]]) -> None:
    """Changes a setting, and compares plain results with those of a model that was compiled before and of one that is new."""
    plain, x = Block(), torch.randn(4, 16, 32)
    earlier: Any = mtcompile.compile(copy.deepcopy(plain), memory="1GiB")
    losses = set()
    for change in settings:
        change()
        expected = results(plain, x)
        losses.add(float(expected[0]))
        for compiled in (earlier, mtcompile.compile(copy.deepcopy(plain), memory="1GiB")):
            assert all(map(torch.equal, results(compiled, x), expected))
    assert len(losses) > 1, "the settings change nothing"


@pytest.fixture
def reduction() -> Iterator[Callable[[bool], None]]:
    yield torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


def test_attention_that_adds_in_16_bits(reduction: Callable[[bool], None]) -> None:
    compare([lambda: reduction(False), lambda: reduction(True), lambda: reduction(False)])


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_operations_of_torch_that_the_user_implements() -> None:
    libraries: list[Any] = []

    def leave_out() -> None:
        while libraries:
            libraries.pop()._destroy()

    def cube() -> None:
        leave_out()
        libraries.append(torch.library.Library("aten", "IMPL"))
        libraries[-1].impl("square", lambda x: x * x * x, "CompositeImplicitAutograd")

    def double() -> None:
        leave_out()
        libraries.append(torch.library.Library("aten", "IMPL"))
        libraries[-1].impl("square", lambda x: x * 2, "CompositeImplicitAutograd")

    try:
        compare([leave_out, cube, double, leave_out])
    finally:
        leave_out()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_gradients_of_the_user_s_for_torch_s_operations_are_refused() -> None:
    """Tracing goes past them: other numbers, without a word."""
    plain, x = nn.Linear(4, 4), torch.ones(2, 4)
    model = mtcompile.compile(nn.Linear(4, 4), memory="1MiB")
    model.load_state_dict(plain.state_dict())
    model(x).square().sum().backward()
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("gelu", lambda x, approximate="none": x * 2, "AutogradCPU")
        with pytest.raises(
            mtcompile.CaptureError, match=r"found an implementation for autograd by torch\.library: aten/gelu/Aut"
        ):
            model(x)
    finally:
        library._destroy()
    model(x).square().sum().backward()
    for _ in range(2):
        plain(x).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_the_newer_precisions_are_read() -> None:
    """Once one is set, torch refuses to tell the older ones."""
    products = torch.backends.mkldnn.matmul
    before, first = products.fp32_precision, trace_settings(CPU)
    try:
        products.fp32_precision = "bf16"
        assert trace_settings(CPU) != first
    finally:
        products.fp32_precision = before
    assert trace_settings(CPU) == first


def test_a_call_that_is_captured_goes_past_what_a_capture_needs_unless_a_stance_asks() -> None:
    """The name of torch's function through which a call is captured, among those that each call enters."""
    model, x = mtcompile.compile(nn.Linear(4, 1), memory="1MiB"), torch.randn(2, 4)

    def entered() -> bool:
        names = set[str]()
        sys.setprofile(lambda frame, event, _: names.add(frame.f_code.co_name))
        try:
            model(x)
        finally:
            sys.setprofile(None)
        assert "call" in names
        return "compile_wrapper" in names

    assert [entered() for _ in range(3)] == [True, False, False]
    with torch.compiler.set_stance("eager_on_recompile"):
        assert entered()
    assert not entered()
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None).remove()
    assert not entered()
    model.bias.requires_grad_(False)
    assert [entered() for _ in range(2)] == [True, False]
