"""Inductor, one kernel at a time; what chooses kernels; and what they allocate, by the allocator's own events."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mtcompile.cached.private import another_inductor_cache, settle_inductor_cache
from mtcompile.errors import ends_device
from mtcompile.torch_private.thread_setting import process_lock

_TORCHS_OWN = frozenset(torch.library._impls)  # as of the import: names of operations and dispatch keys
_FUNCTORCH = f"registered at {Path(torch.__file__).parent / '_functorch'}/"  # torch's, from the first call of vmap on
_PRECISIONS = [
    (backend, operation)
    for backend in ("generic", "cuda", "mkldnn")
    for operation in ("all", "matmul", "conv", "rnn")
    if (backend, operation) not in {("generic", "matmul"), ("generic", "conv"), ("generic", "rnn")}
]


def inductor(
    body: fx.GraphModule, inputs: Sequence[torch.Tensor], strict: bool = False
) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile ``body`` (ATen operations, functional) for tensors like ``inputs``. Inductor caches it on disk
    (``settle_inductor_cache``), keyed by graph, shapes, torch version and device. ``strict``: so that elementwise operations
    round as eager's do."""
    from torch._inductor import standalone_compile
    from torch._inductor.utils import clear_caches

    settle_inductor_cache()
    if all(tensor.device.type == "cpu" for tensor in inputs):
        find_vector_instructions()
    options = {"config_patches": strict_numerics()} if strict else None

    def compiled() -> Callable[..., Sequence[torch.Tensor]]:
        copied = fx.Graph()  # Inductor's passes change the graph they are given
        copied.output(copied.graph_copy(body.graph, {}))
        graph = fx.GraphModule(body, copied)
        return standalone_compile(graph, list(inputs), dynamic_shapes="from_example_inputs", options=options)

    with torch.no_grad():
        try:
            return compiled()
        except Exception as error:
            if ends_device(error):
                raise
            why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        with another_inductor_cache(why):
            clear_caches()
            return compiled()


@functools.cache
def find_vector_instructions() -> None:
    """Lets Inductor find the vector instructions that torch's own kernels use. It tries them by programs in its cache. One that
    was killed while it was compiled, or took too long, would leave it without, here or in every process: slow kernels, and
    other bits than those of a process that has found them."""
    from torch._inductor import cpu_vec_isa

    wanted = torch.backends.cpu.get_cpu_capability().lower()

    def found() -> bool:
        return wanted not in ("avx2", "avx512") or wanted in str(cpu_vec_isa.pick_vec_isa())

    if found():
        return
    with contextlib.suppress(LookupError), another_inductor_cache(f"Inductor's test program for {wanted} did not run"):
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        for kind in {kind for isa in cpu_vec_isa.supported_vec_isa_list for kind in type(isa).__mro__}:
            for member in vars(kind).values():
                getattr(member, "cache_clear", lambda: None)()
        if not found():
            raise LookupError(wanted)


@functools.cache
def strict_numerics() -> dict[str, Any]:
    """The settings of Inductor, of those that this torch has, under which elementwise operations round as eager's do: each
    result to its dtype, quotients to the nearest, no multiplication and addition in one, denormals kept."""
    from torch._inductor import config

    known = config.get_config_copy()
    wanted = {
        "numerics": "strict",  # torch 2.14; the others say the same before
        "emulate_precision_casts": True,
        "eager_numerics.division_rounding": True,
        "eager_numerics.disable_ftz": True,
        "eager_numerics.use_pytorch_libdevice": True,
        "cpp.enable_floating_point_contract_flag": "off",
        "cpp.enable_unsafe_math_opt_flag": False,
    }
    return {name: value for name, value in wanted.items() if name in known}


def numerics_identity(device: torch.device) -> str:
    """Says on what the bits of a compiled elementwise operation may depend beside its code: torch, the processor, and what
    compiles for it."""
    from torch._inductor import cpp_builder

    told = [torch.__version__, str(strict_numerics())]
    if device.type == "cpu":
        told.append(torch.backends.cpu.get_cpu_capability())
        with contextlib.suppress(RuntimeError):  # there is none
            told.append(_version_of(cpp_builder.get_cpp_compiler()))
        return " ".join(told)
    properties = torch.get_device_module(device).get_device_properties(device)
    with contextlib.suppress(ImportError):
        import triton

        told.append(f"triton {triton.__version__}")
    return " ".join([*told, str(properties.name), str(torch.version.cuda or torch.version.hip)])


@functools.cache
def _version_of(compiler: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30).stdout.partition("\n")[0]
    return ""


def probe_inductor() -> threading.Thread:
    """Import Inductor, and let it find out in a thread which vector instructions run here: that waits for other processes, a
    second or two, while this one goes on tracing."""
    settle_inductor_cache()
    from torch._inductor import compile_fx

    def probe() -> None:
        with contextlib.suppress(Exception):  # the compilation itself meets the error again
            find_vector_instructions()

    assert compile_fx is not None  # its imports are those of a compilation: none is left for the thread
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    return thread


