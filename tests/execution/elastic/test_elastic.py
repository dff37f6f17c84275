"""Plans that follow the measured speeds: in both directions, with the bits of plain PyTorch, and seldom."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.execution.elastic.replanner import Elastic
from mtcompile.execution.elastic.speeds import WINDOW
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.evaluate import evaluate
from mtcompile.passes.planning.planner import make_plan
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import Trace
from tests.helpers.stacks import WIDTH, Residual

pytestmark = pytest.mark.slow  # it compiles models
BATCH = 1024
# A block's activations hide behind its kernels on this link, and do not on one of a quarter of its speed.
FAST = Machine("a fast link", flops=1e10, memory_gbps=50.0, h2d_gbps=0.2, d2h_gbps=0.2, issue_us=1.0, host_gbps=20.0)
SLOW = replace(FAST, flops=1e9, h2d_gbps=0.02, d2h_gbps=0.02)  # so that ten steps are enough to plan in, also beside other work


class Training:
    """A compiled model and a plain one, trained side by side."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(3)
        self.plain = Residual(layers=options.pop("layers", 4))
        ours = copy.deepcopy(self.plain)
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=1e-2) for one in (ours, self.plain)]
        options = {"memory": "7MiB", "elastic": True, **options}
        self.model: Any = mtcompile.compile(ours, optimizer=self.optimizers[0], **options)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            x, losses = torch.randn(BATCH, WIDTH), []
            for one, optimizer in zip((self.model, self.plain), self.optimizers, strict=True):
                losses.append(one(x))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*losses)
        for one, two in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(one, two)

    @property
    def changes(self) -> list[str]:
        changes: list[str] = self.model.memory_report()["plan_changes"]
        return changes


def copied_nbytes(schedule: Schedule) -> int:
    return sum(i.nbytes for i in schedule.instructions if i.queue in ("h2d", "d2h"))


def recomputing(schedule: Schedule) -> int:
    return sum(i.work == "recompute" for i in schedule.instructions)


def as_run_by(training: Training, factor: float, machine: Machine = FAST) -> Trace:
    """A step of the program that trained last, as it would run with a link that takes ``factor`` times as long as that of
    ``machine``."""
    compiled = training.model._mt_model.session.last
    times = {
        index: machine.copy_us(each.nbytes, each.queue) * factor if each.queue in ("h2d", "d2h") else each.time_us
        for index, each in enumerate(compiled.schedule.instructions)
        if each.op in ("copy", "run")
    }
    records = (r for r in simulate(compiled.schedule).records if r.index in times)
    return Trace(tuple(replace(r, end_us=r.start_us + times[r.index]) for r in records), "measured")


def told(training: Training, elastic: Elastic, factor: float, steps: int = WINDOW + 1, machine: Machine = FAST) -> None:
    """Tells of steps with that link, waits for a plan if one is made, and trains on."""
    compiled = training.model._mt_model.session.last
    for _ in range(steps):
        elastic.step_ran(compiled, as_run_by(training, factor, machine))
    elastic.join()
    training.step()


def best_us(training: Training, machine: Machine) -> float:
    """The step time of the best plan for a machine."""
    return make_plan(replace(training.model._mt_model.session.last.problem, machine=machine)).plan.total_us


def time_us(training: Training, plan: Plan, machine: Machine) -> float:
    problem = replace(training.model._mt_model.session.last.problem, machine=machine)
    return evaluate(problem, plan).plan.total_us


def of_a_quarter(machine: Machine) -> Machine:
    return replace(machine, h2d_gbps=machine.h2d_gbps / 4, d2h_gbps=machine.d2h_gbps / 4)


def test_a_plan_follows_the_link_in_both_directions_and_changes_no_bits() -> None:
    training = Training(throttle=FAST, layers=2, memory="5MiB")
    session = training.model._mt_model.session
    elastic: Elastic = session.replanner
    session.listeners.remove(elastic)  # which is told of made-up times instead
    session.runner.throttle = None
    training.step()
    first = training.model.plan, training.model.schedule
    told(training, elastic, 1.05)
    assert not training.changes and training.model.plan is first[0]  # as planned for
    told(training, elastic, 12.0)
    (line,) = training.changes
    slow = training.model.plan, training.model.schedule
    assert "takes 12 times as long as planned for; a step copies" in line and "regions recompute instead of" in line
    assert recomputing(slow[1]) > recomputing(first[1])
    told(training, elastic, 12.5)
    assert len(training.changes) == 1 and training.model.plan is slow[0]  # nothing new
    told(training, elastic, 1.0)
    assert len(training.changes) == 2 and recomputing(training.model.schedule) < recomputing(slow[1])
    assert training.model.plan.total_us <= 1.0001 * first[0].total_us
    training.step()


