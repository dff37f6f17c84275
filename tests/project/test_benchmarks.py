"""The benchmarks' own arithmetic, and what they say where nothing was measured."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mtcompile
from benchmarks import faults, fits, host_update, outside, predictions, run, training, utilization
from benchmarks.decoder import build, text
from benchmarks.models import Case, make
from mtcompile.forecast.solve import Forecast
from mtcompile.models.decoders import Decoder, model_flops, parameter_counts
from mtcompile.models.shapes import SHAPES
from mtcompile.passes.analysis.cost import Machine


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_counted_as_they_are(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(SHAPES[name])
    assert parameter_counts(SHAPES[name])[0] == sum(p.numel() for p in model.parameters())
    assert model_flops(SHAPES[name], 2, 8) > 6 * 16 * parameter_counts(SHAPES[name])[1]


def test_tied_weights_are_built_tied() -> None:
    shape = replace(SHAPES["gpt-11m"], tied=True, layers=1)
    model = build(shape, torch.device("cpu"))
    assert model.head.weight is model.embed.weight
    assert parameter_counts(shape)[0] == sum(p.numel() for p in model.parameters())


def test_every_case_names_a_shape_and_peers_that_exist() -> None:
    for case in training.CASES.values():
        assert case.shape in SHAPES and set(case.peers) <= set(training.PEERS)
    assert len(training.CASES) == len(training.CPU) + len(training.GPU)


@pytest.mark.long
def test_a_row_for_each_backend_of_attention() -> None:
    rows = [run.in_child(["--one", f"step-11m-attention/{peer}/None"]) for peer in training.CASES["step-11m-attention"].peers]
    assert [row["attention"] for row in rows] == ["flash", "math"]


def test_text_is_shifted_by_one() -> None:
    tokens, targets = text(3, 50)
    assert torch.equal(tokens.flatten()[1:], targets.flatten()[:-1]) and int(tokens.max()) < 256


def test_a_table_of_what_was_and_was_not_measured() -> None:
    case = training.GPU[0]
    rows = [
        {"case": case.name, "peer": "plain", "step_s": 0.5, "tokens_per_s": 1234.5, "peak_bytes": 0, "busy": {"compute": 0.5}},
        {"case": case.name, "peer": "torch.compile", "error": "OutOfMemoryError: no room"},
    ]
    table = run.training_table([case], rows)
    assert "| plain | 1,234 | 500.0 |" in table and "50.0%" in table
    assert "OutOfMemoryError: no room" in table and "| mtcompile eager | *not yet measured* |" in table


def test_a_run_goes_on_where_one_of_the_same_commit_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    first = run.Results(path, "cpu")
    done: dict[str, Any] = {"case": "step-11m", "peer": "plain", "step_s": 1.0, "peak_bytes": 1}
    first.rows += [done, {"case": "step-11m", "peer": "checkpoint", "error": "stopped"}]
    first.write()
    assert run.Results(path, "cpu").rows == [done]  # what failed is tried again
    assert run.Results(path, "gpu").rows == []
    path.write_text(json.dumps({**json.loads(path.read_text()), "commit": "another"}))
    assert run.Results(path, "cpu").rows == []


@pytest.mark.long
def test_an_error_of_a_child_is_its_last_line() -> None:
    error = run.in_child(["--one", "step-11m/nobody/None"])["error"]
    assert "step-11m/nobody" not in error and "nobody" in error


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", [("benchmarks.gpu",), ("benchmarks.run", "--suite", "gpu")])
def test_without_a_gpu_nothing_is_run(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setattr(sys, "argv", list(command))
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(command[0], run_name="__main__")
    assert ended.value.code == 0 and "nothing was run" in capsys.readouterr().out


@pytest.mark.slow
def test_predictions_are_measured_and_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MT_CACHE", str(tmp_path))
    monkeypatch.setattr(predictions, "SLOW", Machine("slow"))
    tiny = Case("tiny", 1, 16, 2, batch=1, seq=8, vocabulary=16)
    monkeypatch.setitem(predictions.MODELS, "tiny", lambda: make(tiny))
    rows = [
        predictions.measure(predictions.Config("tiny", 1, gbps, calibrates), steps=1, warmups=1)
        for gbps, calibrates in ((0.5, True), (1.0, False), (0.0, True), (0.0, False))
    ]
    assert [row["planned_for"] for row in rows] == ["slow, emulated"] * 2 + ["emulated", "emulated, calibrated"]
    assert all(row["measured_ms"] > 0 and row["predicted_peak_bytes"] >= row["measured_peak_bytes"] > 0 for row in rows)
    assert "calibrated emulated" in rows[2]["calibration"] and list(tmp_path.glob("times/*"))


def test_errors_of_predictions_leave_out_what_calibrates() -> None:
    def row(predicted: float, measured: float, calibrates: bool) -> dict[str, Any]:
        peaks = {"predicted_peak_bytes": 2 * 60_000_000, "measured_peak_bytes": 60_000_000}
        about = {"model": "m", "memory_mib": 1, "link_gbps": None, "calibrates": calibrates}
        return {"predicted_ms": predicted, "measured_ms": measured, **about, **peaks}

    rows = [row(10, 20, True), row(10, 20, False), row(100, 250, False), row(10, 16, False)]
    factor = predictions.overhead(rows)
    judged = predictions.judge(rows, factor)
    assert factor == pytest.approx(2) and judged["configurations"] == 3
    assert judged["worst_percent"] == pytest.approx(25) and judged["median_percent"] == pytest.approx(20)
    assert judged["worst_percent_of_longer_steps"] == pytest.approx(20)
    assert judged["greatest_peak_ratio_above_50_mb"] == 2
    assert "| m | 1 |  | 200.0 | 250.0 | -20.0 |" in predictions.table("t", judged)


def test_updates_are_judged_by_the_faster_copy_and_by_torchs_per_parameter() -> None:
    copy, slower = host_update.COPIES
    seconds = {copy: 0.5, slower: 1.0, host_update.FUSED: 2.0, "c, fp32": 1.0}
    nbytes = {copy: 8 * 10**9, slower: 8 * 10**9, host_update.FUSED: 28 * 10**9, "c, fp32": 28 * 10**9}
    rows = {row["what"]: row for row in host_update.judged(1000, seconds, nbytes, {what: [1.0] for what in seconds})}
    assert rows["c, fp32"]["of_copy"] == 28 / 16 and rows["c, fp32"]["of_fused"] == 2 and "of_fused" not in rows[slower]
    assert rows["c, fp32"]["ns_per_parameter"] == 1.0 and rows[copy]["of_copy"] == 1
    assert "| 1000 million | c, fp32 | 1000.00 | 28.0 | 1.75 | 2.00 |" in host_update.table(list(rows.values()))


def test_what_fits_says_a_speed_or_what_is_short() -> None:
    h100, rtx4090 = fits.Column("h100-sxm", 200), fits.Column("rtx4090", 64)
    figures = {"parameters": 7 * 10**9, "tokens": 8192, "state_bytes": 1, "budget_bytes": {}, "minimum_device_bytes": 0}
    peaks = {"device": 10**9, "host": 90 * 10**9}
    forecast = Forecast("qwen2.5-7b", "h100", True, peak_bytes=peaks, tokens_per_s=1234.5, **figures)
    fitting = fits.cell(forecast, "qwen2.5-7b", h100, batch=2)
    assert str(fitting) == "1,234 tokens/s, batch 2" and fitting.ram_bytes == 94 * 10**9
    short = replace(forecast, feasible=False, short_bytes=30 * 10**9 + 1)
    more_ram = fits.cell(short, "qwen2.5-7b", rtx4090, batch=1)
    assert more_ram.batch == 0 and str(more_ram) == "needs 95 GB of RAM"
    leanest = fits.cell(replace(short, minimum_device_bytes=25 * 10**9), "qwen2.5-7b", rtx4090, batch=1)
    assert str(leanest) == "needs 25 GB of device memory"
    slow = replace(short, refusal="a step takes 90 times what it would without the disk")
    assert str(fits.cell(slow, "llama-70b", fits.Column("rtx4090", 64, disk_gb=2000), batch=1)) == "the disk is too slow"
    text = fits.table([fitting, more_ram], "0123456789abcdef")
    assert "Predicted, not measured" in text and "Commit 012345678." in text
    assert "| qwen2.5-7b, 7.0B | 1,234 tokens/s, batch 2 | needs 95 GB of RAM |" in text
    assert set(fits.MODELS) <= set(SHAPES)


@pytest.mark.slow
def test_the_time_beyond_arithmetic_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "gpt-11m", replace(SHAPES["gpt-11m"], layers=2, vocabulary=512))
    forecast = mtcompile.plan(
        "gpt-11m", batch=2, seq=64, memory="64MiB", machine="rtx4090", update="backward", policies=("megatrain",)
    )
    nothing, everything, policy, chosen = utilization.rows(forecast)
    assert nothing["seconds"] < everything["seconds"] and 1.2 < everything["of_flops"] < 1.5
    assert policy["seconds"] == forecast.rows[0].step_time_us / 1e6 and chosen["seconds"] == forecast.step_time_us / 1e6
    assert chosen["of_flops"] >= 1 and chosen["tflops"] * chosen["seconds"] == pytest.approx(
        nothing["tflops"] * nothing["seconds"]
    )
    text = utilization.table([nothing, everything, policy, chosen]) + utilization.why(chosen, nothing)
    assert text.count("\n") == 7 and "the planner's choice" in text and "are FLOPs that are run again" in text


class Fake:
    """Stands for a package: every call is noted."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def test_trainers_of_others_are_driven_by_their_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Engine:
        def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            calls.append("forward")
            return torch.tensor(2.5)

        def backward(self, loss: torch.Tensor) -> None:
            calls.append("backward")

        def step(self) -> None:
            calls.append("step")

    class Trainer:
        def __init__(self, model: Any, config: Any) -> None:
            self.model = model

        def get_parameters(self) -> list[torch.nn.Parameter]:
            return list(self.model.parameters())

        def forward_and_backward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> tuple[float, int, Any]:
            calls.append("forward and backward")
            return float(self.model(input_ids=ids, labels=labels).loss), ids.numel(), {}

        def _sync_params_to_gpu(self) -> None:
            calls.append("sync")

        def zero_grad(self) -> None:
            calls.append("zero")

    shape = SHAPES["gpt-11m"].shortened(1)
    tokens, targets = text(2, 16)
    with pytest.raises(outside.NotInstalled, match="deepspeed is not installed: pip install deepspeed"):
        outside.deepspeed_zero3(Fake(), torch.device("cpu"), None)
    monkeypatch.setattr(outside, "_WORLD", {})
    packages: dict[str, Any] = {
        "deepspeed": Fake(initialize=lambda model, config: (Engine(),)),
        "infinity": Fake(CPUMasterModel=Trainer),
        "infinity.config": Fake(CPUMasterConfig=Fake),
    }
    found = outside._package
    monkeypatch.setattr(outside, "_package", lambda name, install: packages.get(name) or found(name, install))
    for make_peer in (outside.deepspeed_zero3, outside.megatrain):
        _, call, optimizer = make_peer(Fake(shape=shape), torch.device("cpu"), None)
        loss = call(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert 2 < loss.item() < 10
    assert calls == ["forward", "backward", "step", "forward and backward", "sync", "zero"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, pytest.param(2, marks=pytest.mark.long), pytest.param(5, marks=pytest.mark.long)])
def test_a_round_of_the_soak_meets_faults_and_differs_in_nothing(number: int, tmp_path: Path) -> None:
    _, counts, differs = faults.one_round(number, 0, tmp_path)
    assert not differs and sum(counts[kind] for kind in (*faults.EVERYWHERE, *faults.ON_DISK))
