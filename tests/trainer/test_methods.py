"""``mtcompile train --method``: the losses, rewards and weights of TRL's own trainers, also after an interruption."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtcompile import checkpoint
from mtcompile.data.encoding import load_tokenizer
from mtcompile.data.records import read_rows
from mtcompile.errors import CheckpointError, StepError
from mtcompile.models.loading import load_function
from mtcompile.trainer.by_trl import arguments_of, check_positions, from_logits, read_examples, reward_of
from mtcompile.trainer.methods import COLUMNS
from mtcompile.trainer.recipe import Recipe
from mtcompile.trainer.trainer import Evaluation, Row, train
from tests.data.folders import folder_of
from tests.project.examples import equal, weights
from tests.trainer.recipes import killed, refused, rows_of

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries about each other
SUMS = [(a, b) for a in range(4) for b in range(5)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "dpo": [
        {
            "prompt": [{"role": "user", "content": f"{a} + {b}?"}],
            "chosen": [{"role": "assistant", "content": str(a + b)}],
            "rejected": [{"role": "assistant", "content": "?" * (1 + a)}],
        }
        for a, b in SUMS
    ],
    "grpo": [{"prompt": [{"role": "user", "content": f"{a} + {b}?"}], "sum": a + b} for a, b in SUMS],
    "kto": [{"prompt": f"{a} + {b} is ", "completion": str(a + b + a % 2), "label": a % 2 == 0} for a, b in SUMS],
}

REWARD = """
def short(completions, sum, **columns):
    return [-abs(len(answer[0]["content"]) - number) for answer, number in zip(completions, sum)]
