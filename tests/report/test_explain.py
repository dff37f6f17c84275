"""Explanations: every figure is the plan's, the schedule's or the trace's, and what else could be done costs what planning so
costs."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import mtcompile
from mtcompile.cli.app import app
from mtcompile.passes.analysis.saved import saved_values
from mtcompile.passes.plan import Decision, alike
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.step_graph import calls, placeholders, recomputes, regions, results
from mtcompile.report.explain import explain
from mtcompile.report.explanation import Explanation
from mtcompile.report.tables import parts, plan_tables
from mtcompile.runtime.schedule import gib
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import busy_us, exposed_us, span_us
from tests.helpers.stacks import KINDS, by_policy, forecast, planned, source, stack
from tests.helpers.trace_events import check_format
from tests.helpers.training import adamw, train


@cache
def explained(kind: str, name: str) -> Explanation:
    return explain(planned(kind), forecast(update="backward", run_ahead=True).problem if kind == "backward" else source(), name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_is_the_schedules(kind: str) -> None:
    one = planned(kind)
    found = explained(kind, "layers")
    assert found.step_time_us == one.plan.total_us and found.peak_bytes == one.schedule.peak_nbytes
    records = {r.index: r for r in simulate(one.schedule).records}
    rows, buffers = one.schedule.instructions, one.schedule.buffers
    seen = set()
    for value in found.values:
        for life in value.lives:
            buffer = buffers[life.buffer]
            seen.add(life.buffer)
            assert (life.tier, life.kind, life.nbytes) == (buffer.tier, buffer.kind, buffer.nbytes)
            if life.began:
                index = int(life.began.split()[0][1:])
                assert life.buffer in rows[index].writes and life.start_us == records[index].start_us
                assert rows[index].phase == life.phases[0]
            if life.ended:
                freed = rows[int(life.ended[1:])]
                assert freed.op == "free" and freed.writes == (life.buffer,)
                assert life.end_us >= life.start_us
            assert bool(life.began) or life.kind == "home"
            assert bool(life.ended) == any(i.op == "free" and i.writes == (life.buffer,) for i in rows)
        assert all(d in one.plan.decisions or (one.plan.find(d.kind, d.subject) is None and d.reason) for d in value.why)
    homes = source().step.meta["homes"]
    params = {v.name: v for v in found.values if v.role == "param"}
    assert params.keys() == {name for name, block in homes.items() if "layers" in (name.split(".")[0], block.split(".")[0])}
    for name, value in params.items():
        assert value.home == one.plan.params(homes[name])
        copies = [life for life in value.lives if life.kind in ("placed", "pooled") and life.tier == "device"]
        assert bool(copies) == (value.home == "host")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_step_is_left_out(kind: str) -> None:
    """What all blocks, inputs and outputs explain together is every value; what is computed again is so where it says."""
    one, step = planned(kind), source().step
    assert all(block.startswith("layers.") for block in step.meta["blocks"])
    names = {v.value: v for v in explained(kind, "layers").values}
    for region in regions(step):
        block = step.meta["blocks"][region.meta["block"]]
        for item in results(region):
            assert names[item.name].nbytes == item.meta["nbytes"] and names[item.name].role == item.meta["role"]
        for item in saved_values(region) if region.meta["phase"] == "forward" else ():
            again = [c.name for c in calls(one.step) if region.meta["block"] in recomputes(c)]
            kept = one.plan.keeps(block, item.name)
            assert names[item.name].made_again == (() if kept else tuple(again))
            assert kept or again
    assert {v for v in names} >= {p.name for p in placeholders(step.graph) if p.meta["role"] == "param"}


def test_alternatives_cost_what_planning_so_costs() -> None:
    found = explained("searched", "layers.5.up")
    one, made = planned("searched"), Candidates(source())
    assert found.exact and 1 <= len(found.alternatives) <= 8
    kinds = {a.kind for a in found.alternatives}
    assert kinds >= {"params", "variant"}
    block = source().step.meta["homes"]["layers.5.up.weight"]
    for a in found.alternatives:
        assert a.more_us == a.step_time_us - one.plan.total_us
        assert a.more_bytes == a.peak_bytes["device"] - one.schedule.peak_nbytes["device"]
        limit = one.plan.budget_bytes["device"]
        assert limit is not None and a.fits == (a.peak_bytes["device"] <= limit)
    (params,) = [a for a in found.alternatives if a.kind == "params"]
    other: Any = "host" if one.plan.params(block) == "device" else "device"
    again = made.evaluate(one.plan.with_decision(Decision("params", block, other, 0, "")))
    assert params.step_time_us == again.plan.total_us and params.peak_bytes == again.schedule.peak_nbytes
    (recomputed,) = [a for a in found.alternatives if a.what.startswith("all of") and a.what.endswith("recomputed")]
    again = made.evaluate(one.plan.with_decision(Decision("variant", block, "recompute", 0, "")))
    assert recomputed.step_time_us == again.plan.total_us and recomputed.peak_bytes == again.schedule.peak_nbytes
    assert recomputed.more_us != 0 and params.more_bytes != 0


def test_a_resident_step_could_move_and_recompute_everything() -> None:
    found = explain(by_policy("resident"), source(), "layers.3")
    assert {v.home for v in found.values if v.role in ("param",)} == {"device"}
    assert {"params", "variant", "activation"} == {a.kind for a in found.alternatives}
    assert not any(v.made_again for v in found.values)
    assert all(a.more_us >= 0 for a in found.alternatives)


def test_a_name_that_is_nothing_says_what_comes_close() -> None:
    with pytest.raises(ValueError, match=r"layers\.3\.up") as caught:
        explained("searched", "layer.3.up")
    assert all(block in str(caught.value) for block in source().step.meta["blocks"])
    with pytest.raises(ValueError, match="The blocks are"):
        explained("searched", "")
    one = explained("searched", "layers.3.up.weight")
    assert {v.name for v in one.values} == {"layers.3.up.weight", "layers.3.up.weight.grad"}
    assert explained("searched", one.values[0].value).values == one.values[:1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def test_a_tied_weight_has_both_its_names() -> None:
    model = mtcompile.compile(Tied(), memory="1MiB", device="cpu")
    model(torch.randn(4, 8)).backward()
    assert str(model.explain("second.weight")) == str(model.explain("first.weight"))
    assert "second.bias" in str(model.explain("second.bias"))


def test_it_reads_well_and_as_json() -> None:
    found = explained("searched", "layers.2.up")
    data = json.loads(found.to_json())
    assert [v["name"] for v in data["values"]] == [v.name for v in found.values]
    assert data["peak_bytes"] == dict(found.peak_bytes) and len(data["alternatives"]) == len(found.alternatives)
    text = str(found)
    for value in found.values:
        assert f"{value.name}: {value.role}, {gib(value.nbytes)}" in text
        assert all(d.reason in text for d in value.why)
    assert all(a.what in text for a in found.alternatives)


@pytest.mark.slow
def test_predicted_against_measured() -> None:
    model, data = stack()
    optimizer = adamw(model.parameters())
    compiled: Any = mtcompile.compile(model, memory="2MiB", optimizer=optimizer, device="cpu", policy="megatrain")
    with pytest.raises(mtcompile.StepError, match="train it for one step"):
        compiled.explain("layers.3")
    train(compiled, optimizer, data, steps=1)
    first = compiled.explain("layers.3")
    assert first.compared is None and "nothing measured" in str(first)
    train(compiled, optimizer, data, steps=2)
    found = compiled.explain("layers.3")
    trace, schedule = compiled.last_trace, compiled.schedule
    predicted = simulate(schedule)
    whole, here = found.compared, found.compared_here
    assert found.exact and whole.measured_us == pytest.approx(span_us(trace)) and whole.predicted_us == span_us(predicted)
    busy, was = busy_us(trace), busy_us(predicted)
    assert {q.queue: q.measured_us for q in whole.queues} == pytest.approx(busy)
    for queue in whole.queues:
        assert queue.predicted_us == pytest.approx(was[queue.queue])
        if queue.queue != "compute":
            assert queue.cost_us == pytest.approx(exposed_us(trace, queue.queue) - exposed_us(predicted, queue.queue))
    for queue, us in busy.items():
        rows = [k for k in whole.kinds if k.queue == queue]
        assert sum(k.measured_us for k in rows) == pytest.approx(us)
        ran = [i for i in schedule.instructions if i.queue == queue and i.op in ("copy", "run")]
        assert sum(k.count for k in rows) == len(ran)
        assert sum(k.predicted_us for k in rows) == pytest.approx(sum(i.time_us for i in ran))
    times = {r.index: r.end_us - r.start_us for r in trace.records}
    for kind in whole.kinds:
        index = int(kind.worst.split()[0][1:])
        assert kind.worst_us == pytest.approx(times[index] - schedule.instructions[index].time_us)
    assert 0 < here.measured_us < sum(busy.values()) and sum(k.count for k in here.kinds) < sum(k.count for k in whole.kinds)
    assert "predicted against measured" in str(found)


def test_the_plan_as_tables() -> None:
    one = planned("searched")
    for tier, shares in parts(one.schedule).items():
        assert sum(shares.values()) == one.schedule.peak_nbytes[tier] and min(shares.values()) >= 0
    listed = list(alike(one.plan.decisions, one.plan.names))
    assert sorted(d.subject for each in listed for d in each.decisions) == sorted(d.subject for d in one.plan.decisions)
    out = io.StringIO()
    Console(file=out, width=400).print(plan_tables(one.plan, one.schedule))
    text = out.getvalue()
    for tier, peak in one.schedule.peak_nbytes.items():
        assert tier in text and gib(peak) in text
    assert all(each.reason in text for each in listed) and "█" in text
    device = one.schedule.peak_nbytes["device"] / one.schedule.budget_nbytes["device"]
    assert f" {device:.0%}" in text


def run(*arguments: str) -> tuple[int, str]:
    made = CliRunner().invoke(app, [*arguments, "--machine", "rtx4090"])
    assert made.exception is None or isinstance(made.exception, SystemExit), made.exception
    return made.exit_code, made.output


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from tests.helpers.stacks import stack\n")
    sizes = (f"{tmp_path}/own.py:stack", "--batch", "16", "--seq", "4", "--memory", "200KiB")
    model, *rest = sizes
    code, text = run("explain", model, "layers.2.up", *rest, "--json")
    assert code == 0
    assert json.loads(text) == json.loads(explained("searched", "layers.2.up").to_json())
    rest[-1] = "16MiB"  # in which everything fits, so that nothing is searched
    code, text = run("explain", model, "layers.9", *rest)
    assert code == 2 and "close to it" in text and "Traceback" not in text
    code, text = run("explain", model, *rest)
    assert code == 0 and "memory at its peak" in text
    code, text = run("trace", model, *rest, "-o", f"{tmp_path}/out.json")
    assert code == 0 and check_format(json.loads((tmp_path / "out.json").read_text()))
    code, text = run("graph", model, *rest, "-o", f"{tmp_path}/out.dot", "--fold")
    assert code == 0 and (tmp_path / "out.dot").read_text().startswith("digraph")


def test_the_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    for command in (("trace", "gpt-11m", "-o", "out.txt"), ("graph", "gpt-11m", "-o", "out.png"), ("explain", "gpt-12m", "x")):
        code, text = run(*command)
        assert code == 2 and text.startswith(f"mtcompile {command[0]}: expected"), text
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Loss(torch.nn.Linear):\n"
        "    def forward(self, input):\n        return super().forward(input).square().mean()\n"
        "def make(batch, seq):\n    return Loss(seq, 8), {'input': torch.zeros(batch, seq)}\n"
    )
    code, text = run("explain", f"{tmp_path}/own.py:make", "--batch", "4", "--seq", "16", "--memory", "100B")
    assert code == 3 and "does not fit" in text
