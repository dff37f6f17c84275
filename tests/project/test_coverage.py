"""The coverage run: what it finds in models that are right, wrong, refused or broken, and a slice of the run itself."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from benchmarks.coverage import architectures, compare, configs, results, workers
from benchmarks.coverage.compare import EQUAL, EXCLUDED, INTERNAL, NAMED, REFUSED, ROOMY, WRONG, Subject, judge
from tests.project.sources import ROOT

MODULES = "Linear Conv2d BatchNorm1d LayerNorm GroupNorm Embedding GELU PReLU MaxPool2d Bilinear CrossEntropyLoss Softmax"
ARCHITECTURES = ("causal/llama", "vision/vit")


def linear() -> Subject:
    torch.manual_seed(0)
    return Subject(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), (torch.randn(2, 4),), searched=False)


@pytest.mark.slow
def test_what_is_right_is_equal_at_every_budget() -> None:
    assert judge(linear) == compare.Verdict(EQUAL)


def test_a_model_that_cannot_be_captured_is_refused() -> None:
    class Draws(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * random.Random(0).random()

    verdict = judge(lambda: Subject(Draws(4, 4), (torch.ones(2, 4),)))
    assert verdict.verdict == EXCLUDED and "differs from itself" in verdict.reason  # its weights are drawn anew

    def same() -> Subject:
        torch.manual_seed(0)
        return Subject(Draws(4, 4), (torch.ones(2, 4),))

    verdict = judge(same)
    assert (verdict.verdict, verdict.where) == (REFUSED, "roomy, forward") and "CaptureError" in verdict.reason


class Views(nn.Module):
    """Returns two views of a value that it uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.linear(x)
        return hidden[:4], hidden.exp(), hidden.tanh(), hidden[4:]


def test_what_the_plan_names_is_not_wrong() -> None:
    def views() -> Subject:
        torch.manual_seed(0)
        return Subject(Views(), (torch.randn(8, 64),), searched=False)

    verdict = judge(views, [ROOMY])
    assert verdict.verdict == NAMED and "those of the views of it that are returned are added up first" in verdict.reason


def test_an_error_that_is_not_ours_is_internal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise IndexError("out of range")

    monkeypatch.setattr(mtcompile, "compile", broken)
    verdict = judge(linear, [ROOMY])
    assert verdict.verdict == INTERNAL and verdict.reason.startswith("IndexError: out of range")


def test_tensors_that_differ_are_named() -> None:
    one = {"loss": torch.tensor(1.0), "gradient a": torch.tensor([float("nan"), 1.0]), "gradient b": torch.zeros(1)}
    other = {"loss": torch.tensor(1.0), "gradient a": torch.tensor([float("nan"), 1.5])}
    assert compare.differences(one, one) == []
    assert compare.differences(one, other) == ["gradient b is missing", "gradient a"]
    assert compare.differences(other, one) == ["gradient b is new", "gradient a"]


def test_a_model_that_plain_pytorch_cannot_train_is_excluded() -> None:
    assert judge(lambda: Subject(nn.Linear(4, 4), (torch.ones(3),))).verdict == EXCLUDED
    assert judge(lambda: Subject(nn.Identity(), (torch.ones(3),))).verdict == EXCLUDED


def work(entry: str) -> dict[str, Any]:
    if entry == "crash":
        os._exit(3)
    if entry == "endless":
        while True:
            pass
    if entry == "greedy":
        return {"verdict": len(bytearray(2 << 30))}
    return {"verdict": entry}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork")
def test_an_entry_that_crashes_costs_one_row() -> None:
    rows = dict(workers.rows(["a", "crash", "endless", "greedy", "b"], work, jobs=2, limits=workers.Limits(1, 1 << 30)))
    assert rows["a"] == {"verdict": "a"} and rows["b"] == {"verdict": "b"}
    assert "status 3" in rows["crash"]["crash"] and "within 1 s" in rows["endless"]["crash"]
    assert "MemoryError" in rows["greedy"]["crash"]


