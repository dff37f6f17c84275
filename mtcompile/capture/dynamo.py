"""Dynamo's front end: a function captured whole, with static shapes, and its guards checked at every call.

Dynamo is entered by the public door, ``torch.compile(fn, backend=...)``: it keeps the guards, replays Python side effects,
rebuilds pytree outputs and makes a new graph when a guard fails. What reaches the backend is its graph with parameters and
buffers lifted to inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mtcompile import torch_private
from mtcompile.capture import masks
from mtcompile.capture.refusals import not_captured, not_compiled, place_in, refuse, with_place
from mtcompile.errors import CaptureError, MtcompileError
from mtcompile.torch_private import plain_torch, refusing_random_numbers

_CPU = torch.device("cpu")
_DOING = "the model's forward could not be captured as one graph"
_RANDOM = (
    "forward uses a random.Random or Python's random module, whose numbers cannot be part of a graph\n"
    "  expected random numbers from torch's default generator only; draw others outside forward and pass them as tensors"
)
_MOST_SIGNATURES = 512  # of one model; Dynamo's own default of 8 is for functions, not for training runs


def front_end(fn: Callable[..., Any], backend: Callable[..., Any], device: torch.device = _CPU) -> Callable[..., Any]:
    """``fn`` captured whole (no graph breaks) with static shapes, when it is called; ``backend(graph_module, inputs)`` compiles
    a graph. Parameters may be at home on the host while inputs are on ``device``.

    Raises CaptureError with the user's own source line where ``fn`` cannot be captured.
    """
    without_packed = True
    answers = plain_torch.Answers()

    def checked(graph: fx.GraphModule, inputs: Any) -> Any:
        if without_packed:
            masks.check_positions(graph.graph)
        graph.meta["told"] = answers.told()
        return backend(graph, inputs)

    compiled = torch.compile(fn, backend=checked, fullgraph=True, dynamic=False)
    settings = torch_private.capture_settings(_MOST_SIGNATURES)
    devices = torch_private.mixing_devices(device)
    torch_private.leave_out_of_graphs(_logging_functions())

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal without_packed
        try:
            answering = plain_torch.plain_answers(answers)
            checking = torch_private.checking_branches()
            with settings, devices, refusing_random_numbers(_RANDOM), _masks(without_packed), answering, checking:
                return compiled(*args, **kwargs)
        except Exception as error:
            cause = torch_private.cause_in_dynamo(error)
            if isinstance(cause, masks.Packed):
                without_packed = False
                return call(*args, **kwargs)
            if cause is None and not torch_private.raised_in_capture(error):
                raise
            if (cause is None or type(cause) is CaptureError or not isinstance(cause, MtcompileError)) and answers.concede():
                return call(*args, **kwargs)
            if isinstance(cause, MtcompileError):
                refuse(with_place(cause, error), error)
            if cause is None or torch_private.failed_inside(error):
                refuse(not_compiled(cause or error, _DOING, place_in(str(error))), error)
            refuse(not_captured(error), error)

    return call


def _masks(without_packed: bool) -> contextlib.AbstractContextManager[None]:
    return masks.without_packed() if without_packed else contextlib.nullcontext()


def _logging_functions() -> set[Any]:
    """Functions that only log: harmless to leave out of a graph (Transformers' models call them in forward)."""
    try:
        from transformers.utils import logging

        logger = type(logging.get_logger("transformers"))
        return {logger.warning_once, logger.warning, logger.info, logger.debug}
    except (ImportError, AttributeError):
        return set()
