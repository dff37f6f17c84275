"""A forward that cannot be captured whole is compiled in parts, between the lines that Python runs."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from tests.helpers.training import adamw, same, train

WIDTH = 32


class Block(nn.Module):
    """``breaks``: it looks at its own values."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop, self.breaks = nn.Dropout(0.1), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.wide(x))
        if self.breaks and hidden.mean().item() > 0:
            hidden = hidden * 2
        return x + self.drop(self.narrow(hidden))


class Glue(nn.Module):
    """Two breaks in the glue, and one inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(breaks=i == 1) for i in range(3))
        self.means: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if x.sum() > 0:
            x = x * 1.5
        x = self.blocks[1](x)
        self.means.append(x.mean().item())
        return self.blocks[2](x).square().mean()


class Looping(nn.Module):
    """A loop that may end early."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if x.abs().max().item() > 1e3:
                break
        return x.square().mean()


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(WIDTH, WIDTH), torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + torch.randn(x.shape, generator=self.generator)).square().mean()


class Scripted(nn.Module):
    """A part whose parameters only Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.scripted(x)).square().mean()


KINDS = (Glue, Looping, OwnGenerator, Scripted)


def batches(count: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(16, WIDTH, generator=generator) for _ in range(count)]


def trained(model: nn.Module, options: dict[str, Any] | None) -> list[list[torch.Tensor | None]]:
    optimizer = adamw(model.parameters())
    if options is not None:
        mtcompile.compile(model, optimizer=optimizer, **options)
    return [row for x in batches() for row in train(model, optimizer, {"x": x}, steps=1)]


def plain(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [OwnGenerator, *(pytest.param(kind, marks=pytest.mark.long) for kind in (Glue, Looping, Scripted))]
)
@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")
def test_bits_are_equal_at_three_budgets(kind: type[nn.Module]) -> None:
    expected, least = trained(plain(kind), None), 1
    while True:  # the errors name what is needed, part by part
        try:
            trained(plain(kind), {"memory": least})
            break
        except mtcompile.BudgetError as error:
            assert error.minimum_bytes > least
            least = error.minimum_bytes
    for memory in (1 << 30, 2 * least, least):
        model = plain(kind)
        assert same(expected, trained(model, {"memory": memory})), f"at {memory} bytes, {least} of which are needed"
        report = model.memory_report()  # type: ignore[operator]
        assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= memory


def test_each_break_is_named_once() -> None:
    model = plain(Glue)
    mtcompile.compile(model, memory="1GiB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in batches():
            model(x).backward()
    texts = [str(each.message) for each in caught if "compiled in parts" in str(each.message)]
    lines = ("if x.sum() > 0:", "self.means.append(x.mean().item())", "if self.breaks and hidden.mean().item() > 0:")
    assert [sum(line in text for text in texts) for line in lines] == [1, 1, 1], texts
    assert all("holds\n  at " in text and "results stay the same" not in text for text in texts)
    assert len(model.means) == len(batches())


class Spread(nn.Module):
    """Uses what one part makes, and a parameter, several times in other parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = torch.tanh(self.first(x))
        if early.sum() > 1e9:
            early = early * 2
        middle = early.exp() + early.sin() * self.twice(self.twice(early))
        if middle.sum() > 1e9:
            middle = middle * 2
        return (self.last(middle) + early.cos() * self.twice(middle)).square().mean()


@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")
def test_the_plan_says_what_holds_for_all_parts() -> None:
    torch.manual_seed(0)
    expected, x = Spread(), torch.randn(16, WIDTH)
    model = mtcompile.compile(copy.deepcopy(expected), memory="1GiB")
    for each in (expected, model):
        each(x).backward()
    differing = {name for name, p in expected.named_parameters() if not torch.equal(p.grad, model.get_parameter(name).grad)}
    assert differing and differing <= {"first.weight", "first.bias", "twice.weight", "twice.bias"}
    numerics = model.plan.numerics
    assert numerics.count("bit-equal to plain PyTorch") == numerics.count("twice.weight (2 uses)") == 1
    assert "the gradient of early (3 uses) and of what it was computed from" in numerics
    assert "in parts, 3 of them" in str(model.plan) and numerics in str(model.plan)
    assert model.explain("first.weight").values  # which the last part does not read


@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")
def test_parts_are_compiled_after_a_call_that_an_interrupt_left_half_ended() -> None:
    from torch._C._dynamo import eval_frame

    count = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)
    if count is None:
        pytest.skip("this torch counts no frames")
    count(0)  # as between two lines of torch.compile's wrapper, at which no exception is expected
    try:
        model = plain(OwnGenerator)
        mtcompile.compile(model, memory="1GiB")
        model(batches()[0]).backward()
        assert model.memory_report()["peak_device_bytes"]  # type: ignore[operator]
    finally:
        count(-1)


@pytest.mark.parametrize("options", [{"update": "backward"}, {"accumulate": 2}], ids=str)
def test_what_needs_the_whole_step_refuses_parts(options: dict[str, Any]) -> None:
    model = plain(Glue)
    weights = copy.deepcopy(list(model.parameters()))
    mtcompile.compile(model, memory="1GiB", optimizer=adamw(model.parameters()), **options)
    with pytest.raises(mtcompile.CaptureError, match=r"tensors hold|data-dependent"):
        model(batches(1)[0])
    assert all(map(torch.equal, weights, model.parameters()))


class Absent(torch.autograd.Function):
    """Its backward tells whether its second output has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gradient = torch.zeros_like(x) if first is None else first * 2
        return gradient if second is None else gradient + second * 3 + x


@pytest.mark.parametrize("used", [1, 2])
@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")
def test_an_output_without_a_gradient_is_none_in_the_backward_of_a_function(used: int) -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(output.sum() for output in Absent.apply(super().forward(x))[:used])  # type: ignore[return-value]

    torch.manual_seed(0)
    plain, x = Model(4, 4), torch.randn(3, 4)
    compiled = mtcompile.compile(copy.deepcopy(plain), memory="1MiB")
    for model in (plain, compiled):
        model(x).backward()
    assert torch.equal(compiled.weight.grad, plain.weight.grad)