def test_rows_of_the_same_sources_are_done(tmp_path: Path) -> None:
    store = tmp_path / "rows.jsonl"
    row = {"entry": "nn.Linear/0/bare", "verdict": EQUAL, "reason": "", "budgets": [ROOMY], **results.versions()}
    for verdict in (WRONG, EQUAL):
        results.append(store, {**row, "verdict": verdict})
    (newest,) = results.read(store).values()

    def is_done(row: results.Row | None, budgets: Any = (ROOMY,), again: Any = (), any_source: bool = False) -> bool:
        return results.is_done(row, budgets, again, any_source)

    assert newest == row and is_done(newest)
    assert not is_done(newest, again=(EQUAL,)) and not is_done(None, any_source=True)
    assert not is_done(newest, compare.BUDGETS) and is_done({**newest, "verdict": WRONG}, compare.BUDGETS)
    older = {**row, "source": "older"}
    assert not is_done(older) and is_done(older, any_source=True)
    assert not is_done({**older, "torch": "older"}, any_source=True)
    results.tidy(store)
    assert [json.loads(line) for line in store.read_text().splitlines()] == [row]


def test_the_page_counts_a_module_by_its_worst_sample() -> None:
    verdicts = {
        "nn.Linear/0/bare": EQUAL, "nn.Linear/1/bare": EXCLUDED, "nn.RNN/0/bare": EQUAL, "nn.RNN/1/bare": REFUSED,
        "nn.GELU/0/bare": EXCLUDED, "causal/gpt2": EQUAL, "masked/gpt2": WRONG, "masked/bert": EQUAL,
    }  # fmt: skip
    row = {"reason": "a | b", "about": "", "budgets": [ROOMY], **results.versions(), "source": "older"}
    page = results.page({entry: {"entry": entry, "verdict": v, **row} for entry, v in verdicts.items()}, ["timm"])
    assert "4 of the equal entries have run at the budget of 1 GiB only" in page
    assert "8 of 8 entries ran with earlier sources" in page
    assert "| modules of torch | 1 | 0 | 1 | 0 | 0 | 1 | 50.0% of 2 |" in page
    assert "| architectures | 1 | 0 | 0 | 1 | 0 | 0 | 50.0% of 2 |" in page
    assert "| of these, masked | 1 | 0 | 0 | 1 | 0 | 0 | 50.0% of 2 |" in page
    assert "| nn.RNN/1/bare | refused | a \\| b |" in page and "not run: timm" in page


def test_configurations_are_made_small_and_hold_together() -> None:
    transformers = pytest.importorskip("transformers")
    small = configs.shrunk(transformers.LlavaConfig, configs.narrow)
    assert small.text_config.hidden_size == configs.WIDTH and small.vision_config.num_hidden_layers == configs.LAYERS
    assert small.text_config.vocab_size == configs.VOCABULARY > small.image_token_index >= configs.SPECIAL
    latent = configs.shrunk(transformers.DeepseekV3Config, configs.narrow)
    assert latent.num_attention_heads == latent.num_key_value_heads == configs.HEADS
    assert len(configs.shrunk(transformers.SwinConfig, configs.narrow).depths) == 4  # its stages stay


def test_every_kind_of_model_is_entered_once_in_each_of_its_families() -> None:
    pytest.importorskip("transformers")
    entries = architectures.entries()
    assert len(set(entries)) == len(entries) > 300 and set(ARCHITECTURES) <= set(entries)
    assert entries.index("masked/bert") < entries.index("causal/bert")


@pytest.mark.long
def test_a_slice_of_the_run_is_equal(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    entries = [*(f"nn.{name}/0/bare" for name in MODULES.split()), *ARCHITECTURES]
    store, page = tmp_path / "rows.jsonl", tmp_path / "coverage.md"
    command = [sys.executable, "-m", "benchmarks.coverage", "--store", str(store), "--page", str(page), "--jobs", "2"]
    subprocess.run([*command, "--only", *entries, "--budgets", ROOMY], cwd=ROOT, check=True, timeout=600)
    rows = results.read(store)
    assert {name: row["verdict"] for name, row in rows.items()} == dict.fromkeys(entries, EQUAL), rows
    assert "| architectures | 2 | 0 | 0 | 0 | 0 | 0 | 100.0% of 2 |" in page.read_text()
