"""Compares the state of two modules: what a forward could read in one, and would read alike in the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size)


@dataclass(slots=True)
class Pairs:
    """What corresponds in two modules of equal state. ``of``: id of each module and tensor in the first -> that in the second.
    ``seen``: ids of all containers and objects of both. ``numbers``: the attributes whose ints differ, as (path of the module
    below the first, name)."""

    of: dict[int, Any] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    numbers: list[tuple[tuple[str, ...], str]] = field(default_factory=list)


def pairs_of(one: nn.Module, other: nn.Module) -> Pairs | None:
    """Returns what corresponds in two modules, or None unless all that they hold is equal: classes, the order of attributes,
    constants, what describes tensors, and the very same object where nothing is known of its class. Ints of a module's own may
    differ, and are named. Tensors and modules that both hold are not equal: what is done to one is done to the other."""
    pairs = Pairs()
    return pairs if _modules(one, other, (), pairs) and len(pairs.of) == len({id(p) for p in pairs.of.values()}) else None


def _modules(one: nn.Module, other: nn.Module, path: tuple[str, ...], pairs: Pairs) -> bool:
    if id(one) in pairs.of:
        return pairs.of[id(one)] is other
    ours, theirs = vars(one), vars(other)
    if one is other or type(one) is not type(other) or list(ours) != list(theirs):
        return False
    pairs.of[id(one)] = other
    pairs.seen |= {id(one), id(other)}
    for name, value in ours.items():
        if name == "_modules":
            if list(value) != list(theirs[name]):
                return False
            for key, child in value.items():
                if isinstance(child, nn.Module) and isinstance(theirs[name][key], nn.Module):
                    if not _modules(child, theirs[name][key], (*path, key), pairs):
                        return False
                elif child is not None or theirs[name][key] is not None:
                    return False
        elif type(value) is type(theirs[name]) is int:
            if value != theirs[name]:
                pairs.numbers.append((path, name))
        elif not _equal(value, theirs[name], pairs):
            return False
    return True


def _equal(one: Any, other: Any, pairs: Pairs) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _tensors(one, other, pairs)
    if isinstance(one, nn.Module):  # outside of _modules: Dynamo would find it by another way
        return id(one) in pairs.of and pairs.of[id(one)] is other
    if type(one) in _CONSTANTS:
        return repr(one) == repr(other)
    pairs.seen |= {id(one), id(other)}
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(_equal(ours, theirs, pairs) for ours, theirs in zip(one, other, strict=True))
    if isinstance(one, dict):
        keys = zip(one, other, strict=False)
        if len(one) != len(other) or not all(type(ours) in _CONSTANTS and _equal(ours, theirs, pairs) for ours, theirs in keys):
            return False
        return all(_equal(value, other[key], pairs) for key, value in one.items())
    if isinstance(one, (set, frozenset)):
        return all(type(member) in _CONSTANTS for member in (*one, *other)) and one == other
    return one is other


def _tensors(one: torch.Tensor, other: torch.Tensor, pairs: Pairs) -> bool:
    if id(one) in pairs.of:
        return pairs.of[id(one)] is other
    if one is other or type(one) not in (torch.Tensor, nn.Parameter, FakeTensor):
        return False
    if one._backward_hooks or other._backward_hooks or _about(one) != _about(other):
        return False
    pairs.of[id(one)] = other
    if isinstance(one, FakeTensor) and isinstance(other, FakeTensor):  # of a model of any size, for a plan
        constants = one.constant, other.constant, one.real_tensor, other.real_tensor
        return one.fake_mode is other.fake_mode and one.fake_device == other.fake_device and constants == (None,) * 4
    return _equal(vars(one), vars(other), pairs)


def _about(tensor: torch.Tensor) -> tuple[Any, ...]:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    place = (tensor.stride(), tensor.storage_offset()) if strided else (id(tensor),)
    kind = tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, tensor.is_leaf, tensor._is_view()
    return tensor.shape, *place, *kind, tensor.is_conj(), tensor.is_neg()
