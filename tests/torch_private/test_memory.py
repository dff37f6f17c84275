"""What torch keeps of a capture goes with it, so that a process that compiles one model after another does not grow."""

from __future__ import annotations

import contextvars
import gc
import linecache
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import eval_frame, guards
from torch._dynamo.utils import get_metrics_context
from torch.fx import graph_module

import mtcompile
from mtcompile import torch_private
from mtcompile.capture.dynamo import front_end

_KINDS = (guards.CheckFunctionManager, guards.GuardManagerWrapper, fx.GraphModule, weakref.finalize)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def life(make: Callable[[], nn.Module]) -> None:
    """A model is compiled, trained at two lengths, evaluated, and dropped."""
    model: Any = make()
    optimizer = torch.optim.AdamW(model.parameters())
    mtcompile.compile(model, optimizer=optimizer, memory="1MiB", device="cpu")
    for length in (2, 3):
        model(torch.randn(length, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(2, 8))


def held() -> Counter[str]:
    """How much the process holds of what torch makes for a capture."""
    gc.collect()
    counts = Counter[str]()
    for each in gc.get_objects():
        counts.update(kind.__name__ for kind in _KINDS if isinstance(each, kind))
    counts["stacks of measures"] = len(get_metrics_context()._edits)
    counts["backends"] = len(eval_frame.cached_backends)
    counts["sources"] = sum(name.startswith("<eval_with_key>") for name in linecache.cache)
    return counts


@pytest.mark.parametrize("make", [Net, lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
def test_models_that_have_died_leave_nothing_with_torch(make: Callable[[], nn.Module]) -> None:
    life(make)  # what stays once for all
    before = held()
    for _ in range(2):
        life(make)
    assert held() - before == Counter()


def test_steps_leave_no_context_variables_behind() -> None:
    model: Any = mtcompile.compile(Net(), memory="1MiB", device="cpu")
    model(torch.randn(2, 8)).backward()
    before = len(contextvars.copy_context())
    for length in (2, 2, 3):
        model(torch.randn(length, 8)).backward()
    assert len(contextvars.copy_context()) == before


def test_a_program_goes_when_an_object_that_it_is_guarded_by_has_died() -> None:
    programs: list[weakref.ref[Any]] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        def program(*_: Any) -> tuple[Tensor, ...]:  # holds nothing of its graph
            return tuple(torch.zeros(()) for _ in range(results))

        results = len(graph.graph.output_node().all_input_nodes)
        programs.append(weakref.ref(program))
        return program

    def call(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return activation(x)

    def with_code_of_its_own() -> Callable[[Tensor], Tensor]:
        return types.FunctionType(_activation.__code__.replace(), globals())

    captured, x = front_end(call, backend), torch.randn(2, 8)
    for activation in (_activation, with_code_of_its_own()):
        captured(activation, x)
    del activation
    gc.collect()
    assert [program() is None for program in programs] == [False, True]


def _activation(x: Tensor) -> Tensor:
    return x.tanh()


def test_the_source_of_a_graphs_code_lives_as_long_as_the_code() -> None:
    torch_private.dropping_sources()
    graph = fx.symbolic_trace(_activation)
    file = type(graph).forward.__code__.co_filename
    assert "x.tanh()" in "".join(linecache.getlines(file))
    del graph
    gc.collect()
    assert file not in linecache.cache and file not in graph_module._loader.eval_cache
