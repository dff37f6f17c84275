"""The inputs and outputs that a backward reads or computes anew: they must not change between the forward and it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mtcompile.capture.description import Description
from mtcompile.errors import StepError
from mtcompile.execution.compiled import Frame


def version_of(tensor: torch.Tensor) -> int:
    """Returns the counter that in-place changes raise; 0 for tensors of torch.inference_mode, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def check_versions(frame: Frame, description: Description, again: bool) -> None:
    """Raises StepError if a tensor has changed since the forward, and the backward (or the forward, ``again``) reads it. A
    tensor that the backward changes may have changed: the backward reads its values of now, as in a plain run."""
    compiled = frame.compiled
    kept = compiled.mutated | compiled.changed_in_backward
    read = [index for index in (range(len(frame.inputs)) if again else compiled.read_in_backward) if index not in kept]
    check_unchanged(frame, description, read)
    for index in read:
        spec = description.inputs[index]
        if _is_other(frame, frame.inputs[index], description, again, in_place=spec.role == "param"):
            raise _changed_through_data(spec.name)
    for index, version in frame.output_versions.items():
        output = frame.outputs[index]()
        if output is not None and output._version != version:
            raise StepError(
                f"output {description.computed[index][0]} was changed in place before backward, which needs it; "
                "clone it before changing it"
            )
    for index, reference in enumerate(frame.outputs):
        output = reference()
        if output is not None and _is_other(frame, output, description, again) and index in compiled.outputs_of_backward():
            raise _changed_through_data(f"output {description.computed[index][0]}")


def check_unchanged(frame: Frame, description: Description, indices: Iterable[int]) -> None:
    """Raises StepError if one of these inputs has changed since the forward, but for changes through ``.data``."""
    for index in indices:
        if version_of(frame.inputs[index]) != frame.versions[index]:
            raise StepError(
                f"{description.inputs[index].name} was changed in place between this forward and its backward; the "
                "gradients would be of other values. Step the optimizer after backward, or clone what you change"
            )


def _changed_through_data(name: str) -> StepError:
    return StepError(
        f"{name} was changed through .data between this forward and its backward; some operations of the backward would use "
        "the new values, others than in plain PyTorch. Change it after backward, or before forward"
    )


def _is_other(frame: Frame, tensor: torch.Tensor, description: Description, again: bool, in_place: bool = False) -> bool:
    """Tells whether a change of a tensor through ``.data`` has another effect than in a plain run, whose backward reads the
    tensor itself. A plan that keeps everything where it is, and casts nothing, reads the tensor itself too; but it sees new
    memory only where it reads the tensor ``in_place``."""
    change = "" if frame.writes is None else frame.writes.change_of(tensor)
    by_reference = not again and frame.compiled.plan.all_resident and not any(enabled for _, enabled, _ in description.autocast)
    return bool(change) and not (by_reference and (in_place or change == "written"))
