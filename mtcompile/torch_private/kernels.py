"""Inductor, one kernel at a time; what chooses kernels; and what they allocate, by the allocator's own events."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mtcompile.torch_private.thread_setting import process_lock


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


def kernel_choices() -> tuple[Any, ...]:
    """The settings that choose, while a program is traced, which of several kernels it calls: the backends of attention that
    are on, and their order; cuDNN, oneDNN, and the fast path of attention layers."""
    sdp = torch.backends.cuda
    backends = (sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled(), sdp.cudnn_sdp_enabled())
    libraries = torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled()
    return backends, tuple(torch._C._get_sdp_priority_order()), *libraries


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


@contextlib.contextmanager
def _ending_profiler() -> Iterator[None]:
    """Ends the profiler if an interrupt comes while it is started or stopped: left on, it would gather all that follows."""
    try:
        yield
    except BaseException:
        if profiler_runs():
            with contextlib.suppress(RuntimeError):
                torch.autograd._disable_profiler()
        raise


_READING_VALUES = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::bincount"}


class AllocatorPeak:
    """Measures the largest sum of live bytes that this thread allocated since entry, from the allocator's own events. Holds the
    process's lock meanwhile: there is one profiler.

    ``nbytes`` after exit: the peak over the bytes live at entry; None where another profiler was already active. ``kept``: the
    bytes that are still held then. ``reads_values``: whether operations ran by whose values others may be sized.
    """

    def __init__(self) -> None:
        self.nbytes: int | None = None
        self.kept = 0
        self.reads_values = False
        self._profile: Any = None
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> AllocatorPeak:
        with contextlib.ExitStack() as stack:  # an interrupt gives the lock back
            stack.enter_context(process_lock)
            self._start()
            self._lock = stack.pop_all()
        return self

    def _start(self) -> None:
        if not profiler_runs():
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            with _ending_profiler():
                self._profile.__enter__()

    def __exit__(self, *exc: Any) -> None:
        try:
            if self._profile is None:
                return
            with _ending_profiler():
                self._profile.__exit__(*exc)
        finally:
            self._lock.close()
        every = [(e, e.name()) for e in self._profile.kineto_results.events()]
        self.reads_values = any(name in _READING_VALUES for _, name in every)
        events = ((e.start_ns(), e.nbytes()) for e, name in every if name == "[memory]")
        live = peak = 0
        for _, nbytes in sorted(events, key=lambda event: event[0]):  # stable: events of one nanosecond keep their order
            live += nbytes
            peak = max(peak, live)
        self.nbytes, self.kept = peak, live
