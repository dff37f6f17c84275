"""Gradients that can be differentiated, as a gradient penalty needs them: the forward runs once more in plain PyTorch, and its
gradients come from autograd's own graph of it. Nothing of that is planned. Its memory is measured on fake tensors before it
runs, must be free beside everything else, and counts as long as the graph lives."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from mtcompile import torch_private
from mtcompile.capture.description import Description
from mtcompile.capture.outputs import fake_of
from mtcompile.errors import StepError
from mtcompile.execution.compiled import Frame, PlainGraph
from mtcompile.execution.session import Session
from mtcompile.execution.unchanged import check_versions
from mtcompile.passes.generators import rng_preserved, set_generator_state
from mtcompile.runtime.devices.arena import span_nbytes

Gradients = tuple[torch.Tensor | None, ...]


def differentiable_gradients(
    session: Session, description: Description, frame: Frame, tangents: Sequence[torch.Tensor | None], wanted: Sequence[bool]
) -> Gradients:
    """Returns the gradient of each input of a forward, None where it is not ``wanted`` or there is none. ``tangents``: a
    gradient for each computed output. Raises StepError for inputs that have changed, or that the backward changes, and
    BudgetError."""
    for index in frame.compiled.changed_in_backward:
        raise StepError(
            f"backward was called with create_graph=True, and changes {description.inputs[index].name} in place, which cannot "
            "be differentiated; expected create_graph=False, or a backward that changes nothing"
        )
    check_versions(frame, description, again=True)
    plain = PlainGraph(_peak_nbytes(description, tangents, wanted) + copied_nbytes(frame))
    session.make_room_for(plain, "a backward with create_graph=True")
    inputs = [tensor.to(description.device) for tensor in inputs_before(frame)]
    device = str(description.device)
    # What is saved holds ``plain``, which so lives until the last saved value is freed.
    saving = torch.autograd.graph.saved_tensors_hooks(lambda value: (value.detach(), plain), lambda saved: saved[0])
    with torch.enable_grad(), rng_preserved(device), saving:
        if frame.generator is not None:
            set_generator_state(device, frame.generator)
        return _gradients(description, inputs, tangents, wanted)


def _gradients(
    description: Description, inputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], wanted: Sequence[bool]
) -> Gradients:
    outputs = run_plainly(description, inputs)
    pairs = [(output, tangent) for output, tangent in zip(outputs, tangents, strict=True) if tangent is not None]
    sources = [i for i, tensor in enumerate(inputs) if wanted[i] and tensor.requires_grad]
    results = torch.autograd.grad(
        [output for output, _ in pairs],
        [inputs[i] for i in sources],
        [tangent for _, tangent in pairs],
        create_graph=True,
        allow_unused=True,
    )
    by_input = dict(zip(sources, results, strict=True))
    return tuple(by_input.get(i) for i in range(len(inputs)))


def run_plainly(description: Description, inputs: Sequence[torch.Tensor]) -> Any:
    """Returns what a captured graph returns, run in plain PyTorch."""
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in description.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        return description.graph(*inputs)


def inputs_before(frame: Frame) -> list[torch.Tensor]:
    """Returns the inputs of a forward at home, with the buffers that it changes as they were before."""
    return [frame.snapshots[i].clone() if i in frame.snapshots else tensor for i, tensor in enumerate(frame.inputs)]


def copied_nbytes(frame: Frame) -> int:
    """Returns the device bytes of the inputs that are at home on the host."""
    return sum(span_nbytes(tensor) for tensor in frame.inputs if tensor.device.type == "cpu")


def _peak_nbytes(description: Description, tangents: Sequence[torch.Tensor | None], wanted: Sequence[bool]) -> int:
    """Returns the most device bytes that the forward, its gradients and their derivatives take at once."""
    fakes: list[Any] = [fake_of(node) for node in description.graph.graph.find_nodes(op="placeholder")]
    mode = torch_private.fake_mode_of(fakes)
    with mode, torch.autograd.set_multithreading_enabled(False), torch_private.LiveBytes() as counted, torch.enable_grad():
        inputs = [fake.detach().clone().requires_grad_(fake.requires_grad) for fake in fakes]
        before = counted.live
        arriving = [None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tangents]
        gradients = [g for g in _gradients(description, inputs, arriving, wanted) if g is not None and g.requires_grad]
        if gradients:
            sources = [tensor for tensor in inputs if tensor.requires_grad]
            try:
                torch.autograd.grad(gradients, sources, [torch.empty_like(g) for g in gradients], allow_unused=True)
            except RuntimeError as error:  # as for attention: torch says so itself when one differentiates twice
                if "is not implemented" not in str(error):
                    raise
    return int(counted.peak - before)
