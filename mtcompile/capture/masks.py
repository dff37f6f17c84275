"""Attention masks of Transformers models, captured as a plain run makes them.

A plain run looks at the positions, and where no sequences are packed it gives attention no mask. While a model is captured,
the library cannot look at values (and before torch 2.14 it believes that it is exported), so it always makes the mask: other
kernels, other bits and more memory. Positions that the caller did not pass count up by construction. So a model is captured as
one without packed sequences, with a mark where the library asked; a capture whose marked positions depend on the inputs is
discarded, and repeated with the library's own functions.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

_lock = threading.Lock()
_originals: dict[str, Any] = {}  # the library's own functions
_captures = 0  # how many are under way


class Packed(Exception):
    """The positions depend on the inputs: sequences may be packed."""


@contextlib.contextmanager
def without_packed() -> Iterator[None]:
    """Captures inside, in any thread, take sequences as not packed; plain runs go on as before."""
    global _captures
    library = sys.modules.get("transformers.masking_utils")
    if library is None:
        yield
        return
    with _lock:
        _captures += 1
        if _captures == 1:
            for name, function in _REPLACEMENTS.items():
                if hasattr(library, name):
                    _originals[name] = getattr(library, name)
                    setattr(library, name, function)
    try:
        yield
    finally:
        with _lock:
            _captures -= 1
            if _captures == 0:
                for name, function in _originals.items():
                    setattr(library, name, function)


def check_positions(graph: fx.Graph) -> None:
    """Raise Packed where positions that the library asked about in a captured graph may not count up by one."""
    marks = [node for node in graph.nodes if node.target is torch.diff and not node.users]
    if not all(_counts_up(node.args[0]) for node in marks):
        raise Packed


def _packed_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
    if not torch.compiler.is_compiling():
        original: Callable[..., torch.Tensor | None] = _originals["find_packed_sequence_indices"]
        return original(position_ids)
    torch.diff(position_ids, dim=-1)  # the mark
    return None


def _tracing(tensor: torch.Tensor | None = None) -> bool:
    """False for None, which older versions ask about where there is no mask."""
    original: Callable[..., bool] = _originals["is_tracing"]
    return tensor is not None and original(tensor)


def _exporting() -> bool:
    return False


_REPLACEMENTS = {
    "find_packed_sequence_indices": _packed_indices,
    "is_tracing": _tracing,
    "is_torchdynamo_exporting": _exporting,
}


_ADDING_A_NUMBER = (operator.add, operator.sub, torch.add, torch.sub, "add", "sub")
_RESHAPING = ("unsqueeze", "expand", "expand_as", "to", "long", "clone", "contiguous")


def _counts_up(node: Any) -> bool:
    """True where a tensor, by the operations it comes from, counts up by one along its last dimension."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is torch.arange:
        step: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("step", 1)
        return bool(step == 1)
    if node.target in _ADDING_A_NUMBER and len(node.args) == 2:
        return isinstance(node.args[1], int) and _counts_up(node.args[0])
    if node.target in _RESHAPING:
        tensor: Any = node.args[0]
        return tensor.meta["example_value"].shape[-1:] == node.meta["example_value"].shape[-1:] and _counts_up(tensor)
    return False
