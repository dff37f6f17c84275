"""``mtcompile train --lora``: the losses and adapters of a plain loop with PEFT, and of TRL, in folders that PEFT reads."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from mtcompile.cli.app import app
from mtcompile.errors import CheckpointError
from mtcompile.models.four_bits import qlora
from mtcompile.runtime.schedule import placed
from mtcompile.trainer.merging import merge
from mtcompile.trainer.recipe import Recipe, learning_rate
from mtcompile.trainer.trainer import Row, train
from tests.data.folders import SIZES, chats, folder_of, tokenizer_of
from tests.project.examples import equal, example
from tests.trainer.recipes import killed, recipe_of, refused, rows_for, rows_in, rows_of

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
ROOT = Path(__file__).resolve().parents[2]


def adapted_of(recipe: Recipe) -> Any:
    """The model that a user of PEFT makes."""
    four = {"quantization_config": qlora(), "device_map": "cpu"} if recipe.base_bits else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(recipe.model, **four).train()
    names = [name for text in recipe.lora_targets for name in text.split(",")] or "all-linear"
    options = {"lora_dropout": recipe.lora_dropout, "use_dora": recipe.dora, "task_type": "CAUSAL_LM"}
    torch.manual_seed(recipe.seed)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=recipe.lora, lora_alpha=2 * recipe.lora, target_modules=names, **options)
    )


def plain_loop(recipe: Recipe) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses and the adapter, by PEFT's names, of an ordinary loop over the same batches."""
    model = adapted_of(recipe)
    rows = rows_for(recipe, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1.0, betas=(0.9, 0.95))
    losses = []
    for step in range(1, (recipe.steps or 0) + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, recipe.steps or 0, step)
        loss = model(**rows.batch(step, recipe.batch, recipe.seed).arguments).loss
        loss.backward()
        if recipe.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, peft.get_peft_model_state_dict(model)


