"""``mtcompile train`` of a Hugging Face folder: the losses and weights of a plain loop, in a folder that Transformers reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import mtcompile
from mtcompile import checkpoint
from mtcompile.cli.app import app
from mtcompile.trainer.recipe import Recipe, learning_rate
from mtcompile.trainer.trainer import Row, train
from tests.data.folders import CHAT, SIZES, chats, folder_of, tokenizer_of
from tests.project.examples import equal, weights
from tests.trainer.recipes import FITS, recipe_of, refused, rows_for, rows_of

transformers = pytest.importorskip("transformers")


def plain_loop(recipe: Recipe) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains the same batches as anybody would; micro-batches one by one, each weighed by its targets."""
    model = transformers.AutoModelForCausalLM.from_pretrained(recipe.model).train()

    rows = rows_for(recipe, model)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    torch.manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
    losses = []
    for step in range(1, (recipe.steps or 0) + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, recipe.steps or 0, step)
        arguments = rows.batch(step, recipe.batch, recipe.seed).arguments
        flags = {name: value for name, value in arguments.items() if not isinstance(value, torch.Tensor)}
        tensors = {name: value.chunk(recipe.accumulate) for name, value in arguments.items() if name not in flags}
        parts = [{name: value[n] for name, value in tensors.items()} for n in range(recipe.accumulate)]
        counts = [(part["labels"][:, 1:] != -100).sum() for part in parts]
        total = torch.zeros(())
        for part, count in zip(parts, counts, strict=True):
            loss = model(**part, **flags).loss
            loss = loss if recipe.accumulate == 1 else loss * (count / sum(counts))
            loss.backward()
            total = total + loss.detach()
        if recipe.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses, weights(model)


@pytest.mark.slow
def test_losses_weights_and_the_saved_folder_are_those_of_plain_transformers(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, memory="1300KiB", save=tmp_path / "run")
    rows: list[Row] = []
    summary = train(recipe, lambda row, model: rows.append(row), stop=lambda: len(rows) == 2)  # type: ignore[arg-type]
    assert summary.interrupted and summary.limiting_resource  # it was planned
    assert 0 < summary.peak_device_bytes <= summary.budget_device_bytes
    rows += rows_of(replace(recipe, resume=tmp_path / "run"))
    losses, stepped = plain_loop(recipe)
    assert [row.loss for row in rows] == losses and losses[-1] < losses[0]
    saved = tmp_path / "run" / "step-00000003"
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert equal(weights(model), stepped) and type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float32
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    own, first = (transformers.AutoTokenizer.from_pretrained(each) for each in (saved, recipe.model))
    assert own("import os")["input_ids"] == first("import os")["input_ids"] and own.chat_template == first.chat_template == CHAT
    assert checkpoint.inspect(saved).extra.keys() == {"seed", "data", "settings"}
    with pytest.raises(ValueError, match=r"expected the data that .*step-00000002 was trained on"):
        train(replace(recipe, resume=tmp_path / "run" / "step-00000002", seq=100))


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"packing": False, "memory": "1500KiB"},
        {"accumulate": 2, "batch": 4, "memory": "1500KiB"},
        {"update": "backward", "clip": 0.0, "memory": "1500KiB"},
        {"dtype": torch.bfloat16, "memory": "1MiB"},
        {"config": "Qwen3Config", "memory": "1500KiB"},
        {"config": "Gemma2Config", "accumulate": 2, "memory": "2MiB"},  # a mask for each type of layer
        {"config": "GPT2Config", "memory": "2MiB"},
    ],
    ids=str,
)
def test_other_ways_to_train_have_the_losses_and_weights_of_a_plain_loop(tmp_path: Path, options: dict[str, Any]) -> None:
    if "config" in options:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 384} if options["config"] == "GPT2Config" else SIZES
        window = {} if options["config"] == "GPT2Config" else {"sliding_window": 16, "head_dim": 8}
        options = {**options, "config": getattr(transformers, options["config"])(**sizes, **window)}
    recipe = recipe_of(tmp_path, **options, evaluate_every=3, save=tmp_path / "run")
    rows: list[Row] = []
    summary = train(recipe, lambda row, model: rows.append(row) if isinstance(row, Row) else None)
    losses, stepped = plain_loop(recipe)
    assert summary.limiting_resource and [row.loss for row in rows] == losses
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.latest(tmp_path / "run"))
    assert equal(weights(model), stepped)
    (held_out,) = rows_for(recipe, model).evaluation(recipe.batch // recipe.accumulate, 8)
    with torch.no_grad():
        assert summary.eval_loss == float(model(**held_out.arguments).loss) and held_out.targets > 0


@pytest.mark.long
def test_split_masters_resume_and_are_saved_as_the_weights_that_they_are(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES, attention_dropout=0.1)
    recipe = recipe_of(
        tmp_path, config=config, save=tmp_path / "run", precision="bf16-master32", update="backward", memory="1700KiB"
    )
    whole = rows_of(replace(recipe, save=tmp_path / "whole"))
    seen: list[Row] = []
    train(recipe, lambda row, model: seen.append(row), stop=lambda: len(seen) == 2)  # type: ignore[arg-type]
    rest = rows_of(replace(recipe, resume=tmp_path / "run"))
    assert [row.loss for row in seen + rest] == [row.loss for row in whole]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "step-00000003")
    assert model.dtype == torch.bfloat16 and model.config.dtype == torch.bfloat16


