"""mtcompile compiles a PyTorch training step into a schedule that fits a device-memory budget."""

import os as _os
from pathlib import Path as _Path

# The allocator's events are read through torch's profiler, which otherwise reports every start and stop on stderr.
_os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# In a checkout, passes/ and runtime/ lie beside this folder instead of inside it: look for submodules there too.
# In an installed wheel this does nothing.
_here = _Path(__file__).resolve().parent
if not (_here / "passes").is_dir() and (_here.parent / "passes").is_dir():
    __path__.append(str(_here.parent))

__version__ = "0.2.0"

from typing import TYPE_CHECKING as _TYPE_CHECKING  # noqa: E402

if _TYPE_CHECKING:
    from mtcompile import passes as passes
    from mtcompile.api import CompiledModule, compile, master_parameters
    from mtcompile.distributed.batches import weight_of_batch
    from mtcompile.errors import BudgetError, CaptureError, CheckpointError, MtcompileError, PassError, StepError
    from mtcompile.forecast.result import Forecast
    from mtcompile.forecast.solve import plan
    from mtcompile.models.pretrained import from_pretrained
    from mtcompile.parity.verification import Verification, verify

_LAZY = {
    "mtcompile.api": ("CompiledModule", "compile", "master_parameters"),
    "mtcompile.distributed.batches": ("weight_of_batch",),
    "mtcompile.errors": ("BudgetError", "CaptureError", "CheckpointError", "MtcompileError", "PassError", "StepError"),
    "mtcompile.forecast.result": ("Forecast",),
    "mtcompile.forecast.solve": ("plan",),
    "mtcompile.models.pretrained": ("from_pretrained",),
    "mtcompile.parity.verification": ("Verification", "verify"),
}
__all__ = [
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "CompiledModule",
    "Forecast",
    "MtcompileError",
    "PassError",
    "StepError",
    "Verification",
    "compile",
    "from_pretrained",
    "master_parameters",
    "plan",
    "verify",
    "weight_of_batch",
]


def __getattr__(name: str) -> object:
    """Load on first use, so that reading and proving a schedule needs no torch."""
    import importlib

    if name == "passes":
        return importlib.import_module("mtcompile.passes")
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'mtcompile' has no attribute {name!r}")
