"""torch.utils.checkpoint in a forward: it trains as in a plain run, or is refused where a plain run does in the backward what a
compiled one does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mtcompile
from tests.helpers.training import equal_to_plain

pytestmark = pytest.mark.slow  # it compiles many models


class Model(nn.Module):
    def __init__(self, within: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inner, self.within = nn.Linear(6, 6), nn.Linear(6, 6), within
        self.dropout, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(6)
        self.register_buffer("count", torch.zeros(()))
        self.state = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.within(self, self.first(x), x).pow(2).sum()


def again(function: Callable[..., Tensor], *args: Tensor, use_reentrant: bool = False, **options: bool) -> Tensor:
    return checkpoint(function, *args, use_reentrant=use_reentrant, **options)  # type: ignore[no-any-return]


def unrestored(function: Callable[..., Tensor], *args: Tensor, **options: bool) -> Tensor:
    return again(function, *args, preserve_rng_state=False, **options)


def normed_alone(model: Any, z: Tensor) -> Tensor:
    return F.batch_norm(z, model.norm.running_mean, model.norm.running_var, training=True)


def part_of_state(model: Any, z: Tensor) -> Tensor:
    model.state[1:].add_(1)
    return z * model.state


def without_grad(model: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        return again(model.norm, h)


def under_autocast(model: Any, h: Tensor) -> Tensor:
    def attends(z: Tensor) -> Tensor:  # autocast makes one dtype of these two
        return F.scaled_dot_product_attention(z[None], z[None], model.inner(z)[None].bfloat16())[0]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        return again(attends, h.float()).float()


CHANGES: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "batch norm": (lambda m, h, x: again(m.norm, h), "the buffer norm.num_batches_tracked,"),
    "its function": (lambda m, h, x: again(lambda z: normed_alone(m, z), h), "the buffer norm.running_mean,"),
    "a counter": (lambda m, h, x: again(lambda z: z * m.count.add_(1), h), "the buffer count,"),
    "part of an attribute": (lambda m, h, x: again(lambda z: part_of_state(m, z), h), "state,"),
    "an input": (lambda m, h, x: again(lambda z: m.inner(z) + x.add_(1), h), "of kwargs_x,"),
    "a value": (lambda m, h, x: again(lambda z: m.inner(z.add_(1)), h), "a tensor that is computed outside of it,"),
    "within another": (lambda m, h, x: again(lambda z: again(m.norm, m.inner(z)), h), "the buffer norm.num_batches_tracked,"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_in_place_that_a_plain_run_makes_twice_is_refused(kind: str) -> None:
    within, changed = CHANGES[kind]
    x = torch.ones(5, 6)
    model = Model(within)
    with pytest.raises(mtcompile.CaptureError, match=rf"(?s){changed} .*test_checkpoints\.py:.*remove the checkpoint"):
        mtcompile.compile(model, memory="1GiB")(x=x)
    assert not model.count and not model.state.any() and not model.norm.num_batches_tracked and bool((x == 1).all())


DRAWS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "dropout": lambda m, h, x: unrestored(lambda z: m.inner(m.dropout(z)), h),
    "reentrant": lambda m, h, x: unrestored(lambda z: m.inner(m.dropout(z)), h, use_reentrant=True),
    "noise": lambda m, h, x: unrestored(lambda z: m.inner(z * torch.rand_like(z)), h),
    "in attention": lambda m, h, x: unrestored(lambda z: F.scaled_dot_product_attention(z, z, z, dropout_p=0.5), h[None, None]),
    "around another": lambda m, h, x: unrestored(lambda z: again(lambda y: m.inner(m.dropout(y)), z).tanh(), h),
    "within another": lambda m, h, x: again(lambda z: unrestored(lambda y: m.inner(m.dropout(y)), z).tanh(), h),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_random_numbers_that_a_plain_run_draws_anew_are_refused(kind: str) -> None:
    with pytest.raises(mtcompile.CaptureError, match=r"(?s)others in the backward.*test_checkpoints\.py:.*preserve_rng_state"):
        mtcompile.compile(Model(DRAWS[kind]), memory="1GiB")(x=torch.ones(5, 6))


AS_IN_A_PLAIN_RUN: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "dropout": lambda m, h, x: again(lambda z: m.inner(m.dropout(z)), h),
    "reentrant": lambda m, h, x: again(lambda z: m.inner(m.dropout(z)), h, use_reentrant=True),
    "a change of its own value": lambda m, h, x: again(lambda z: m.inner(z).tanh().mul(2).add_(1), h),
    "statistics that are only read": lambda m, h, x: again(lambda z: F.batch_norm(z, m.state, m.state + 1), h),
    "where no gradient flows": lambda m, h, x: h + without_grad(m, h),
    "no draw": lambda m, h, x: unrestored(lambda z: F.dropout(m.inner(z), 0.3, training=False), h),
    "one within another": lambda m, h, x: again(lambda z: again(m.inner, z).tanh(), h),
}


@pytest.mark.parametrize("kind", AS_IN_A_PLAIN_RUN)
def test_others_train_as_in_a_plain_run(kind: str) -> None:
    torch.manual_seed(0)
    assert equal_to_plain(Model(AS_IN_A_PLAIN_RUN[kind]), {"x": torch.randn(5, 6)})


def test_without_gradients_a_buffer_is_changed_once() -> None:
    torch.manual_seed(0)
    model = Model(CHANGES["batch norm"][0])
    with torch.no_grad():
        mtcompile.compile(model, memory="1GiB")(torch.randn(5, 6))
    assert model.norm.num_batches_tracked == 1


def attribute(model: Any, x: Tensor) -> Tensor:
    return model.inner(x).tanh()  # type: ignore[no-any-return]


NO_GRADIENTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "an input": lambda m, h, x: h + again(lambda z: attribute(m, z), x, use_reentrant=True),
    "by default": lambda m, h, x: h + checkpoint(lambda z: attribute(m, z), x),
    "in a tuple": lambda m, h, x: h + again(lambda z: attribute(m, z[0]), (h,), use_reentrant=True),  # type: ignore[arg-type]
    "used in it": lambda m, h, x: again(lambda z: attribute(m, h + z), x, use_reentrant=True),
}


@pytest.mark.parametrize("kind", NO_GRADIENTS)
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_stops_gradients_is_refused(kind: str) -> None:
    with pytest.raises(mtcompile.CaptureError, match=r"(?s)requires grad, .*test_checkpoints\.py:.*pass use_reentrant=False"):
        mtcompile.compile(Model(NO_GRADIENTS[kind]), memory="1GiB")(torch.ones(5, 6))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("refused", "words"), [(CHANGES["batch norm"][0], "change in"), (NO_GRADIENTS["an input"], "no tensor")]
)
def test_the_backend_refuses_them_too(refused: Callable[..., Tensor], words: str) -> None:
    torch.compiler.reset()
    with pytest.raises(BackendCompilerFailed, match=rf"CaptureError: .*{words}"):
        torch.compile(Model(refused), backend="mtcompile", fullgraph=True)(torch.ones(5, 6))


GRADIENTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "one argument of two": lambda m, h, x: again(lambda z, y: attribute(m, z * y), x, h, use_reentrant=True),
    "a parameter": lambda m, h, x: h + again(lambda z, w: F.linear(z, w), x, m.inner.weight, use_reentrant=True),
    "nothing trained": lambda m, h, x: h + again(torch.tanh, x, use_reentrant=True),
    "not reentrant": lambda m, h, x: h + again(lambda z: attribute(m, z), x),
    "under autocast": lambda m, h, x: under_autocast(m, h),
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_passes_gradients_trains(kind: str) -> None:
    torch.manual_seed(0)
    assert equal_to_plain(Model(GRADIENTS[kind]), {"x": torch.randn(5, 6)})


@pytest.mark.filterwarnings("ignore")
def test_without_gradients_none_are_stopped() -> None:
    torch.manual_seed(0)
    model, x = Model(NO_GRADIENTS["an input"]), torch.randn(5, 6)
    with torch.no_grad():
        assert torch.equal(mtcompile.compile(model, memory="1GiB")(x), model(x))