@pytest.mark.long
def test_flags_and_a_yaml_file_are_the_same_run(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {recipe.model}\ndata: [{recipe.data[0]}]\nbatch: 2\nseq: 96  # tokens\nepochs: 1\nlr: 1e-3\nmemory: 64MiB\n"
        f"evaluate-every: 2\nwarmup: 2\ndevice: cpu\npacking: no\nmetrics: {tmp_path}/file.jsonl\n"
    )
    flags = ["--data", str(recipe.data[0]), "--batch", "2", "--seq", "96", "--epochs", "1", "--lr", "1e-3", "--memory", "64MiB"]
    flags += [
        "--evaluate-every",
        "2",
        "--warmup",
        "2",
        "--device",
        "cpu",
        "--no-packing",
        "--metrics",
        f"{tmp_path}/flags.jsonl",
    ]
    runs = [["--config", str(file)], [recipe.model, *flags], ["--config", str(file), "--seq", "80"]]
    outputs = [CliRunner().invoke(app, ["train", *run]) for run in runs]
    assert [output.exit_code for output in outputs] == [0, 0, 2], "".join(output.output for output in outputs)
    said = outputs[0].stdout
    assert "12 samples of 572 tokens, 289 of them targets, in 12 rows of 96" in said and "trained 6 of 6 steps" in said
    assert "expected at most 80 tokens" in outputs[2].stderr  # a flag overrides the file
    rows = [[json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in ("file", "flags")]
    losses = [[row.get("loss", row.get("eval_loss")) for row in run] for run in rows]
    assert losses[0] == losses[1] and len(losses[0]) == 6 + 3


@pytest.mark.long
def test_text_is_trained_too_and_tokenizers_of_a_template_of_your_own_are_saved(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, save=tmp_path / "run", steps=1)
    text = tmp_path / "notes.md"
    text.write_text((Path(__file__).parents[2] / "LICENSE").read_text())
    own = tmp_path / "own.jinja"
    own.write_text(CHAT + "\n")
    train(replace(recipe, data=(*recipe.data, text), chat_template=own))
    saved = tmp_path / "run" / "step-00000001"
    assert transformers.AutoTokenizer.from_pretrained(saved).chat_template == CHAT + "\n"
    again = replace(recipe, model=str(saved), save=tmp_path / "again")  # a checkpoint is a folder to start from
    with pytest.raises(ValueError, match="which is or holds the model"):
        train(replace(again, save=tmp_path / "run"))
    losses, stepped = plain_loop(again)
    assert [row.loss for row in rows_of(again)] == losses
    assert equal(weights(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "step-00000001")), stepped)


@pytest.mark.long
def test_folders_go_to_the_trainer_of_transformers_and_back(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, save=tmp_path / "run", steps=1)
    train(recipe)
    saved = tmp_path / "run" / "step-00000001"
    tokens = torch.arange(16)
    trainer = transformers.Trainer(
        mtcompile.from_pretrained(saved, memory=FITS),
        transformers.TrainingArguments(str(tmp_path / "hf"), max_steps=1, save_steps=1, report_to=[]),
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 8,
        processing_class=transformers.AutoTokenizer.from_pretrained(saved),
    )
    trainer.train()
    again = replace(recipe, model=str(tmp_path / "hf" / "checkpoint-1"), save=None)
    losses, _ = plain_loop(again)
    assert [row.loss for row in rows_of(again)] == losses


