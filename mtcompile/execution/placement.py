"""The placement of a step's inputs: the protocol that each door implements, and helpers that the doors share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import fx

from mtcompile.errors import BudgetError
from mtcompile.options import Options
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.cuts.fragments.cut import UNCUT
from mtcompile.passes.generators import generator_nbytes
from mtcompile.passes.joint.build import InputHomes
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.disk.limits import NotWorthwhile
from mtcompile.passes.planning.problem import DoesNotFit, Planned, PlanningProblem
from mtcompile.passes.step_graph import calls, has_random, is_convert
from mtcompile.runtime.schedule import aligned, gib
from mtcompile.sizes import FEWEST


class Placement(Protocol):
    """The homes of a step's inputs, and the limits its plan must keep to. One implementation per door: a compiled model
    (``execution/model_door``), torch.compile's graphs (``backend``), a forecast (``forecast/request``)."""

    @property
    def effort(self) -> str:
        """Returns the name of what the search for its plan may cost."""

    def input_homes(self, joint: fx.GraphModule) -> InputHomes:
        """Says where the inputs of a step have their homes, before anything is planned."""

    def constraints(self, step: fx.GraphModule) -> tuple[Budgets, Mapping[str, str]]:
        """Returns the budgets, and the home tier of each block that is not the plan's to decide."""


class RunnablePlacement(Placement, Protocol):
    """The placement of a step that will run."""

    def needs_loss_head(self, joint: fx.GraphModule) -> bool:
        """Tells whether ``loss_chunks`` is an error for a training graph without a loss head."""

    def may_cut_weights(self) -> bool:
        """Tells whether weights may be cut into fragments where nothing fits otherwise."""
        return False

    def fragments_begin(self) -> int:
        """Returns the bytes at multiples of which fragments of a weight begin."""
        return UNCUT.begins

    def separate_frozen(self) -> None:
        """Takes frozen parameters that lie with others that train out of their homes: they may have homes of their own now."""
        return

    def shard_weights(self, error: DoesNotFit) -> bool:
        """Gives each host a part of the weights, if that may help. Tells whether it did so now."""
        return False

    def give_up_residents(self, error: DoesNotFit) -> bool:
        """Lets plans decide anew which parameters stay on the device, if that may help. Tells whether it did so now."""
        return False

    def expect(self, problem: PlanningProblem) -> None:
        """Called with a problem before its plan is searched."""
        return

    def limit_host(self, plan: Plan) -> bool:
        """Sets the host budget that there is by default, if a plan takes more. Tells whether it has set one."""
        return False

    def limit_device(self, planned: Planned) -> bool:
        """Lowers the device budget that there is by default, if the allocator may find no room for a plan. Tells whether it
        has lowered it."""
        return False

    def refusal(self, error: DoesNotFit) -> BudgetError:
        """Returns the error to raise if no plan fits the user's budget."""

    def adopt(self, step: fx.GraphModule, planned: Planned) -> None:
        """Puts parameters where a proven plan wants them, before it first runs."""
        return

    def is_advised(self) -> bool:
        """Tells whether its user is told what other options would gain."""
        return False

    def may_update_in_backward(self) -> bool:
        """Tells whether updates that run after the backward could run in it."""
        return False

    def host_kernels(self, step: fx.GraphModule) -> Mapping[str, Any]:
        """Returns the kernels of instructions that are not regions: updates and conversions."""


def random_reserve_nbytes(step: fx.GraphModule) -> int:
    """Returns the device bytes held beside a schedule: the generator's states before the forward and before the backward (on
    the emulated device, both count)."""
    return 2 * aligned(generator_nbytes(step.meta["device"])) if has_random(step) else 0


def conversions(step: fx.GraphModule) -> dict[str, Any]:
    """Returns the kernels of a step's conversions. They change nothing: writing a result to its place casts it."""
    return {node.name: lambda *values: values for node in calls(step) if is_convert(node)}


