"""What else is used of torch's private APIs: Inductor, questions to autograd, and the allocator's events."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree  # noqa: F401  (others import it from here)

from mtcompile.errors import StepError

# -------------------------------------------------------------------------------------------------------------- inductor


def inductor(body: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
    """``body`` (ATen operations, functional) compiled for tensors like ``inputs``. Inductor keeps what it made on disk
    (TORCHINDUCTOR_CACHE_DIR), keyed by graph, shapes, torch version and device."""
    from torch._inductor import standalone_compile

    # A module of its own: Inductor's passes change the graph they are given.
    copied = fx.Graph()
    copied.output(copied.graph_copy(body.graph, {}))
    with torch.no_grad():
        return standalone_compile(fx.GraphModule(body, copied), list(inputs), dynamic_shapes="from_example_inputs")


def probe_inductor() -> threading.Thread:
    """Import Inductor, and let it find out in a thread which vector instructions run here: that is waiting for other
    processes, a second or two, while this one goes on tracing."""
    from torch._inductor import compile_fx, cpu_vec_isa

    def probe() -> None:
        with contextlib.suppress(Exception):  # the compilation itself meets the error again
            cpu_vec_isa.pick_vec_isa()

    assert compile_fx is not None  # its imports are those of a compilation: none is left for the thread
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    return thread


def inductor_cache() -> str:
    """The directory of Inductor's disk cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


# ------------------------------------------------------------------------------------------------------- without memory


def without_memory() -> contextlib.AbstractContextManager[Any]:
    """Tensors made inside have shapes and devices and no content."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def lasting() -> contextlib.AbstractContextManager[Any]:
    """Tensors made inside may be written at any time, also when they are made under torch.inference_mode."""
    if not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())  # which leaving inference mode would enable
    return stack


# -------------------------------------------------------------------------------------------------------------- autograd


def keeps_graph() -> bool:
    """True inside a backward called with retain_graph=True (or create_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def accumulates(function: Any) -> bool:
    """Of a backward node that is running: whether this is a call of ``backward()``, which adds to ``.grad``, and not of
    ``torch.autograd.grad``."""
    leaves = [node for node, _ in function.next_functions if node is not None and hasattr(node, "variable")]
    try:
        return not leaves or any(torch._C._will_engine_execute_node(node) for node in leaves)
    except RuntimeError:  # what it says of a leaf within torch.autograd.grad
        return False


def accumulation_hooks(parameter: torch.Tensor) -> bool:
    """Whether it has hooks of register_post_accumulate_grad_hook."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def refuse_clipping(parameters: Iterable[torch.Tensor], why: str) -> None:
    """From now on torch's functions that clip gradients raise StepError(why) for these parameters. They would find no
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


def _refusing(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip, assigned=("__name__", "__qualname__", "__doc__"))
    def refusing(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for parameter in given:
            if why := getattr(parameter, "_mt_not_clipped", None):
                raise StepError(why)
        return clip(given, *args, **kwargs)

    return refusing


def counting_losses(losses: list[tuple[int, int, bool]]) -> contextlib.AbstractContextManager[Any]:
    """Inside, every cross-entropy that runs adds (reduction, tokens that count, whether classes are weighted) to ``losses``."""
    from torch.utils._python_dispatch import TorchDispatchMode

    kinds = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in kinds:
                _, target, weight, reduction, ignored = args
                losses.append((reduction, int((target != ignored).sum()), weight is not None))
            return func(*args, **(kwargs or {}))

    return Counting()  # type: ignore[no-untyped-call]


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors and storages share the tensor's memory, those of C++ included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# ---------------------------------------------------------------------------------------------------- allocator's events


class AllocatorPeak:
    """Largest sum of live bytes that this thread allocated since entry, from the allocator's own events.

    ``nbytes`` after exit: the peak over bytes live at entry; None where another profiler was already active. ``kept``:
    what is still held then.
    """

    def __init__(self) -> None:
        self.nbytes: int | None = None
        self.kept = 0
        self._profile: Any = None

    def __enter__(self) -> AllocatorPeak:
        if not torch._C._autograd._profiler_enabled():
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(*exc)
        found = self._profile.kineto_results.events()
        memory = ((e.start_ns(), e.nbytes()) for e in found if e.name() == "[memory]")
        events = sorted(memory, key=lambda event: event[0])  # stable: events of the same nanosecond keep their order
        live = peak = 0
        for _, nbytes in events:
            live += nbytes
            peak = max(peak, live)
        self.nbytes, self.kept = peak, live
