"""Random numbers in forward: torch's default generator gives those of a plain run; every other source is refused, before
anything ran, with the user's line."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import mtcompile
from mtcompile import torch_private
from tests.helpers.training import equal_to_plain

pytestmark = pytest.mark.slow  # it compiles many models

GENERATOR = torch.Generator()


class Model(nn.Module):
    def __init__(self, draw: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw
        self.random, self.generator = random.Random(3), torch.Generator()
        self.numpy, self.numpy_generator = numpy.random.RandomState(0), numpy.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(self, self.linear(x)).pow(2).sum()


def forked(model: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return h * torch.rand(8)


def seeded(model: Any, h: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return h * torch.rand(8)


def reseeded(model: Any, h: torch.Tensor) -> torch.Tensor:
    torch.seed()
    return h * torch.rand(8)


def put_back(model: Any, h: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    h = h * torch.rand(8)
    torch.set_rng_state(state)
    return h


def only_drawn(model: Any, h: torch.Tensor) -> torch.Tensor:
    model.random.random()
    return h


REFUSED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "fork_rng": forked,
    "manual_seed": seeded,
    "seed": reseeded,
    "set_rng_state": put_back,
    "own generator": lambda model, h: h * torch.rand(8, generator=model.generator),
    "own generator in place": lambda model, h: h * torch.empty(8).normal_(generator=model.generator),
    "global generator": lambda model, h: h * torch.rand(8, generator=GENERATOR),
    "python": lambda model, h: h * random.random(),
    "python int": lambda model, h: h * random.randint(1, 5),
    "python float": lambda model, h: h * random.uniform(1, 5),
    "python branch": lambda model, h: h * 2 if random.random() < 0.5 else h,
    "python choice": lambda model, h: h * random.choice([1.0, 2.0]),
    "own python": lambda model, h: h * model.random.random(),
    "own python int": lambda model, h: h * model.random.randint(1, 5),
    "own python, not used": only_drawn,
    "made in forward": lambda model, h: h * random.Random().random(),
    "numpy": lambda model, h: h * torch.from_numpy(numpy.random.rand(8)).float(),
    "numpy scalar": lambda model, h: h * numpy.random.rand(),
    "numpy permutation": lambda model, h: h[numpy.random.permutation(4)],
    "own numpy": lambda model, h: h * model.numpy.rand(),
    "numpy generator": lambda model, h: h * torch.from_numpy(model.numpy_generator.random(8)).float(),
}


def states(model: Any) -> list[Any]:
    own = [model.random.getstate(), model.generator.get_state().tolist(), str(model.numpy.get_state())]
    shared = [random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state()), GENERATOR.get_state().tolist()]
    return [*own, *shared, model.numpy_generator.bit_generator.state]


@pytest.mark.parametrize("source", REFUSED)
def test_any_other_source_is_refused_before_it_is_read(source: str) -> None:
    model = Model(REFUSED[source])
    before = states(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = mtcompile.compile(model, memory="1GiB", optimizer=optimizer, update="backward")  # not in parts
    with pytest.raises(mtcompile.CaptureError, match=r"\n  at .*test_random.py:\d+ in ") as refusal:
        compiled(torch.ones(4, 8))
    assert "expected random numbers from torch's default generator" in str(refusal.value)
    assert states(model) == before


@pytest.mark.parametrize("source", REFUSED)
@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")
def test_in_parts_any_other_source_is_read_as_in_a_plain_run_or_refused(source: str) -> None:
    def run(model: Any) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        GENERATOR.manual_seed(0)
        losses = [float(model(torch.ones(4, 8) * count)) for count in range(1, 4)]
        return [*losses, *states(model)]

    torch.manual_seed(1)
    plain = Model(REFUSED[source])
    torch.manual_seed(1)
    compiled = mtcompile.compile(Model(REFUSED[source]), memory="1GiB")
    try:
        actual = run(compiled)
    except mtcompile.CaptureError as refusal:
        assert "expected random numbers from torch's default generator" in str(refusal)
    else:
        assert actual == run(plain)


@pytest.mark.filterwarnings("ignore:the forward is compiled in parts")
def test_a_part_without_inputs_is_remembered_for_the_next_model() -> None:
    values = []
    for _ in range(2):
        torch.manual_seed(1)
        model: Any = mtcompile.compile(Model(REFUSED["own generator in place"]), memory="1GiB", device="cpu")
        values.append(float(model(torch.ones(4, 8))))
    assert values[0] == values[1]


@pytest.mark.parametrize("policy", ["fastest", "checkpoint-all"])
def test_every_way_to_draw_from_the_default_generator_is_a_plain_runs(policy: str) -> None:
    class Draws(Model):
        """Every factory, with and without device=, in layers that are computed again."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(self.linear(x))
                x = x * torch.rand((4, 1), dtype=x.dtype, device=x.device) + torch.randn(8, device=x.device)
                x = x * torch.bernoulli(torch.full((8,), 0.5)) + torch.randint(0, 3, (8,), device=x.device)
                x = x[torch.randperm(4, device=x.device)] * torch.rand_like(x) * torch.empty(8).uniform_(1, 2)
                x = x + torch.distributions.Normal(x, 1.0).rsample() + torch.multinomial(torch.ones(9), 8)
            return x.pow(2).mean()

    assert equal_to_plain(Draws(lambda model, h: h), {"x": torch.ones(4, 8)}, policy=policy)


class DrawsInVain(nn.Module):
    """Draws random numbers that nothing reads, as a last layer does whose second output nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.beside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.beside(nn.functional.dropout(h, 0.5))
        torch.rand(3)
        torch.multinomial(h.softmax(-1), 2)
        nn.functional.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.3)
        h = h + nn.functional.dropout(h, 1.0)  # draws none
        return torch.tanh(nn.functional.dropout(h, 0.2))


@pytest.mark.parametrize(
    "policy", ["checkpoint-all", *(pytest.param(p, marks=pytest.mark.long) for p in ("resident", "offload-all"))]
)
@pytest.mark.parametrize("autocast", [False, True])
def test_numbers_that_nothing_reads_are_drawn_too(policy: str, autocast: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(DrawsInVain() for _ in range(3)))
    compiled = mtcompile.compile(copy.deepcopy(plain), memory="1GiB", policy=policy)
    results = []
    for model in (plain, compiled):
        torch.manual_seed(7)
        losses = []
        for training in (True, False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), torch.set_grad_enabled(training):
                losses.append(model(torch.ones(4, 8)).float().pow(2).sum())
            if training:
                losses[-1].backward()
        gradients = [p.grad for p in model.parameters()]
        results.append([torch.get_rng_state(), *losses, *(grad for grad in gradients if grad is not None)])
    assert len(results[0]) == len(results[1]) == 4 + 6
    assert all(map(torch.equal, *results))


def test_dynamo_may_draw_python_numbers_elsewhere() -> None:
    """The refusal ends with the capture, and is of the capturing thread alone."""
    with torch_private.refusing_random_numbers("not here"):
        pass
    torch.compiler.reset()
    drawn = torch.compile(lambda x: x * random.randint(3, 3), backend="eager", fullgraph=True)(torch.ones(2))
    assert torch.equal(drawn, torch.full((2,), 3.0))
