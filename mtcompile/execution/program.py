"""A program: one captured graph for one input signature, as Dynamo calls it and as autograd sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from mtcompile import torch_private
from mtcompile.capture.description import Description, Pattern, Tangents
from mtcompile.capture.outputs import Constant, Passed, rebuilt
from mtcompile.compiler import CapturedStep
from mtcompile.errors import CaptureError, StepError, told_briefly
from mtcompile.execution.compiled import CompiledStep, Frame
from mtcompile.execution.inner import InnerOutputs, waiting_frame
from mtcompile.execution.memory.fragments import index_of
from mtcompile.execution.memory.shortage import with_retry
from mtcompile.execution.second_order import differentiable_gradients
from mtcompile.execution.session import CompiledSteps, Session
from mtcompile.passes.joint.batch.joining import Micro


class DifferentMicroBatches(StepError):
    """Raised before anything runs when the micro-batches of one batch run different graphs."""


class NotCompared(StepError):
    """Raised before anything runs when a graph of micro-batches is to be compared with that of the whole batch, which was not
    captured."""


@dataclass(slots=True)
class MicroBatchCalls:
    """The calls that make one step of ``count`` micro-batches; ``wide``: as in ``Micro``. ``compiled``: receives the compiled
    step, which does not run; None: it runs. ``whole``: receives the captured graph of a call with the whole batch, while
    ``takes_whole`` is set. ``branches``: that depends on what the batch holds, and so each is compared."""

    count: int
    wide: bool
    compiled: list[CompiledStep] | None = None
    calls: list[tuple[Program, tuple[torch.Tensor, ...]]] = field(default_factory=list)
    whole: list[Description] = field(default_factory=list)
    takes_whole: bool = False
    branches: bool = False


@dataclass(slots=True)
class Collector:
    """Shared by the programs of one model: ``batch`` holds the calls collected so far, or None while calls simply run.
    ``parts``: what the last training call ran, in order, of the programs that are part of a forward."""

    batch: MicroBatchCalls | None = None
    parts: dict[Program, CompiledStep] = field(default_factory=dict)


def refuse_tangents(tensors: Iterable[torch.Tensor]) -> None:
    """Raises StepError if a tensor carries a tangent."""
    if torch_private.has_tangent(tensors):
        raise StepError(
            "the call gets a dual tensor of forward-mode differentiation (torch.autograd.forward_ad); a plan has only a "
            "forward and a backward. Use torch.func.jvp, which runs the plain forward"
        )


class Program:
    """A captured graph, called with its flat inputs; returns its flat outputs.

    ``micro``: given for a program of several micro-batches; ``description`` is then that of one.
    """

    def __init__(
        self, session: Session, description: Description, collector: Collector | None = None, micro: Micro | None = None
    ) -> None:
        self.session, self.collector, self.micro = session, collector or Collector(), micro
        if micro is not None:
            description = replace(description, inputs=micro.specs(description.inputs))
        self.description = description
        self.compiled: CompiledSteps = {}
        self.whole: Description | None = None  # of a call with the whole batch, to compare with
        # By the number of micro-batches, the inputs that are split, and the graph that it was compared with, if that differs.
        self._of_micro_batches: dict[tuple[int, tuple[int, ...], int], Program] = {}
        scalars = tuple(differentiable and scalar for _, differentiable, scalar in description.computed)
        # The first trace assumes a gradient at scalar outputs, the loss; another pattern is traced when it occurs.
        differentiable = tuple(differentiable for _, differentiable, _ in description.computed)
        self.pattern: Pattern = scalars if any(scalars) else differentiable

    def of_micro_batches(self) -> tuple[Program, ...]:
        """The programs that run several calls of this one as micro-batches."""
        return tuple(self._of_micro_batches.values())

    def release(self) -> None:
        """Forgets all that was compiled."""
        for program in (self, *self.of_micro_batches()):
            program.compiled.clear()
        self._of_micro_batches.clear()

    @property
    def trains(self) -> bool:
        """True if a call now is a training forward."""
        return torch.is_grad_enabled() and any(self.pattern)

    @torch_private.one_at_a_time
    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        if self.collector.batch is not None and self.micro is None:
            return self._collect(self.collector.batch, inputs)
        refuse_tangents(inputs)
        for spec, tensor in zip(self.description.inputs, inputs, strict=True):
            if spec.role == "param":
                self.session.parameters.restore(spec.name, tensor)  # type: ignore[arg-type]
        if self.trains:
            names = (spec.name for spec in self.description.inputs)
            self.session.door.before_forward(dict(zip(names, inputs, strict=True)))
        computed = with_retry(self.session, lambda again: self._computed(inputs))
        seen: dict[int, torch.Tensor] = {}
        if self.trains and self.description.flow is not None:
            seen = self._handed_out(inputs, computed)
        outputs = enumerate(self.description.outputs)
        return tuple(seen[i] if i in seen else rebuilt(output, inputs, computed) for i, output in outputs)

    def _handed_out(self, inputs: tuple[torch.Tensor, ...], computed: tuple[torch.Tensor, ...]) -> dict[int, torch.Tensor]:
        """The outputs that need gradients, by index, as the caller sees them."""
        step: Any = next(tensor.grad_fn for tensor in computed if tensor.grad_fn is not None)
        step.inner = InnerOutputs(self.session, self.description, self.micro is not None)
        seen: dict[int, torch.Tensor] = step.inner.hand_out(step, inputs, computed)
        step.frame.hand_out(computed)
        return seen

    def _computed(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        compiled = self.compile()  # before autograd looks at the inputs: planning may send a parameter to another device
        self._note_part(compiled)
        if self.trains:
            return _Step.apply(self, compiled, *self._differentiated(inputs))  # type: ignore[no-any-return,no-untyped-call]
        return self.session.infer(compiled, inputs)

    def _note_part(self, compiled: CompiledStep) -> None:
        if self.description.is_part and torch.is_grad_enabled():
            self.collector.parts[self] = compiled

    def _differentiated(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The inputs, detached where no gradient can flow back. An input may be a result of the previous call, such as the
        state of a recurrent layer: autograd would walk on into that call, whose backward has already run."""
        only_values = self.description.only_values
        leaving = [tensor.requires_grad and not tensor.is_leaf and i in only_values for i, tensor in enumerate(inputs)]
        return tuple(tensor.detach() if leaves else tensor for tensor, leaves in zip(inputs, leaving, strict=True))

    def compile(self) -> CompiledStep:
        """Compiles the step that a call would run now. Raises CaptureError and BudgetError."""
        return self.compile_once(self.captured(self.pattern if self.trains else None))

    def captured(self, tangents: Tangents) -> CapturedStep:
        return CapturedStep(self.description, tangents, self.micro, self.whole)

    def compile_again(self, captured: CapturedStep) -> CompiledStep:
        """Compiles the step for another pattern of gradients than was traced; later forwards expect this pattern."""
        self.description = captured.description
        compiled = self.compile_once(captured)
        assert captured.tangents is not None
        self.pattern = captured.tangents
        if self in self.collector.parts:
            self.collector.parts[self] = compiled
        return compiled

    def compile_once(self, captured: CapturedStep) -> CompiledStep:
        """Compiles a step; later forwards expect what they did before."""
        return self.session.compile(captured, self.compiled)

    @property
    def losses(self) -> set[int]:
        """The outputs that may be a loss."""
        return {i for i, (_, differentiable, scalar) in enumerate(self.description.computed) if differentiable and scalar}

    def _collect(self, batch: MicroBatchCalls, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Collects one micro-batch's call. The last call runs, or compiles, them all and returns their joint results."""
        if batch.takes_whole:
            batch.whole.append(self.description)
            return self._unseen(inputs)
        batch.calls.append((self, inputs))
        if any(program is not self for program, _ in batch.calls):
            raise DifferentMicroBatches(
                f"accumulate={batch.count}: expected micro-batches that run the same operations on the same shapes, found "
                "others: what the model does seems to depend on how often it was called, or on numbers that its inputs hold"
            )
        if len(batch.calls) < batch.count:
            return self._unseen(inputs)
        (_, first), *others = batch.calls
        split = tuple(i for i, tensor in enumerate(first) if any(other[i] is not tensor for _, other in others))
        tensors = [output for output in self.description.outputs if not isinstance(output, Constant)]
        if any(output.views or (isinstance(output, Passed) and output.index in split) for output in tensors):
            raise CaptureError(
                f"accumulate={batch.count}: the model returns an input, or a view of another output; return copies (clone)"
            )
        key = batch.count, split, id(batch.whole[0]) if batch.branches else 0
        if batch.count > 1 and key not in self._of_micro_batches:
            if not batch.whole:
                raise NotCompared(f"accumulate={batch.count}: expected a capture with the whole batch before, found none")
            micro = Micro(batch.count, split, len(first), batch.wide, not self.session.door.alone)
            program = Program(self.session, self.description, self.collector, micro)
            program.whole = batch.whole[0]
            self._of_micro_batches[key] = program
        program = self._of_micro_batches[key] if batch.count > 1 else self
        if batch.compiled is not None:
            batch.compiled.append(program.compile())
            return self._unseen(inputs)
        return program(*first, *(other[i] for _, other in others for i in split))

    def _unseen(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Returns as many results as a call has, which nobody will see."""
        return (inputs[0].new_empty(0),) * len(self.description.outputs)


class _Step(torch.autograd.Function):
    """Forward and backward of one training step, as autograd sees them. ``ctx.frame``: what the next backward starts from; the
    first has what the forward saved, further ones run the forward again. ``ctx.used``: the outputs whose backward has run.
    ``ctx.places``: where the model holds what the backward changes in place."""

    @staticmethod
    def forward(ctx: Any, program: Program, compiled: CompiledStep, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.program, ctx.used, ctx.inner = program, frozenset(), None
        ctx.model = getattr(program.session.door, "model", lambda: None)()  # a backward may have to plan, which looks at it
        ctx.places = [] if ctx.model is None else list(_places(ctx.model, [inputs[i] for i in compiled.changed_in_backward]))
        ctx.frame, outputs = program.session.forward(compiled, inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for t, (_, differentiable, _) in zip(outputs, program.description.computed, strict=True) if not differentiable)
        )
        return outputs

    @staticmethod
    @told_briefly
    @torch_private.one_at_a_time
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if any(tangent is not None and torch_private.is_batched(tangent) for tangent in tangents):
            raise StepError(
                "backward was called for several gradients at once (vmap, is_grads_batched=True or vectorize=True), and a plan "
                "has one backward. Call it for each gradient, with retain_graph=True, or use torch.func.jacrev, which runs the "
                "plain forward"
            )
        arriving = frozenset(i for i, tangent in enumerate(tangents) if tangent is not None)
        frame = waiting_frame(ctx.program.session, ctx.frame, bool(arriving & ctx.used))
        program: Program = ctx.program
        session, keeps = program.session, torch_private.keeps_graph()
        session.door.before_backward(frame, keeps)
        if torch.is_grad_enabled():  # create_graph=True
            session.note_differentiated()
            wanted = ctx.needs_input_grad[2:]
            ctx.used = ctx.used if keeps else ctx.used | arriving
            return None, None, *differentiable_gradients(session, program.description, frame, tangents, wanted)
        if arriving:
            _check_changes(ctx, frame, program.description)
        ctx.frame = None
        if not arriving:
            return (None,) * (2 + len(frame.inputs))
        first = not frame.repeated
        used = ctx.used if keeps else ctx.used | arriving
        repeated = frame.repeat() if keeps or program.losses - used else None
        if ctx.inner is not None and ctx.inner.is_looked_at:
            gradients = ctx.inner.gradients(frame, tangents, ctx.needs_input_grad[2:])
        else:
            with session.door.backward(ctx, frame, tangents):
                captured = program.captured(frame.compiled.tangents)
                compile_again = program.compile_again if first else program.compile_once
                gradients = session.backward(frame, captured, tangents, compile_again)
        session.door.before_accumulation(frame.inputs, gradients)
        if repeated is not None:
            session.frames.repeated.add(repeated)
            ctx.frame, ctx.used = repeated, used
        else:
            ctx.model = None
        return (None, None, *gradients)


def _places(model: nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yields (attributes, name, tensor) for each attribute of a module or a parameter that holds one of these tensors."""
    wanted = {id(tensor) for tensor in tensors}
    owners = [*model.modules(), *model.parameters()] if wanted else []
    for held in (held for owner in owners for held in (vars(owner), vars(owner).get("_buffers", {}))):
        yield from ((held, name, value) for name, value in held.items() if id(value) in wanted)


def _check_changes(ctx: Any, frame: Frame, description: Description) -> None:
    """Raises StepError if a plain run might change other tensors in place than this backward does: because only some gradients
    are asked for, or because a tensor that the backward changes was replaced since the forward."""
    compiled = frame.compiled
    if not compiled.changed_in_backward:
        return
    for held, name, tensor in ctx.places:
        if held.get(name) is not tensor:
            raise StepError(
                f"{name}, which the backward of this model changes in place, was replaced between this forward and its "
                "backward; expected one tensor for both: change it in place (copy_, zero_), or replace it before the forward"
            )
    made = {spec.index for spec, _ in compiled.outputs if spec.kind in ("grad", "update")}
    inputs = [index_of(spec) for spec, _ in compiled.inputs if spec.index in made and spec.role != "tangent"]
    if missing := [index for index in inputs if not torch_private.asks_for(ctx, index)]:
        raise StepError(
            f"the backward of this model changes {description.inputs[min(compiled.changed_in_backward)].name} in place, "
            f"and was called for some gradients alone, without that of {description.inputs[missing[0]].name}: a plain run "
            "might not reach that change. Ask for all gradients, as loss.backward() does"
        )
