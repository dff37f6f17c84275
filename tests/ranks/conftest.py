"""What the test process imports before it forks ranks."""

from __future__ import annotations

import importlib

import pytest

# The imports of a first compilation, and of the key by which tests/conftest.py shares graphs: most of a small rank's time.
_IMPORTED = (
    "highspy",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
)


@pytest.fixture(scope="session", autouse=True)
def ranks_share_imports() -> None:
    """Imports once what each forked rank would import for itself."""
    for name in _IMPORTED:
        importlib.import_module(name)
    from torch._inductor.codecache import torch_key
    from torch._inductor.codegen.common import init_backend_registration

    torch_key()  # reads torch's sources
    init_backend_registration()
