"""Tensors without memory that note the operations on them, forward and backward, as a graph. Uses torch's private APIs, as
``torch_private`` does.

They do what torch's own tracing does for simple models, several times faster, and load neither Dynamo nor AOTAutograd: loading
those takes longer than tracing here. What they have not been made for raises NotNoted.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mtcompile.passes.joint.shapes import Unsure, result_of
from mtcompile.torch_private.autograd import storage_id

_CPU, _META = torch.device("cpu"), torch.device("meta")
_REFUSED = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # random only with dropout, its fourth argument


class NotNoted(Exception):
    """Raised for an operation that only torch's own tracing can trace."""


class Light(torch.Tensor):
    """A tensor on the CPU without content. ``value``: a tensor like it on the device "meta"; ``node``: what makes it."""

    value: torch.Tensor
    node: Any  # fx.Node

    @staticmethod
    def __new__(cls, value: torch.Tensor, node: Any = None, requires_grad: bool = False) -> Light:
        place = {"strides": value.stride(), "storage_offset": value.storage_offset(), "layout": value.layout}
        make: Any = torch.Tensor._make_wrapper_subclass
        light: Light = make(cls, value.shape, dtype=value.dtype, device=_CPU, requires_grad=requires_grad, **place)
        light.value, light.node = value, node
        return light

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotNoted(f"{func} outside of Noting")


def lighten(model: nn.Module) -> None:
    """Makes the parameters and buffers of a model on the device "meta" light. Tied ones stay tied."""
    lights: dict[int, Light] = {}
    for part in model.modules():
        held: Any
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = lights.setdefault(id(tensor), Light(tensor.detach(), None, tensor.requires_grad))


