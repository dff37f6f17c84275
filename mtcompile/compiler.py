"""The pipeline: from a captured step to one that can run.

    captured step ──joint_of──► joint graph ──rewrite_joint──► cut into smaller operations, micro-batches
                  ──planning_problem──► regions, budgets, homes ──plan_for──► plan, rewritten step graph, schedule
                  ──Toolchain.build──► kernels, measured ──prove──► compiled step

Training runs all of it, in ``compile_step``; ``mtcompile.plan`` runs it from the joint graph to the plan. Around it are three
loops: ``fastest_form`` tries how small the operations are cut, and again if nothing fits beside what earlier programs keep on
the device; ``compile_step`` plans again with slower copies if host memory cannot be pinned.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import fx

from mtcompile import cache, knobs, progress, torch_private
from mtcompile.capture.description import Description, Tangents
from mtcompile.capture.joint import compare_with_whole, joint_graph
from mtcompile.capture.program_key import program_key
from mtcompile.capture.refusals import in_micro_batches
from mtcompile.errors import BudgetError, CaptureError, PassError
from mtcompile.execution.calibration import known_machine, warn_not_pinned
from mtcompile.execution.compiled import CompiledStep, compiled_step
from mtcompile.execution.memory.beside import plan_beside
from mtcompile.execution.memory.fragment_figures import cut_on_disk, streamed_whole, told_fragments, told_whole
from mtcompile.execution.placement import Placement, RunnablePlacement
from mtcompile.forecast.changes import LEAST_GAIN, Setting, can_be_joined, changes
from mtcompile.kernels.measure import strides_on
from mtcompile.kernels.same_bits import has_same_bits
from mtcompile.kernels.toolchain import BuiltStep, Toolchain
from mtcompile.machine.measure import identity
from mtcompile.optim.precision import Precision
from mtcompile.options import FASTEST, Options
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.kernels import Shared
from mtcompile.passes.analysis.memory import workspace_nbytes
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts import fastest
from mtcompile.passes.cuts.form import Check, Form, cut_joint, first_form, in_rows, small_head, told_head
from mtcompile.passes.cuts.fragments.cut import UNCUT, Cut, has_misplaced_fragments
from mtcompile.passes.generators import python_rng_preserved
from mtcompile.passes.joint.accumulate import repeat
from mtcompile.passes.joint.batch.joining import Micro, joining_of, micro_of
from mtcompile.passes.joint.build import InputHomes, built_once
from mtcompile.passes.joint.exceptions import Contract, contract
from mtcompile.passes.joint.normalize import normalize
from mtcompile.passes.lower import Workspace
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.disk.within import may_fit_without, planned_without, within_disk
from mtcompile.passes.planning.planner import homes_of_rows, may_be_resident, plan_like, resident_plan, structure
from mtcompile.passes.planning.policies import KEEP_STATE
from mtcompile.passes.planning.problem import DoesNotFit, Planned, PlanningProblem, Solved, leaves_room
from mtcompile.passes.proof.cuts.loss_weights import check_weights
from mtcompile.passes.proof.cuts.micro_batches import check_micro_batches
from mtcompile.passes.proof.same_computation import same_computation
from mtcompile.passes.proof.schedule import Given, check_schedule
from mtcompile.passes.registered import PassFailed, blaming
from mtcompile.passes.rewrites.collectives import check_reads
from mtcompile.passes.step_graph import copy_step, fragments_of
from mtcompile.runtime.devices.protocol import Device
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.verify import verify


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured step: its graph, which outputs receive gradients, its micro-batches, and the graph of the ``whole`` batch."""

    description: Description
    tangents: Tangents
    micro: Micro | None = None
    whole: Description | None = None


class Searched(NamedTuple):
    """The plan that a search has found for a joint graph."""

    joint: fx.GraphModule
    plan: Plan


@dataclass(frozen=True, slots=True)
class Target:
    """The target that a step is compiled for. ``machine``: the speeds that plans assume. ``beside``: the number of further
    forwards of the same step that may wait for their backward at once. ``searched``: plans found, by graphs' structures.
    ``advised``: the changes whose gains were told."""

    options: Options
    device: Device
    toolchain: Toolchain
    machine: Machine
    beside: int = 0
    searched: dict[bytes, Searched] = field(default_factory=dict)
    advised: set[str] = field(default_factory=set)

    @property
    def pinned(self) -> bool:
        """True as long as host memory could be pinned."""
        return self.device.staging is None