"""


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("trl", "datasets"):  # not where tests are only collected: loading them takes seconds
        pytest.importorskip(name)


def plain(recipe: Recipe, folder: Path) -> Any:
    """The trainer of a user of TRL, after training."""
    import trl
    from datasets import Dataset

    name = recipe.method.upper()
    kind, settings = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")

    rows, more = ROWS[recipe.method], {}
    if recipe.lora:
        config = peft.LoraConfig(r=recipe.lora, lora_alpha=2 * recipe.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        more["peft_config"] = config
    if recipe.method == "grpo":
        more["reward_funcs"] = load_function(*str(recipe.reward).rsplit(":", 1))
    else:
        more["eval_dataset"], rows = Dataset.from_list(rows[-1:]), rows[:-1]
    trainer = (from_logits(kind) if recipe.update == "backward" else kind)(
        transformers.AutoModelForCausalLM.from_pretrained(recipe.model),
        args=settings(str(folder), **arguments_of(recipe, recipe.steps or 0, int(recipe.method != "grpo")), use_cpu=True),
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(recipe.model),
        **more,
    )
    trainer.train()
    return trainer


def logged(row: Mapping[str, Any]) -> dict[str, Any]:
    clocks = ("runtime", "per_second", "tokens", "epoch", "step", "bytes", "lr", "learning_rate", "per_s", "step_time")
    return {name: value for name, value in row.items() if not name.endswith(clocks)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dpo", {"update": "backward"}),
        pytest.param("dpo", {"lora": 4}, marks=pytest.mark.long),
        pytest.param("dpo", {"update": "backward", "lora": 4, "accumulate": 2}, marks=pytest.mark.long),
        pytest.param("dpo", {"accumulate": 2}, marks=pytest.mark.long),
        ("kto", {"update": "backward"}),
        pytest.param("kto", {"lora": 4, "beta": 0.3}, marks=pytest.mark.long),
        pytest.param("grpo", {"update": "backward"}, marks=pytest.mark.long),
        pytest.param("grpo", {"lora": 4, "beta": 0.1}, marks=pytest.mark.long),
        pytest.param("kto", {}, marks=pytest.mark.long),
    ],
)
def test_losses_rewards_and_weights_are_those_of_trl(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder, data = folder_of(tmp_path / "model"), written(tmp_path / "rows.jsonl", ROWS[method])
    given: dict[str, Any] = {"steps": 4, "batch": 4, "seq": 32, "warmup": 1, "lr": 1e-2, "evaluate_every": 2, **options}
    memory = "4MiB" if "update" in options else "64MiB"  # TRL's own chunks need more, also of a small model
    recipe = Recipe(str(folder), (data,), method=method, device="cpu", memory=memory, save=tmp_path / "run", **given)
    recipe = replace(recipe, metrics=tmp_path / "run.jsonl")
    if method == "grpo":
        (tmp_path / "rewards.py").write_text(REWARD)
        recipe = replace(recipe, reward=f"{tmp_path}/rewards.py:short", completions=2, new_tokens=8, seq=64)
    rows: list[Row | Evaluation] = []
    evaluations = 0 if method == "grpo" else 2
    assert train(recipe, lambda row, model: rows.append(row), stop=lambda: len(rows) > 1 + bool(evaluations)).interrupted
    before = checkpoint.latest(tmp_path / "run")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):  # what Transformers would read
        assert before is not None and not (before / name).exists()
        (before / name).write_bytes(b"no pickle")
    summary = train(replace(recipe, resume=tmp_path / "run"), lambda row, model: rows.append(row))
    with pytest.raises(ValueError, match=r"found --beta 0\.7"):
        train(replace(recipe, resume=tmp_path / "run", beta=0.7, steps=6, allow_change=("steps",)))
    expected = plain(recipe, tmp_path / "plain")
    history = [logged(row) for row in expected.state.log_history if "loss" in row or "eval_loss" in row]
    assert [logged(json.loads(line)) for line in (tmp_path / "run.jsonl").read_text().splitlines()] == history
    assert sum("eval_loss" in row for row in history) == evaluations and any(row.get("grad_norm") for row in history)
    assert 0 < summary.peak_device_bytes <= summary.budget_device_bytes and summary.limiting_resource
    saved = checkpoint.latest(tmp_path / "run")
    assert saved is not None and saved.name == "step-00000004"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(recipe.model if recipe.lora else saved)
    if recipe.lora:
        own = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(model, saved))
        assert equal(own, peft.get_peft_model_state_dict(expected.model)) and any(value.any() for value in own.values())
    else:
        assert equal(weights(model), weights(expected.model))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "kto", "grpo"])
def test_a_run_that_is_killed_goes_on_with_the_bits_of_one_that_is_not(method: str, tmp_path: Path) -> None:
    folder, data = folder_of(tmp_path / "model"), written(tmp_path / "rows.jsonl", ROWS[method])
    given: dict[str, Any] = {"steps": 40, "batch": 4, "seq": 32, "warmup": 2, "lr": 1e-3, "evaluate_every": 0, "lora": 4}
    given |= {"method": method, "update": "backward", "memory": "64MiB", "device": "cpu"}
    if method == "grpo":
        (tmp_path / "rewards.py").write_text(REWARD)
        given |= {"reward": f"{tmp_path}/rewards.py:short", "completions": 2, "new_tokens": 8, "seq": 64}
    flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    saved = killed(str(folder), "--data", str(data), *flags, run=tmp_path / "run", metrics=tmp_path / "rows")
    assert 1 <= saved < 40
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        recipe = Recipe(str(folder), (data,), save=tmp_path / "run", **given)
        rest = rows_of(replace(recipe, resume=tmp_path / "run"))
        whole = rows_of(replace(recipe, save=tmp_path / "whole"))
    finally:
        torch.set_num_threads(threads)
    assert [row.loss for row in rest] == [row.loss for row in whole[saved:]]
    assert equal(*(load_file(tmp_path / name / "step-00000040" / "adapter_model.safetensors") for name in ("run", "whole")))


GOOD = {"prompt": "1 + 1 is ", "chosen": "2", "rejected": "3"}
CHAT = {name: [{"role": "user", "content": text}] for name, text in GOOD.items()}


GRPO = ["--method", "grpo", "--completions", "2", "--batch", "2", "--new-tokens", "8", "--reward", f"{__file__}:written"]


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        ([{"prompt": "a", "chosen": "b"}], [], "line 1: rejected: expected text, found no such field among prompt, chosen"),
        ([GOOD, {**GOOD, "chosen": 3}], [], "line 2: chosen: expected text, found a number"),
        ([GOOD, CHAT], [], "line 2: expected the fields of the first row (prompt: text, chosen: text, rejected: text), found"),
        ([{**CHAT, "chosen": []}], [], "chosen: expected messages, found none"),
        ([GOOD, {**GOOD, "rejected": "3" * 99}], ["--seq", "32"], "line 2: expected at most 32 tokens, found"),
        ([GOOD] * 3, ["--batch", "4"], "expected at least 4 rows for a batch of 4, beside 1 held out, found 2"),
        ([{"prompt": "a", "completion": "b", "label": 2}], ["--method", "kto"], "label: expected true or false, found 2"),
        ([CHAT], [], "which the tokenizer takes, found this template takes no conversation"),
        ([GOOD], ["--method", "grpo"], "expected --reward file.py:function with --method grpo, found no --reward"),
        ([GOOD], ["--method", "grpo", "--reward", f"{__file__}:no", "--batch", "4"], "a multiple of --completions 8"),
        ([GOOD], ["--reward", f"{__file__}:no"], "expected --reward with --method grpo, found --method dpo"),
        ([GOOD], ["--beta", "inf"], "expected --beta to be a number of at least 0, found inf"),
        ([{"prompt": ""}], GRPO, "line 1: prompt: expected text, found no token"),
        ([{"prompt": "a", "of": 10**30}], GRPO, "expected rows with values of one type in each column"),
        ([{"prompt": "a"}], [*GRPO[:-1], f"{__file__}:GOOD"], "expected a function 'GOOD' in"),
        ([GOOD], ["--method", "kto", "--batch", "1"], "expected a --batch of at least 2 rows for each of --accumulate"),
    ],
)
def test_what_is_refused(rows: list[dict[str, Any]], flags: list[str], message: str, tmp_path: Path) -> None:
    template = "{{ raise_exception('this template takes no conversation') }}"
    folder, data = folder_of(tmp_path / "model", template), written(tmp_path / "rows.jsonl", rows)
    told = refused(folder, "--data", str(data), "--method", "dpo", *flags)
    assert message in " ".join(told.split()), told


def test_too_long_rows_are_cut_or_dropped(tmp_path: Path) -> None:
    rows = [GOOD, {**GOOD, "rejected": "3" * 99}, {**GOOD, "prompt": "1" * 99}, GOOD]
    folder, data = folder_of(tmp_path / "model"), written(tmp_path / "rows.jsonl", rows)
    recipe = Recipe(str(folder), (data,), method="dpo", seq=32, batch=2, evaluate_every=0, device="cpu")
    tokenizer = load_tokenizer(folder)
    cut, dropped = (read_examples(replace(recipe, too_long=how), tokenizer, abs) for how in ("cut", "drop"))
    assert cut.trained.to_list() == [rows[0], rows[1], rows[3]] and dropped.trained.to_list() == [GOOD, GOOD]
    assert cut.too_long == dropped.too_long == 2 and cut.digest != dropped.digest


def test_rows_of_a_table_and_of_a_conversation_that_begins_with_its_prompt(tmp_path: Path) -> None:
    table = tmp_path / "rows.CSV"
    table.write_text("prompt,completion,label\na,b,True\nc,d,false\n")
    found = [row for _, row in read_rows([table], COLUMNS["kto"])]
    assert found == [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "c", "completion": "d", "label": False}]
    whole = {name: CHAT["prompt"] + CHAT[name] for name in ("chosen", "rejected")}
    ((_, row),) = read_rows([written(tmp_path / "chats.jsonl", [{**whole, "tools": [{"name": "add"}]}])], COLUMNS["dpo"])
    assert row == {**whole, "tools": '[{"name": "add"}]'}


def test_tools_that_only_a_later_row_has_are_kept_and_other_labels_are_other_data(tmp_path: Path) -> None:
    folder, rows = (
        folder_of(tmp_path / "model"),
        [{"prompt": "a", "label": "cat"}, {"prompt": "b", "label": "cat", "tools": [1]}],
    )
    digests = set()
    for label in ("cat", "dog"):
        rows[1]["label"] = label
        data = written(tmp_path / "rows.jsonl", rows)
        recipe = Recipe(str(folder), (data,), method="grpo", seq=32, batch=2, completions=2, new_tokens=8, device="cpu")
        read = read_examples(recipe, load_tokenizer(folder), abs)
        assert read.trained.to_list() == [{**rows[0], "tools": None}, {**rows[1], "tools": "[1]"}]
        digests.add(read.digest)
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("{}['x']", "raised KeyError: 'x'; the step was not made"),
        ("exit(0)", "raised SystemExit: 0; the step was not made"),
        ("[1.0]", "to return 2 finite numbers, one for each completion (None: not judged), found [1.0]"),
        ("['a', 'b']", "found ['a', 'b']"),
        ("[None, None]", "found [None, None]"),
        ("[1.0, float('nan')]", "found [1.0, nan]"),
    ],
)
def test_a_reward_that_fails_is_named(body: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(f"def scored(completions, **columns):\n    return {body}\n")
    with pytest.raises(StepError, match=re.escape(told)):
        reward_of(f"{tmp_path}/rewards.py:scored")(completions=["a", "b"])


def test_the_reference_is_the_model_that_the_training_began_with(tmp_path: Path) -> None:
    folder, data = folder_of(tmp_path / "model"), written(tmp_path / "rows.jsonl", ROWS["dpo"])
    given: dict[str, Any] = {"batch": 4, "seq": 32, "evaluate_every": 0, "device": "cpu", "memory": "64MiB", "lr": 1e-2}
    recipe = Recipe(str(folder), (data,), method="dpo", update="backward", save=tmp_path / "run", steps=1, warmup=0, **given)
    train(recipe)
    again = replace(recipe, resume=tmp_path / "run", steps=2, allow_change=("steps",))
    with pytest.raises(CheckpointError, match="expected the model that this training began with"):
        train(replace(again, model=str(tmp_path / "run" / "step-00000001"), save=None))
    with pytest.raises(ValueError, match="found --update step"):
        train(replace(again, update="step"))


def test_rows_are_not_longer_than_a_model_has_positions(tmp_path: Path) -> None:
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    recipe = Recipe("gpt2", (), method="grpo", seq=62, new_tokens=20)
    with pytest.raises(ValueError, match="at most 64 tokens, the positions of gpt2, found 80: lower --seq"):
        check_positions(model, recipe)
    check_positions(model, replace(recipe, seq=60))