def inductor_cache() -> str:
    """The directory of Inductor's disk cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    settle_inductor_cache()
    return str(cache_dir())


def kernel_choices(device: torch.device) -> tuple[Any, ...]:
    """The settings that choose, while a program is traced for ``device``, which of several kernels it calls, or how these
    compute: the backends of attention that are on, their order, and whether the plain one adds in 16 bits; cuDNN, oneDNN, and
    the fast path of attention layers; the order of an einsum's products; the precision of fp32 products; operations of torch's
    that the user has implemented."""
    _settle_order(device)
    sdp, einsum = torch.backends.cuda, torch.backends.opt_einsum
    backends = (sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled(), sdp.cudnn_sdp_enabled())
    libraries = torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled()
    sums = sdp.fp16_bf16_reduction_math_sdp_allowed(), einsum.enabled, einsum.strategy
    return backends, tuple(torch._C._get_sdp_priority_order()), *libraries, *sums, _precisions(), _users_operations()


def _precisions() -> tuple[str, ...]:
    """The precisions of fp32 products. torch refuses to tell the older setting once a newer one was made; newer torch has more
    of these."""
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is None:
        return (torch.get_float32_matmul_precision(),)
    return tuple(str(read(backend, operation)) for backend, operation in _PRECISIONS)


def _users_operations() -> tuple[str, ...]:
    """The operations of torch's that ``torch.library`` has implementations of for what models run on, with the lines that made
    the libraries: implementations by two libraries that one line made are not told apart."""
    every = torch.library._impls  # names are added by those who implement, and taken away by them alone
    if len(every) == len(_TORCHS_OWN):
        return ()
    if len(every) != len(_TORCHS_OWN) + len(_seen.added) or not _seen.added <= every:
        _seen.added = frozenset(every - _TORCHS_OWN)
        _seen.users = sorted(n for n in _seen.added if n.startswith("aten/") and not n.endswith("/Meta"))
    places = ((name, _registered_at(*name.split("/")[1:])) for name in _seen.users)
    return tuple(f"{name} {place}" for name, place in places if _FUNCTORCH not in place)


class _Seen(threading.local):
    """The names beside torch's own when this thread looked last, and those of the user's operations."""

    added: frozenset[str] = frozenset()
    users: Sequence[str] = ()


_seen = _Seen()


def users_gradients() -> tuple[str, ...]:
    """The operations of torch's that the user has an implementation of for autograd, which tracing goes past; each with the
    dispatch key and the line that made it."""
    return tuple(name for name in _users_operations() if name.split()[0].rpartition("/")[2].startswith("Autograd"))


def _registered_at(operation: str, key: str) -> str:
    lines = torch._C._dispatch_dump(f"aten::{operation}").splitlines()
    return next((line.partition(" :: ")[0] for line in lines if line.startswith((f"{key}: ", f"{key}[alias]: "))), "")


@functools.cache
def _settle_order(device: torch.device) -> None:
    """Lets torch order its backends of attention, as it does where one is first chosen on a GPU (on some, cuDNN comes first
    from then on): else a program's first step changes what it was captured by, and its second captures it again."""
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError, AssertionError):  # no choice there, or no such device: CPU builds assert
            tiny = torch.empty((1, 1, 1, 8), dtype=torch.bfloat16, device=device)
            torch._fused_sdp_choice(tiny, tiny, tiny)


def attention_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Names the backend that torch chooses for causal attention of ``q`` (batch, heads, tokens, width) over ``k`` and ``v``."""
    grouped = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped)
    return torch.nn.attention.SDPBackend(choice).name.lower().removesuffix("_attention").replace("_", " ")


def expand_segments() -> None:
    """Lets torch's allocator on a GPU grow its segments from now on, page by page. Without that it leaves more of its memory
    unused between what it has given out. Nothing changes where the system cannot do that."""
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def profiler_runs() -> bool:
    """Tells whether a profiler of torch's records now: this thread or, as one may be asked to, all threads."""
    return bool(torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled())


_READING_VALUES = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::bincount"}


@dataclass(slots=True)
class AllocatorPeak:
    """Bytes that a piece of work allocated, beyond those live when it began. ``nbytes``: the largest sum of live bytes; None
    where that could not be measured. ``kept``: those still held when it ended. ``reads_values``: whether operations read
    values, by which others may be sized."""

    nbytes: int | None = None
    kept: int = 0
    reads_values: bool = False


@contextlib.contextmanager
def cpu_allocator_peak() -> Iterator[AllocatorPeak]:
    """Measures what this thread allocates on the CPU inside, from the allocator's own events; the figures are there at the end.
    Measures nothing where another profiler is already active: there is one in a process, whose lock is held meanwhile.

    An interrupt may come after any call. The profiler's own functions are called, not ``profile``, which would say that it runs
    before it does and after it has ended: one that is left on ends the process when it exits."""
    peak = AllocatorPeak()
    with process_lock:
        if profiler_runs():
            yield peak
            return
        profile = torch.autograd.profiler.profile(profile_memory=True)
        prepared, enabled = profile.config(create_trace_id=True), profile.config(create_trace_id=False)
        torch.autograd._prepare_profiler(prepared, profile.kineto_activities)
        try:
            torch.autograd._enable_profiler(enabled, profile.kineto_activities)
            yield peak
        finally:  # nothing is called before: an interrupt after that would leave it on
            recorded = torch.autograd._disable_profiler()
    _read_events(recorded.events(), peak)


def _read_events(events: Iterable[Any], peak: AllocatorPeak) -> None:
    """Reads what a profiler has recorded into ``peak``."""
    named = [(event, event.name()) for event in events]
    peak.reads_values = any(name in _READING_VALUES for _, name in named)
    changes = ((event.start_ns(), event.nbytes()) for event, name in named if name == "[memory]")
    live = most = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):  # stable: those of one nanosecond keep their order
        live += nbytes
        most = max(most, live)
    peak.nbytes, peak.kept = most, live
