"""Build and load the second device (device.cpp), and give torch a module for it, as ``torch.cuda`` is one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

import torch
from torch import _refs
from torch._subclasses import fake_impls

from tests.device.second.launches import register
from tests.device.second.streams import DEVICE, Event, Stream
from tests.helpers import fake_cuda
from tests.helpers.fake_cuda import FakeCuda

NAME = "hpu"
SOURCE = Path(__file__).with_name("device.cpp")


class LateCopies(FakeCuda):
    """Kernels run as they are called, after ``catch_up``; copies wait until something that needs them is about to run, or the
    host blocks, so that they outlive their phase."""

    def push(self, name: str) -> None:
        """A kernel or copy is about to be called by this name: kernels on the caller's thread, which has no name of ours."""
        if not threading.current_thread().name.startswith("mtcompile-"):
            self.catch_up()

    def pop(self) -> None:
        pass

    def catch_up(self) -> None:
        """Run all that a kernel that is called now comes after."""
        with self.lock:
            while self.main.work:
                self._advance(self.main)

    def block(self, event: fake_cuda.Event) -> None:
        with self.lock:
            self.blocked += 1
            self._reach(event, event.recorded)
        DEVICE.synchronize()  # what was run here went to a stream of the device, and is there now

    def _reach(self, event: fake_cuda.Event, times: int) -> None:
        """Run what the event comes after, and nothing else."""
        while event.done < times:
            self._advance(next(stream for stream in self.streams if ("record", event) in stream.work))

    def _advance(self, stream: fake_cuda.Stream) -> None:
        what, about = stream.work[0]
        if what == "wait":
            self._reach(*about)
        self._do_next(stream)


def built(source: Path = SOURCE) -> Path:
    """The shared library of a source, compiled once per version of it and of torch, and per torch: it names torch's folder."""
    from torch.utils import cpp_extension

    libraries = Path(torch.__file__).parent / "lib"
    key = hashlib.sha256(f"{torch.__version__} {libraries} {sys.version} {source.read_text()}".encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir(), f"mtcompile-second-device-{os.getuid()}", f"{key}.so")
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        new = library.with_suffix(f".{os.getpid()}")
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        where = [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
        include = [f"-I{path}" for path in cpp_extension.include_paths()]
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", abi, *include, str(source), "-o", str(new), *where]
        subprocess.run([*command, "-lc10", "-ltorch_cpu", "-ltorch"], check=True, capture_output=True)
        new.replace(library)
    return library


def load() -> None:
    torch.ops.load_library(str(built()))
    register(NAME)
    fake_impls.is_noncontiguous_supported = _refs.is_noncontiguous_supported = lambda device: True  # as of a GPU
    torch._register_device_module(NAME, _module())


def _module() -> Any:
    """Its generator is the CPU's."""
    counters = torch.ops.second_device
    module: Any = types.ModuleType(f"torch.{NAME}")

    class Driver:
        """Grants all host memory to be pinned."""

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            counters.pin(address, nbytes)
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            counters.unpin(address)
            return 0

    def generator_state(device: Any = None) -> torch.Tensor:
        DEVICE.main.drain()
        return torch.get_rng_state()

    def set_generator_state(state: torch.Tensor, device: Any = None) -> None:
        DEVICE.main.drain()
        torch.set_rng_state(state)

    stats = {"requested_bytes.all.current": counters.live, "requested_bytes.all.peak": counters.peak}
    module.__dict__.update(
        Event=Event,
        Stream=Stream,
        stream=DEVICE.use,
        device=lambda device: contextlib.nullcontext(),
        cudart=Driver,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        current_stream=lambda device=None: DEVICE.current(),
        synchronize=lambda device=None: DEVICE.synchronize(),
        empty_cache=lambda: None,
        get_rng_state=generator_state,
        set_rng_state=set_generator_state,
        manual_seed_all=lambda seed: None,
        mem_get_info=lambda device=None: (counters.cap() - counters.live(), counters.cap()),
        memory_reserved=lambda device=None: 0,
        memory_allocated=lambda device=None: 0,
        memory_stats=lambda device=None: {key: read() for key, read in stats.items()},
        reset_peak_memory_stats=lambda device=None: counters.reset_peak(),
        get_device_properties=lambda device=None: types.SimpleNamespace(name="second device"),
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
    )
    return module
