"""Autograd: what runs in a backward, hooks, modes, clipping, and who shares a tensor's storage."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from mtcompile.errors import StepError


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


def current_backward() -> int:
    """The number of the backward that is running in this thread."""
    return int(torch._C._current_graph_task_id())


def after_backward(callback: Callable[[], Any]) -> None:
    """Calls a function at the end of the backward that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def asked_for() -> tuple[list[Any], bool] | None:
    """What the backward that is running was asked for, by ``torch.autograd.grad`` or ``inputs=``; nothing for ``backward()``
    alone, which is for all leaves. And whether it adds to ``.grad``. None where torch does not tell."""
    code = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)

    def call(frame: Any) -> Any:
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        return frame

    own = call(sys._getframe())  # a backward on an accelerator runs in another thread than the one that waits for it
    calls = [own] if own is not None else [found for frame in sys._current_frames().values() if (found := call(frame))]
    given = [(frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {})) for frame in calls]
    if not given or any(len(args) < 4 for args, _ in given):
        return None
    return [tensor for args, _ in given for tensor in args[3]], all(kwargs.get("accumulate_grad") for _, kwargs in given)


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
    leaves, seen = [], set[Any]()
    todo = [t.grad_fn for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        through = type(node).__name__ == node_name
        for following, _ in node.next_functions:
            if following is not None and not hasattr(following, "variable"):
                todo.append(following)
            elif following is not None and not through:
                leaves.append(following.variable)
    return leaves


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


def in_capture() -> bool:
    """Tells whether Dynamo or ``torch.export`` captures this call. ``torch.compiler.is_compiling`` does not tell: it is True in
    every thread while one of them captures."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


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


def move_to_front(hook: Any) -> None:
    """Lets a hook, by its handle, be called before the others of its kind."""
    hook.hooks_dict_ref().move_to_end(hook.id, last=False)


def gradient_norm(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of a gradient as ``clip_grad_norm_`` computes it. On a GPU its sum has another order than ``vector_norm``'s."""
    return torch._foreach_norm([gradient])[0]


def total_norm(norms: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of gradients as ``clip_grad_norm_`` adds it up: by device and dtype, on the device of the first. ``norms``: of
    each, in the dtype of its gradient. ``like``: for each, a tensor of its gradient's device and dtype."""
    groups = _group_tensors_by_device_and_dtype([[tensor.new_empty(0) for tensor in like]], with_indices=True)
    order = [index for _, indices in groups.values() for index in indices]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norms[index].to(like[0].device) for index in order]))
    return total


def refuse_clipping(parameters: Iterable[torch.Tensor], why: str) -> None:
    """Make torch's functions that clip gradients raise StepError(why) for these parameters from now on. They would find no
    gradients and silently do nothing, and no hook of torch's sees that: the functions are wrapped where they are, once."""
    for parameter in parameters:
        parameter._mt_not_clipped = why  # type: ignore[attr-defined]
    clipping = torch.nn.utils.clip_grad
    for name in ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"):  # the last: where the first was imported
        plain = getattr(clipping, name, None)
        if plain is None or plain.__module__ == __name__:
            continue
        wrapped = _refusing(plain)
        for module in (clipping, torch.nn.utils):
            if getattr(module, name, None) is plain:
                setattr(module, name, wrapped)


def allow_clipping(parameters: Iterable[torch.Tensor]) -> None:
    """Takes ``refuse_clipping`` of these parameters back."""
    for parameter in parameters:
        parameter.__dict__.pop("_mt_not_clipped", None)


def _refusing(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip, assigned=("__name__", "__qualname__", "__doc__"))
    def refusing(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for tensor in tensors:
            if why := getattr(tensor, "_mt_not_clipped", None):
                raise StepError(why)
        return clip(tensors, *args, **kwargs)

    return refusing


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
