"""numpy in a forward: numpy itself computes what depends on constants alone; what torch would round otherwise is refused.

Dynamo turns numpy's functions into torch operations. These round otherwise, and a number of numpy's, such as ``np.sqrt(2)``,
becomes a float64 tensor. Here, numpy itself evaluates all that depends on constants alone, during the capture, and numbers stay
numbers. For arrays with the values of tensors, a graph takes what has the same bits in torch: copies, views, basic arithmetic.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_aggregate

from mtcompile.errors import CaptureError
from mtcompile.torch_private.thread_setting import ThreadSetting

_computing = ThreadSetting[torch.device | None](None)  # the device of the graph that this thread captures

_ARRAY = "mt_array"  # in the meta of a node that makes an array of constants: that array
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)  # which take the dtype of a number of numpy's
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_LOGICAL = ("and_", "or_", "xor", "invert", "eq", "ne", "iand", "ior", "ixor")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "neg", "pos", "iadd", "isub", "imul", "itruediv")
_DIVISIONS = {
    "nb_true_divide_impl": operator.truediv,
    "nb_floor_divide_impl": operator.floordiv,
    "nb_remainder_impl": operator.mod,
    "nb_divmod_impl": divmod,
}
_VIEWS = ("T", "reshape", "ravel", "flatten", "squeeze", "transpose", "swapaxes", "copy", "expand_dims", "ascontiguousarray")
_MOVES = (*_VIEWS, "array", "asarray", "concatenate", "stack")
_WRITES = ("setitem", "__setitem__")
_CHANGING = ("fill", "sort", "partition", "put", "resize", "setfield", "setflags", "byteswap", "__setitem__")


@contextlib.contextmanager
def computing_numpy(device: torch.device) -> Iterator[None]:
    """Captures inside, in this thread, let numpy compute what depends on constants alone. Raises CaptureError where a forward
    that computes on ``device`` uses numpy in a way that has other bits in torch."""
    _replace_variables()
    with _computing.during(device):
        yield


class _Float(float):
    """A number of numpy's in Dynamo's graph, until ``_pass_numbers`` sees the node that takes it."""

    number: np.generic


class _Int(int):
    """An integer of numpy's, as ``_Float`` is a float."""

    number: np.generic


def _in_graph(number: np.generic) -> _Float | _Int:
    value = number.item()
    if type(value) not in (float, int):
        raise _refusal(type(number).__name__, "as an operand of a tensor operation; convert it by bool(...) or float(...)")
    held = _Float(value) if isinstance(value, float) else _Int(value)
    held.number = number
    return held


class _Constant:
    """A function that makes a tensor with the values of an array. Each call makes a new tensor: a forward may write to it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.__name__ = "array"

    def __call__(self) -> torch.Tensor:
        return torch.tensor(self.array)


class _Unknown(Exception):
    """Raised where a value is not a constant."""


def _called(node: fx.Node) -> tuple[str, Callable[..., Any] | None, bool]:
    """Returns what a node of Dynamo's graph calls in numpy: (name, numpy's own function, whether it changes its operand).
    The name is empty for all other nodes."""
    from torch._dynamo import utils
    from torch._dynamo.variables.misc import get_tnp_to_np_map

    target: Any = node.target
    in_numpy: dict[Any, Any] = get_tnp_to_np_map()
    if isinstance(target, utils.numpy_to_tensor_wrapper):
        return target.f.__name__, in_numpy.get(target.f), False
    if isinstance(target, utils.numpy_method_wrapper):
        method = target.method
        return method, lambda obj, *args, **kwargs: getattr(obj, method)(*args, **kwargs), method in _CHANGING
    if isinstance(target, utils.numpy_operator_wrapper):
        name = target.op.__name__
        return name, target.op, name in ("setitem", "delitem") or (name.startswith("i") and name not in ("invert", "index"))
    if target is utils.numpy_attr_wrapper:
        return str(node.args[1]), getattr, False
    return "", None, False


def _evaluated(node: fx.Node, function: Callable[..., Any]) -> tuple[Any, list[np.ndarray[Any, Any]]]:
    """Returns numpy's result of a call on constants, and the arrays that the call takes. Raises _Unknown for other operands."""
    arrays = []

    def known(value: Any) -> Any:
        if isinstance(value, fx.Node):
            example = value.meta.get("example_value")
            if _ARRAY not in value.meta or not isinstance(example, torch.Tensor) or example._version:
                raise _Unknown  # not a constant, or written to since
            arrays.append(value.meta[_ARRAY])
            return value.meta[_ARRAY]
        if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise _Unknown
        if isinstance(value, torch.dtype):
            return torch.empty(0, dtype=value).numpy().dtype
        return getattr(value, "number", value)

    args, kwargs = map_aggregate((node.args, node.kwargs), known)
    return function(*args, **kwargs), arrays


