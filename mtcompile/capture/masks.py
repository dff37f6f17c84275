"""Attention masks of Transformers models, captured as a plain run makes them.

A plain run looks at the positions, and where no sequences are packed it gives attention no mask. While it is captured, the
library cannot look at values (and before torch 2.14 it believes that it is exported), so it makes the mask in any case: other
kernels, other bits and more memory. Positions that nobody passed count up by construction. So a model is captured as one
without packed sequences, with a mark where it asked; a capture whose marked positions depend on the inputs is given up, and
made again as the library has it.
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
_plain: dict[str, Any] = {}  # the library's own functions
_depth = 0  # how many capture now


class Packed(Exception):
    """The positions depend on the inputs: sequences may be packed."""


@contextlib.contextmanager
def without_packed() -> Iterator[None]:
    """What is captured inside, in any thread, has no packed sequences; what is run plainly goes on as before."""
    global _depth
    library = sys.modules.get("transformers.masking_utils")
    if library is None:
        yield
        return
    with _lock:
        _depth += 1
        if _depth == 1:
            for name, function in _OURS.items():
                if hasattr(library, name):
                    _plain[name] = getattr(library, name)
                    setattr(library, name, function)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                for name, function in _plain.items():
                    setattr(library, name, function)


def check_positions(graph: fx.Graph) -> None:
    """Of what Dynamo captured. Raises Packed where positions that were asked about may not count up by one."""
    marks = [node for node in graph.nodes if node.target is torch.diff and not node.users]
    if not all(_counts_up(node.args[0]) for node in marks):
        raise Packed


def _found(position_ids: torch.Tensor) -> torch.Tensor | None:
    if not torch.compiler.is_compiling():
        plain: Callable[..., torch.Tensor | None] = _plain["find_packed_sequence_indices"]
        return plain(position_ids)
    torch.diff(position_ids, dim=-1)  # the mark
    return None


def _tracing(tensor: torch.Tensor | None = None) -> bool:
    """Older versions ask it of no mask, too."""
    plain: Callable[..., bool] = _plain["is_tracing"]
    return tensor is not None and plain(tensor)


def _exporting() -> bool:
    return False


_OURS = {"find_packed_sequence_indices": _found, "is_tracing": _tracing, "is_torchdynamo_exporting": _exporting}


_BY_A_NUMBER = (operator.add, operator.sub, torch.add, torch.sub, "add", "sub")
_IN_OTHER_SHAPES = ("unsqueeze", "expand", "expand_as", "to", "long", "clone", "contiguous")


def _counts_up(node: Any) -> bool:
    """Whether a tensor counts up by one along its last dimension, by how it is made."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is torch.arange:
        step: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("step", 1)
        return bool(step == 1)
    if node.target in _BY_A_NUMBER and len(node.args) == 2:
        return isinstance(node.args[1], int) and _counts_up(node.args[0])
    if node.target in _IN_OTHER_SHAPES:
        tensor: Any = node.args[0]
        return tensor.meta["example_value"].shape[-1:] == node.meta["example_value"].shape[-1:] and _counts_up(tensor)
    return False
