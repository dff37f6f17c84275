"""Dynamo's front end: a function captured whole, with static shapes, and its guards checked at every call.

Dynamo is entered by the public door, ``torch.compile(fn, backend=...)``: it keeps the guards, replays Python side effects,
rebuilds pytree outputs and makes a new graph when a guard fails. What reaches the backend is its graph with parameters and
buffers lifted to inputs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mtcompile import torch_private
from mtcompile.capture import masks, plain_torch
from mtcompile.errors import CaptureError, MtcompileError

_CPU = torch.device("cpu")
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
            packing = masks.without_packed() if without_packed else contextlib.nullcontext()
            with settings, devices, packing, plain_torch.plain_answers(answers):
                return compiled(*args, **kwargs)
        except Exception as error:
            cause = torch_private.cause_in_dynamo(error)
            if cause is None:
                raise
            if isinstance(cause, masks.Packed):
                without_packed = False
                return call(*args, **kwargs)
            if isinstance(cause, MtcompileError):
                raise cause from None
            if answers.concede():
                return call(*args, **kwargs)
            raise CaptureError(_capture_message(error)) from error

    return call


def _logging_functions() -> set[Any]:
    """Functions that only log: harmless to leave out of a graph (Transformers' models call them in forward)."""
    try:
        from transformers.utils import logging

        logger = type(logging.get_logger("transformers"))
        return {logger.warning_once, logger.warning, logger.info, logger.debug}
    except (ImportError, AttributeError):
        return set()


def _capture_message(error: BaseException) -> str:
    """A message with the reason and the user's line out of Dynamo's report."""
    text = str(error)
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(\S[^\n]*)', text)
    frames = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    place = "\n  at {}:{} in {}: {}".format(*frames[-1]) if frames else ""
    tip = (
        "expected a forward without data-dependent Python control flow or unsupported calls; "
        "try torch.where / a tensor operation at that line, or compile the submodules that do not contain it"
    )
    if "backwards hooks" in reason:
        tip = "remove the module's backward hooks; those on parameters and outputs (tensor.register_hook) work"
    return f"the model's forward could not be captured as one graph: {reason}{place}\n  {tip}"