def _check(node: fx.Node, name: str, device: torch.device) -> None:
    """Raises CaptureError for a call on arrays of unknown values, if its bits or its type may be others in torch."""
    arrays = [n.meta["example_value"] for n in node.all_input_nodes if isinstance(n.meta.get("example_value"), torch.Tensor)]
    if name == "getitem":
        exact = _is_plain_index(node.args[1])
    elif name in _WRITES:
        exact = _is_plain_index(node.args[1]) and len({array.dtype for array in arrays}) == 1
    elif name == "astype":  # of floats to integers: a value that does not fit has no defined result
        dtypes = [*node.args[1:], *node.kwargs.values()]
        exact = len(dtypes) == 1 and arrays[0].is_contiguous() and _widens(arrays[0].dtype, dtypes[0])
    elif name in _MOVES:
        exact = len({array.dtype for array in arrays}) == 1 and all(array.is_contiguous() for array in arrays)
    else:
        numbers = [value for value in node.args if not isinstance(value, fx.Node)]
        exact = _is_exact(name, arrays, numbers, device)
    if not exact:
        raise _refusal(name)


def _widens(dtype: torch.dtype, other: Any) -> bool:
    """Tells whether a cast from a dtype to another has one defined result: one from floats to integers does not."""
    name = str(other).removeprefix("torch.")
    return name in ("float32", "float64") or (name in ("int64", "bool") and not dtype.is_floating_point)


def _is_plain_index(index: Any) -> bool:
    """Tells whether an index gives a view or a copy of rows, which have numpy's strides."""
    if isinstance(index, (fx.Node, list)):
        return True
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)


def _is_exact(name: str, arrays: Sequence[torch.Tensor], numbers: Sequence[Any], device: torch.device) -> bool:
    """Tells whether elementwise arithmetic of arrays and Python's numbers has numpy's dtype, strides and bits in torch."""
    if len({array.dtype for array in arrays}) != 1 or not all(array.dim() and array.is_contiguous() for array in arrays):
        return False
    dtype, types = arrays[0].dtype, {type(number) for number in numbers}
    if dtype is torch.bool:
        return name in _LOGICAL and not numbers
    if name.endswith("truediv") and (not dtype.is_floating_point or (numbers and device.type != "cpu")):
        return False  # a GPU multiplies by the reciprocal of a number
    if dtype in (torch.float32, torch.float64):
        return name in (*_ARITHMETIC, *_COMPARISONS) and types <= {int, float}
    return dtype is torch.int64 and name in (*_ARITHMETIC, *_COMPARISONS) and types <= {int}


def _check_result(name: str, node: fx.Node) -> None:
    """Raises CaptureError where numpy's result would be a number, or of another dtype than torch's."""
    result = node.meta.get("example_value")
    if not isinstance(result, torch.Tensor) or name in _WRITES:
        return
    free = name == "astype" or not node.all_input_nodes
    first = result if free else node.all_input_nodes[0].meta["example_value"]
    if not result.dim() or result.dtype is not (torch.bool if name in _COMPARISONS else first.dtype):
        raise _refusal(name)


def _refusal(name: str, use: str = "") -> CaptureError:
    in_torch = f" (torch.{name})" if callable(getattr(torch, name, None)) else ""
    return CaptureError(
        f"forward uses numpy's {name} "
        + (use or "on an array whose values are not known during capture, and torch would compute other bits than numpy")
        + f"\n  expected torch operations there{in_torch}, or numpy outside forward, with its result passed as a tensor"
    )


def _variable(tx: Any, value: Any) -> Any:
    """A variable of Dynamo's for what numpy computed from constants."""
    from torch._dynamo.variables import NumpyNdarrayVariable
    from torch._dynamo.variables.base import VariableTracker

    if isinstance(value, (tuple, list)):
        return VariableTracker.build(tx, type(value)).call_function(
            tx, [_list_variable(tx, [_variable(tx, each) for each in value])], {}
        )
    if not isinstance(value, np.ndarray):
        return VariableTracker.build(tx, value)
    if not value.flags.c_contiguous:
        raise _refusal("array", "with values that are not contiguous in memory")
    proxy = tx.output.create_proxy("call_function", _Constant(value.copy()), (), {})
    variable = NumpyNdarrayVariable.create(tx, proxy)
    proxy.node.meta[_ARRAY] = proxy.node.target.array
    return variable


def _list_variable(tx: Any, items: list[Any]) -> Any:
    from torch._dynamo.variables import ListVariable
    from torch._dynamo.variables.base import ValueMutationNew

    return ListVariable(items, mutation_type=ValueMutationNew())