class JointStep(NamedTuple):
    """A rewritten joint graph, to be planned. ``numerics``: its contract in words. ``shared``: by the steps of all forms.
    ``checks``: prove, before it runs, that it computes what was captured."""

    graph: fx.GraphModule
    numerics: Contract
    form: Form
    shared: Shared | None = None
    checks: tuple[Check, ...] = ()


class PlannedStep(NamedTuple):
    """A plan, the problem that it solves, and the joint graph whose results it must reproduce."""

    joint: JointStep
    problem: PlanningProblem
    planned: Planned


# ------------------------------------------------------------------------------------------------------- the composition


@python_rng_preserved()
def compile_step(captured: CapturedStep, target: Target, placement: RunnablePlacement) -> CompiledStep:
    """Plans, builds and proves one captured step. Raises CaptureError, and BudgetError if no plan fits."""
    probing = torch_private.probe_inductor() if target.toolchain.compiling else None
    with progress.doing("tracing forward and backward"):
        joint = joint_of(captured, target)
    while True:
        pinned = target.pinned
        best = fastest_form(joint, captured, target, placement)
        lowered = placement.limit_host(best.planned.plan) or placement.limit_device(best.planned)
        if lowered or not target.toolchain.has_room(best.planned, target.machine):
            continue
        if probing is not None:
            probing.join()
        compiled = built_step(best, captured.tangents, target, placement)
        if pinned == target.pinned:
            if captured.tangents is not None and placement.is_advised():
                progress.add(functools.partial(told_gains, joint, captured, best, target, placement))
            return compiled
        target = replace(target, machine=known_machine(target.device, target.options))
        warn_not_pinned(target.machine)


def built_step(best: PlannedStep, tangents: Tangents, target: Target, placement: RunnablePlacement) -> CompiledStep:
    """Builds and proves a planned step, and puts parameters where its plan wants them."""
    built = target.toolchain.build(best.planned, target.machine)
    progress.tell("proving the schedule")
    prove(best, built, placement.input_homes(best.joint.graph))
    placement.adopt(best.problem.step, built.planned)
    kernels = {**built.kernels, **placement.host_kernels(built.planned.step)}
    return compiled_step(tangents, built.planned, best.problem, kernels, best.joint.graph)


def told_gains(
    joint: fx.GraphModule, captured: CapturedStep, best: PlannedStep, target: Target, placement: RunnablePlacement
) -> list[str]:
    """Says what other options would gain in a planned step, unless all of it was told before."""
    count = 1 if captured.micro is None else captured.micro.count
    setting = Setting(
        Candidates(best.problem),
        best.planned,
        best.problem.budgets,
        count,
        placement.may_update_in_backward(),
        target.options.kernels == "eager",
        lambda: can_be_joined(copied := copy_step(joint), micro_of(copied, 2 * count, target.options.precision.split)),
    )
    step_time_us = best.planned.plan.total_us
    gaining = {each.what: each for each in changes(setting) if each.gain(step_time_us) >= LEAST_GAIN}
    if gaining.keys() <= target.advised:
        return []
    target.advised.update(gaining)
    best_first = sorted(gaining.values(), key=lambda each: -each.gain(step_time_us))
    return ["what other options would gain, estimated:", *(f"  {each.told(step_time_us)}" for each in best_first)]


def joint_of(captured: CapturedStep, target: Target) -> fx.GraphModule:
    """Returns the normalized joint graph of one micro-batch."""
    description = captured.description
    if captured.micro is not None:
        description = replace(description, inputs=description.inputs[: captured.micro.inputs])
    joint = _traced(description, captured, target.device.where)
    if captured.micro is not None and (whole := captured.whole) is not None:
        pattern = None if captured.tangents is None else tuple(map(bool, captured.tangents))
        of_whole = replace(captured, description=whole, tangents=pattern)
        compare_with_whole(joint, captured.micro, description, whole, lambda: _traced(whole, of_whole, None))
    return joint


