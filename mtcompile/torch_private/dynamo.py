"""Dynamo: its settings, its errors, and the random numbers that it must not take."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from mtcompile.errors import CaptureError
from mtcompile.torch_private.thread_setting import ThreadSetting

set_grad_enabled = torch._C._set_grad_enabled  # what torch.no_grad() is in Dynamo's graphs
_refused = ThreadSetting[str | None](None)  # why random numbers are refused while this thread captures


def capture_settings(signatures: int) -> contextlib.AbstractContextManager[Any]:
    """Dynamo's settings while a model is called that is captured at most ``signatures`` times: floats and ints of the call
    become constants of the graph (guarded), so that nothing in it is symbolic."""
    from torch._dynamo import config as dynamo_config

    return dynamo_config.patch(  # type: ignore[no-any-return]
        specialize_float=True,
        automatic_dynamic_shapes=False,
        skip_nnmodule_hook_guards=False,  # a hook that comes or goes is another computation
        enable_dynamo_decompositions=False,  # of addcmul_ and the like: they round otherwise
        recompile_limit=signatures,
        accumulated_recompile_limit=8 * signatures,
        allow_rnn=True,  # what their operations are shows in the trace
        use_numpy_random_stream=True,  # numpy's random numbers are refused, not drawn from torch's generator
    )


def leave_out_of_graphs(functions: Iterable[Callable[..., Any]]) -> None:
    """Let Dynamo leave out calls of functions that only log."""
    from torch._dynamo import config as dynamo_config

    dynamo_config.ignore_logging_functions = _SortableSet({*set.__iter__(dynamo_config.ignore_logging_functions), *functions})


class _SortableSet(set[Any]):
    """A set whose members are seen by their names: some versions of torch sort the members of the setting above for their log,
    and functions cannot be sorted."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(repr(member) for member in set.__iter__(self)))


def cause_in_dynamo(error: Exception) -> BaseException | None:
    """The exception behind one that Dynamo raised, or that one itself; None for an exception that is not Dynamo's."""
    from torch._dynamo.exc import InternalTorchDynamoError, TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    internal = error.__context__ if isinstance(error, InternalTorchDynamoError) else None
    return getattr(error, "inner_exception", None) or error.__cause__ or internal or error


def mixing_devices(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Traced inside, an operation on operands of the host and of ``device`` computes on ``device``, where parameters will be
    when they are used."""
    from torch._functorch import config as functorch_config

    if device.type == "cpu":
        return contextlib.nullcontext()
    return functorch_config.patch(fake_tensor_prefer_device_type=device.type)  # type: ignore[no-any-return]


@contextlib.contextmanager
def refusing_random_numbers(why: str) -> Iterator[None]:
    """Raises CaptureError(why) where a function that is captured inside draws from, seeds or reads a ``random.Random``.

    Dynamo would take the numbers of the first call for those of every call, or make float32 of them, and leave the generator
    elsewhere than a plain run does."""
    from torch._dynamo.variables import misc, user_defined

    _refusing(user_defined, "call_random_fn")
    _refusing(misc, "call_random_fn")
    _refusing(misc.RandomVariable, "call_method")
    with _refused.during(why):
        yield


def _refusing(owner: Any, name: str) -> None:
    """Makes a function of Dynamo's raise CaptureError while this thread refuses; once."""
    plain: Callable[..., Any] = getattr(owner, name)
    if plain.__dict__.get("_mt_refuses"):
        return

    @functools.wraps(plain)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if (why := _refused.value) is not None:
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