@contextlib.contextmanager
def building_on_meta() -> Iterator[None]:
    """Lets a model be built on the device "meta", for ``lighten``."""
    with torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    """Leaves the initial values of parameters out: on the device "meta" there are none, and drawing them loads Dynamo."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


class Noting(TorchDispatchMode):
    """Makes each operation inside a node of ``graph``, as torch's tracing would: with the meta ``val``, on the device "meta",
    ``partitioner_tag`` and ``seq_nr``, the number of its step of autograd. ``about``: gives further meta of an operation of the
    forward, which those of its backward get too."""

    def __init__(self, about: Callable[[], dict[str, Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        _check_numbers_at_once()
        self.graph, self._about = fx.Graph(), about
        self._of_step: dict[int, dict[str, Any]] = {}  # further meta, by the number of the step
        self._step: int | None = None  # the number of that whose backward runs
        self._backward = False
        self._viewed = set[int]()  # storages of which there are views
        self._values: list[torch.Tensor] = []  # as long as they live, no other storage has the number of theirs

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it loads it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if value is not None or not _is_none(func, name)}
        if func._schema.is_mutable:
            return self._change(func, args, kwargs)
        if not _REFUSED.isdisjoint(func.tags) and (func is not _ATTENTION or any(args[3:4])):
            raise NotNoted(str(func))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        lights = [leaf for leaf in leaves if isinstance(leaf, Light)]
        if any(isinstance(leaf, torch.Tensor) and getattr(leaf, "node", None) is None for leaf in leaves):
            raise NotNoted(f"{func} of a tensor from elsewhere")
        inner_args, inner_kwargs = pytree.tree_unflatten([_value(leaf) for leaf in leaves], spec)
        result = _result(func, inner_args, inner_kwargs, not lights)
        node_args, node_kwargs = pytree.tree_unflatten([_operand(leaf) for leaf in leaves], spec)
        node = self._node(func, node_args, node_kwargs, func.overloadpacket.__name__, result)
        if isinstance(result, torch.Tensor):
            if storage_id(result) in {storage_id(light.value) for light in lights}:
                self._viewed.add(storage_id(result))
            return self._light(result, node)
        return self._items(func, result, node)

    def _items(self, func: Any, results: Any, node: fx.Node) -> Any:
        if not isinstance(results, (tuple, list)) or not all(isinstance(item, torch.Tensor) for item in results):
            raise NotNoted(f"{func} returns {type(results).__name__}")
        self._viewed.update(map(storage_id, results))
        getitem = operator.getitem
        return type(results)(
            self._light(item, self._node(getitem, (node, index), {}, "getitem", item)) for index, item in enumerate(results)
        )

    def _change(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Notes a change in place as the operation that makes a new value: nothing else is in the memory of the old one."""
        namespace, name = func._schema.name.split("::")
        packet = getattr(getattr(torch.ops, namespace), name[:-1], None) if name.endswith("_") else None
        pure, changed = getattr(packet, func._overloadname, None), args[0]
        if pure is None or not isinstance(changed, Light) or storage_id(changed.value) in self._viewed:
            raise NotNoted(str(func))
        result = self.__torch_dispatch__(pure, (), args, kwargs)
        if (result.shape, result.stride(), result.dtype) != (changed.shape, changed.stride(), changed.dtype):
            raise NotNoted(str(func))
        changed.value, changed.node = result.value, result.node
        return changed

    def _light(self, value: torch.Tensor, node: fx.Node) -> Light:
        self._values.append(value)
        return Light(value, node)

    def _node(self, target: Any, args: Any, kwargs: Any, name: str, value: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, name=self.graph._target_to_str(name))
        node.args, node.kwargs = args, kwargs
        number = torch.autograd._get_sequence_nr() - 1 if self._step is None else self._step
        node.meta = {"val": value, "seq_nr": number, "partitioner_tag": "is_backward" if self._backward else "is_forward"}
        if not self._backward:
            node.meta |= (about := self._about())
            self._of_step.setdefault(number, about)
        elif self._step is not None:  # else a sum of gradients
            node.meta |= self._of_step.get(number, {})
        return node

    def _enter(self, step: int | None, *_: Any) -> None:
        self._step = step

    def gradients(self, result: Light, tangent: Light, inputs: Sequence[Light]) -> tuple[Light | None, ...]:
        """Computes the gradients of a result; ``tangent``: the one that arrives at it."""
        steps: list[Any] = [result.grad_fn]
        seen = set(steps)
        for step in steps:
            step.register_prehook(functools.partial(self._enter, step._sequence_nr()))
            step.register_hook(functools.partial(self._enter, None))
            before = dict.fromkeys(each for each, _ in step.next_functions if each is not None and each not in seen)
            seen.update(before)
            steps += before
        self._backward = True
        backward: Any = torch.autograd.graph._engine_run_backward  # what torch.autograd.grad calls, without its checks of sizes
        gradients: tuple[Light | None, ...] = backward(
            (result,), (tangent,), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
        return gradients


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Light) else _META if isinstance(leaf, torch.device) else leaf


def _operand(leaf: Any) -> Any:
    return leaf.node if isinstance(leaf, Light) else leaf


def _result(func: Any, args: Any, kwargs: Any, makes: bool) -> Any:
    """Calls an operation on tensors on the device "meta". ``makes``: it takes no tensors."""
    if not makes:
        try:
            return result_of(func, args, kwargs, exact=True)
        except Unsure as error:
            raise NotNoted(str(error)) from None
    if func.overloadpacket is torch.ops.aten.arange:  # on "meta", it loads Dynamo
        like = func(*args, **{**kwargs, "device": _CPU})
        return torch.empty(like.shape, dtype=like.dtype, device=_META)
    return func(*args, **{**kwargs, "device": _META})


@functools.cache
def _check_numbers_at_once() -> None:
    """Lets torch's shape functions check what is known without the package of symbolic numbers, which takes long to load."""
    plain: Any = getattr(torch, "_check_with", None)
    if plain is None:  # another torch, which checks as it can
        return

    @functools.wraps(plain)
    def check(error_type: Any, cond: Any, message: Any) -> None:
        if cond is not True:
            plain(error_type, cond, message)

    torch._check_with = check


def _is_none(func: Any, name: str) -> bool:
    """Tells whether None is the default of an argument: autograd gives it for tensors that are not there."""
    return any(argument.name == name and argument.default_value is None for argument in func._schema.arguments)