def _traced(description: Description, captured: CapturedStep, where: torch.device | None) -> fx.GraphModule:
    """Returns the normalized joint graph of a description: that of an equal one which this process or an earlier one has
    traced, or a new one. ``where``: the device whose kernels make its strides; None: torch's are believed."""
    key = program_key(description, captured.tangents, str(where)) if knobs.cache() else None
    if (joint := cache.recalled_joint(key)) is not None:
        return joint
    on_disk = None if key is None or torch_private.was_torch_patched() else f"{identity(description.device)} {key}"
    joint = cache.read_joint(on_disk)
    if joint is None:
        try:
            observe = None if where is None else strides_on(where)
            joint = normalize(joint_graph(description, captured.tangents, observe), observe)
        except NotImplementedError as error:
            raise CaptureError(f"the model uses {error}; expected ATen operations only") from None
        cache.write_joint(on_disk, joint)
    cache.remember_joint(key, joint)
    return joint


def rewrite_joint(
    joint: fx.GraphModule, precision: Precision, fuses: bool, form: Form, micro: Micro | None, shared: Shared
) -> JointStep:
    """Returns ``joint`` cut as ``form`` says, and repeated for all micro-batches. Raises CaptureError."""
    with in_micro_batches(micro):
        joining = micro and joining_of(joint, micro)  # it marks what cutting keeps
        rewritten, form, changed, checks = cut_joint(joint, form, shared.rewritten)
        numerics = contract(joint, fuses, changed).between(precision.contract())
        if micro and joining:
            one, rewritten = rewritten, repeat(rewritten, micro, joining)
            checks = (
                functools.partial(check_weights, joint, micro, joining),
                *checks,
                functools.partial(check_micro_batches, one, rewritten, micro, joining),
            )
            numerics = numerics.between(after=joining.numerics(micro))
    return JointStep(rewritten, numerics, form, shared, checks)


def planning_problem(
    joint: JointStep,
    placement: Placement,
    machine: Machine,
    workspace: Workspace = workspace_nbytes,
    whole: bool = False,
    like: fx.GraphModule | None = None,
    apart: bool = True,
) -> PlanningProblem:
    """Returns the step graph of ``joint``, cut into regions, with the limits on its plan. ``whole``: one region per phase.
    ``like``: the same at another size, whose regions are reused. ``apart``: False if frozen weights share homes with others."""
    homes = placement.input_homes(joint.graph)
    step = built_once(joint.graph, whole, like, homes if apart else replace(homes, frozen_apart=False), joint.shared)
    budgets, fixed_homes = placement.constraints(step)
    return PlanningProblem(step, machine, budgets, workspace, fixed_homes, joint.numerics, effort=placement.effort)


def prove(best: PlannedStep, built: BuiltStep, input_homes: InputHomes) -> None:
    """Proves that the schedule is safe and computes what was captured, in the bytes that its kernels were measured to need and
    within what was asked for. Each cut of the captured graph must compute what the graph before it did, and the step what the
    last one does. Raises an error that names the violated invariant, and the registered passes, if any."""
    plan, step, schedule = built.planned.plan, built.planned.step, built.planned.schedule
    for check in best.joint.checks:
        check()
    budgets = best.problem.budgets
    given = Given(plan, budgets, built.workspace, built.held_nbytes, input_homes.all_on_device, input_homes.ranks)
    with blaming(best.problem.own_passes, "made a step that is not proven"):
        same_computation(best.joint.graph, step)
        check_schedule(step, schedule, given)
        verify(schedule)
        if budgets.sharing > 1:
            check_reads(step, schedule)


@contextlib.contextmanager
def pass_errors() -> Iterator[None]:
    """Raises PassError, the public error, in place of PassFailed, with the same cause."""
    try:
        yield
    except PassFailed as error:
        raise PassError(str(error)) from error.__cause__


# --------------------------------------------------------------------------------------------------- the loops around it


