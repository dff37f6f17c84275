"""Times that were measured in place of formulas, where they come from, and the emulated device that keeps to given speeds."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mtcompile
from mtcompile import api, cache
from mtcompile.cached import files
from mtcompile.execution import calibration
from mtcompile.execution.calibration import as_measured
from mtcompile.machine.measure import MeasuredMachine
from mtcompile.machine.presets import machine_of, named, remember
from mtcompile.passes.analysis.cost import Machine, Measured, formula_us, kernel_digest, kernel_us
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.planning import candidates
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.problem import PlanningProblem
from mtcompile.passes.step_graph import kernel_of, regions
from mtcompile.runtime.schedule import PHASES, Instruction
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import Record, Trace, span_us
from tests.helpers.models import Gpt, tokens
from tests.helpers.tracing import traced_case
from tests.helpers.training import adamw, same, train

pytestmark = pytest.mark.slow  # it compiles many models

DATA = {"tokens": tokens(4)}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MT_CACHE", str(tmp_path))
    monkeypatch.delenv("MT_CHECK", raising=False)
    return tmp_path


def gpt() -> torch.nn.Module:
    torch.manual_seed(0)
    return Gpt(layers=2)


def run(model: torch.nn.Module, steps: int = 1, **options: Any) -> tuple[list[Any], Any]:
    """Returns what training a compiled copy logged, and the copy."""
    torch.compiler.reset()
    copied = copy.deepcopy(model)
    optimizer = adamw(copied.parameters())
    compiled = mtcompile.compile(copied, optimizer=optimizer, device="cpu", **options)
    return train(compiled, optimizer, DATA, steps), compiled


def fake_us(instruction: Instruction) -> float:
    """Kernels five times as long as predicted and copies three times."""
    return instruction.time_us * (5 if instruction.op == "run" else 3)


def inject(compiled: Any) -> float:
    """Steps that took ``fake_us``, in place of those that ran; how long each took."""
    last = compiled._mt_model.session.last
    rows = tuple(replace(i, time_us=fake_us(i)) for i in last.schedule.instructions)
    records = simulate(replace(last.schedule, instructions=rows)).records
    compiled._mt_model.session.calibrator.phases.clear()
    span = 0.0
    for phase in PHASES:
        own: list[Record] = [records[i] for i, row in last.schedule.phase(phase) if row.op in ("run", "copy")]
        span += span_us(Trace(tuple(own), "measured"))
        compiled._mt_model.session.calibrator.phases.extend([(last, phase, own)] * 3)
    return span


def test_what_was_not_measured_is_scaled() -> None:
    step = traced_case("llama").step
    measured, other, *_ = {kernel_digest(k): k for k in (kernel_of(step, region) for region in regions(step))}.values()
    plain = Machine()
    known = replace(plain, measured=Measured({kernel_digest(measured): 123.0}, {"compute": 2.0, "h2d": 3.0}))
    assert kernel_us(measured, known) == 123.0
    assert kernel_us(other, known) == pytest.approx(2 * kernel_us(other, plain))
    assert formula_us(measured, known) == kernel_us(measured, plain)
    assert known.copy_us(1000, "h2d") == pytest.approx(3 * plain.copy_us(1000, "h2d"))
    assert known.copy_us(1000, "d2h") == plain.copy_us(1000, "d2h")

    planned = make_plan(PlanningProblem(step, known, Budgets()), policy="megatrain")
    bodies: dict[str, Any] = dict(planned.step.named_children())
    for i in planned.schedule.instructions:
        if i.op == "run":
            assert i.time_us == kernel_us(bodies[i.kernel], known)
        elif i.op == "copy":
            assert i.time_us == known.copy_us(i.nbytes, i.queue)


def test_factors_are_sums_over_sums_and_short_copies_tell_nothing() -> None:
    times = {
        "compute": {"a": (30.0, 10.0), "b": (10.0, 30.0)},
        "h2d": {"64": (40.0, 1.0), "9": (300.0, 100.0)},
        "d2h": {"8": (9.0, 1.0)},
    }
    machine = as_measured(Machine(), times)
    assert machine.name == "emulated, calibrated" and machine.measured is not None
    assert machine.measured.kernels == {"a": 30.0, "b": 10.0}
    assert machine.measured.scale == {"compute": 1.0, "h2d": 3.0}
    assert as_measured(Machine(), None) == Machine()


def test_predictions_are_close_after_calibration() -> None:
    """Calibrates to traces with given times, by a plan that stays the same."""
    options = {"memory": "64MiB", "policy": "megatrain"}
    _, first = run(gpt(), 2, **options)
    measured_us = inject(first)
    outcome = first.calibrate()
    assert outcome.remembered and outcome.kernels > 3 and outcome.copies > 3
    assert outcome.scale["compute"] == pytest.approx(5)
    assert outcome.predicted_us == first.plan.step_time_us and outcome.measured_us == pytest.approx(measured_us)
    assert outcome.predicted_us < 0.3 * outcome.measured_us
    _, second = run(gpt(), **options)
    assert second.plan.step_time_us == outcome.fitted_us == pytest.approx(outcome.measured_us, rel=0.05)
    assert second.plan.machine == "emulated, calibrated" and second.plan.decisions == first.plan.decisions
    assert "5.00" in str(outcome) and "later plans count on it" in str(outcome)

    again = run(gpt(), 2, **options)[1]
    inject(again)  # five times as long again, by what the plan says now: formulas are not compounded with factors
    assert again.calibrate().scale["compute"] == pytest.approx(25)


def test_bits_stay_the_same_and_the_same_times_give_the_same_plan(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    model, memory = gpt(), 450_000
    expected, first = run(model, 3, memory=memory)
    before = first.plan
    inject(first)
    first.calibrate()
    searches: list[int] = []
    search = candidates.searched
    monkeypatch.setattr(candidates, "searched", lambda *args: (searches.append(1), search(*args))[1])
    actual, second = run(model, 3, memory=memory)
    assert same(expected, actual) and searches  # other times are another question
    searches.clear()
    actual, third = run(model, 3, memory=memory)
    assert same(expected, actual) and not searches and third.plan == second.plan

    monkeypatch.setenv("MT_MEASURED", "0")
    assert run(model, memory=memory)[1].plan == before
    monkeypatch.delenv("MT_MEASURED")
    for file in folder.glob("times/*"):
        files.write("times", file.stem, json.dumps({"compute": {"a": [-1.0, 1.0]}}))
    assert run(model, memory=memory)[1].plan == before


def test_compile_plans_with_the_speeds_that_doctor_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"memory": "64MiB", "policy": "megatrain"}
    assert run(gpt(), **options)[1].plan.machine == "emulated"
    here = torch.device("cpu")
    remember(here, MeasuredMachine(Machine("this one", h2d_gbps=0.5, d2h_gbps=0.25), ()))
    measured = run(gpt(), **options)[1]
    assert measured.plan.machine == "this one, measured by doctor"
    assert "plan for this one, measured by doctor" in str(measured.plan)
    copies = [i for i in measured.schedule.instructions if i.op == "copy"]
    slow = Machine(h2d_gbps=0.5, d2h_gbps=0.25)
    assert copies and all(i.time_us == slow.copy_us(i.nbytes, i.queue) for i in copies)
    inject(measured)
    measured.calibrate()
    assert run(gpt(), **options)[1].plan.machine == "this one, measured by doctor, calibrated"

    monkeypatch.setenv("MT_MEASURED", "0")
    assert run(gpt(), **options)[1].plan.machine == "emulated"
    monkeypatch.delenv("MT_MEASURED")
    path = remember(here, MeasuredMachine(Machine("broken"), ()))
    assert path is not None
    path.write_text("{")
    assert run(gpt(), **options)[1].plan.machine == "emulated"


def test_times_are_of_one_machine_and_one_kind_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"memory": "64MiB", "policy": "megatrain"}
    _, first = run(gpt(), 2, **options)
    inject(first)
    first.calibrate()

    def other(where: torch.device, fuses: bool, staged: bool) -> Machine:
        return replace(machine_of(where, fuses, staged), name="another")

    with monkeypatch.context() as patched:
        patched.setattr(calibration, "machine_of", other)
        _, second = run(gpt(), **options)
    assert second.plan.machine == "another" and second.plan.step_time_us == first.plan.step_time_us
    keys = {cache.times_key(*which) for which in (("a", "cpu", "eager"), ("a", "cuda", "eager"), ("a", "cpu", "inductor"))}
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        keys.add(cache.times_key("a", "cpu", "eager"))
    finally:
        torch.set_num_threads(threads)
    assert len(keys) == 4


def test_calibrating_needs_steps_and_says_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    _, compiled = run(gpt(), 1, memory="64MiB")  # the first step compiles and is measured otherwise
    with pytest.raises(mtcompile.StepError, match="at least two training steps"):
        compiled.calibrate()
    monkeypatch.setenv("MT_CACHE", "0")
    compiled(**DATA).backward()
    outcome = compiled.calibrate()
    assert not outcome.remembered and "kept nowhere" in str(outcome) and outcome.measured_us > 0
    assert not list(folder.glob("times/*"))


def test_a_throttled_device_gives_the_same_bits_and_takes_its_time() -> None:
    model = gpt()
    machine = Machine("slow", flops=2e9, memory_gbps=2.0, h2d_gbps=0.2, d2h_gbps=0.1)
    expected, _ = run(model, 2, memory=450_000, policy="megatrain")
    actual, compiled = run(model, 2, memory=450_000, policy="megatrain", throttle=machine)
    assert same(expected, actual) and compiled.plan.machine == "slow, emulated"
    rows = compiled.schedule.instructions
    records = compiled.last_trace.records
    assert {record.queue for record in records} == {"compute", "h2d", "d2h"}
    for record in records:
        assert record.end_us - record.start_us >= rows[record.index].time_us - 0.01 > 0
        if rows[record.index].op == "copy":
            assert rows[record.index].time_us == machine.copy_us(rows[record.index].nbytes, record.queue)
    with pytest.raises(mtcompile.StepError, match="throttle="):
        compiled.calibrate()


def test_only_the_emulated_device_is_throttled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(api, "choose", lambda *about: SimpleNamespace(where=torch.device("cuda", 0)))
    with pytest.raises(ValueError, match="throttle="):
        mtcompile.compile(gpt(), throttle=Machine())
    with pytest.raises(ValueError, match="expected machine to be one of"):
        mtcompile.compile(gpt(), throttle="abacus")
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"flops": 1e9, "measured": None}))
    with pytest.raises(ValueError, match="expected an object with fields"):
        named(str(file))
