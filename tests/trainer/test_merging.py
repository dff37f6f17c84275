"""``mtcompile merge``: the bits of PEFT's own merge, in a folder that is whole or not there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mtcompile.cli.app import app
from mtcompile.errors import CheckpointError
from mtcompile.trainer.merging import merge
from mtcompile.trainer.trainer import train
from tests.data.folders import SIZES, VOCABULARY, folder_of
from tests.project.examples import equal, weights
from tests.trainer.recipes import recipe_of

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
ROOT = Path(__file__).resolve().parents[2]
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 128}
TOKENS = torch.arange(32)[None]


def adapted(folder: Path, **options: Any) -> Any:
    """A model of a folder with an adapter that changes what it computes."""
    torch.manual_seed(1)
    given = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM", **options}
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(**given)).eval()
    for parameter in model.parameters():
        parameter.data += 0.01 * parameter.requires_grad  # DoRA's magnitudes and modules_to_save begin as the base has them
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in several files, and adapters of it."""
    folder = folder_of(tmp_path_factory.mktemp("merge") / "model")
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="60KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("*.safetensors"))) > 1
    adapted(folder).save_pretrained(folder.parent / "adapter")
    return folder


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"use_dora": True, "modules_to_save": ["lm_head"]}),
        ("qwen3", {"modules_to_save": ["embed_tokens"]}),  # tied to the head, which stays as it was
        ("qwen3", {"use_dora": True}),
        ("gpt2", {"fan_in_fan_out": True}),
    ],
    ids=str,
)
def test_the_bits_are_those_of_pefts_own_merge(kind: str, options: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    folder = llama
    if kind == "qwen3":
        config = transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True, dtype="bfloat16")
        folder = folder_of(tmp_path / "model", config=config, dtype=torch.bfloat16)
    elif kind == "gpt2":
        folder = folder_of(tmp_path / "model", config=transformers.GPT2Config(**GPT2))
    model = adapted(folder, **options)
    model.save_pretrained(tmp_path / "adapter")
    out = tmp_path / "new" / "merged"
    assert merge(tmp_path / "adapter", out) == (tmp_path / "adapter", folder)
    base, found = (transformers.AutoModelForCausalLM.from_pretrained(each) for each in (folder, out))
    assert equal(weights(found), weights(model.merge_and_unload())) and found.dtype == base.dtype
    assert not equal(weights(found), weights(base)) and not (out / "adapter_config.json").exists()
    tokenizers = [transformers.AutoTokenizer.from_pretrained(each) for each in (folder, out)]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template and os.listdir(tmp_path / "new") == ["merged"]


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_one_of_two_tied_weights_leaves_the_other(target: str, tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)
    model = adapted(folder_of(tmp_path / "model", config=config), target_modules=[target])
    model.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits, rtol=0, atol=1e-5)
    assert not merged.config.tie_word_embeddings


@pytest.mark.slow
def test_a_training_is_merged_into_the_base_that_it_had(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, lora=4, save=tmp_path / "run")
    train(recipe)
    saved = tmp_path / "run" / "step-00000003"
    assert merge(tmp_path / "run", tmp_path / "merged") == (saved, Path(recipe.model))
    base = transformers.AutoModelForCausalLM.from_pretrained(recipe.model)
    expected = peft.PeftModel.from_pretrained(base, saved).merge_and_unload()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert equal(weights(merged), weights(expected))
    train(replace(recipe, model=str(tmp_path / "merged"), lora=0, save=None, steps=1))  # it can be trained again
    config = transformers.LlamaConfig(**SIZES, initializer_range=0.5)
    other = folder_of(tmp_path / "other", config=config)
    with pytest.raises(CheckpointError, match="expected the model that this training began with, found another"):
        merge(tmp_path / "run", tmp_path / "again", other)
    assert not (tmp_path / "again").exists()


def refused(*arguments: Path | str) -> str:
    output = CliRunner().invoke(app, ["merge", *map(str, arguments)])
    assert output.exit_code == 2 and "Traceback" not in output.output, output.output
    return output.stderr


def test_what_cannot_be_merged_is_refused(llama: Path, tmp_path: Path) -> None:
    adapter, out = llama.parent / "adapter", tmp_path / "out"
    small = folder_of(tmp_path / "small", config=transformers.LlamaConfig(**{**SIZES, "intermediate_size": 24}))
    gpt2 = folder_of(tmp_path / "gpt2", config=transformers.GPT2Config(**GPT2))
    two = folder_of(tmp_path / "two", config=transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2}))
    for folder in (llama, two):
        adapted(folder, target_modules=["q_proj"]).save_pretrained(tmp_path / f"of-{folder.name}")
    assert "that PEFT refuses it" in refused(adapter, out, "--base", small) and not out.exists()
    assert "that PEFT refuses it" in refused(adapter, out, "--base", gpt2)
    assert "found 2 tensors" in (said := refused(tmp_path / "of-two", out, "--base", llama)) and "layers.1." in said
    assert "found 2 tensors" in (said := refused(tmp_path / "of-model", out, "--base", two)) and "not in its file" in said
    assert "whole weights, which need no merging" in refused(llama, out)
    assert "found no such folder" in refused(tmp_path / "none", out)
    assert "expected --base to name the folder of the base" in refused(adapter, out, "--base", tmp_path / "none")
    assert "an empty text" in refused(adapter, "") and "an empty text" in refused("", out)
    lost = shutil.copytree(adapter, tmp_path / "lost")
    config = (lost / "adapter_config.json").read_text()
    (lost / "adapter_config.json").write_text(config.replace(str(llama), "meta-llama/Llama-3.1-8B"))
    assert "found 'meta-llama/Llama-3.1-8B', which is not there (nothing is downloaded): pass --base" in refused(lost, out)
    (lost / "adapter_config.json").write_text("{")
    assert "adapter_config.json" in refused(lost, out)
    (lost / "adapter_model.safetensors").rename(lost / "adapter_model.bin")
    assert "a pickle, which is not read" in refused(lost, out)
    out.mkdir()
    (out / "notes").write_text("mine")
    assert "a folder that is not empty" in refused(adapter, out) and os.listdir(out) == ["notes"]
    assert "notes, a file" in refused(adapter, out / "notes")


@pytest.mark.slow
def test_a_kill_leaves_no_folder_that_looks_whole(llama: Path, tmp_path: Path) -> None:
    """Stopped when its files are on the disk and about to get their name; the next merge deletes them."""
    stop = (
        "import os, pathlib, time; from mtcompile.checkpoint import files\n"
        "pathlib.Path.rename = lambda *_: (print('here', flush=True), time.sleep(60))\n"
        "from mtcompile.trainer.merging import merge\n"
        f"merge(pathlib.Path({str(llama.parent / 'adapter')!r}), pathlib.Path({str(tmp_path / 'out')!r}))"
    )
    environment = {**os.environ, "MT_CACHE": "0", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-c", stop], **options)
    assert process.stdout is not None and process.stdout.readline() == b"here\n"
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.unfinished-") and (left / "config.json").exists()
    merge(llama.parent / "adapter", tmp_path / "other")  # of another name: it is left alone
    assert left.exists()
    shutil.rmtree(tmp_path / "other")
    process.send_signal(signal.SIGKILL)
    process.wait()
    merge(llama.parent / "adapter", tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
