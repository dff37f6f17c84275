"""Every use of torch's private APIs, as small functions: Dynamo, the joint export, Inductor, autograd, the allocator's events.

The contract test is tests/capture/test_dynamo.py."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

from mtcompile.errors import StepError

pytree = _pytree  # as a public name
set_grad_enabled = torch._C._set_grad_enabled  # what torch.no_grad() is in Dynamo's graphs

# ---------------------------------------------------------------------------------------------------------------- dynamo


def capture_settings(signatures: int) -> contextlib.AbstractContextManager[Any]:
    """Dynamo's settings while a model is called that is captured at most ``signatures`` times: floats and ints of the call
    become constants of the graph (guarded), so that nothing in it is symbolic."""
    from torch._dynamo import config as dynamo_config

    return dynamo_config.patch(  # type: ignore[no-any-return]
        specialize_float=True,
        automatic_dynamic_shapes=False,
        skip_nnmodule_hook_guards=False,  # a hook that comes or goes is another computation
        enable_dynamo_decompositions=False,  # of addcmul_ and the like: they round otherwise
        recompile_limit=signatures,
        accumulated_recompile_limit=8 * signatures,
        use_numpy_random_stream=True,  # numpy's random numbers are refused, not drawn from torch's generator
    )


def leave_out_of_graphs(functions: Iterable[Callable[..., Any]]) -> None:
    """Let Dynamo leave out calls of functions that only log."""
    from torch._dynamo import config as dynamo_config

    dynamo_config.ignore_logging_functions = _SortableSet({*set.__iter__(dynamo_config.ignore_logging_functions), *functions})


class _SortableSet(set[Any]):
    """A set whose members are seen by their names: some versions of torch sort the members of the setting above for their log,
    and functions cannot be sorted."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(repr(member) for member in set.__iter__(self)))


def cause_in_dynamo(error: Exception) -> BaseException | None:
    """The exception behind one that Dynamo raised, or that one itself; None for an exception that is not Dynamo's."""
    from torch._dynamo.exc import InternalTorchDynamoError, TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    internal = error.__context__ if isinstance(error, InternalTorchDynamoError) else None
    return getattr(error, "inner_exception", None) or error.__cause__ or internal or error


def mixing_devices(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Traced inside, an operation on operands of the host and of ``device`` computes on ``device``, where parameters will be
    when they are used."""
    from torch._functorch import config as functorch_config

    if device.type == "cpu":
        return contextlib.nullcontext()
    return functorch_config.patch(fake_tensor_prefer_device_type=device.type)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------- the joint graph


def fake_mode_of(fakes: Iterable[torch.Tensor]) -> Any:
    """The mode that the fake tensors were made under, else the one that is active."""
    from torch._guards import detect_fake_mode

    return next((fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode")), None) or detect_fake_mode()


@contextlib.contextmanager
def tracing_joint(fake_mode: Any, backward_autocast: Iterable[tuple[str, torch.dtype]]) -> Iterator[None]:
    """The context that ``export_joint`` and ``joint_trace_key`` need. ``backward_autocast``: (device, dtype) of every autocast
    that is enabled when backward is called."""
    from torch._functorch import config as functorch_config
    from torch._guards import TracingContext, tracing

    autocast = [{"device_type": device, "dtype": dtype} for device, dtype in backward_autocast]
    with tracing(TracingContext(fake_mode)), functorch_config.patch(backward_pass_autocast=autocast):
        yield


def export_joint(stack: contextlib.ExitStack, graph: fx.GraphModule, fakes: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    """The joint (forward and backward) ATen graph of one of Dynamo's. Placeholders carry ``meta["desc"]``, and so does the
    output node."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    return aot_export_joint_with_descriptors(stack, graph, fakes, ignore_shape_env=True).graph_module


def joint_trace_key(graph: fx.GraphModule, fakes: tuple[torch.Tensor, ...]) -> str:
    """torch's own key of what ``export_joint`` would trace, which knows the settings that tracing depends on. Raises where
    torch can promise no such key: an operation or setting that it does not know to be safe."""
    from torch._functorch._aot_autograd.autograd_cache import autograd_cache_key
    from torch._functorch._aot_autograd.schemas import AOTConfig

    config = AOTConfig(None, None, None, None, 0, 0, False, is_export=True, ignore_shape_env=True)
    key: Any = autograd_cache_key
    of_compilers: tuple[Any, ...] = ({},) if "fx_config" in inspect.signature(key).parameters else ()  # torch 2.11
    return str(key(graph, fakes, config, *of_compilers)[0])


# -------------------------------------------------------------------------------------------------------------- inductor


def inductor(body: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile ``body`` (ATen operations, functional) for tensors like ``inputs``. Inductor caches it on disk
    (TORCHINDUCTOR_CACHE_DIR), keyed by graph, shapes, torch version and device."""
    from torch._inductor import standalone_compile

    copied = fx.Graph()  # Inductor's passes change the graph they are given
    copied.output(copied.graph_copy(body.graph, {}))
    with torch.no_grad():
        return standalone_compile(fx.GraphModule(body, copied), list(inputs), dynamic_shapes="from_example_inputs")


def probe_inductor() -> threading.Thread:
    """Import Inductor, and let it find out in a thread which vector instructions run here: that waits for other processes, a
    second or two, while this one goes on tracing."""
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
    """True inside a backward that was called with retain_graph=True (or create_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def accumulating(function: Any) -> list[bool]:
    """Tells for each leaf that the backward node which is running has a gradient for: will this backward add it to ``.grad``?
    ``backward()`` adds to all of them, with ``inputs=`` to some, ``torch.autograd.grad`` to none."""
    accumulators = [node for node, _ in function.next_functions if node is not None and hasattr(node, "variable")]
    try:
        return [torch._C._will_engine_execute_node(node) for node in accumulators]
    except RuntimeError:  # raised for a leaf within torch.autograd.grad
        return [False]


def accumulation_hooks(parameter: torch.Tensor) -> bool:
    """True where a parameter has hooks of register_post_accumulate_grad_hook."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


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


# ---------------------------------------------------------------------------------------------------- allocator's events


class AllocatorPeak:
    """Measures the largest sum of live bytes that this thread allocated since entry, from the allocator's own events.

    ``nbytes`` after exit: the peak over the bytes live at entry; None where another profiler was already active. ``kept``: the
    bytes that are still held then.
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
        memory = (e for e in self._profile.kineto_results.events() if e.name() == "[memory]")
        events = ((e.start_ns(), e.nbytes()) for e in memory)
        live = peak = 0
        for _, nbytes in sorted(events, key=lambda event: event[0]):  # stable: events of one nanosecond keep their order
            live += nbytes
            peak = max(peak, live)
        self.nbytes, self.kept = peak, live