@pytest.mark.parametrize(
    ("layers", "memory", "swaps"),
    [(4, "8MiB", 4), *(pytest.param(*each, 0, marks=pytest.mark.long) for each in ((6, "7MiB"), (3, "6MiB"), (6, "10MiB")))],
)
def test_a_link_of_a_quarter_of_its_speed_and_its_return_are_followed(layers: int, memory: str, swaps: int) -> None:
    """Within ten steps, which are made up, with the exact times of each speed. Some plans are near the best at both speeds."""
    training = Training(throttle=SLOW, layers=layers, memory=memory)
    session = training.model._mt_model.session
    elastic: Elastic = session.replanner
    session.listeners.remove(elastic)
    session.runner.throttle = None
    training.step()
    first = training.model.plan
    for factor, machine in ((4.0, of_a_quarter(SLOW)), (1.0, SLOW)) * 2:
        told(training, elastic, factor, 9, SLOW)  # and a tenth, of training
        assert time_us(training, training.model.plan, machine) <= 1.05 * best_us(training, machine), factor
    assert time_us(training, training.model.plan, SLOW) <= 1.05 * time_us(training, first, SLOW)
    assert len(training.changes) >= swaps


def test_swaps_are_bounded_and_options_that_do_not_go_with_them_are_refused() -> None:
    training = Training()
    elastic = training.model._mt_model.session.replanner
    assert elastic._may_swap()
    elastic._swaps.extend(range(8))
    elastic._steps = 100
    assert not elastic._may_swap()
    elastic._steps = 500
    assert elastic._may_swap()
    rests = []
    for _ in range(7):
        elastic._rest()
        rests.append(elastic._rests)
    assert rests == [20, 40, 80, 160, 320, 500, 500]
    for options in ({"policy": "megatrain"}, {"kernels": "inductor"}):
        with pytest.raises(ValueError, match="elastic=True changes plans while a model trains; expected"):
            mtcompile.compile(nn.Linear(2, 2), elastic=True, **options)
    with pytest.raises(TypeError, match="expected elastic to be True or False, found 1"):
        mtcompile.compile(nn.Linear(2, 2), elastic=1)


@pytest.mark.long
def test_a_link_throttled_to_a_quarter_and_released_while_a_model_trains() -> None:
    training = Training(throttle=SLOW, layers=6, memory="7MiB")
    session = training.model._mt_model.session
    quarter = of_a_quarter(session.runner.throttle)

    def steps() -> None:
        """Ten steps, in which a plan is made; beside other work, its thread may have to be waited for."""
        training.step(9)
        session.replanner.join()
        training.step()

    training.step(4)
    full, before = session.runner.throttle, training.model.plan
    assert time_us(training, before, quarter) > 1.1 * best_us(training, quarter)
    for machine in (quarter, full):
        session.runner.throttle, swaps = machine, len(training.changes)
        is_far = time_us(training, training.model.plan, machine) > 1.05 * best_us(training, machine)
        steps()
        assert len(training.changes) > swaps or not is_far  # a plan may be near the best at both speeds
        assert time_us(training, training.model.plan, machine) <= 1.05 * best_us(training, machine)
    assert time_us(training, training.model.plan, full) <= 1.05 * time_us(training, before, full)


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{"update": "backward"}, {"update": "backward", "run_ahead": True}, {"accumulate": 2, "memory": "5MiB"}]
)
def test_every_way_of_training_goes_on_with_the_same_bits(options: dict[str, Any]) -> None:
    training = Training(throttle=FAST, layers=2, **{"memory": "6MiB", **options})
    session = training.model._mt_model.session
    elastic: Elastic = session.replanner
    session.listeners.remove(elastic)
    session.runner.throttle = None
    reference = Training(layers=2, **{**options, "memory": "1GiB"})
    for factor in (1.0, 12.0, 12.0, 1.0, 1.0):
        torch.manual_seed(7)
        x = torch.randn(BATCH, WIDTH)
        for one in (training, reference):
            one.model(x).backward()
            one.optimizers[0].step()
            one.optimizers[0].zero_grad()
        training.model.synchronize()
        compiled = session.last
        for _ in range(WINDOW + 1):
            elastic.step_ran(compiled, as_run_by(training, factor))
        elastic.join()
    reference.model.synchronize()
    for one, two in zip(training.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert len(training.changes) == 2
