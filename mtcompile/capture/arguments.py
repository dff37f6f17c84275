"""A call's arguments, copied to the device or cut into micro-batches; and the attributes that its forward assigns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mtcompile.runtime.schedule import aligned
from mtcompile.torch_private import pytree

_MOST_HALVINGS = 3  # of a batch, with accumulate="auto": each is another plan to search, of as many more operations
_FIXED = ("_modules", "_parameters")  # of an nn.Module


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


def with_whole(output: Any, micro: Any, call: Any) -> Any:
    """Returns what forward returned of a micro-batch, with the whole batch's arguments in place of the micro-batch's own."""
    wholes = dict(zip(map(id, pytree.tree_leaves(micro)), pytree.tree_leaves(call), strict=True))
    leaves, spec = pytree.tree_flatten(output)
    if not any(isinstance(leaf, torch.Tensor) and id(leaf) in wholes for leaf in leaves):
        return output
    return pytree.tree_unflatten([wholes.get(id(v), v) if isinstance(v, torch.Tensor) else v for v in leaves], spec)


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    """Those values that may have the batch in front."""
    return [t for t in values if isinstance(t, torch.Tensor) and not isinstance(t, torch.nn.Parameter) and t.dim()]


def _first_sizes(tensors: list[torch.Tensor]) -> list[int]:
    return sorted({tensor.shape[0] for tensor in tensors} - {1})


class Attributes:
    """The attributes and buffers of a model's modules as they are now. ``restore`` undoes what a forward has assigned to them,
    put into their lists, dictionaries and sets, or taken out; values of tensors stay."""

    def __init__(self, model: nn.Module) -> None:
        self._of = [(vars(module), _own(vars(module))) for module in model.modules()]

    def restore(self) -> None:
        for attributes, before in self._of:
            for name in [name for name in attributes if name not in before]:
                del attributes[name]
            for name, (value, content) in before.items():
                if attributes.get(name, attributes) is not value:
                    attributes[name] = value
                if content is not None and not _same_content(value, content):
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(content)


def _own(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and a copy of it if it holds other values. Modules and parameters are not a forward's to assign."""
    held = (list, dict, set)
    return {n: (v, v.copy() if type(v) in held and n not in _FIXED else None) for n, v in attributes.items()}


def _same_content(one: Any, other: Any) -> bool:
    """Says whether two lists, dictionaries or sets hold the same objects in the same order."""
    if isinstance(one, dict):
        return list(one) == list(other) and _same_content(list(one.values()), list(other.values()))
    return len(one) == len(other) and all(left is right for left, right in zip(one, other, strict=True))
