"""State dictionaries as JSON and tensors. A tensor becomes its number in a list; what JSON has no word for becomes an object of
one key."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mtcompile.checkpoint.shards import DTYPES
from mtcompile.distributed.homes.gathering import WholeLater
from mtcompile.optim.master_weights import JoinedLater

_MOST_DEPTH = 64


def storable(tensor: Tensor, where: str) -> Tensor:
    """Returns the tensor without its gradient. Raises TypeError for one that a file cannot hold."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.dtype not in DTYPES.values():
        raise TypeError(
            f"expected dense tensors of a dtype that safetensors has in a checkpoint, found {tensor.dtype}, {tensor.layout}, "
            f"on {tensor.device} at {where}"
        )
    return tensor


Storable = Tensor | JoinedLater | WholeLater


def encoded(value: Any, tensors: list[Storable], where: str, depth: int = 0) -> Any:
    """Returns ``value`` as what JSON can say, and appends its tensors to ``tensors``. ``where``: its name in an error. Raises
    TypeError for other objects than numbers, text, tensors, dtypes, and lists, tuples and dictionaries of them."""
    if depth > _MOST_DEPTH:
        raise TypeError(f"expected state that is nested at most {_MOST_DEPTH} deep in a checkpoint, found more at {where[:80]}")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Storable):
        tensors.append(storable(value, where) if isinstance(value, Tensor) else value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (list, tuple)):
        items = [encoded(item, tensors, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if metadata := getattr(value, "_metadata", None):  # of a module's state dictionary: versions, which decide how it is loaded
        return {"module": [encoded(dict(value), tensors, where, depth + 1), encoded(dict(metadata), tensors, where, depth + 1)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "ordered" if isinstance(value, OrderedDict) else "dict"
        return {
            kind: [[_key(key, where), encoded(item, tensors, f"{where}[{key!r}]", depth + 1)] for key, item in value.items()]
        }
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError(
        f"expected numbers, text, tensors, and lists and dictionaries of them in a checkpoint, found {type(value).__name__} "
        f"at {where}"
    )


def _key(key: Any, where: str) -> Any:
    if isinstance(key, (int, str)):
        return key
    raise TypeError(f"expected keys that are numbers or text in a checkpoint, found {key!r} at {where}")


def decoded(value: Any, tensors: Sequence[Tensor], depth: int = 0) -> Any:
    """Returns what ``encoded`` was given. Raises ValueError for anything else."""
    if depth > _MOST_DEPTH:
        raise ValueError(f"expected state that is nested at most {_MOST_DEPTH} deep")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [decoded(item, tensors, depth + 1) for item in value]
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError(f"expected state as it was saved, found {value!r:.80}")
    ((kind, content),) = value.items()
    if kind == "tensor" and type(content) is int and 0 <= content < len(tensors):
        return tensors[content]
    if kind == "tuple" and isinstance(content, list):
        return tuple(decoded(item, tensors, depth + 1) for item in content)
    if (
        kind in _DICTIONARIES
        and isinstance(content, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in content)
    ):
        if all(isinstance(key, (int, str)) for key, _ in content):
            return _DICTIONARIES[kind]({key: decoded(item, tensors, depth + 1) for key, item in content})
    if kind == "module" and isinstance(content, list) and len(content) == 2:
        state = OrderedDict(decoded(content[0], tensors, depth + 1))
        state._metadata = OrderedDict(decoded(content[1], tensors, depth + 1))  # type: ignore[attr-defined]
        return state
    if kind == "dtype" and isinstance(dtype := getattr(torch, str(content), None), torch.dtype):
        return dtype
    raise ValueError(f"expected state as it was saved, found {value!r:.80}")


_DICTIONARIES: Mapping[str, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
