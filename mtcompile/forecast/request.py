"""The request for a forecast, and its step: traced without memory, rewritten and ready to be planned."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from mtcompile import cache, knobs
from mtcompile.capture.joint import trace_settings
from mtcompile.capture.recording.joint import NotRecorded
from mtcompile.capture.stamping.blocks import FEWEST
from mtcompile.capture.tracing import record_joint, trace_joint
from mtcompile.compiler import JointStep, planning_problem, rewrite_joint
from mtcompile.distributed.layout import ALONE, RankLayout
from mtcompile.execution.memory.fragments import homes_off_device
from mtcompile.forecast.changes import can_be_joined
from mtcompile.models.decoders import fake
from mtcompile.models.lora import add_lora
from mtcompile.models.shapes import SHAPES, Shape
from mtcompile.optim.disk_state import PIECE
from mtcompile.optim.precision import Precision
from mtcompile.optim.state_sizes import average_copies, is_elementwise, state_nbytes
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.kernels import Shared
from mtcompile.passes.analysis.state import Budgets, is_trained, with_parts
from mtcompile.passes.cuts.form import Allowed, Form, first_form, in_rows, small_head
from mtcompile.passes.cuts.fragments.cut import UNCUT, homes_between
from mtcompile.passes.joint.batch.joining import Micro, micro_of
from mtcompile.passes.joint.build import InputHomes
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.planner import homes_of_rows
from mtcompile.passes.planning.problem import Progress
from mtcompile.passes.step_graph import inputs_of, span_nbytes
from mtcompile.runtime.disk.store import piece_nbytes, staging_nbytes
from mtcompile.torch_private import building_on_meta, building_without_memory, without_memory

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class ForecastRequest:
    """The request of a forecast, except batch and sequence. ``machine`` and ``budgets``: those that each rank has.
    ``on_disk``: False to plan as if there were no disk. ``effort``: what planning may cost.
    ``run_tokens``: those of the whole run, whose costs are to be told."""

    model: str | nn.Module | Callable[..., Any]
    data: Mapping[str, Any] | None
    precision: Precision
    optimizer: str
    machine: Machine
    budgets: Budgets
    policies: tuple[str, ...]
    force: bool
    progress: Progress
    accumulate: int
    lora: int = 0
    base_bits: int | None = None
    make_optimizer: MakeOptimizer | None = None
    ranks: RankLayout = ALONE
    fragments: str | None = "auto"
    on_disk: bool = True
    effort: str = "normal"
    run_tokens: int | None = None

    @property
    def cuts(self) -> str | None:
        """The weights that may be cut into fragments, as ``possible_cuts`` takes it."""
        if self.fragments != "auto":
            return self.fragments
        return "exact" if self.ranks.count == 1 and (self.budgets.updates is None or not self.budgets.updates.held) else None

    def allowed(self, joint: fx.GraphModule) -> Allowed:
        """Returns the forms to choose among for a captured step: with fragments beginning where ``compile`` would cut, and
        without tiles where fragments were asked for, which a training step goes with instead."""
        asked = self.fragments not in (None, "auto")
        begins = UNCUT.begins if self.budgets.disk is None else piece_nbytes(_parameters_nbytes(joint))
        tiles = 1 if asked else "auto"
        return Allowed("auto", tiles, self.cuts, last_fragments=self.cuts, begins=begins, in_fragments=asked)


@dataclass(frozen=True, slots=True)
class SizedStep:
    """A step of ``size``, which is (batch, seq), and its candidate plans. ``captured``: its joint graph before any rewrite."""

    candidates: Candidates
    captured: fx.GraphModule
    joint: JointStep
    tokens: int
    size: tuple[int, int]

    @property
    def form(self) -> Form:
        return self.joint.form


@dataclass(frozen=True, slots=True)
class AssumedPlacement:
    """The placement of a step that will not run: inputs are at home on the host, and the plan chooses every block's home.
    ``make_optimizer``: makes the optimizer whose state is measured; what it does not take is counted as AdamW's. None: the
    budgets say how much there is. ``ranks``: several have every home on the host. ``effort``: what planning may
    cost."""

    budgets: Budgets
    make_optimizer: MakeOptimizer | None = None
    ranks: RankLayout = ALONE
    effort: str = "normal"

    def input_homes(self, joint: fx.GraphModule) -> InputHomes:
        return InputHomes(frozen_apart=self.budgets.disk is not None, ranks=self.ranks.count, hosts=self.ranks.hosts)

    def constraints(self, step: fx.GraphModule) -> tuple[Budgets, Mapping[str, str]]:
        budgets = self.budgets
        if budgets.disk is not None:
            torn = homes_between(step, piece_nbytes(nbytes := _parameters_nbytes(step)))
            takes = tuple(home for home in homes_off_device(step) if home not in torn)
            budgets = replace(budgets, disk_staging=staging_nbytes(nbytes), disk_takes=takes)
        fixed = dict.fromkeys(step.meta["homes"].values(), "host") if self.ranks.count > 1 else homes_off_device(step)
        if budgets.sharing * budgets.hosts > 1:
            sharded = tuple(sorted(fixed)) if budgets.hosts == self.ranks.hosts else ()
            updates = None if budgets.updates is None else replace(budgets.updates, sharded=sharded)
            budgets = replace(budgets, once=frozenset(fixed), updates=updates)
        if self.make_optimizer is None:
            return with_parts(step, budgets, knobs.ranks_shard_weights()), fixed
        with without_memory():
            trained = [(spec.name, node.meta["val"]) for spec, node in inputs_of(step) if is_trained(spec)]
            parameters = {name: nn.Parameter(torch.empty_like(value, device="cpu")) for name, value in trained}
            optimizer = self.make_optimizer(list(parameters.values()))
            taken = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            rest = {name: parameter for name, parameter in parameters.items() if id(parameter) not in taken}
        state = {**state_nbytes(optimizer, parameters), **state_nbytes(None, rest)}
        copies, updates = average_copies(state, parameters), budgets.updates
        updates = None if updates is None else replace(updates, state_copies=copies)
        elementwise = budgets.disk_updates and is_elementwise(optimizer)
        budgets = replace(budgets, state=state, state_copies=copies, updates=updates, disk_updates=elementwise)
        return with_parts(step, budgets, knobs.ranks_shard_weights()), fixed


def _parameters_nbytes(graph: fx.GraphModule) -> int:
    return sum(span_nbytes(node.meta["val"]) for spec, node in inputs_of(graph) if spec.role == "param")


def sized_step(
    request: ForecastRequest, batch: int, seq: int, like: SizedStep | None = None, compared: bool = False
) -> SizedStep:
    """Captures a step at one size. ``like``: the same step at another size, whose form and regions are reused. ``compared``:
    the step of other forms will be planned too."""
    request.progress("capturing the step", 0, 0)
    captured, data = _captured(request, batch // request.accumulate, seq)
    device = request.budgets.device
    first = first_form(captured, device) if compared and request.budgets.disk is None else small_head(captured, device)
    form = like.joint.form if like else first
    return _in_form(request, captured, (tokens_of(data) * request.accumulate, (batch, seq)), form, like)


def in_form(request: ForecastRequest, sized: SizedStep, form: Form) -> SizedStep:
    """Returns a captured step in another form, as far as there is something to cut."""
    return _in_form(request, sized.captured, (sized.tokens, sized.size), form, shared=sized.joint.shared)


def exactly_in_form(request: ForecastRequest, sized: SizedStep, form: Form) -> SizedStep | None:
    """Returns a captured step in another form; None where not all of that can be cut."""
    joint = _rewritten(request, sized.captured, form, sized.joint.shared or Shared())
    return _candidates(request, sized.captured, (sized.tokens, sized.size), joint) if joint.form == form else None


def sized_in_rows(request: ForecastRequest, sized: SizedStep, embeddings: str = "auto") -> SizedStep | None:
    """Returns a step that takes only those rows of embeddings that a batch names, as ``compile`` would with ``embeddings``;
    None where all rows are as well."""
    rows, whole = in_rows(sized.joint.graph, embeddings), sized.candidates.problem
    if rows is None or "device" in homes_of_rows(whole, rows):
        return None
    return _candidates(request, sized.captured, (sized.tokens, sized.size), sized.joint._replace(graph=rows))


def may_accumulate(request: ForecastRequest, sized: SizedStep) -> bool:
    """Tells whether twice as many micro-batches of the size that was captured make a batch twice as large."""
    if isinstance(request.model, str):  # one of ours
        return True
    return can_be_joined(sized.captured, _micro(sized.captured, request, 2 * request.accumulate))


def _in_form(
    request: ForecastRequest,
    captured: fx.GraphModule,
    tokens_and_size: tuple[int, tuple[int, int]],
    form: Form,
    like: SizedStep | None = None,
    shared: Shared | None = None,
) -> SizedStep:
    joint = _rewritten(request, captured, form, shared or Shared())
    return _candidates(request, captured, tokens_and_size, joint, like)


def _rewritten(request: ForecastRequest, captured: fx.GraphModule, form: Form, shared: Shared) -> JointStep:
    micro = _micro(captured, request, request.accumulate) if request.accumulate > 1 else None
    return rewrite_joint(captured, request.precision, False, form, micro, shared)


def _candidates(
    request: ForecastRequest,
    captured: fx.GraphModule,
    tokens_and_size: tuple[int, tuple[int, int]],
    joint: JointStep,
    like: SizedStep | None = None,
) -> SizedStep:
    placement = AssumedPlacement(request.budgets, request.make_optimizer, request.ranks, request.effort)
    known = None if like is None else like.joint.graph
    problem = planning_problem(joint, placement, request.machine, like=known, apart=request.on_disk)
    candidates = Candidates(problem, request.progress)
    return SizedStep(candidates, captured, joint, *tokens_and_size)


def budgets_of(request: ForecastRequest, sized: SizedStep) -> Budgets:
    """Returns the budgets of a step, with its optimizer's state, within the request's limits."""
    return replace(sized.candidates.problem.budgets, device=request.budgets.device, host=request.budgets.host)


def _micro(joint: fx.GraphModule, request: ForecastRequest, count: int) -> Micro:
    return micro_of(joint, count, request.precision.split, request.ranks.count > 1)


def _captured(request: ForecastRequest, batch: int, seq: int) -> tuple[fx.GraphModule, Mapping[str, Any]]:
    model, data = request.model, request.data
    if isinstance(model, str):
        return _captured_shape(model, request, batch, seq)
    own = _same_values(model, bool(request.lora)) if isinstance(model, nn.Module) else None
    with building_without_memory() as built:
        module = own if own is not None else model(batch, seq) if takes_sizes(model) else model()
        if isinstance(module, tuple):
            module, data = module
        if data is None:
            raise ValueError("expected data=, the module's keyword arguments, for a model that is not a built-in shape")
        module, data = _off_meta(module, data)
        if request.lora:
            add_lora(module, request.lora, request.base_bits)
        built(module)
        return _traced(module, data, request.precision), data


def _traced(
    module: nn.Module,
    data: Mapping[str, Any],
    precision: Precision,
    repeated: tuple[str, int] | None = None,
) -> fx.GraphModule:
    if precision.weights is not None:
        _cast(module, precision.weights)
    torch.compiler.reset()
    return trace_joint(module.train(), data, repeated=repeated)[0]


def _captured_shape(name: str, request: ForecastRequest, batch: int, seq: int) -> tuple[fx.GraphModule, Mapping[str, Any]]:
    """Captures the step of a built-in shape. Its sources are ours, so that of a few of its blocks says what the others are. A
    trace is cached between runs; making a recording takes little longer than reading one."""
    shape = SHAPES[name]
    tokens = torch.empty((batch, seq), dtype=torch.int64, device="meta")
    data = {"tokens": tokens, "targets": tokens}
    repeated = ("blocks", shape.layers) if shape.layers > FEWEST else None
    traced = shape.shortened(FEWEST) if repeated else shape
    with contextlib.suppress(NotRecorded):
        return _recorded(traced, tokens, request, repeated), data
    key = repr(
        (shape, request.precision, tuple(tokens.shape), request.lora, request.base_bits, trace_settings(torch.device("cpu")))
    )
    joint = cache.read_joint(key)
    if joint is None:
        joint = _traced_shape(traced, tokens, request, repeated)
        cache.write_joint(key, joint)
    return joint, data


def _recorded(shape: Shape, tokens: torch.Tensor, request: ForecastRequest, repeated: tuple[str, int] | None) -> fx.GraphModule:
    with building_on_meta():
        model = fake(shape)
        if request.lora:
            add_lora(model, request.lora, request.base_bits)
    if request.precision.weights is not None:
        _cast(model, request.precision.weights)
    return record_joint(model, {"tokens": tokens, "targets": tokens}, repeated)


def _traced_shape(
    shape: Shape, like: torch.Tensor, request: ForecastRequest, repeated: tuple[str, int] | None
) -> fx.GraphModule:
    with building_without_memory() as built:
        module = fake(shape)
        if request.lora:
            add_lora(module, request.lora, request.base_bits)
        built(module)
        tokens = torch.zeros(like.shape, dtype=torch.int64)
        return _traced(module, {"tokens": tokens, "targets": tokens}, request.precision, repeated)


def _same_values(module: nn.Module, frozen: bool) -> nn.Module:
    """Returns a copy of a user's module with the same values: casts, adapters and the training mode are the copy's. ``frozen``:
    the copy has parameters of its own, so that it may freeze them."""

    def shared(value: torch.Tensor) -> torch.Tensor:
        is_own = frozen and isinstance(value, nn.Parameter)
        return nn.Parameter(value.detach(), value.requires_grad) if is_own else value

    held = [value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]
    return copy.deepcopy(module, {id(value): shared(value) for value in (*held, *module.parameters(), *module.buffers())})


def _off_meta(module: nn.Module, data: Mapping[str, Any]) -> tuple[nn.Module, Mapping[str, Any]]:
    """Returns a module and its arguments on the CPU, without memory still, if they are on the device "meta", for which torch
    traces other operations."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "meta":
            return value
        on_cpu = torch.empty_like(value, device="cpu")
        return nn.Parameter(on_cpu, value.requires_grad) if isinstance(value, nn.Parameter) else on_cpu

    tensors = *module.parameters(), *module.buffers()
    if any(tensor.device.type == "meta" for tensor in tensors):
        module = copy.deepcopy(module, {id(tensor): moved(tensor) for tensor in tensors})
    return module, {name: moved(value) for name, value in data.items()}


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Casts as ``module.to(dtype)`` does, which fails on tensors without memory. Tied parameters stay tied."""
    casts: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.is_floating_point():
                cast = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                setattr(part, name, casts.setdefault(id(parameter), cast))
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(dtype))


def with_disk(budgets: Budgets, nbytes: int | None, precision: Precision, force: bool = False) -> Budgets:
    """Returns the budgets with a disk of that size. ``force``: however slow it is, and however soon it wears out."""
    return replace(
        budgets,
        disk=nbytes,
        disk_updates=budgets.updates is not None,
        update_piece=2 * PIECE if precision.split else 0,
        disk_slowdown=0.0 if force else knobs.disk_slowdown(),
        disk_days=0.0 if force else knobs.disk_days(),
        disk_direct=knobs.disk_direct() is True,  # whether kvikio works on that machine is not known
    )


def takes_sizes(model: Any) -> bool:
    """Tells whether a model is a function of (batch, seq)."""
    if isinstance(model, nn.Module) or not callable(model):
        return False
    taken = inspect.signature(model).parameters.values()
    return sum(p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in taken) == 2


def tokens_of(data: Mapping[str, Any]) -> int:
    """Returns the number of tokens: the elements of the largest integer input or, without one, the number of samples."""
    tensors = [v for v in data.values() if isinstance(v, torch.Tensor)]
    integers = [t.numel() for t in tensors if not t.is_floating_point()]
    return max(integers, default=tensors[0].shape[0] if tensors and tensors[0].dim() else 1)
