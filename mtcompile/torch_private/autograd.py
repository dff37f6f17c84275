"""Autograd: what runs in a backward, hooks, modes, clipping, and who shares a tensor's storage."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


def keeps_graph() -> bool:
    """True inside a backward that was called with retain_graph=True (or create_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def inside_ddp() -> bool:
    """True inside the forward of a DistributedDataParallel, which averages gradients once they are in ``.grad``."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def accumulating(function: Any) -> list[bool]:
    """Tells for each leaf that the backward node which is running has a gradient for: will this backward add it to ``.grad``?
    ``backward()`` adds to all of them, with ``inputs=`` to some, ``torch.autograd.grad`` to none."""
    accumulators = [node for node, _ in function.next_functions if node is not None and hasattr(node, "variable")]
    try:
        return [torch._C._will_engine_execute_node(node) for node in accumulators]
    except RuntimeError:  # raised for a leaf within torch.autograd.grad
        return [False]


def asks_for(function: Any, position: int) -> bool:
    """Tells whether this backward needs the gradient of the ``position``-th tensor that the running node was applied to."""
    node, _ = function.next_functions[position]
    return node is not None and will_run(node)


def current_backward() -> int:
    """The number of the backward that is running in this thread."""
    return int(torch._C._current_graph_task_id())


def after_backward(callback: Callable[[], Any]) -> None:
    """Calls a function at the end of the backward that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def asked_for() -> tuple[list[Any], bool] | None:
    """Returns the tensors that the running backward was asked for, by ``torch.autograd.grad`` or ``inputs=``; none for
    ``backward()`` alone, which is for all leaves. And whether it adds to ``.grad``. None where torch does not tell."""
    given = [(call.f_locals.get("args", ()), call.f_locals.get("kwargs", {})) for call in _running_backwards()]
    if not given or any(len(args) < 4 for args, _ in given):
        return None
    return [tensor for args, _ in given for tensor in args[3]], all(kwargs.get("accumulate_grad") for _, kwargs in given)


def _running_backwards() -> list[FrameType]:
    """torch's calls of its engine for the backward that is running in this thread; where autograd runs it in a thread of its
    own, as on an accelerator, those of all threads. Empty if the call did not come from Python."""
    code = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)

    def calls(frame: FrameType | None) -> Iterator[FrameType]:
        while frame is not None:
            if frame.f_code is code:
                yield frame
            frame = frame.f_back

    own = list(calls(sys._getframe()))[:1]
    return own or [call for top in sys._current_frames().values() for call in calls(top)]


def is_among(tensor: torch.Tensor, asked: Iterable[Any]) -> bool:
    """Tells whether a backward that was asked for these tensors, or edges of autograd's graph, returns the gradient of one."""
    edge = tensor.grad_fn, tensor.output_nr
    return any(each is tensor or (isinstance(each, tuple) and tuple(each[:2]) == edge) for each in asked)


def goes_on_below(tensor: torch.Tensor) -> bool:
    """Tells whether the backward that is running goes on from the gradient of a tensor to other ones."""
    return any(node is not None and will_run(node) for node, _ in getattr(tensor.grad_fn, "next_functions", ()))


def will_run(node: Any) -> bool:
    """Tells whether the backward that is running comes, or has come, to a node of autograd's graph."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised for a leaf that torch.autograd.grad was called with
        return True


def hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor | None], torch.Tensor | None]) -> Mapping[int, Any]:
    """Calls a function with the gradient of a tensor, before all hooks that are registered later. Returns the hooks of the
    tensor as it is now, which are kept up to date."""
    hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # or saving the tensor would warn of it
    tensor.register_hook(hook)
    return tensor._backward_hooks  # type: ignore[return-value]


def leaves_outside(output: Any, node_name: str) -> list[torch.Tensor]:
    """The leaves that autograd's graph of the tensors in ``output`` reaches by another way than through a node of this name."""
    return _leaves(_nodes_of(output), lambda node: type(node).__name__ == node_name)[0]


def leaves_behind(function: Any) -> list[torch.Tensor]:
    """The leaves that gradients from this backward node reach: its own, and those that its other inputs were computed from."""
    return _leaves([function], lambda node: False)[0]


def leaves_beside(function: Any) -> list[torch.Tensor] | None:
    """The leaves that the backward which is running reaches by another way than from one of its nodes, ``function``. None if
    torch's Python did not begin that backward, which then cannot be looked at."""
    for call in _running_backwards():
        leaves, seen = _leaves(_nodes_of(call.f_locals["t_outputs"]), lambda node: node is function)
        if function in seen:
            return leaves
    return None


def _nodes_of(output: Any) -> list[Any]:
    return [t.grad_fn for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.grad_fn is not None]


def _leaves(todo: list[Any], is_through: Callable[[Any], bool]) -> tuple[list[torch.Tensor], set[Any]]:
    """The leaves that nodes of autograd's graph reach, but for those next to nodes that are ``is_through``; and all nodes."""
    leaves, seen = [], set[Any]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        through = is_through(node)
        for following, _ in node.next_functions:
            if following is not None and not hasattr(following, "variable"):
                todo.append(following)
            elif following is not None and not through:
                leaves.append(following.variable)
    return leaves, seen