def disk_error(error: DoesNotFit, folder: Path, nbytes: int, free: int) -> BudgetError:
    """Makes the error of a plan that does not fit a disk, or whose disk makes no sense. ``nbytes``: asked for; ``free``: of
    these, how many there are."""
    if isinstance(error, NotWorthwhile):
        ways = "\n  try " + "\n  or ".join(error.ways)
        return BudgetError(f"disk={folder} makes no sense for this step: {error.why}{ways}", error.minimum, error.tier)
    if error.minimum <= nbytes:
        return BudgetError(
            f"disk={folder}: expected room for {error.minimum} bytes ({gib(error.minimum)}), found {free} bytes free "
            f"({gib(free)}), of the {nbytes} asked for; free space there, name another folder, or give mtcompile more host "
            "memory",
            error.minimum,
            "disk",
        )
    return budget_error(error, "disk", nbytes, 0)


def host_error(
    error: DoesNotFit, options: Options, waiting: int, gradients: int, state: int, optimizer: str = ""
) -> BudgetError:
    """Makes the error of a host that is too small. ``waiting``: bytes of forwards that wait; ``gradients``: those that are held
    for optimizer.step(); ``state``: those that the ``optimizer`` of that class keeps."""
    budget = options.host or 0
    plain = budget_error(error, "host", budget, waiting)
    ways = [f"pass host={plain.minimum_bytes} or more"]
    if gradients:
        ways.append(f'pass update="backward": no gradients are held, up to {gib(gradients)} less')
    if state:
        if optimizer != "Adafactor":
            ways.append(f"take an optimizer with less state than {gib(state)}, such as torch.optim.Adafactor")
        ways.append("train adapters (LoRA): of what is frozen, only the weights are held")
    if options.disk is None:
        ways.append('pass disk="/path:SIZE": frozen weights and activations go there, and with update="backward" what trains')
    if why := _why_not_cut(options):
        ways.append(why)
    text = str(plain).rpartition("\n")[0] + "\n  " + "\n  or ".join(ways)
    return BudgetError(f"{text}\n  mtcompile.plan(model, data, host=...) predicts what each gives", plain.minimum_bytes, "host")


def _why_not_cut(options: Options) -> str:
    """Says what to change so that "auto" may cut weights into fragments; "" if it may."""
    if options.fragments != "auto" or not options.needs_all_gradients:
        return ""
    name = "" if options.updates is None else options.updates.limit_name
    clipping = f"set the {name} to 0, leave out" if name else "leave out max_grad_norm= and"
    return (
        f'{clipping} nonfinite="skip", or pass update="step": with them, fragments="auto" keeps weights '
        "whole, since a fragment is updated as its gradient arrives, before all norms are known"
    )


def budget_error(
    error: DoesNotFit, name: str, budget: int, reserved_nbytes: int, options: Options | None = None
) -> BudgetError:
    """Makes the error. ``name``: what the user calls the budget. ``reserved_nbytes``: held by others. ``options``: to say which
    of them keep weights whole."""
    why = "" if options is None else _why_not_cut(options)
    largest = "\n".join(f"  {gib(nbytes):>12}  {what}" for what, nbytes in error.causes)
    beside = f" beside {gib(reserved_nbytes)} of waiting forwards, and of parameters for others" if reserved_nbytes else ""
    minimum = error.minimum + reserved_nbytes
    meant = f'; {name}={budget} is so many bytes: did you mean "{budget}GiB"?' if 0 < budget < FEWEST else ""
    return BudgetError(
        f"no plan fits {name}={gib(budget)}{beside}: the smallest {name} that works is at most {minimum} bytes "
        f"({gib(minimum)}); the largest parts of it are\n{largest}\n"
        f"  pass {name}={minimum} or more, or a smaller batch or sequence{meant}" + (f"\n  or {why}" if why else ""),
        minimum,
        error.tier,
    )
