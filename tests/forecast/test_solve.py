"""Plans before anything runs: the figures add up, agree with what is compiled, and the command line says what it finds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import mtcompile
from mtcompile.cli.app import app
from mtcompile.machine.presets import PRESETS, named
from mtcompile.models.decoders import Shape, fake
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.joint.build import build
from mtcompile.passes.planning.candidates import Candidates
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.policies import POLICIES
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem
from mtcompile.passes.planning.symbolic import MONOMIALS, NotPolynomial, evaluated, peak_expressions
from tests.helpers.models import make, tower
from tests.helpers.tracing import trace


def run(*arguments: str) -> tuple[int, str]:
    made = CliRunner().invoke(app, ["plan", *arguments])
    return made.exit_code, made.output


def test_the_ledger_adds_up_and_names_every_byte() -> None:
    found = mtcompile.plan("gpt-11m", batch=4, seq=64, memory="40MiB", machine="rtx4090")
    assert found.feasible and found.ledger is not None and found.planned is not None
    for tier, parts in found.ledger.items():
        assert sum(parts.values()) == found.peak_bytes[tier]
        assert 0 <= parts["other"] <= 2**20
    assert found.peak_bytes["device"] <= 40 * 2**20
    assert found.state_bytes == pytest.approx(4 * 4 * found.parameters, rel=0.01)
    assert found.step_time_us > found.update_us > 0 and found.tokens == 256
    assert found.tokens_per_s == pytest.approx(256 / found.step_time_us * 1e6)
    assert all(saved >= 0 for saved in (found.next_gib_us or {}).values())
    text = str(found)
    assert "fits:" in text and "workspace" in text and "numerics" in text


def test_it_plans_what_compile_then_runs() -> None:
    model, data = make("tied")
    forecast = mtcompile.plan(lambda: (make("tied")[0], data), memory="1MiB", machine=Machine())
    compiled: Any = mtcompile.compile(model, memory="1MiB", optimizer=torch.optim.AdamW(model.parameters()), device="cpu")
    compiled(**data).backward()
    assert forecast.planned is not None
    assert [d.choice for d in forecast.planned.plan.decisions] == [d.choice for d in compiled.plan.decisions]
    assert forecast.parameters == sum(p.numel() for p in model.parameters())
    assert forecast.state_bytes >= compiled.memory_report()["state_bytes"]


SMALL = Shape(128, 384, 2, 2, 1, 1024, head_dim=64, dtype=torch.float32)


def small(batch: int, seq: int) -> Any:
    """A factory of (batch, seq): a decoder."""
    tokens = torch.zeros((batch, seq), dtype=torch.int64)
    return fake(SMALL), {"tokens": tokens, "targets": tokens}


def test_what_does_not_fit_says_how_much_is_short_and_what_would() -> None:
    def planned(memory: str | int, host: str | None = None, **options: Any) -> mtcompile.Forecast:
        return mtcompile.plan(small, batch=4, seq=64, memory=memory, host=host, **options)

    found = planned("200KiB")
    assert not found.feasible and found.short_bytes > 0 and len(found.ways_out) == 3
    assert found.minimum_device_bytes == 200 * 2**10 + found.short_bytes
    again = planned(found.minimum_device_bytes)
    assert again.feasible and again.peak_bytes["device"] <= found.minimum_device_bytes
    host = planned("4MiB", "1MiB")
    assert not host.feasible and any(way.startswith("host memory") for way in host.ways_out)
    both = planned("200KiB", "1MiB")
    assert not both.feasible and len(both.ways_out) == 3
    kept = planned("4MiB", "9MiB")
    assert not kept.feasible and kept.ways_out[0].startswith('update="backward"')
    assert planned("4MiB", "9MiB", update="backward").feasible


@pytest.mark.long
def test_candidates_give_every_budget_what_a_search_of_its_own_would() -> None:
    traced = trace(*make("gpt2"))
    most = make_plan(PlanningProblem(traced.step, Machine(), Budgets())).plan.peak_bytes["device"]
    candidates = Candidates(PlanningProblem(traced.step, Machine(), Budgets()))
    with pytest.raises(DoesNotFit) as caught:
        candidates.best(1, None)
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = int(caught.value.minimum + share * (most - caught.value.minimum))
        one, other = candidates.best(budget, None), make_plan(PlanningProblem(traced.step, Machine(), Budgets(budget)))
        assert one.plan.decisions == other.plan.decisions and one.schedule == other.schedule


def test_machines_come_from_presets_and_files(tmp_path: Path) -> None:
    assert named("gh200") is PRESETS["gh200"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"h2d_gbps": 12, "device_nbytes": 8 * 10**9}))
    mine = named(str(path))
    assert (mine.name, mine.h2d_gbps, mine.device_nbytes) == ("mine", 12, 8 * 10**9)
    wrongs = ['{"speed": 1}', '{"h2d_gbps": 0}', '{"h2d_gbps": "fast"}', '{"device_nbytes": 1.5}', '{"fuses": 1}', "[]", "{"]
    for wrong in wrongs:
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"machine file .*mine\.json"):
            named(str(path))
    with pytest.raises(ValueError, match="expected machine to be one of h200-sxm"):
        named("abacus")


def test_the_command_line(tmp_path: Path) -> None:
    code, text = run("gpt-11m", "--batch", "2", "--seq", "64", "--memory", "60MiB", "--json", "--policy", "all")
    found = json.loads(text)
    assert code == 0 and found["feasible"] and {row["policy"] for row in found["rows"]} == set(POLICIES)
    for key in ("parameters", "state_bytes", "budget_bytes", "peak_bytes", "minimum_device_bytes", "step_time_us"):
        assert found[key]
    assert found["limiting_resource"] and found["busy"]["compute"] > 0 and found["precision"] == "model"
    fitting = [row["step_time_us"] for row in found["rows"] if row["feasible"]]
    assert fitting and found["step_time_us"] <= min(fitting) * 1.000001
    code, text = run("gpt-11m", "--batch", "2", "--seq", "64", "--memory", "1MiB")
    assert code == 3 and "does not fit" in text and "Ways out" in text
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def make(batch, seq):\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(seq, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))\n"
        "    class Loss(torch.nn.Module):\n"
        "        def __init__(self):\n            super().__init__()\n            self.model = model\n"
        "        def forward(self, x):\n            return self.model(x).square().mean()\n"
        "    return Loss(), {'x': torch.zeros(batch, seq)}\n"
    )
    code, text = run(f"{tmp_path}/own.py:make", "--batch", "4", "--seq", "16", "--memory", "1MiB")
    assert code == 0 and "own.py:make" in text
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "vocab_size": 100}))
    code, text = run(f"{tmp_path}/config.json", "--seq", "32")
    assert code == 0 and "fits:" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("nobody",),
        ("gpt-11m", "--memory", "12XB"),
        ("gpt-11m", "--machine", "abacus"),
        ("gpt-11m", "--policy", "hope"),
        ("/none/such.json",),
        ("/none/such.py:make",),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(arguments: tuple[str, ...]) -> None:
    code, text = run(*arguments)
    assert code == 2 and text.startswith("mtcompile plan: ") and "expected" in text and "Traceback" not in text


def test_a_module_of_real_tensors_is_planned_without_being_run() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).square().mean()

    found = mtcompile.plan(Loss(), {"x": torch.zeros(4, 8)}, memory="1MiB")
    assert found.feasible and found.parameters == 72


def test_precisions_and_updates_count_their_own_bytes() -> None:
    sizes = {}
    for precision, update in (("fp32", "step"), ("bf16", "step"), ("bf16-master32", "step"), ("bf16-master32", "backward")):
        found = mtcompile.plan(small, batch=1, seq=128, machine=Machine(), precision=precision, update=update)
        assert found.feasible and found.ledger is not None and found.numerics
        sizes[precision, update] = found.state_bytes / found.parameters
        for tier, parts in found.ledger.items():
            assert sum(parts.values()) == found.peak_bytes[tier] and min(parts.values()) >= 0
    assert sizes["fp32", "step"] == pytest.approx(16, rel=0.01)
    assert sizes["bf16", "step"] == pytest.approx(8, rel=0.01)
    assert sizes["bf16-master32", "step"] == pytest.approx(14, rel=0.01)
    assert 12 <= sizes["bf16-master32", "backward"] < 12.1  # gradients take slots of the arena, for two regions


def test_an_update_as_gradients_arrive_hides_behind_the_backward() -> None:
    slow = replace(Machine(), host_gbps=40.0, flops=1e10)
    after, along = (mtcompile.plan(small, seq=128, memory="4MiB", machine=slow, update=u) for u in ("step", "backward"))
    assert 0 <= along.update_us < after.update_us / 2 and along.step_time_us < after.step_time_us


@pytest.mark.slow
@pytest.mark.parametrize(("solve", "memory"), [("seq", "30MiB"), pytest.param("batch", "20MiB", marks=pytest.mark.long)])
def test_solving_finds_the_largest_size_that_fits(solve: str, memory: str) -> None:
    found = mtcompile.plan(tower, batch=2, seq=256, memory=memory, machine=Machine(), solve=solve)
    assert found.feasible and found.solved is not None and found.peak_expressions is not None
    largest = found.solved[solve]
    step = 1 if solve == "batch" else 128
    assert largest > step and solve in found.peak_expressions["device"]
    for size, fits in ((largest, True), (largest + step, False)):
        again = mtcompile.plan(tower, **{"batch": 2, "seq": 256} | {solve: size}, memory=memory, machine=Machine())
        assert again.feasible == fits
    with pytest.raises(ValueError, match="expects a limit"):
        mtcompile.plan(tower, machine=Machine(), solve=solve)


def test_peaks_are_expressions_of_batch_and_sequence() -> None:
    """Of one plan, by six sizes: at a seventh they say what lowering it there gives, or a little more."""
    points = [(2, 128), (3, 128), (2, 256), (3, 256), (2, 384), (3, 384), (5, 512)]
    joints = [trace(*tower(*point)).joint for point in points]
    steps = [Candidates(PlanningProblem(build(joint, like=joints[-1]), Machine(), Budgets())) for joint in joints]
    for plan in (steps[0].least().plan, steps[0].best(None, None).plan):
        planned = [step.evaluate(plan) for step in steps]
        expressions = peak_expressions(planned[:-1], points[:-1], MONOMIALS["both"])
        for tier, expression in expressions.items():
            for point, made in zip(points, planned, strict=True):
                found = made.schedule.peak_nbytes[tier]
                assert found <= evaluated(expression, *point) <= found * 1.2
    assert "seq**2" in str(expressions["device"])
    tied = trace(*make("tied"))
    with pytest.raises(ValueError, match="same operations"):
        build(tied.joint, like=joints[0])
    other = Candidates(PlanningProblem(tied.step, Machine(), Budgets())).best(None, None)
    with pytest.raises(NotPolynomial):
        peak_expressions([planned[0], other], points[:2], MONOMIALS["batch"])


@pytest.mark.long
def test_what_does_not_fit_is_shown_all_the_same_when_forced() -> None:
    code, said = run("gpt-11m", "--seq", "64", "--memory", "3MiB", "--force")
    assert code == 3 and "if there were room" in said and "Ways out" in said and "workspace" in said


def test_solve_memory_says_the_least_that_works() -> None:
    found = mtcompile.plan(small, seq=64, memory="200KiB", solve="memory")
    assert found.feasible and found.solved == {"memory": found.budget_bytes["device"]}
    assert not mtcompile.plan(small, seq=64, memory=found.solved["memory"] - 1).feasible
