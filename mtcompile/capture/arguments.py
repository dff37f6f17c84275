"""The arguments of a model's call: copied to the device, or cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mtcompile.runtime.schedule import aligned
from mtcompile.torch_private import pytree

_MOST_HALVINGS = 3  # of a batch, with accumulate="auto": each is another plan to search, of as many more operations


def sent(values: Any, device: torch.device) -> tuple[Any, int]:
    """A call's arguments with every tensor of the host copied to ``device``, and the bytes of the copies."""
    nbytes = 0

    def send(value: Any) -> Any:
        nonlocal nbytes
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or value.device.type != "cpu":
            return value
        nbytes += aligned(max(value.untyped_storage().nbytes(), value.numel() * value.element_size()))
        return value.to(device)  # waits: the caller may write the next batch over it

    return pytree.tree_map(send, values), nbytes


def possible_counts(batch: int) -> list[int]:
    """The numbers of equal micro-batches that ``accumulate="auto"`` tries for a batch of that size: powers of two."""
    return [count for count in (2**power for power in range(_MOST_HALVINGS + 1)) if batch % count == 0]


def batch_sizes(call: Any) -> list[int]:
    """The first dimensions of a call's tensors, but for 1; the batch's where there is one."""
    return _first_sizes(_tensors(pytree.tree_leaves(call)))


def micro_batches(call: Any, count: int) -> Iterator[Any]:
    """Yields a call's arguments for each of ``count`` micro-batches: tensors with the batch in front are cut into views, all
    others are passed to each. Raises ValueError where the batch size is ambiguous, or cannot be cut into equal parts."""
    values, spec = pytree.tree_flatten(call)
    tensors = _tensors(values)
    sizes = _first_sizes(tensors)
    if len(sizes) != 1:
        different = ", ".join(map(str, sizes)) or "none above 1"
        raise ValueError(
            f"accumulate={count}: expected tensors with one batch size in front, found {different}; give those that belong to "
            "the whole batch a first dimension of 1"
        )
    batch = sizes[0]
    if batch % count:
        near = f"{batch // count * count} or " if batch > count else ""
        near += str((batch // count + 1) * count)
        raise ValueError(f"accumulate={count}: expected a batch of a multiple of it, found {batch}; try {near}")
    batched = {id(tensor) for tensor in tensors if tensor.shape[0] == batch}
    rows = batch // count
    for start in range(0, batch, rows):
        micro = [value[start : start + rows] if id(value) in batched else value for value in values]
        yield pytree.tree_unflatten(micro, spec)


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    """Those values that may have the batch in front."""
    return [t for t in values if isinstance(t, torch.Tensor) and not isinstance(t, torch.nn.Parameter) and t.dim()]


def _first_sizes(tensors: list[torch.Tensor]) -> list[int]:
    return sorted({tensor.shape[0] for tensor in tensors} - {1})
