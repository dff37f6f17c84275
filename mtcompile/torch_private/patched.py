"""torch's settings, changed for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def patched(config: Any, **changes: Any) -> Iterator[None]:
    """Gives settings of one of torch's modules of settings other values inside, as the module's own ``patch`` does, which
    leaves a context variable behind with every call in torch 2.13: a training would grow with every step."""
    before = {name: getattr(config, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
