"""Every environment variable that mtcompile reads, typed, in one place."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
from collections.abc import Iterator


def _number(name: str, default: float) -> float:
    value = os.environ.get(name, "") or default
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"expected {name} to be a number, such as {default:g}, found {value!r}") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"expected {name} to be a number of 0 or more, found {value!r}")
    return number


def _whole(name: str, default: int) -> int:
    value = os.environ.get(name, "") or str(default)
    if not value.isascii() or not value.isdigit():
        raise ValueError(f"expected {name} to be a whole number of 0 or more, such as {default or 1}, found {value!r}")
    return int(value)


def check() -> bool:
    """MT_CHECK=1: poison freed bytes, delay instructions at random, compare every result with its declaration."""
    return os.environ.get("MT_CHECK", "0") not in ("", "0")


def disk_check() -> bool:
    """MT_DISK_CHECK=1: compare what is read from disk with its checksum (MT_CHECK=1 does so too)."""
    return os.environ.get("MT_DISK_CHECK", "0") not in ("", "0")


def disk_verified() -> bool:
    """Says whether what is read from disk is compared with its checksum. What was written before has none."""
    return check() or disk_check()


def host_check() -> bool:
    """MT_HOST_CHECK=0: allocate host memory without asking the system whether there is room for it."""
    return os.environ.get("MT_HOST_CHECK", "1") not in ("", "0")


def disk_slowdown() -> float:
    """MT_DISK_SLOWDOWN=n: refuse plans whose step takes more than n times what it would with a disk that costs no time (default
    10); 0: never."""
    return _number("MT_DISK_SLOWDOWN", 10.0)


def disk_days() -> float:
    """MT_DISK_DAYS=n: refuse plans that write a drive as often as it is rated for in fewer days than n (default 1); 0:
    never."""
    return _number("MT_DISK_DAYS", 1.0)


def disk_direct() -> bool | None:
    """MT_DISK_DIRECT=1: read weights on disk straight to the device, by kvikio on a GPU; 0: through the host; auto (default):
    where kvikio can and it is predicted to be faster."""
    value = os.environ.get("MT_DISK_DIRECT", "") or "auto"
    if value not in ("0", "1", "auto"):
        raise ValueError(f"expected MT_DISK_DIRECT to be 0, 1 or auto, found {value!r}")
    return None if value == "auto" else value == "1"


def disk_spare() -> str:
    """MT_DISK_SPARE=dir: a folder on another drive, for what the disk does not take among the updates of a step."""
    return os.environ.get("MT_DISK_SPARE", "")


def check_seed() -> int:
    """MT_CHECK_SEED: seed of the random delays of MT_CHECK (default 0)."""
    return _whole("MT_CHECK_SEED", 0)


def debug() -> int:
    """MT_DEBUG=0..3: 1 prints the plan, 2 the schedule, 3 the step graph after each pass; commands show tracebacks."""
    return _whole("MT_DEBUG", 0)


def trace() -> bool:
    """MT_TRACE=1: on a GPU, trace when each instruction ran by its clock (else ``last_trace`` says when it was issued)."""
    return os.environ.get("MT_TRACE", "0") not in ("", "0")


def nvtx() -> bool:
    """MT_NVTX=1: on a GPU, a named NVTX range around each copy and kernel, for Nsight Systems; not yet measured."""
    return os.environ.get("MT_NVTX", "0") not in ("", "0")


def cuda_graphs() -> bool:
    """MT_CUDA_GRAPHS=1: on a GPU, run kernels as CUDA graphs where that is measured to be faster."""
    return os.environ.get("MT_CUDA_GRAPHS", "0") not in ("", "0")


def measured() -> bool:
    """MT_MEASURED=0: plan by presets and formulas, whatever ``doctor`` and ``calibrate`` have measured on this machine."""
    return os.environ.get("MT_MEASURED", "1") not in ("", "0")


def dump() -> str:
    """MT_DUMP=dir: write the plan, schedule and step graphs of each program there."""
    return os.environ.get("MT_DUMP", "")


def viz() -> str:
    """MT_VIZ=1: write each training program's timeline to mtcompile-<pid>-<n>.html here; MT_VIZ=dir: in that folder."""
    folder = os.environ.get("MT_VIZ", "")
    return "" if folder == "0" else "." if folder == "1" else folder