def read(recipe: Recipe, saved: Path) -> dict[str, torch.Tensor]:
    """What PEFT reads from a checkpoint's folder."""
    base = transformers.AutoModelForCausalLM.from_pretrained(recipe.model)
    found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, saved))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"dora": True}, marks=pytest.mark.long),
        pytest.param({"update": "backward", "clip": 0.0, "lora_targets": ("q_proj,v_proj",)}, marks=pytest.mark.long),
        pytest.param({"lora_dropout": 0.1, "packing": False}, marks=pytest.mark.long),
        pytest.param({"dtype": torch.bfloat16, "host": "1500KiB", "disk": "32MB"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_losses_and_adapters_are_those_of_a_plain_loop_with_peft(options: dict[str, Any], tmp_path: Path) -> None:
    if "disk" in options:
        options = {**options, "disk": f"{tmp_path}/disk:{options['disk']}"}
    recipe = recipe_of(tmp_path, lora=4, memory="1200KiB", save=tmp_path / "run", **options)
    rows: list[Row] = []
    summary = train(recipe, lambda row, model: rows.append(row), stop=lambda: len(rows) == 2)  # type: ignore[arg-type]
    assert summary.interrupted and summary.limiting_resource  # it was planned
    rows += rows_of(replace(recipe, resume=tmp_path / "run"))
    losses, adapter = plain_loop(recipe)
    assert [row.loss for row in rows] == losses
    saved = tmp_path / "run" / "step-00000003"
    assert equal(read(recipe, saved), adapter) and any(value.any() for name, value in adapter.items() if "lora_B" in name)
    assert equal(load_file(saved / "adapter_model.safetensors"), adapter)  # nothing of the base
    told = json.loads((saved / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == recipe.model and told["inference_mode"] and not (saved / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packed_before", "options"),
    [
        (False, {}),
        pytest.param(True, {"update": "backward", "clip": 0.0}, marks=pytest.mark.long),
        pytest.param(False, {"dora": True, "lora_dropout": 0.1}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_base_in_four_bits(packed_before: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """QLoRA has the losses and adapters of PEFT and bitsandbytes, also from a folder that has 4 bits already; its base crosses
    the link in them; and its adapter is merged into the base that has all bits."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is an extra: pip install mtcompile[qlora]")
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 64, "intermediate_size": 128}, dtype="bfloat16")
    given = {"dtype": torch.bfloat16, "config": config, "memory": "1200KiB", "save": tmp_path / "run", **options}
    recipe = recipe_of(tmp_path, lora=4, base_bits=4, evaluate_every=2, **given)
    trained = recipe
    if packed_before:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(recipe.model, quantization_config=qlora(), device_map="cpu")
        loaded.save_pretrained(tmp_path / "packed")
        tokenizer_of().save_pretrained(tmp_path / "packed")
        trained = replace(recipe, model=str(tmp_path / "packed"), base_bits=None)
    rows: list[Row] = []

    def report(row: Any, model: Any) -> None:
        rows.extend([row] if isinstance(row, Row) else [])
        copies = [(i, model.schedule.buffers[i.writes[0]]) for i in model.schedule.instructions if i.op == "copy"]
        home = sum(i.nbytes for i, buffer in copies if i.queue == "d2h" and buffer.role == "param")
        assert home <= sum(placed(p.nbytes) for p in model.parameters() if p.requires_grad)
        weights = {p.dtype for name, p in model.named_parameters() if "proj.base_layer.weight" in name}
        assert weights == {torch.uint8}

    summary = train(trained, report, stop=lambda: len(rows) == 2)
    assert summary.interrupted and summary.limiting_resource  # it was planned
    rows += rows_of(replace(trained, resume=tmp_path / "run"))  # after an evaluation
    losses, adapter = plain_loop(recipe)
    saved = tmp_path / "run" / "step-00000003"
    assert [row.loss for row in rows] == losses and equal(load_file(saved / "adapter_model.safetensors"), adapter)
    assert equal(read(recipe, saved), adapter)
    if packed_before:
        with pytest.raises(ValueError, match="expected a base that is not quantized"):
            merge(tmp_path / "run", tmp_path / "merged")
    else:
        merge(tmp_path / "run", tmp_path / "merged")
        assert (tmp_path / "merged" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_base_or_settings_that_have_changed_are_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, lora=4, save=tmp_path / "run", steps=2)
    train(replace(recipe), stop=lambda: True)
    again = replace(recipe, resume=tmp_path / "run")
    for change, said in (
        ({"lora": 8}, r"found --lora 8 \(4 there\), --lora-alpha 16 \(8 there\)"),
        ({"lora_targets": ("q_proj",)}, r"--lora-targets q_proj \(all-linear there\)"),
        ({"lora": 0, "lr": 1e-2}, r"found --lora 0 \(4 there\)"),
    ):
        with pytest.raises(ValueError, match=said):
            train(replace(again, **change))  # type: ignore[arg-type]
    (Path(recipe.model) / "config.json").rename(tmp_path / "config.json")
    folder_of(Path(recipe.model), config=transformers.LlamaConfig(**SIZES, initializer_range=0.5))
    (tmp_path / "config.json").rename(Path(recipe.model) / "config.json")
    with pytest.raises(CheckpointError, match=r"expected the model that this training began with, found another model\.safet"):
        train(replace(again, save=None))


def test_adapters_that_cannot_be_are_refused(tmp_path: Path) -> None:
    folder, data = folder_of(tmp_path / "model"), str(chats(tmp_path / "chats.jsonl"))
    given = ("--data", data, "--seq", "96", "--batch", "2")
    assert "expected --lora RANK with --dora, found no --lora" in refused(folder, *given, "--dora")
    assert "expected --lora RANK with --lora-alpha" in refused(folder, *given, "--lora-alpha", "8")
    assert "expected --lora-dropout to be at least 0 and below 1" in refused(
        folder, *given, "--lora", "4", "--lora-dropout", "1"
    )
    assert "found 'all-linear,q_proj'" in refused(folder, *given, "--lora", "4", "--lora-targets", "q_proj,all-linear")
    assert "expected --lora RANK with --base-bits, found no --lora" in refused(folder, *given, "--base-bits", "4")
    assert "expected --base-bits 4, or no --base-bits, found 8" in refused(folder, *given, "--lora", "4", "--base-bits", "8")
    four = (*given, "--lora", "4", "--base-bits", "4")
    assert "without fp32 masters" in refused(folder, *four, "--precision", "bf16-master32")
    if importlib.util.find_spec("bitsandbytes") is None:
        assert 'pip install "mtcompile[qlora]"' in refused(folder, *four)
    said = refused(folder, *given, "--lora", "4", "--lora-targets", "q_proj,v_porj")
    assert "found 'v_porj'; did you mean v_proj?" in said
    output = CliRunner().invoke(app, ["train", "gpt-11m", "--lora", "4", "--device", "cpu"])
    assert output.exit_code == 2 and "expected --lora with a folder of pretrained weights" in output.stderr


@pytest.mark.parametrize("arguments", [["gpt-11m", "--lora", "4"], ["FOLDER", "--dora"]])
def test_they_are_refused_before_torch_is_imported(arguments: list[str], tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    given = [str(folder) if each == "FOLDER" else each for each in arguments]
    code = (
        "import sys; from mtcompile.cli.app import app\n"
        "try: app()\n"
        "except SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code, "train", *given], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["2", "False"] and "--lora" in ended.stderr


@pytest.mark.long
def test_a_run_that_is_killed_goes_on_with_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, lora=4, steps=40, lora_dropout=0.1, memory="1200KiB")
    given = ["--data", str(recipe.data[0]), "--batch", "2", "--seq", "96", "--steps", "40", "--warmup", "2", "--lr", "1e-2"]
    given += ["--memory", "1200KiB", "--device", "cpu", "--evaluate-every", "0", "--lora", "4", "--lora-dropout", "0.1"]
    saved = killed(recipe.model, *given, run=tmp_path / "run", metrics=tmp_path / "rows")
    assert 1 <= saved < 40
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rest = rows_of(replace(recipe, save=tmp_path / "run", resume=tmp_path / "run"))
        whole = rows_of(replace(recipe, save=tmp_path / "whole"))
    finally:
        torch.set_num_threads(threads)
    assert [row.loss for row in rest] == [row.loss for row in whole[saved:]]
    assert rows_in(tmp_path / "rows")[:saved] == [row.loss for row in whole[:saved]]
    assert equal(*(read(recipe, tmp_path / name / "step-00000040") for name in ("run", "whole")))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", ["of the model", pytest.param("of TRL", marks=pytest.mark.long)])
def test_losses_and_adapters_are_those_of_trl(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its SFTTrainer, given our batches and our rates: equal with the model's own loss. TRL's adds up in another order, in
    chunks of those tokens that are targets: equal up to rounding, which Adam enlarges."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    recipe = recipe_of(tmp_path, lora=4, packing=False, memory="1200KiB", save=tmp_path / "run")
    rows = rows_of(recipe)
    model = adapted_of(recipe)
    batches = [rows_for(recipe, model).batch(step, recipe.batch, recipe.seed).arguments for step in (1, 2, 3)]
    data = [{name: batch[name][line].tolist() for name in ("input_ids", "labels")} for batch in batches for line in range(2)]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1.0, betas=(0.9, 0.95), weight_decay=recipe.weight_decay)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: learning_rate(recipe, 3, min(done + 1, 3)))
    options: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "use_cpu": True}
    options |= {
        "bf16": False,
        "loss_type": "nll",
        "train_sampling_strategy": "sequential",
        "max_grad_norm": recipe.clip,
        "report_to": [],
    }
    config = trl.SFTConfig(str(tmp_path / "trl"), disable_tqdm=True, save_strategy="no", **options)

    def collated(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {name: torch.tensor([sample[name] for sample in samples]) for name in ("input_ids", "labels")}
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}  # causal; padding follows what is trained

    kind = trl.SFTTrainer if loss == "of TRL" else example("trl_trainers").WholeSFTTrainer
    trainer = kind(
        model,
        config,
        train_dataset=datasets.Dataset.from_list(data),
        data_collator=collated,
        processing_class=transformers.AutoTokenizer.from_pretrained(recipe.model),
        optimizers=(optimizer, rate),
    )
    trainer.train()
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert [round(row.loss, 4) for row in rows] == [round(loss, 4) for loss in logged]
    ours, theirs = read(recipe, tmp_path / "run" / "step-00000003"), peft.get_peft_model_state_dict(trainer.model)
    if loss == "of the model":
        assert equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)  # a thousandth of a step of Adam
