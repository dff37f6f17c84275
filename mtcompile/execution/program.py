"""One program: one captured graph under one input signature, as Dynamo calls it and as autograd sees it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from mtcompile import torch_private
from mtcompile.capture.description import Constant, Description, Passed
from mtcompile.errors import CaptureError, StepError
from mtcompile.execution.runner import Compiled, Frame, run_backward, run_forward
from mtcompile.optim.backward_update import marking_failure
from mtcompile.passes.joint.accumulate import Micro

if TYPE_CHECKING:
    from mtcompile.execution.session import Engine


class DifferentMicroBatches(StepError):
    """Of one batch; nothing has run yet."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The calls that make one step of ``count`` micro-batches; ``wide``: as ``Micro``."""

    count: int
    wide: bool
    calls: list[tuple[Program, tuple[torch.Tensor, ...]]] = field(default_factory=list)


class Program:
    """Callable on the flat inputs of a captured graph, as Dynamo calls it; returns its flat outputs."""

    def __init__(self, engine: Engine, description: Description, micro: Micro | None = None) -> None:
        """``micro``: of several micro-batches, ``description`` being that of one."""
        self.engine, self.description, self.micro = engine, description, micro
        if micro is not None:
            self.description = replace(description, inputs=micro.specs(description.inputs))
        self.split: dict[tuple[int, ...], Program] = {}  # of several micro-batches of this size, by the inputs that are split
        self.compiled: dict[Any, Compiled | tuple[str, int]] = {}  # or why nothing fits, and what would
        computed = description.computed
        scalars = tuple(differentiable and scalar for _, differentiable, scalar in computed)
        # The first trace follows the loss; a gradient arriving at another output traces once for that pattern.
        self.pattern = scalars if any(scalars) else tuple(differentiable for _, differentiable, _ in computed)

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        if self.engine.collected is not None and self.micro is None:
            return self._collect(self.engine.collected, inputs)
        for spec, tensor in zip(self.description.inputs, inputs, strict=True):
            if spec.role == "param" and spec.name in self.engine.home.places:
                self.engine.home.settle(spec.name, tensor)  # type: ignore[arg-type]
        if torch.is_grad_enabled() and any(self.pattern):
            self.engine.begin_training_forward()
            # Before autograd looks at the inputs: planning may send a parameter to another device.
            compiled = self.engine.compile(self, self.pattern)
            made = _Step.apply(self, compiled, *inputs)  # type: ignore[no-untyped-call]
        else:
            made = self.engine.infer(self, inputs)
        return tuple(self._rebuild(output, inputs, made) for output in self.description.outputs)

    def _collect(self, collected: Collected, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """One micro-batch's call; the last one runs them all, and returns what they make together."""
        collected.calls.append((self, inputs))
        if any(program is not self for program, _ in collected.calls):
            raise DifferentMicroBatches(
                f"accumulate={collected.count}: expected micro-batches that run the same operations on the same shapes, found "
                "others: what the model does seems to depend on how often it was called"
            )
        if len(collected.calls) < collected.count:
            return tuple(inputs[0].new_empty(0) for _ in self.description.outputs)  # nobody will see them
        (_, first), *others = collected.calls
        split = tuple(i for i, tensor in enumerate(first) if any(other[i] is not tensor for _, other in others))
        if any((isinstance(o, Passed) and o.index in split) or getattr(o, "view", None) for o in self.description.outputs):
            raise CaptureError(
                f"accumulate={collected.count}: the model returns an input, or a view of another output; return copies (clone)"
            )
        if split not in self.split:
            self.split[split] = Program(
                self.engine, self.description, Micro(collected.count, split, len(first), collected.wide)
            )
        return self.split[split](*first, *(other[i] for _, other in others for i in split))

    @staticmethod
    def _rebuild(output: Any, inputs: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Any:
        if isinstance(output, Constant):
            return output.value
        tensor = inputs[output.index] if isinstance(output, Passed) else made[output.position]
        return tensor if output.view is None else tensor.as_strided(*output.view)


class _Step(torch.autograd.Function):
    """Forward and backward of one training step, as autograd sees them."""

    @staticmethod
    def forward(ctx: Any, program: Program, compiled: Compiled, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        frame, outputs = run_forward(program.engine, compiled, inputs)
        ctx.program, ctx.frame = program, frame
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for t, (_, differentiable, _) in zip(outputs, program.description.computed, strict=True) if not differentiable)
        )
        program.engine.remember(frame)
        frame.outputs = tuple(weakref.ref(t) for t in outputs)
        frame.output_versions = {i: outputs[i]._version for i in frame.compiled.outputs_read_in_backward}
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() or torch_private.keeps_graph():
            raise StepError(
                "backward was called with retain_graph=True or create_graph=True; a compiled step runs backward once "
                "and frees what it saved. Call loss.backward() without them, or run the plain model for double backward"
            )
        frame: Frame | None = ctx.frame
        if frame is None or frame.spent:
            raise StepError("backward was already run for this forward; run the forward again")
        ctx.frame = None
        if all(t is None for t in tangents):
            return (None,) * (2 + len(frame.inputs))
        updates = ctx.program.engine.updates
        if updates is not None:
            planned = frame.compiled.step.meta.get("updated")
            updates.begin_backward(planned, [ref() for ref in frame.outputs], tangents, torch_private.accumulates(ctx))
        with marking_failure(updates):
            gradients = run_backward(ctx.program, frame, tangents)
        if updates is not None:
            updates.end_backward()
        ctx.program.engine.before_accumulation(frame.inputs, gradients)
        return (None, None, *gradients)
