"""A fault before and after each layer of calls without gradients, and of generation: the model is as it was."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import mtcompile
from mtcompile.runtime.devices.fetching import CpuFetcher

pytestmark = pytest.mark.slow  # generation of a whole model


class Injected(RuntimeError):
    """A fault."""


@contextlib.contextmanager
def failing_at(count: int) -> Iterator[list[int]]:
    """Fails at the ``count``-th beginning or end of a linear layer from now on. Yields how many there were."""
    seen, forward = [0], nn.Linear.forward

    def instant() -> None:
        seen[0] += 1
        if seen[0] == count:
            raise Injected("at a layer")

    def failing(layer: nn.Linear, x: Tensor) -> Tensor:
        instant()
        result = forward(layer, x)
        instant()
        return result

    nn.Linear.forward = failing  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        nn.Linear.forward = forward  # type: ignore[method-assign]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


def check(model: Any, call: Callable[[Any], Tensor], expected: Tensor, instants: int) -> None:
    """Lets calls fail at ``instants`` places."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with failing_at(-1) as seen:
        assert torch.equal(call(model), expected)
    assert seen[0] >= 8
    for instant in range(1, seen[0] + 1, -(-seen[0] // instants)):
        with pytest.raises(Injected), failing_at(instant):
            call(model)
        assert not any(thread.name.startswith("mtcompile") for thread in threading.enumerate())
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(type(module._parameters) is dict for module in model.modules())  # nothing is lent any more
        assert torch.equal(call(model), expected)


def test_calls_without_gradients() -> None:
    plain, x = Small().eval(), torch.linspace(-1, 1, 64).view(2, 32)

    def call(model: Any) -> Tensor:
        with torch.no_grad():
            return model(x)  # type: ignore[no-any-return]

    expected = call(plain)
    check(mtcompile.compile(Small().eval(), memory="12KiB"), call, expected, 8)


def test_a_fetch_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x, fetch, fetches = Small().eval(), torch.linspace(-1, 1, 64).view(2, 32), CpuFetcher.fetch, [0]
    model: Any = mtcompile.compile(Small().eval(), memory="12KiB")
    with torch.no_grad():
        expected = plain(x)
        for fails_at in range(1, 9):
            fetches[0] = 0

            def failing(fetcher: CpuFetcher, source: Tensor, fails_at: int = fails_at) -> Any:
                fetches[0] += 1
                if fetches[0] == fails_at:
                    raise Injected("a fetch")
                return fetch(fetcher, source)

            with monkeypatch.context() as patched, pytest.raises(Injected):
                patched.setattr(CpuFetcher, "fetch", failing)
                model(x)
            assert torch.equal(model(x), expected)
    assert not any(thread.name.startswith("mtcompile") for thread in threading.enumerate())


@pytest.mark.parametrize("instants", [4, pytest.param(100, marks=pytest.mark.long)])
def test_generation(instants: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=128
    )
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    model = mtcompile.compile(copy.deepcopy(plain), memory="160KiB")

    def call(model: Any) -> Tensor:
        prompt = torch.arange(1, 6)[None]
        return model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)  # type: ignore[no-any-return]

    check(model, call, call(plain), instants)
