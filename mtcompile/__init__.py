"""mtcompile compiles a PyTorch training step into a schedule that fits a device-memory budget."""

from pathlib import Path as _Path

# In a checkout, passes/ and runtime/ lie beside this folder instead of inside it: look for submodules there too.
# In an installed wheel this does nothing.
_here = _Path(__file__).resolve().parent
if not (_here / "passes").is_dir() and (_here.parent / "passes").is_dir():
    __path__.append(str(_here.parent))

__version__ = "0.1.0"