def saving_hook() -> str | None:
    """The name of the user's function that packs every tensor saved for a backward now; None for none, and for torch's own."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or hooks[0].__module__.startswith("torch."):
        return None
    return str(getattr(hooks[0], "__qualname__", hooks[0]))


def dispatch_mode() -> str | None:
    """The name of the user's innermost TorchDispatchMode, in which Dynamo captures nothing; None if there is none."""
    modes: list[Any] = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    hiding = [mode for mode in modes if not getattr(mode, "ignore_compile_internals", bool)()]
    return type(hiding[-1]).__name__ if hiding else None


def function_mode() -> str | None:
    """The name of the user's innermost TorchFunctionMode; None if there is none but torch's own, such as a default device."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = [type(mode) for mode in torch.overrides._get_current_function_mode_stack()]
    users = [mode.__name__ for mode in modes if not mode.__module__.startswith("torch.")]
    return users[-1] if users else None


def in_transform() -> bool:
    """Tells whether this call stands in a transform (``torch.func``, ``vmap``), or is traced by ``make_fx`` or
    ``torch.jit.trace``: Dynamo captures nothing there."""
    traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None or torch._C._is_tracing()
    return traced or torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor was made within a transform of ``torch.func`` and left it; it then has no storage of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_batched(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor stands for several, within ``vmap`` or a backward with ``is_grads_batched=True``."""
    return is_wrapped(tensor) or bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def has_tangent(tensors: Iterable[torch.Tensor]) -> bool:
    """Tells whether a tensor carries a tangent of forward-mode differentiation (``torch.autograd.forward_ad``)."""
    from torch.autograd import forward_ad

    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def in_capture() -> bool:
    """Tells whether Dynamo or ``torch.export`` captures this call. ``torch.compiler.is_compiling`` does not tell: it is True in
    every thread while one of them captures."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


class _OwnCaptures:
    """``running``: how many captures of mtcompile's run: Dynamo can read it as a constant, unlike what belongs to a thread."""

    running = 0


@contextlib.contextmanager
def own_capture() -> Iterator[None]:
    """Marks what Dynamo captures inside as captured for a plan."""
    _OwnCaptures.running += 1
    try:
        yield
    finally:
        _OwnCaptures.running -= 1


def in_own_capture() -> bool:
    """Tells whether what Dynamo captures now is for a plan."""
    return _OwnCaptures.running > 0


def in_foreign_capture() -> bool:
    """Tells whether Dynamo captures this call for ``torch.compile`` of the user's or a library's."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting() and not _OwnCaptures.running


def caches_casts() -> bool:
    """Tells whether autocast is enabled for the host, and keeps the copies of weights that it casts."""
    return torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()


def cast_of(weight: torch.Tensor) -> torch.Tensor:
    """The copy of a [1, 1] weight that autocast computes with: one that it has kept, if there is one."""
    with torch.enable_grad():
        return torch.mm(torch.ones(1, 1), weight).detach()


def accumulation_hooks(parameter: torch.Tensor) -> bool:
    """True where a parameter has hooks of register_post_accumulate_grad_hook."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def move_hook(hook: Any, last: bool) -> None:
    """Lets a hook, by its handle, be called after or before the others of its kind."""
    hook.hooks_dict_ref().move_to_end(hook.id, last=last)


def is_last_hook(hook: Any) -> bool:
    """Tells whether a hook, by its handle, is called after the others of its kind."""
    return bool(next(reversed(hook.hooks_dict_ref())) == hook.id)


def gradient_norm(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of a gradient as ``clip_grad_norm_`` computes it. On a GPU its sum has another order than ``vector_norm``'s."""
    return torch._foreach_norm([gradient])[0]


def largest_magnitudes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The largest magnitude in each tensor of one dtype and device, NaN if there is one. On a GPU one kernel looks at all."""
    return list(torch._foreach_norm(list(tensors), math.inf))


def total_norm(norms: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of gradients as ``clip_grad_norm_`` adds it up: by device and dtype, on the device of the first. ``norms``: of
    each, in the dtype of its gradient. ``like``: for each, a tensor of its gradient's device and dtype."""
    groups = _group_tensors_by_device_and_dtype([[tensor.new_empty(0) for tensor in like]], with_indices=True)
    order = [index for _, indices in groups.values() for index in indices]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norms[index].to(like[0].device) for index in order]))
    return total


def counting_losses(losses: list[tuple[int, int, bool]]) -> contextlib.AbstractContextManager[Any]:
    """Every cross-entropy that runs inside adds (reduction, tokens that count, whether classes are weighted) to ``losses``."""
    from torch.utils._python_dispatch import TorchDispatchMode

    kinds = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in kinds:
                _, target, weight, reduction, ignored = args
                losses.append((reduction, int((target != ignored).sum()), weight is not None))
            return func(*args, **(kwargs or {}))

    return Counting()  # type: ignore[no-untyped-call]


def storage_id(tensor: torch.Tensor) -> int:
    """A number of the tensor's storage, while it lives."""
    return int(tensor.untyped_storage()._cdata)


def storage_holders(tensor: torch.Tensor) -> int:
    """The number of tensors and storages that share the tensor's memory, those of C++ included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def shares_storage(tensor: torch.Tensor, own: int = 1) -> bool:
    """Tells whether more than ``own`` tensors share the tensor's memory."""
    return storage_holders(tensor) > storage_holders(torch.empty(1)) - 1 + own