def _computed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what replaces the function by which Dynamo makes a variable for each operation in its graph."""

    def wrapped(target: Any, tx: Any, proxy: Any, *args: Any, **kwargs: Any) -> Any:
        node = proxy.node
        if (device := _computing.value) is None or node.op not in ("call_function", "call_method"):
            return plain(target, tx, proxy, *args, **kwargs)
        name, function, changes = _called(node)
        if not name:
            _pass_numbers(node)
            if target.__name__ == "NumpyNdarrayVariable" and getattr(node.target, "__name__", "") == "getitem":
                name, function = "getitem", node.target  # a loop over an array
            else:
                return plain(target, tx, proxy, *args, **kwargs)
        value, arrays = None, None
        if function is not None and not changes:
            with contextlib.suppress(_Unknown):
                value, arrays = _evaluated(node, function)
        if arrays is None:
            _check(node, name, device)
        elif not isinstance(value, np.ndarray) or not any(np.may_share_memory(value, array) for array in arrays):
            tx.output.remove_node(node)
            return _variable(tx, value)
        _pass_numbers(node)
        variable = plain(target, tx, proxy, *args, **kwargs)
        if arrays is None:
            _check_result(name, node)
        else:  # a view stays one: it shows what is written to its base
            node.meta[_ARRAY] = value
        return variable

    return wrapped


def _pass_numbers(node: fx.Node) -> None:
    """Replaces the numpy numbers that a node takes by Python's, with which torch computes the same. Only tensors made of them
    would have another dtype, so they get numpy's explicitly."""
    numbers = []

    def plain(value: Any) -> Any:
        if not isinstance(value, (_Float, _Int)):
            return value
        numbers.append(value.number)
        return value.number.item()

    args, kwargs = map_aggregate((node.args, node.kwargs), plain)
    if not numbers:
        return
    if node.target in _FROM_NUMBERS and kwargs.get("dtype") is None:
        if node.all_input_nodes:
            raise _refusal(type(numbers[0]).__name__, "in a list from which a tensor is made; pass dtype=")
        data = map_aggregate(node.args[0], lambda value: getattr(value, "number", value))
        kwargs = {**kwargs, "dtype": torch.tensor(data).dtype}
    node.args, node.kwargs = args, kwargs


@functools.cache
def _number_variable() -> Any:
    """The class of Dynamo's variables that stand for a number of numpy's."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.base import AsPythonConstantNotImplementedError, VariableTracker

    class NumpyNumberVariable(ConstantVariable):
        def __init__(self, value: np.generic, **kwargs: Any) -> None:
            VariableTracker.__init__(self, **kwargs)
            self.value = value

        def as_proxy(self) -> Any:
            return _in_graph(self.value)

        def reconstruct(self, codegen: Any) -> None:
            codegen.append_output(codegen.create_load_const_unchecked(self.value))

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            try:
                values = [arg.as_python_constant() for arg in args]
                named = {key: arg.as_python_constant() for key, arg in kwargs.items()}
            except AsPythonConstantNotImplementedError:
                return super().call_method(tx, name, args, kwargs)
            return _variable(tx, getattr(self.value, name)(*values, **named))

    def computing(operation: Callable[[Any, Any], Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        def compute(self: Any, tx: Any, other: Any, reverse: bool = False) -> Any:
            if not other.is_python_constant():
                return plain(self, tx, other, reverse)
            operands = self.value, other.as_python_constant()
            return _variable(tx, operation(*(reversed(operands) if reverse else operands)))

        return compute

    for name, operation in _DIVISIONS.items():  # which Dynamo knows for Python's own numbers only
        if (plain := getattr(ConstantVariable, name, None)) is not None:  # from torch 2.13 on
            setattr(NumpyNumberVariable, name, computing(operation, plain))
    return NumpyNumberVariable


@functools.cache
def _replace_variables() -> None:
    """Lets Dynamo ask here first. Outside ``computing_numpy``, nothing is changed."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables import ConstantVariable, NumpyNdarrayVariable, builder

    def creating(plain: Callable[..., Any]) -> Callable[..., Any]:
        def create(value: Any, **kwargs: Any) -> Any:
            number = _computing.value is not None and isinstance(value, np.generic)
            return _number_variable()(value, **kwargs) if number else plain(value, **kwargs)

        return create

    def building(plain: Callable[..., Any]) -> Callable[..., Any]:
        def create(tx: Any, value: Any) -> Any:
            number = _computing.value is not None and isinstance(value, np.generic)
            return _number_variable()(value) if number else plain(tx, value)

        return create

    def wrapping(plain: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(self: Any, value: Any) -> Any:
            if _computing.value is None or not isinstance(value, np.generic):
                return plain(self, value)
            self.install_guards(GuardBuilder.CONSTANT_MATCH)
            return _number_variable()(value, source=self.source)

        return wrap

    def calling(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            node = self.as_proxy().node
            known = _computing.value is not None and _ARRAY in node.meta and not node.meta["example_value"]._version
            if known and name in ("tolist", "item") and not kwargs:
                return _variable(tx, getattr(node.meta[_ARRAY], name)(*(arg.as_python_constant() for arg in args)))
            return plain(self, tx, name, args, kwargs)

        return call_method

    replaced: tuple[tuple[Any, str, Callable[..., Any], bool], ...] = (
        (builder, "_wrap_fx_proxy", _computed, False),
        (ConstantVariable, "create", creating, True),
        (builder.SourcelessBuilder, "create", building, True),
        (builder.VariableBuilder, "_wrap", wrapping, False),
        (NumpyNdarrayVariable, "call_method", calling, False),
    )
    for owner, name, replacement, static in replaced:
        plain = getattr(owner, name)
        function = functools.wraps(plain)(replacement(plain))
        setattr(owner, name, staticmethod(function) if static else function)
