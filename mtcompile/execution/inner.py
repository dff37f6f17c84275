"""Gradients of inner outputs: hidden states, features and attention maps that a forward returns and goes on computing with.

All outputs of a forward come out of one node of autograd's graph, so no path leads from a loss to an inner output. Each output
therefore gets a node of its own, which computes nothing, with edges to the inner outputs that its gradient flows to:

    loss ── output ─────────── the forward's node ── parameters
              └── inner output ──┘

If nobody looks at an inner output in a backward, all gradients pass to the forward's node, as if these nodes were not there. If
somebody does (a hook, ``retain_grad``, ``torch.autograd.grad``), the forward runs once more in plain PyTorch, cut
at these outputs. Once the gradients of what comes after an inner output are known, so is its own; hooks see that and may change
it; and in the end plain PyTorch computes the gradients of the inputs, in its own order. Its memory is measured and counted
before it runs, as that of ``second_order`` is."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from mtcompile import torch_private
from mtcompile.capture.description import Description
from mtcompile.capture.outputs import Computed, Constant, Passed, fake_of, rebuilt
from mtcompile.errors import StepError, told_briefly
from mtcompile.execution.compiled import Frame, PlainGraph
from mtcompile.execution.second_order import Gradients, copied_nbytes, inputs_before, run_plainly
from mtcompile.execution.session import Session
from mtcompile.execution.unchanged import check_versions
from mtcompile.passes.generators import generator_state, rng_preserved, set_generator_state

Tangents = Mapping[int, torch.Tensor | None]  # by computed output


class InnerOutputs:
    """The state that the nodes of one forward's outputs share. ``in_micro_batches``: whether the program runs several."""

    def __init__(self, session: Session, description: Description, in_micro_batches: bool) -> None:
        assert description.flow is not None
        self.session, self.description, self.flow = session, description, description.flow
        self._in_micro_batches = in_micro_batches
        # By inner output: the tensor that the caller has, and its hooks, which may live longer.
        self._handed_out: dict[int, tuple[weakref.ref[torch.Tensor], Mapping[int, Any]]] = {}
        self._nodes: dict[int, weakref.ref[Any]] = {}  # of computed outputs
        self._looks: dict[int, _Look | None] = {}  # by the backward that is running; None: nobody looks

    def hand_out(self, step: Any, inputs: Sequence[torch.Tensor], computed: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gives the outputs that need gradients nodes of their own. Returns what the caller sees of each. ``step``: the
        forward's node."""
        outputs, made, seen = self.description.outputs, set[int](), dict[int, torch.Tensor]()
        for index in self.flow.order:
            output = outputs[index]
            assert not isinstance(output, Constant)
            if isinstance(output, Computed) and output.position not in made and computed[output.position].requires_grad:
                made.add(position := output.position)
                reached = [seen[inner] for inner in self.flow.reached[position]]
                node = _Output.apply(self, step, position, computed[position], *reached).grad_fn  # type: ignore[no-untyped-call]
                self._nodes[position] = weakref.ref(node)
            if (viewed := self.flow.viewed.get(index)) is not None:
                above = outputs[viewed]
                assert not isinstance(above, Constant)
                seen[index] = rebuilt(Passed(0, output.views[len(above.views) :]), [seen[viewed]], ())
            else:
                seen[index] = rebuilt(output, inputs, computed)
            if index in self.flow.inner and seen[index].requires_grad:
                hook = functools.partial(_gradient, weakref.ref(self), index)
                self._handed_out[index] = weakref.ref(seen[index]), torch_private.hook_first(seen[index], hook)
        return seen

    def arrives(self, step: Any, position: int, tangent: torch.Tensor | None) -> Gradients:
        """Takes the gradient of a computed output. Returns what its node sends to the inner outputs that it flows to."""
        reached, backward = self.flow.reached[position], torch_private.current_backward()
        if not self._handed_out:
            return ()
        if backward not in self._looks:
            self._looks[backward] = self._look(step)
            torch_private.after_backward(functools.partial(self._looks.pop, backward, None))
        if (look := self._looks[backward]) is None:
            return (None,) * len(reached)
        look.tangents[position] = tangent
        return tuple(look.sent_to(inner, self._is_last(inner, look.tangents)) for inner in reached)

    def _is_last(self, inner: int, arrived: Collection[int]) -> bool:
        """Tells whether the gradients of all computed outputs that flow to an inner one, in this backward, have arrived."""
        missing = (p for p, inners in enumerate(self.flow.reached) if inner in inners and p not in arrived)
        nodes = (self._nodes[position]() for position in missing)
        return not any(node is not None and torch_private.will_run(node) for node in nodes)

    def gradient(self, inner: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the gradient of an inner output that somebody looks at. ``gradient``: of its uses outside of the forward."""
        look = self._looks.get(torch_private.current_backward())
        return None if look is None or gradient is None else look.gradient(inner, gradient)

    @property
    def is_looked_at(self) -> bool:
        """True in a backward in which somebody looks at an inner output."""
        return self._looks.get(torch_private.current_backward()) is not None

    def gradients(self, frame: Frame, tangents: Sequence[torch.Tensor | None], wanted: Sequence[bool]) -> Gradients:
        """Returns the gradient of each input of the forward, after those of the inner outputs that somebody looks at."""
        look = self._looks[torch_private.current_backward()]
        assert look is not None
        frame.spent = True
        frame.evict()
        return look.run.gradients(dict(enumerate(tangents)), wanted)

    def _look(self, step: Any) -> _Look | None:
        """Finds the inner outputs that somebody looks at in this backward, and runs the forward again for them. Raises
        StepError where their gradients cannot be had, and BudgetError."""
        asked, adds = torch_private.asked_for() or (None, False)
        looked, returned = dict[int, str](), set[int]()
        for inner, (reference, hooks) in self._handed_out.items():
            tensor = reference()
            is_asked = tensor is not None and (asked is None or torch_private.is_among(tensor, asked))
            if len(hooks) > 1 or is_asked or (tensor is not None and tensor.retains_grad):
                looked[inner] = self.flow.inner[inner]
                if tensor is not None and is_asked and not adds and torch_private.goes_on_below(tensor):
                    returned.add(inner)  # before its hooks run
        if not looked:
            return None
        frame = waiting_frame(self.session, step.frame)
        with self.session.door.training_call():  # the other ranks learn of it
            self._check(frame, looked)
        return _Look(_PlainRun(self.session, self.description, frame, looked), frozenset(returned))

    def _check(self, frame: Frame, looked: Mapping[int, str]) -> None:
        """Raises StepError where gradients of inner outputs cannot be had."""
        name = next(iter(looked.values()))
        what = (
            f"a hook, retain_grad or torch.autograd.grad asks for the gradient of {name}, which forward returns and goes on "
            "computing with"
        )
        if self.session.options.updates is not None:
            raise StepError(f'{what}; with update="backward" no backward computes it. Use update="step"')
        if self._in_micro_batches:
            raise StepError(f"{what}; with accumulate= it would be that of several micro-batches. Leave accumulate= out")
        if not self.session.door.alone:
            raise StepError(f"{what}; where several ranks train, no backward computes it. Train with one rank")
        if torch.is_grad_enabled():
            raise StepError(f"{what}, with create_graph=True; expected a backward without it, or the plain model")
        if frame.compiled.changed_in_backward:
            raise StepError(
                f"{what}; the backward of this model changes tensors in place, and would do so twice. Call the plain model"
            )
        if changed := [looked[inner] for inner in looked if inner in self.flow.changed]:
            raise StepError(
                f"{what}; forward changes {changed[0]} in place. Change a copy (clone) in forward, or call the plain model"
            )


def waiting_frame(session: Session, frame: Frame | None, used: bool = False) -> Frame:
    """Returns a frame whose backward may run. ``used``: whether it has run for some gradient that arrives. Raises StepError."""
    if session.closed:
        raise StepError("backward was called after model.close(), for a forward before it; call it before you close the model")
    if frame is not None and frame.replaced:
        raise StepError(
            'backward was called for a forward that a later one has taken the place of: with update="backward" a step has one '
            'forward. Call backward before the next forward, or use update="step"'
        )
    if frame is None or frame.spent or used:
        raise StepError(
            "backward was already run for this forward; run the forward again, or call the first backward with "
            "retain_graph=True"
        )
    return frame


class _Output(torch.autograd.Function):
    """A computed output as the caller sees it: the same tensor, with a node of its own."""

    @staticmethod
    def forward(
        ctx: Any, shared: InnerOutputs, step: Any, position: int, computed: torch.Tensor, *reached: torch.Tensor
    ) -> torch.Tensor:
        ctx.shared, ctx.step, ctx.position = shared, step, position
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(computed)
        return computed

    @staticmethod
    @told_briefly
    @torch_private.one_at_a_time
    def backward(ctx: Any, tangent: torch.Tensor | None) -> tuple[Any, ...]:
        return None, None, None, tangent, *ctx.shared.arrives(ctx.step, ctx.position, tangent)


@told_briefly
@torch_private.one_at_a_time
def _gradient(shared: weakref.ref[InnerOutputs], inner: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The first hook of an inner output."""
    outputs = shared()
    return None if outputs is None else outputs.gradient(inner, gradient)


@dataclass(slots=True)
class _Look:
    """A backward in which somebody looks at inner outputs. ``returned``: those whose gradient ``torch.autograd.grad`` takes
    before their hooks run. ``tangents``: the gradients of computed outputs that have arrived. ``sent``: to inner outputs."""

    run: _PlainRun
    returned: frozenset[int]
    tangents: dict[int, torch.Tensor | None] = field(default_factory=dict)
    sent: dict[int, torch.Tensor | None] = field(default_factory=dict)

    def sent_to(self, inner: int, is_last: bool) -> torch.Tensor | None:
        """Returns what an output's node sends to an inner output. If a hook will compute the gradient, this is -0, which
        changes no sum: a hook runs only where some gradient arrives. Otherwise the last output's node sends all of it."""
        if inner not in self.run.cut or inner in self.sent or (inner in self.returned and not is_last):
            return None
        if inner in self.returned:
            sent = self.run.gradient(inner, None, self.tangents)
        else:
            value = self.run.cut[inner]
            sent = torch.zeros((), dtype=value.dtype, device=value.device).neg().expand(value.shape)
        self.sent[inner] = sent
        return sent

    def gradient(self, inner: int, gradient: torch.Tensor) -> torch.Tensor | None:
        if (sent := self.sent.get(inner)) is None:
            return None
        alone = gradient.data_ptr() == sent.data_ptr()
        if inner not in self.returned:
            return self.run.gradient(inner, None if alone else gradient, self.tangents)
        if not alone:
            raise StepError(
                "torch.autograd.grad was called for an inner output of forward together with others, and the loss also uses "
                "it directly; expected a call for its gradient alone: torch.autograd.grad(loss, hidden, retain_graph=True)"
            )
        return None


class _PlainRun:
    """A forward that has run again in plain PyTorch, cut at inner outputs. ``cut``: what it went on with, by inner output."""

    def __init__(self, session: Session, description: Description, frame: Frame, inner: Mapping[int, str]) -> None:
        check_versions(frame, description, again=True)
        description = replace(description, graph=_cut(description.graph, inner.values()))
        self._device = str(description.device)
        self._plain = PlainGraph(_peak_nbytes(description, len(inner)) + copied_nbytes(frame))
        session.make_room_for(self._plain, "a backward that is asked for the gradient of an inner output of forward")
        self._inputs = [
            tensor.detach().requires_grad_(given.requires_grad)
            for given, tensor in zip(frame.inputs, inputs_before(frame), strict=True)
        ]
        with torch.enable_grad(), rng_preserved(self._device):
            if frame.generator is not None:
                set_generator_state(self._device, frame.generator)
            self._outputs, cut = run_plainly(description, [tensor.to(description.device) for tensor in self._inputs])
        self.cut: Mapping[int, torch.Tensor] = dict(zip(inner, cut, strict=True))

    def gradient(self, inner: int, outside: torch.Tensor | None, tangents: Tangents) -> torch.Tensor | None:
        """Returns the gradient of an inner output. ``outside``: that of its uses outside of the forward, to which plain PyTorch
        adds the others."""
        value, before = self.cut[inner], generator_state(self._device)
        roots = ([] if outside is None else [(value, outside)]) + self._roots(tangents)
        (gradient,) = _gradients(roots, [value], keeps=True)
        if not torch.equal(before, generator_state(self._device)):
            set_generator_state(self._device, before)
            raise StepError(
                "the gradient of an inner output of forward was asked for, and the backward draws random numbers, which it "
                "would draw twice; expected a backward without them, or the plain model"
            )
        return gradient

    def gradients(self, tangents: Tangents, wanted: Sequence[bool]) -> Gradients:
        """Returns the gradient of each input, None where it is not ``wanted`` or there is none. Frees the graph."""
        sources = [i for i, tensor in enumerate(self._inputs) if wanted[i] and tensor.requires_grad]
        results = _gradients(self._roots(tangents), [self._inputs[i] for i in sources], keeps=False)
        by_input = dict(zip(sources, results, strict=True))
        return tuple(by_input.get(i) for i in range(len(self._inputs)))

    def _roots(self, tangents: Tangents) -> list[tuple[torch.Tensor, torch.Tensor]]:
        outputs = ((self._outputs[position], tangent) for position, tangent in tangents.items())
        return [(output, tangent) for output, tangent in outputs if tangent is not None and output.requires_grad]


def _gradients(roots: Sequence[tuple[torch.Tensor, torch.Tensor]], sources: Sequence[torch.Tensor], keeps: bool) -> Gradients:
    if not roots or not sources:
        return (None,) * len(sources)
    outputs, tangents = zip(*roots, strict=True)
    return torch.autograd.grad(outputs, sources, tangents, retain_graph=keeps, allow_unused=True)


def _cut(graph: fx.GraphModule, names: Collection[str]) -> fx.GraphModule:
    """Returns a graph that goes on with leaves in place of these nodes, and returns the leaves beside its outputs."""
    copied, env = fx.Graph(), dict[fx.Node, fx.Node]()
    copied.graph_copy(graph.graph, env)
    by_name: dict[str, fx.Node] = {node.name: made for node, made in env.items()}
    outputs: Any = graph.graph.output_node().args[0]
    leaves = []
    for node in map(by_name.__getitem__, names):
        with copied.inserting_after(node):
            leaves.append(leaf := copied.call_function(_leaf, (node,)))
        node.replace_all_uses_with(leaf, delete_user_cb=functools.partial(operator.is_not, leaf))
    copied.output((tuple(env[output] for output in outputs), tuple(leaves)))
    return fx.GraphModule(graph, copied)


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_()


def _peak_nbytes(description: Description, count: int) -> int:
    """Returns the most device bytes that a forward cut at ``count`` inner outputs and all gradients take at once."""
    fakes: list[Any] = [fake_of(node) for node in description.graph.graph.find_nodes(op="placeholder")]
    mode = torch_private.fake_mode_of(fakes)
    with mode, torch.autograd.set_multithreading_enabled(False), torch_private.LiveBytes() as counted, torch.enable_grad():
        inputs = [fake.detach().clone().requires_grad_(fake.requires_grad) for fake in fakes]
        before = counted.live
        outputs, cut = run_plainly(description, inputs)
        roots = [(output, torch.empty_like(output)) for output in outputs if output.requires_grad]
        kept = [_gradients(roots, [value], keeps=True) for value in cut]
        kept.append(_gradients(roots, [tensor for tensor in inputs if tensor.requires_grad], keeps=False))
    return int(counted.peak - before)