@pytest.mark.long
def test_a_folder_without_a_language_model_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, pad_token_id=0)).save_pretrained(recipe.model)
    with pytest.raises(ValueError, match=r"expected a causal language model in .*, found LlamaForSequenceClassification"):
        train(recipe)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_trained_is_said_before_weights_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", chat_template=None)
    data = chats(tmp_path / "chats.jsonl")
    (folder / "model.safetensors").unlink()
    assert "expected --data to train the weights of" in refused(folder)
    assert "which is or holds the model" in refused(folder, "--data", str(data), "--save", str(folder))
    assert "expected no --vocab" in refused(folder, "--data", str(data), "--vocab", "9")
    assert "line 1: expected a chat template" in refused(folder, "--data", str(data))
    tokenizer_of().save_pretrained(folder)
    said = refused(folder, "--data", str(data), "--seq", "32")
    assert "line 3: expected at most 32 tokens, found 36 (7 more are too long, the longest of 93): give --seq 93, or" in said
    assert "expected at least 8 rows of 1024 tokens" in refused(folder, "--data", str(data))
    assert "expected model.safetensors" in refused(folder, "--data", str(data), "--batch", "1")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "vocab_size": 100}))
    assert "expected tokens below 100" in refused(folder, "--data", str(data))
    (folder / "tokenizer.json").unlink()
    assert "expected a tokenizer.json in" in refused(folder, "--data", str(data))
    (folder / "config.json").unlink()
    assert "found no config.json" in refused(folder, "--data", str(data))
    assert "expected --too-long with a folder of pretrained weights" in refused(Path("gpt-11m"), "--too-long", "cut")


@pytest.mark.long
def test_a_model_that_cannot_be_packed_is_trained_unpacked(tmp_path: Path) -> None:
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=SIZES["vocab_size"])
    recipe = recipe_of(tmp_path, config=config, steps=1)
    with pytest.raises(ValueError, match=r"MambaForCausalLM cannot tell them apart: .*Try --no-packing"):
        train(recipe)
    losses, _ = plain_loop(replace(recipe, packing=False))
    assert [row.loss for row in rows_of(replace(recipe, packing=False))] == losses


def test_a_missing_weight_stops_the_command_unless_it_may_be_new(tmp_path: Path) -> None:
    folder, data = folder_of(tmp_path / "model"), str(chats(tmp_path / "chats.jsonl"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "up_proj" in name)
    save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors", {"format": "pt"})
    steps = ("--data", data, "--seq", "96", "--batch", "2", "--memory", FITS, "--steps", "1", "--save", str(tmp_path / "run"))
    assert f"missing there: {name}; " in refused(folder, *steps)
    output = CliRunner().invoke(app, ["train", str(folder), *steps, "--device", "cpu", "--allow-new", name])
    assert output.exit_code == 0 and checkpoint.inspect(tmp_path / "run").provenance["weights"][0]["new"] == [name]


def test_a_checkpoint_says_what_was_trained_on_what(tmp_path: Path) -> None:
    folder, data = folder_of(tmp_path / "model"), chats(tmp_path / "chats.jsonl")
    steps = (
        "--data",
        str(data),
        "--seq",
        "96",
        "--batch",
        "2",
        "--memory",
        FITS,
        "--steps",
        "1",
        "--save",
        str(tmp_path / "run"),
    )
    assert CliRunner().invoke(app, ["train", str(folder), *steps, "--device", "cpu"]).exit_code == 0
    told = checkpoint.inspect(tmp_path / "run").provenance
    assert set(told["files"]["weights"]) == {str(folder / name) for name in ("config.json", "model.safetensors")}
    assert told["options"]["seq"] == "96" and told["versions"]["torch"] == torch.__version__ and len(told["plans"]) == 1
    verify = ["checkpoint", "verify", str(tmp_path / "run")]
    output = CliRunner().invoke(app, verify)
    assert output.exit_code == 0 and f"data: {data}: same" in output.stdout
    data.write_text(data.read_text() + "\n")
    (folder / "config.json").unlink()
    output = CliRunner().invoke(app, verify)
    assert output.exit_code == 5 and f"{data}: different" in output.stdout and "config.json: missing" in output.stdout
    with (tmp_path / "run" / "step-00000001" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    output = CliRunner().invoke(app, verify)
    assert output.exit_code == 2 and "is damaged" in output.stderr