def progress() -> bool:
    """MT_PROGRESS=0: say nothing on stderr while a model is captured and planned, however long that takes."""
    return os.environ.get("MT_PROGRESS", "1") not in ("", "0")


def effort() -> str:
    """MT_EFFORT=quick, normal or thorough: what planning may cost where no ``effort=`` says so (default normal)."""
    return os.environ.get("MT_EFFORT", "") or "normal"


def cache() -> str:
    """MT_CACHE=dir: where plans and speeds are cached (default: mtcompile in the user's cache folder; 0: nowhere)."""
    folder = os.environ.get("MT_CACHE", "")
    if folder == "0":
        return ""
    return folder or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "mtcompile")


def processes() -> int:
    """WORLD_SIZE, which torchrun sets: how many processes it has started."""
    return _whole("WORLD_SIZE", 1)


def process_here() -> int:
    """LOCAL_RANK, which torchrun sets: the number of this process among those of its machine."""
    return _whole("LOCAL_RANK", 0)


def ranks_timeout() -> float:
    """MT_RANKS_TIMEOUT=n: how many seconds a rank waits for the others before it gives up (default 600)."""
    return _number("MT_RANKS_TIMEOUT", 600.0)


def ranks_share() -> bool:
    """MT_RANKS_SHARE=0: each rank has weights and optimizer state of its own, also where all of a host could share them."""
    return os.environ.get("MT_RANKS_SHARE", "1") not in ("", "0")


def ranks_shard() -> bool:
    """MT_RANKS_SHARD=0: each host has all of the optimizer state, also where hosts could have a part of it each. With "state",
    each has a part of the state alone, with "weights" of the weights too; default: of these where ``host=`` has no room for
    all."""
    return os.environ.get("MT_RANKS_SHARD", "1") not in ("", "0")


def ranks_shard_weights() -> bool | None:
    """MT_RANKS_SHARD=weights, or =state: whether each host has a part of the weights; None where that is not said."""
    return {"weights": True, "state": False}.get(os.environ.get("MT_RANKS_SHARD", ""))


def ranks_host() -> str:
    """MT_RANKS_HOST=name: the host that a rank counts itself to (default: the machine it runs on)."""
    return os.environ.get("MT_RANKS_HOST", "")


@contextlib.contextmanager
def transformers_load_in_order() -> Iterator[None]:
    """Lets Transformers load one tensor after the other, not several at a time in threads, which takes more memory."""
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before


def products_in_one_order() -> bool:
    """Lets cuBLAS add in one order, by CUBLAS_WORKSPACE_CONFIG, unless the user has chosen a workspace. Returns False if that
    one lets it add in several. It counts from the first product of a process on."""
    return os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8") in (":4096:8", ":16:8")


def kvikio_reads_at_once(count: int) -> None:
    """Lets kvikio, if it is imported after this, read so many pieces at once, unless the user has said how many."""
    os.environ.setdefault("KVIKIO_NTHREADS", str(count))


def panics_in_one_line() -> None:
    """Lets libraries in Rust tell of a panic without a backtrace, whatever the user's RUST_BACKTRACE says."""
    os.environ["RUST_BACKTRACE"] = "0"


def inductor_cache() -> str:
    """TORCHINDUCTOR_CACHE_DIR, torch's: where Inductor keeps compiled kernels; empty: not set."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")


def set_inductor_cache(folder: str) -> None:
    """Lets Inductor keep compiled kernels in this folder from now on."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder


def allocator_is_the_users() -> bool:
    """Tells whether the user has set torch's allocator, by one of its two variables."""
    return any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))


def listed() -> dict[str, tuple[str | None, str]]:
    """Returns name -> (value or None, meaning) of every variable above, from the first line of each docstring."""
    variables = {}
    for read in list(globals().values()):
        about, _, meaning = (getattr(read, "__doc__", None) or "").partition(":")
        if about.startswith("MT_"):
            name = about.partition("=")[0]
            variables[name] = (os.environ.get(name), meaning.strip().rstrip("."))
    return variables


def unknown() -> dict[str, str]:
    """Returns name -> the variable that may be meant, or "", of every ``MT_`` variable that is set and not known."""
    known = list(listed())
    names = sorted(name for name in os.environ if name.startswith("MT_") and name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, 1)), "") for name in names}
