"""Gives values the strides of a plain run, and as many bytes, while a program is traced. Uses torch's private APIs, as
``torch_private`` does.

Where operands are not in row-major order, torch's shape functions and its kernels often disagree about a result's order, and an
operation that changes its operand in place is traced as one that makes a new value. Which order it is decides what comes after:
whether ``contiguous`` copies, whether ``reshape`` is a view, in which order a kernel walks through the elements. So it must be
right at once, not when the trace is done.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import traceback
from torch.utils._python_dispatch import _disable_current_modes

from mtcompile.capture.refusals import place_in
from mtcompile.errors import CaptureError
from mtcompile.passes.joint.strides import Observe, as_viewed, may_differ, with_strides
from mtcompile.runtime.devices.arena import same_strides
from mtcompile.torch_private import pytree
from mtcompile.torch_private.thread_setting import ThreadSetting

aten = torch.ops.aten

_PRODUCTS = ("aten::addmm_", "aten::addbmm_", "aten::baddbmm_", "aten::addmv_", "aten::addr_")


# Of recurrent layers: their forward keeps bytes for their backward whose number and meaning only a library knows.
_RESERVING = (aten.mkldnn_rnn_layer.default, aten._cudnn_rnn.default, aten.miopen_rnn.default)


# On a CPU, statistics of half-precision rows are in fp32 if the weight is; torch's shape functions do not say so.
_NORMS = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
)

_observe = ThreadSetting[Observe | None](None)
_wide_statistics = ThreadSetting(False)


@contextlib.contextmanager
def plain_strides(observe: Observe | None, wide_statistics: bool = False) -> Iterator[None]:
    """Traces inside, in this thread, give results the strides that ``observe`` sees; None: those that are there outside.
    ``wide_statistics``: statistics of norms also get their real dtypes, which gradients of gradients compute with."""
    _replace_dispatch()
    with _observe.during(observe), _wide_statistics.during(wide_statistics):
        yield


@functools.cache
def _replace_dispatch() -> None:
    """Lets every operation that torch traces pass here. Outside ``plain_strides``, nothing is changed."""
    FakeTensorMode.dispatch = _as_observed(FakeTensorMode.dispatch)  # type: ignore[method-assign]
    FunctionalTensorMode.__torch_dispatch__ = _in_place(FunctionalTensorMode.__torch_dispatch__)  # type: ignore[method-assign]


def _as_observed(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(dispatch)
    def observed(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        observe = _observe.value
        if observe is not None and func in _RESERVING and torch.is_grad_enabled():
            return _reserving(dispatch(mode, func, types, args, kwargs or {}), func, args)
        result = dispatch(mode, func, types, args, kwargs or {})
        if func in _NORMS and _wide_statistics.value and args[0].device.type == "cpu":
            dtype = next((other.dtype for other in args[1:] if isinstance(other, torch.Tensor)), args[0].dtype)
            return result[0], *(statistic.to(dtype) for statistic in result[1:])
        if observe is None or not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
            return result
        if func is aten.view.default and 1 in result.shape:
            with plain_strides(None), _disable_current_modes(), no_python_dispatcher():
                return as_viewed(result, *args)
        operands = pytree.tree_leaves((args, kwargs or {}))
        if all(operand.is_contiguous() for operand in operands if isinstance(operand, torch.Tensor)):
            return result
        call = _as_node(func, args, kwargs or {})
        if not may_differ(call):
            return result
        with plain_strides(None), torch._C._DisableAutocast():
            return with_strides(result, observe(call))

    return observed


def _reserving(results: Any, func: Any, args: Any) -> Any:
    """The fake results of a recurrent layer, the last with as many bytes as the library reserves for operands like these."""
    if func is not aten.mkldnn_rnn_layer.default or args[0].device.type != "cpu":
        _refuse_reserving(func)
    with plain_strides(None), _disable_current_modes(), no_python_dispatcher():
        real = pytree.tree_map_only(torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), args)
        reserved = func(*real)[-1]
    return (*results[:-1], results[0].new_empty(reserved.shape, dtype=reserved.dtype))


def reserve_always(graph: fx.Graph) -> None:
    """Lets recurrent layers reserve their bytes wherever the graph runs. oneDNN's looks at whether autograd is enabled, which
    it is not while a step runs."""
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        if any(user.args[1] == 3 and user.users for user in node.users):
            node.target = _reserving_layer()


@functools.cache
def _reserving_layer() -> Any:
    library = torch.library.Library("mtcompile", "FRAGMENT")
    library.define(str(aten.mkldnn_rnn_layer.default._schema).removeprefix("aten::"))

    def run(*args: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return aten.mkldnn_rnn_layer.default(*args)

    library.impl("mkldnn_rnn_layer", run, "CPU")
    _libraries.append(library)  # what it defines goes with it
    return torch.ops.mtcompile.mkldnn_rnn_layer.default


_libraries: list[torch.library.Library] = []


def _refuse_reserving(func: Any) -> NoReturn:
    place = place_in("".join(traceback.format_stack()))
    raise CaptureError(
        f"{func} keeps bytes for its backward whose number only its library knows{place}\n"
        "  recurrent layers run it on a GPU: switch the library off before, in plain runs as well "
        "(torch.backends.cudnn.enabled = False), or use nn.LSTMCell and the like"
    )


def _as_node(func: Any, args: Any, kwargs: Any) -> fx.Node:
    """A node that calls ``func`` with these operands."""
    graph = fx.Graph()

    def operand(tensor: torch.Tensor) -> fx.Node:
        node = graph.placeholder("operand")
        node.meta["val"] = tensor
        return node

    return graph.call_function(func, *pytree.tree_map_only(torch.Tensor, operand, (tuple(args), dict(kwargs))))


def _in_place(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(dispatch)
    def keeping_strides(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _observe.value is not None and func is aten.mul_.Scalar and args[0].device.type == "cpu":
            args = (args[0], _rounded(args[1], args[0].dtype))
        result = dispatch(mode, func, types, args, kwargs)
        if _observe.value is not None and args and isinstance(args[0], FunctionalTensor) and _changes_first_operand(func):
            _keep_strides(args[0], func)
        return result

    return keeping_strides


def _rounded(number: Any, dtype: torch.dtype) -> Any:
    """A number as a CPU takes it for a product in place with half-precision values: rounded as they are. Formulas of torch's
    own multiply so; a product that makes a new value takes the number as it is."""
    if dtype not in (torch.bfloat16, torch.float16) or not isinstance(number, float):
        return number
    with plain_strides(None), _disable_current_modes(), no_python_dispatcher():
        return torch.tensor(number, dtype=dtype).item()


def _changes_first_operand(func: Any) -> bool:
    if torch.Tag.inplace_view in func.tags or not func._schema.arguments:
        return False
    alias = func._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def _keep_strides(tensor: FunctionalTensor, func: Any) -> None:
    """After a change in place by ``func``: puts the new value where the old one was, element by element, as a plain run does.
    Raises CaptureError for a matrix product, whose kernel rounds by the order in which it writes."""
    if not tensor.is_base_tensor():  # its values are those of its base, read through its own strides
        return
    value = tensor.from_functional()
    if same_strides(value.shape, value.stride(), tensor.stride()):
        return
    if func._schema.name in _PRODUCTS:
        raise CaptureError(
            f"{func} adds a product in place to a matrix with strides {tuple(tensor.stride())}; expected row-major order: "
            "leave the underscore out, or call contiguous() first"
        )
    place = aten.new_empty_strided.default(value, list(value.shape), list(tensor.stride()))
    tensor.replace_(aten.copy.default(place, value))
    tensor.commit_update()
    tensor.sync()
