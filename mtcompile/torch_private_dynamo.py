"""Uses of Dynamo's private parts that change what it captures: Python's and numpy's random numbers are refused.

The contract test is tests/capture/test_random.py."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from mtcompile.errors import CaptureError

_thread = threading.local()  # ``refused``: why random numbers are refused while this thread captures


@contextlib.contextmanager
def refusing_random_numbers(why: str) -> Iterator[None]:
    """Raises CaptureError(why) where a function that is captured inside draws from, seeds or reads a ``random.Random``.

    Dynamo would take the numbers of the first call for those of every call, or make float32 of them, and leave the generator
    elsewhere than a plain run does."""
    from torch._dynamo.variables import misc, user_defined

    _refusing(user_defined, "call_random_fn")
    _refusing(misc, "call_random_fn")
    _refusing(misc.RandomVariable, "call_method")
    before = getattr(_thread, "refused", None)
    _thread.refused = why
    try:
        yield
    finally:
        _thread.refused = before


def _refusing(owner: Any, name: str) -> None:
    """Makes a function of Dynamo's raise CaptureError while this thread refuses; once."""
    plain: Callable[..., Any] = getattr(owner, name)
    if plain.__dict__.get("_mt_refuses"):
        return

    @functools.wraps(plain)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if (why := getattr(_thread, "refused", None)) is not None:
            raise CaptureError(why)
        return plain(*args, **kwargs)

    refusing._mt_refuses = True  # type: ignore[attr-defined]
    setattr(owner, name, refusing)


def raised_in_capture(error: BaseException) -> bool:
    """Tells whether an exception was raised while Dynamo captured a function, and not by what it has captured."""
    from torch._dynamo import convert_frame

    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == convert_frame.__file__:
            return True
        trace = trace.tb_next
    return False


def failed_inside(error: BaseException) -> bool:
    """Tells whether Dynamo passes on an exception that it did not expect: its own, or that of the backend it called."""
    from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError

    return isinstance(error, (BackendCompilerFailed, InternalTorchDynamoError))