def fastest_form(joint: fx.GraphModule, captured: CapturedStep, target: Target, placement: RunnablePlacement) -> PlannedStep:
    """Returns the plan of the fastest form that options allow. If none fits beside what earlier programs keep on the device,
    some of it goes home. Raises BudgetError if none fits then, CaptureError if there is nothing of what was to be cut."""
    forms, options, begins = _Forms(joint, captured, target, placement), target.options, placement.fragments_begin()
    if captured.tangents and placement.needs_loss_head(joint):
        options.check_form(forms.first.form)
    compared = fastest.fastest_form(forms, options.allowed(placement.may_cut_weights(), begins))
    if compared.best is None:
        if not any(placement.give_up_residents(error) for _, error in compared.refused):
            refused = forms.errors[compared.refusal[0]]
            of_head = (
                told_head(joint, forms.limits.device) if options.loss_chunks == "auto" and refused.tier == "device" else []
            )
            told = "\n  ".join([str(refused), *of_head])
            raise BudgetError(told, refused.minimum_bytes, refused.tier) from None
        return fastest_form(joint, captured, target, placement)
    best = forms.planned[compared.best[0]]
    forms.shared.keep_only(best.problem.step, best.planned.step)
    if not fragments_of(best.joint.graph):
        return best

    def streamed() -> Schedule:
        problem = forms.problem(forms.rewritten(replace(best.joint.form, cut=UNCUT)))
        return streamed_whole(problem, cut_on_disk(best.planned.step, best.planned.plan))

    whole = next((planned.schedule for each, planned in compared.fitting if not fragments_of(each.joint.graph)), None)
    told = told_fragments(best.planned, streamed() if whole is None else whole, fits=whole is not None)
    notes = (*best.planned.plan.notes, told, *told_whole(joint, best.joint.form.cut, best.planned.step, begins))
    return best._replace(planned=replace(best.planned, plan=replace(best.planned.plan, notes=notes)))


@dataclass(frozen=True, eq=False)
class _Form:
    """A form of a step that is to be compiled."""

    joint: JointStep
    forms: _Forms

    @property
    def form(self) -> Form:
        return self.joint.form

    @functools.cached_property
    def candidates(self) -> Candidates:
        return Candidates(self.forms.problem(self.joint), _tell)


