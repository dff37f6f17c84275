"""Graph modules that write their code when it is asked for compute what those of torch compute."""

from __future__ import annotations

import copy

import torch
from torch import fx

from mtcompile.passes.lazy_graph import LazyGraphModule, forward_of, lazy


def _doubled() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.mul, (graph.placeholder("x"), 2)))
    return fx.GraphModule(torch.nn.Module(), graph, class_name="Doubled")


def _tripled(module: fx.GraphModule) -> None:
    (product,) = module.graph.find_nodes(op="call_function", target=torch.mul)
    product.args = (product.args[0], 3)
    module.recompile()


def test_the_graph_is_computed_as_it_is_at_the_call() -> None:
    plain = _doubled()
    plain.meta["of"] = "a test"
    module, x = lazy(plain), torch.ones(3)
    assert module.meta == {"of": "a test"} and type(module).__name__ == "Doubled"
    assert torch.equal(module(x), x * 2)
    _tripled(module)
    assert torch.equal(module(x), x * 3) and torch.equal(module.forward(x), x * 3)
    _tripled(copied := copy.deepcopy(lazy(_doubled())))
    assert torch.equal(copied(x), x * 3)


def test_no_code_is_written_before_it_is_asked_for() -> None:
    for asked in (str, lambda module: module.code, lambda module: module(torch.ones(1)), forward_of):
        module = lazy(_doubled())
        assert type(module).forward is LazyGraphModule.forward
        asked(module)
        assert type(module).forward is not LazyGraphModule.forward
    assert "mul" in str(lazy(_doubled())) and forward_of(_doubled())(torch.ones(1)) == 2


def test_modules_of_one_graph_class_write_their_own_code() -> None:
    one, other = lazy(_doubled()), lazy(_doubled())
    _tripled(other)
    assert one(torch.ones(1)) == 2 and other(torch.ones(1)) == 3
