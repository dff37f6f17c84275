"""Runs the example as a user starts it: small, at a quarter of what it would use, with other timings every time."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # it compiles many models

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = ["--layers", "2", "--width", "64", "--batch", "2", "--seq", "32", "--steps", "3"]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timeline: Path, *flags: str) -> tuple[int, str]:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_gpt", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *SMALL, "--timeline", str(timeline), *flags])
    code = module.main()
    return code, capsys.readouterr().out


@pytest.fixture
def quarter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    """Measures a quarter of the peak with everything resident, in bytes."""
    code, out = run(monkeypatch, capsys, tmp_path / "resident.html", "--memory", "1GiB")
    assert code == 0
    peak = re.search(r"peak device ([\d.]+) MiB", out)
    assert peak is not None
    return str(int(float(peak[1]) * 2**20 / 4))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 20), marks=pytest.mark.long)])
def test_equal_at_a_quarter_of_the_resident_peak_under_delay_seeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quarter: str, tmp_path: Path, seeds: range
) -> None:
    monkeypatch.setenv("MT_CACHE", str(tmp_path))  # one search for all of them
    expected = r"compare: losses 3/3 equal, gradients (\d+)/\1 equal, weights \1/\1 equal"
    timeline = tmp_path / "timeline.html"
    code, out = run(monkeypatch, capsys, timeline, "--memory", quarter, "--compare")
    assert code == 0 and re.search(expected, out), out
    shown, following = out.splitlines()[-2:]
    assert shown.startswith("shown: loss") and "bit-identical to plain PyTorch" in shown
    assert timeline.exists() and f"open {timeline}" in following
    monkeypatch.setenv("MT_CHECK", "1")
    for seed in seeds:
        monkeypatch.setenv("MT_CHECK_SEED", str(seed))
        code, out = run(monkeypatch, capsys, timeline, "--memory", quarter, "--compare")
        assert code == 0 and re.search(expected, out), f"seed {seed}: {out}"
        peak, budget = map(float, re.search(r"peak device ([\d.]+) MiB of budget ([\d.]+) MiB", out).groups())  # type: ignore[union-attr]
        assert peak <= budget


def test_too_small_a_budget_says_what_to_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out = run(monkeypatch, capsys, tmp_path / "timeline.html", "--memory", "64KiB")
    assert code == 2 and "Try --memory" in out


def test_it_can_be_read_in_one_sitting() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 270


def test_the_notebooks_cells_run_and_show_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)  # of no machine
    names: dict[str, object] = {}
    shown = []
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), NOTEBOOK.name, "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names))
    forecast, report, plan = shown
    assert forecast.feasible and forecast.advice and forecast._repr_html_()
    assert report["peak_device_bytes"] <= report["budget_device_bytes"] == 2**20 and plan.decisions
    losses = [float(line) for line in capsys.readouterr().out.split()]
    assert len(losses) == 3 and losses[-1] < losses[0]