@dataclass(frozen=True)
class _Forms:
    """See ``cuts.forms.Forms``. ``planned``, ``errors``: what came of each that was planned. ``on_disk``: False for plans as if
    there were no disk; ``at_home``: the forms that have such a plan."""

    captured: fx.GraphModule
    step: CapturedStep
    target: Target
    placement: RunnablePlacement
    planned: dict[_Form, PlannedStep] = field(default_factory=dict)
    errors: dict[_Form, BudgetError] = field(default_factory=dict)
    on_disk: bool = True
    at_home: set[_Form] = field(default_factory=set)
    _by_form: dict[tuple[Form, frozenset[str]], _Form] = field(default_factory=dict)
    _keep_bits: dict[Cut, bool] = field(default_factory=dict)
    shared: Shared = field(default_factory=Shared)

    def rewritten(self, form: Form) -> JointStep:
        options = self.target.options
        return rewrite_joint(self.captured, options.precision, options.fuses, form, self.step.micro, self.shared)

    def problem(self, joint: JointStep) -> PlanningProblem:
        target, apart = self.target, self.target.options.disk is None
        return planning_problem(joint, self.placement, target.machine, target.toolchain.eager.workspace, apart=apart)

    @property
    def limits(self) -> Budgets:
        budgets = self.first.candidates.problem.budgets
        return budgets if self.on_disk else replace(budgets, disk=None)

    @functools.cached_property
    def first(self) -> _Form:
        options = self.target.options
        begun = first_form if options.disk is None else small_head  # with a disk, others are compared only if it does not fit
        chunks = begun(self.captured, options.memory).chunks if options.loss_chunks == "auto" else int(options.loss_chunks)
        return self._known(Form(chunks, 1 if options.tiles == "auto" else int(options.tiles)))

    def cut(self, form: Form) -> _Form | None:
        return step if (step := self._known(form)).form == form else None

    def in_rows(self, step: _Form, embeddings: str) -> _Form | None:
        graph = step.joint.graph
        if self.target.options.policy in KEEP_STATE or self.placement.input_homes(graph).all_on_device:
            return None
        rows = in_rows(graph, embeddings)
        if rows is None or "device" in homes_of_rows(step.candidates.problem, rows):
            return None
        key = step.form, frozenset(rows.meta["rows"])
        return self._by_form.setdefault(key, _Form(step.joint._replace(graph=rows), self))

    def may_take_all_rows(self, step: _Form, rows: _Form) -> bool:
        problem, options = step.candidates.problem, self.target.options
        is_open = None in homes_of_rows(problem, rows.joint.graph) and options.policy == FASTEST
        return is_open and (options.embeddings == "auto" or may_be_resident(problem))

    def allows(self, cut: Cut) -> bool:
        """Tells whether a cut keeps bits, for which its products are computed."""
        if cut not in self._keep_bits:
            options, where = self.target.options, self.target.device.where
            exact = options.fragments == "exact"
            self._keep_bits[cut] = options.fuses or has_same_bits(self.captured, cut, where, options.memory, exact)
        return self._keep_bits[cut]

    def find(self, step: _Form) -> Planned | None:
        if not self.on_disk and not may_fit_without(step.candidates.problem, step.candidates):
            return None
        try:
            solution = plan_for(step, self.target, self.placement, self.on_disk, not self.at_home)
        except DoesNotFit as error:
            self.errors[step] = self.placement.refusal(error)
            raise
        self.planned[step] = planned = PlannedStep(step.joint, *solution)
        self.at_home.update(() if self.on_disk else {step})
        misplaced = has_misplaced_fragments(planned.problem.step, planned.planned.plan, self.placement.fragments_begin())
        return None if misplaced else planned.planned

    def without_disk(self) -> _Forms:
        return replace(self, on_disk=False)

    def _known(self, form: Form) -> _Form:
        key = form, frozenset[str]()
        if key not in self._by_form:
            self._by_form[key] = _Form(self.rewritten(form), self)
        return self._by_form[key]


def plan_for(form: _Form, target: Target, placement: RunnablePlacement, on_disk: bool, may_move: bool) -> Solved:
    """Returns the problem and its plan: that of the same step at other sizes, if it serves as well. With kernels that fuse,
    takes one region per phase if everything fits. ``on_disk``: False to plan as if there were no disk; ``may_move``: whether
    frozen weights may be set apart, to be there. Raises DoesNotFit."""
    joint, options, machine, workspace = form.joint, target.options, target.machine, target.toolchain.eager.workspace
    serves_others = options.policy == FASTEST and not target.beside and options.disk is None and "cut" not in joint.graph.meta
    key, apart = structure(joint.graph), options.disk is None  # with one, frozen weights are apart if they may go there
    while True:
        if serves_others and (similar := target.searched.get(key)) is not None:
            alike = planning_problem(joint, placement, machine, workspace, like=similar.joint)
            if (planned := plan_like(alike, similar.plan)) is not None:
                return alike, planned
        problem = planning_problem(joint, placement, machine, workspace, apart=apart)
        placement.expect(problem)
        if options.fuses and options.policy == FASTEST and may_be_resident(problem):
            whole = planning_problem(joint, placement, machine, workspace, whole=True)
            if (resident := resident_plan(whole)) is not None and leaves_room(whole.budgets, resident.schedule, target.beside):
                return whole, resident
        try:
            find = functools.partial(plan_beside, form.candidates, policy=options.policy, beside=target.beside)
            if on_disk:
                problem, planned = within_disk(problem, find, apart, form.candidates)
            else:
                problem, planned = planned_without(problem, form.candidates, find)
        except DoesNotFit as error:
            if not on_disk:
                raise
            if not apart and may_move and error.tier == "host" and problem.budgets.disk is not None:
                placement.separate_frozen()
                apart = True
            elif not placement.shard_weights(error):
                raise
        else:
            if serves_others and not planned.plan.all_resident:
                target.searched[key] = Searched(joint.graph, planned.plan)
            return problem, planned


def _tell(activity: str, done: int, total: int) -> None:
    progress.tell(f"{activity}, {done} of {total} candidates")
