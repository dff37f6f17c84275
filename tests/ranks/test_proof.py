"""Collectives are proven like every other call: none may be left out, misnamed, or run before what it combines is there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

import mtcompile
from mtcompile.forecast.result import Forecast
from mtcompile.passes.analysis.state import NO_LIMITS, held_nbytes, with_parts
from mtcompile.passes.proof.numbering import over_ranks
from mtcompile.passes.proof.same_computation import SameComputationError, same_computation
from mtcompile.passes.proof.schedule import Given, check_schedule
from mtcompile.passes.rewrites.collectives import check_reads
from mtcompile.passes.step_graph import (
    all_gather,
    all_reduce,
    broadcast,
    calls,
    copy_step,
    is_collective,
    ranks_of,
    reduce_scatter,
    results,
    update,
)
from mtcompile.report.dot import dot
from mtcompile.runtime.schedule import from_json, with_deps
from mtcompile.runtime.verify import ScheduleError, verify
from tests.ranks.reference import Model, batches


@pytest.fixture(scope="module")
def planned() -> Forecast:
    ids, labels = batches(1, 1)[0][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MT_EFFORT", "quick")
        return mtcompile.plan(Model, {"ids": ids, "labels": labels}, memory="200KB", update="backward", gpus=2)


@pytest.fixture(scope="module")
def sharded() -> Forecast:
    """A step of two hosts, which have a part each of the optimizer state."""
    ids, labels = batches(1, 1)[0][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MT_EFFORT", "quick")
        one_block = functools.partial(Model, blocks=1)
        return mtcompile.plan(one_block, {"ids": ids, "labels": labels}, memory="200KB", update="backward", hosts=2)


@pytest.fixture(scope="module")
def in_parts() -> Forecast:
    """A step of two hosts, which have a part each of the weights, and no room to keep them for the backward."""
    ids, labels = batches(1, 1)[0][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MT_EFFORT", "quick")
        patch.setenv("MT_RANKS_SHARD", "weights")
        one_block = functools.partial(Model, blocks=1)
        return mtcompile.plan(one_block, {"ids": ids, "labels": labels}, memory="80KB", update="backward", hosts=2)


def call_of(step: fx.GraphModule, target: object) -> fx.Node:
    return next(call for call in calls(step) if call.target is target)


def reduce_all(step: fx.GraphModule) -> None:
    call_of(step, reduce_scatter).target = broadcast


def gather_nothing(step: fx.GraphModule) -> None:
    for item in results(call := call_of(step, all_gather)):
        item.replace_all_uses_with(call.args[item.args[1]])
        step.graph.erase_node(item)
    step.graph.erase_node(call)


def gather_under_another_name(step: fx.GraphModule) -> None:
    call = call_of(step, all_gather)
    call.meta["names"] = (*call.meta["names"][1:], "another")


def return_a_part(step: fx.GraphModule) -> None:
    """Leaves a gradient of which a rank has a part to the user."""
    output = step.graph.output_node()
    position = next(i for i, spec in enumerate(step.meta["outputs"]) if spec.kind == "update")
    values = list(output.args[0])
    name = step.meta["outputs"][position].name
    call = next(call for call in calls(step) if call.target is reduce_scatter and name in call.meta["names"])
    values[position] = results(call)[call.meta["names"].index(name)]
    output.args = (tuple(values),)
    specs = list(step.meta["outputs"])
    specs[position] = replace(specs[position], kind="grad")
    step.meta["outputs"] = tuple(specs)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [reduce_all, gather_nothing, gather_under_another_name, return_a_part])
def test_parts_of_parameters_are_updated_by_parts_of_gradients_and_gathered(
    sharded: Forecast, damage: Callable[[fx.GraphModule], None]
) -> None:
    step = step_of(sharded)
    assert sharded.joint is not None and sharded.planned is not None
    same_computation(sharded.joint, step)
    updates = sharded.planned.plan.updates
    assert updates is not None and {call.target for call in filter(is_collective, calls(step))} == {reduce_scatter, all_gather}
    given = Given(sharded.planned.plan, replace(NO_LIMITS, updates=updates), ranks=2)
    damage(step)
    with pytest.raises(SameComputationError):
        same_computation(sharded.joint, step)
        check_schedule(step, sharded.planned.schedule, given)


def fetch_a_part(step: fx.GraphModule) -> None:
    """Leaves out what makes a weight whole."""
    gather_nothing(step)


def gather_another(step: fx.GraphModule) -> None:
    call = call_of(step, all_gather)
    other = next(each for each in calls(step) if each.target is all_gather and each.meta["names"] != call.meta["names"])
    call.args, call.meta["names"] = other.args, other.meta["names"]


def call_a_part_whole(step: fx.GraphModule) -> None:
    for node in step.graph.nodes:
        if node.meta.get("part"):
            node.meta["part"] = False


@pytest.mark.slow
@pytest.mark.parametrize("damage", [fetch_a_part, gather_another, gather_under_another_name, call_a_part_whole])
def test_parts_of_weights_are_whole_before_they_are_read(in_parts: Forecast, damage: Callable[[fx.GraphModule], None]) -> None:
    step, planned = step_of(in_parts), in_parts.planned
    assert in_parts.joint is not None and in_parts.problem is not None and planned is not None
    phases = {call.meta["phase"] for call in calls(step) if call.target is all_gather}
    assert phases == {"forward", "backward"} and "each host has a part" in str(planned.plan)
    given = Given(planned.plan, in_parts.problem.budgets, ranks=2)
    same_computation(in_parts.joint, step)
    damage(step)
    with pytest.raises(SameComputationError, match="I5"):
        same_computation(in_parts.joint, step)
        check_schedule(step, planned.schedule, given)


@pytest.mark.parametrize(("room", "parts"), [(1, False), (-1, True)])
def test_hosts_have_parts_of_weights_where_they_have_no_room_for_all(in_parts: Forecast, room: int, parts: bool) -> None:
    assert in_parts.problem is not None
    step, budgets = in_parts.problem.step, replace(in_parts.problem.budgets, parts=frozenset())
    whole = sum(held_nbytes(step, budgets, "host").values()) + budgets.exchange
    limited = with_parts(step, replace(budgets, host=whole + room), None)
    assert bool(limited.parts) == parts
    assert (sum(held_nbytes(step, limited, "host").values()) + budgets.exchange < whole) == parts


def test_the_next_version_of_a_gathered_parameter_is_proven(sharded: Forecast) -> None:
    assert sharded.planned is not None
    schedule = from_json(sharded.planned.schedule.to_json())
    verify(schedule)
    index = next(i for i, each in enumerate(schedule.instructions) if each.label.startswith("gather_"))
    gather, rows = schedule.instructions[index], list(schedule.instructions)
    wrong = {
        "I1": replace(gather, reads=(schedule.buffers[gather.writes[0]].version_of, *gather.reads[1:])),
        "I2": replace(gather, deps=()),
    }
    for instruction in wrong.values():
        with pytest.raises(ScheduleError):
            verify(replace(schedule, instructions=(*rows[:index], instruction, *rows[index + 1 :])))
    late = next(i for i, each in enumerate(rows) if i > index and each.queue == "host" and each.op == "run")
    reading = replace(rows[late], reads=(*rows[late].reads, gather.reads[0]))
    with pytest.raises(ScheduleError, match=r"is read, but #\d+ has written"):
        verify(replace(schedule, instructions=(*rows[:late], reading, *rows[late + 1 :])))


def step_of(forecast: Forecast) -> fx.GraphModule:
    assert forecast.planned is not None
    return copy_step(forecast.planned.step)


def leave_out(step: fx.GraphModule) -> None:
    call = next(filter(is_collective, calls(step)))
    for item in results(call):
        item.replace_all_uses_with(call.args[item.args[1]])
        step.graph.erase_node(item)
    step.graph.erase_node(call)


def take_another(step: fx.GraphModule) -> None:
    next(filter(is_collective, calls(step))).target = broadcast


def misname(step: fx.GraphModule) -> None:
    call = next(filter(is_collective, calls(step)))
    call.meta["names"] = (*call.meta["names"][1:], "another")


def combine_twice(step: fx.GraphModule) -> None:
    call = next(filter(is_collective, calls(step)))
    item = results(call)[0]
    with step.graph.inserting_before(results(call)[-1].next):
        again = step.graph.create_node("call_function", all_reduce, (item,), name="again")
        again.meta.update(call.meta, names=call.meta["names"][:1])
        (twice,) = [step.graph.call_function(results(call)[0].target, (again, 0))]
        twice.meta.update(item.meta)
    item.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not again)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [leave_out, take_another, misname, combine_twice])
def test_a_step_with_other_collectives_is_refused(planned: Forecast, damage: Callable[[fx.GraphModule], None]) -> None:
    step = step_of(planned)
    assert ranks_of(step) == 2 and planned.joint is not None
    same_computation(planned.joint, step)
    damage(step)
    with pytest.raises(SameComputationError):
        same_computation(planned.joint, step)


def test_a_share_of_a_gradient_is_for_the_update_of_a_share_alone(planned: Forecast) -> None:
    assert planned.planned is not None and planned.planned.plan.updates is not None
    step, updates = step_of(planned), planned.planned.plan.updates
    assert {call.target for call in filter(is_collective, calls(step))} == {reduce_scatter}  # one host: nothing to gather
    given = Given(planned.planned.plan, replace(NO_LIMITS, updates=replace(updates, sharded=())), ranks=2)
    with pytest.raises(SameComputationError, match="for its update, found a share"):
        check_schedule(step, planned.planned.schedule, given)


def test_a_collective_waits_for_its_gradients_and_updates_wait_for_it(planned: Forecast) -> None:
    assert planned.planned is not None
    schedule = from_json(planned.planned.schedule.to_json())
    verify(schedule)
    deps = [instruction.deps for instruction in schedule.instructions]
    network = {i for i, each in enumerate(schedule.instructions) if each.queue == "network" and each.op == "run"}
    waiting = [i for i, each in enumerate(schedule.instructions) if i in network or network & set(each.deps)]
    assert network and len(waiting) > len(network)
    for index in waiting:
        kept = tuple(dep for dep in deps[index] if index not in network and dep not in network)
        if kept == deps[index]:
            continue
        with pytest.raises(ScheduleError) as error:
            verify(with_deps(schedule, [*deps[:index], kept, *deps[index + 1 :]]))
        assert error.value.invariant in ("I1", "I2", "I3")


def test_a_collective_on_another_queue_or_of_device_memory_is_refused(planned: Forecast) -> None:
    assert planned.planned is not None
    schedule = planned.planned.schedule
    first = next(each for each in schedule.instructions if each.queue == "network" and each.op == "run")
    buffers = {**schedule.buffers, first.reads[0]: replace(schedule.buffers[first.reads[0]], tier="device")}
    with pytest.raises(ScheduleError):
        verify(replace(schedule, buffers=buffers))


@pytest.mark.slow
def test_it_is_drawn_and_interpreted_and_numbered(planned: Forecast) -> None:
    step = step_of(planned)
    assert "combined over all ranks" in dot(step)
    call = next(filter(is_collective, calls(step)))
    assert over_ranks(call.target, (3,)) == ("reduce_scatter", 3)
    assert torch.equal(all_reduce(torch.ones(2))[0], torch.ones(2))


def test_a_read_of_shared_weights_after_their_gradients_are_combined_is_refused(planned: Forecast) -> None:
    assert planned.planned is not None
    step, schedule = planned.planned.step, planned.planned.schedule
    check_reads(step, schedule)
    changed = [call for call in calls(step) if call.target is update]
    home = str(changed[0].args[0])
    late = next(i for i, each in enumerate(schedule.instructions) if each.label == changed[-1].name)
    later = replace(schedule.instructions[late], reads=(*schedule.instructions[late].reads, home))
    instructions = (*schedule.instructions[:late], later, *schedule.instructions[late + 1 :])
    with pytest.raises(SameComputationError, match=r"I7: expected every read of .* before its gradients are combined"):
        check_reads(step, replace(schedule, instructions=instructions))
