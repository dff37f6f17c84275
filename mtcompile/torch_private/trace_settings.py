"""The settings that a trace depends on beside its graph, and whether torch's functions are torch's own."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from mtcompile.passes.graph_json import NAMESPACES
from mtcompile.torch_private.kernels import kernel_choices

_OPERATORS = set(dir(torch._C._VariableFunctions))  # those that ``torch`` has as functions
_CHANGED_BY_OTHERS = {"manual_seed", "compile"}  # which libraries replace, and nothing traced calls


def _functions() -> list[tuple[Any, str, Any]]:
    """torch's functions that graphs and traces call, with where they are found."""
    found: list[tuple[Any, str, Any]] = [
        (torch, name, value) for name, value in vars(torch).items() if name in _OPERATORS and callable(value)
    ]
    for place in (torch.Tensor, torch.functional, torch.nn.functional, torch._C._nn):
        found += [(place, name, value) for name, value in vars(place).items() if callable(value)]
    return found


_TORCHS_FUNCTIONS, _TENSORS_NAMES = _functions(), frozenset(vars(torch.Tensor))  # as of the import
_TORCHS_FOLDER = str(Path(torch.__file__).parent)


def kernel_settings(device: torch.device) -> tuple[Any, ...] | None:
    """The settings that choose the kernels of operations on ``device``, and how these compute; None where the user has
    implemented one of torch's operations, or something listens to all operations of this thread."""
    *choices, users = kernel_choices(device)
    if users or torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    cudnn, matmul, cuda = torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.cuda
    return (
        *choices,
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        (cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit),
        (torch.backends.mkldnn.deterministic, torch._C._get_nnpack_enabled(), torch.backends.quantized.engine),
        (matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction),
        (str(cuda.preferred_linalg_library()), str(cuda.preferred_blas_library())),
        tuple(sorted((path, os.stat(path).st_mtime_ns) for path in torch.ops.loaded_libraries if os.path.exists(path))),
    )


def settings_of_traces(device: torch.device) -> tuple[Any, ...] | None:
    """``kernel_settings``, and what else decides which operations a trace consists of. None where they give none, where the
    user has replaced one of torch's functions, and where a mode or hooks would take part in a trace."""
    settings = kernel_settings(device)
    if settings is None or not _are_torchs_own():
        return None
    modes = torch._C._len_torch_function_stack() - (torch.utils._device.CURRENT_DEVICE is not None)
    if modes > 0 or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    configs = (sys.modules.get(name) for name in ("torch._functorch.config", "torch.fx.experimental._config"))
    return (
        settings,
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.is_autocast_cache_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_inference_mode_enabled(),
        [config and config.get_hash().hex() for config in configs],
    )


def _are_torchs_own() -> bool:
    more = vars(torch.Tensor).keys() - _TENSORS_NAMES  # each may hide what the class inherits
    if any(callable(vars(torch.Tensor)[name]) for name in more):
        return False
    return all(vars(place).get(name) is value or name in _CHANGED_BY_OTHERS for place, name, value in _TORCHS_FUNCTIONS)


@functools.cache
def was_torch_patched() -> bool:
    """Tells whether somebody had replaced one of torch's functions before this package was imported. Then names tell functions
    apart within this process only."""
    return any(not _is_of_torch(value) for _, name, value in _TORCHS_FUNCTIONS if name not in _CHANGED_BY_OTHERS)


def _is_of_torch(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return value.__code__.co_filename.startswith(_TORCHS_FOLDER)  # wrappers take the name of what they wrap
    return _root(value) in ("torch", "builtins", "typing", "collections")


def about_input(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what a trace sees of an input beside its dtype and layout."""
    return tensor._is_view(), str(torch._C._dispatch_keys(tensor))


def name_of_function(function: Any) -> tuple[Any, ...] | None:
    """A name by which a function of torch's, of Python's operators or of this package's is told from all others; None for
    others, whose code no name tells."""
    kind, module = type(function), str(getattr(function, "__module__", None) or "torch")
    root, name = _root(function), str(getattr(function, "__qualname__", ""))
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return (kind, str(function)) if str(function).partition(".")[0] in NAMESPACES else None
    if isinstance(function, HigherOrderOperator):
        return (kind, function.name()) if kind.__module__.partition(".")[0] in ("torch", "mtcompile") else None
    if kind.__name__ in ("builtin_function_or_method", "method_descriptor", "wrapper_descriptor"):
        return (kind, module, name) if root in ("torch", "_operator", "math", "builtins") else None
    if root not in ("torch", "mtcompile", "builtins") or _found(module, name) is not function:
        return None
    return kind, module, name


def _root(function: Any) -> str:
    return str(getattr(function, "__module__", None) or "torch").partition(".")[0]


def _found(module: str, name: str) -> Any:
    """The attribute of that dotted name in a module that is loaded."""
    value: Any = importlib.import_module(module) if module in sys.modules else None
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
