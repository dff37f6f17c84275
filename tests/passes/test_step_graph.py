"""What the operations of a step graph are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from mtcompile.passes.step_graph import is_view

aten = torch.ops.aten
VIEWS: dict[Any, tuple[Any, ...]] = {
    aten._unsafe_view.default: ([8],),
    aten.unsafe_split.Tensor: (1,),
    aten.unsafe_split_with_sizes.default: ([1, 1],),
    aten.split.Tensor: (1,),
    aten.view.default: ([8],),
    aten.clone.default: (),
    aten.split_copy.Tensor: (1,),
}


@pytest.mark.parametrize("operation", VIEWS)
def test_a_view_is_what_shares_its_operands_memory(operation: Any) -> None:
    operand = torch.ones(2, 4)
    results = operation(operand, *VIEWS[operation])
    first = results if isinstance(results, torch.Tensor) else results[0]
    graph = fx.Graph()
    node = graph.call_function(operation, (graph.placeholder("x"), *VIEWS[operation]))
    assert is_view(node) == (first.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr())
