"""examples/trl_trainers.py: TRL's trainers train compiled models with the losses, rewards and weights of plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mtcompile
from tests.project.examples import equal, example, weights

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of libraries about each other
QUIET: dict[str, Any] = {"disable_tqdm": True, "save_strategy": "no"}
CLOCKED = ("runtime", "per_second", "step_time", "total_flos")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("trl", "datasets"):  # not where tests are only collected: loading them takes seconds
        pytest.importorskip(name)
    torch.compiler.reset()


def history(trainer: Any) -> list[dict[str, float]]:
    """Returns what was logged, clocks and speeds left out."""
    return [{name: v for name, v in row.items() if not name.endswith(CLOCKED)} for row in trainer.state.log_history]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("packed", {"steps": 1, "layers": 1, "bf16": False, "gradient_checkpointing": False}),
        pytest.param("sft", {}, marks=pytest.mark.long),
        pytest.param("packed", {}, marks=pytest.mark.long),
        pytest.param("sft", {"gradient_accumulation_steps": 2, "gradient_checkpointing": False}, marks=pytest.mark.long),
        pytest.param("dpo", {}, marks=pytest.mark.long),
        pytest.param("grpo", {}, marks=pytest.mark.long),
        pytest.param("grpo", {"num_iterations": 2, "steps": 4}, marks=pytest.mark.long),
    ],
)
def test_the_history_is_that_of_a_plain_model(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    train = example("trl_trainers").train
    plain = train(kind, str(tmp_path / "plain"), None, **QUIET, **options)
    compiled = train(kind, str(tmp_path / "compiled"), "16MiB", **QUIET, **options)
    assert history(compiled) == history(plain) and equal(weights(compiled.model), weights(plain.model))
    assert any(row.get("grad_norm", 0) > 0 for row in history(plain))  # there was something to learn
    report = compiled.model.memory_report()
    assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= 16 * 2**20
    compiled.save_model(str(tmp_path / "saved"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert equal(weights(again), weights(compiled.model))


SMALL: dict[str, Any] = {"steps": 2, "layers": 1, "gradient_checkpointing": False}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("whole", {**SMALL, "steps": 1}),
        ("whole-dpo", SMALL),
        pytest.param("whole", {"gradient_accumulation_steps": 2}, marks=pytest.mark.long),
        pytest.param("whole", {"max_grad_norm": 0.0}, marks=pytest.mark.long),
        pytest.param("whole-dpo", {"gradient_accumulation_steps": 2}, marks=pytest.mark.long),
    ],
)
def test_with_a_loss_from_what_the_model_returns_updates_are_in_the_backward(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    train = example("trl_trainers").train
    plain = train(kind, str(tmp_path / "plain"), None, **QUIET, **options)
    compiled = train(kind, str(tmp_path / "compiled"), "16MiB", compiled={"update": "backward"}, **QUIET, **options)
    assert history(compiled) == history(plain) and equal(weights(compiled.model), weights(plain.model))
    assert "in the backward" in str(compiled.model.plan.updates) and not compiled.model.plan.notes


@pytest.mark.parametrize("kind", ["backbone-dpo", pytest.param("backbone-sft", marks=pytest.mark.long)])
def test_below_the_loss_of_trl_updates_of_the_backbone_are_in_the_backward(kind: str, tmp_path: Path) -> None:
    train, update = example("trl_trainers").train, {"update": "backward"}
    plain = train(kind, str(tmp_path / "plain"), None, max_grad_norm=0.0, **QUIET, **SMALL)
    compiled = train(kind, str(tmp_path / "compiled"), "16MiB", compiled=update, max_grad_norm=0.0, **QUIET, **SMALL)
    assert history(compiled) == history(plain) and equal(weights(compiled.model), weights(plain.model))
    assert "in the backward" in str(compiled.model.model.plan.updates)


@pytest.mark.long
def test_adapters_learn_preferences_against_their_base_with_updates_in_the_backward(tmp_path: Path) -> None:
    """In bf16 with gradient checkpointing, TRL's defaults; the reference is the same model without its adapters."""
    peft, own = pytest.importorskip("peft"), example("trl_trainers")
    trl = pytest.importorskip("trl")
    data = own.Dataset.from_dict({"prompt": own.ASKED, "chosen": own.RIGHT, "rejected": own.WRONG})
    options: dict[str, Any] = {"max_length": 48, "pad_to_multiple_of": 48, "use_cpu": True, "report_to": [], **QUIET}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    trainers = []
    for memory in (None, "64MiB"):
        transformers.set_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(own.WORDS), eos_token_id=1, **sizes))
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        if memory is not None:
            model = mtcompile.compile(model, memory=memory, update="backward")
        config = trl.DPOConfig(str(tmp_path), max_steps=2, logging_steps=1, per_device_train_batch_size=2, **options)
        trainers.append(own.WholeDPOTrainer(model, None, config, train_dataset=data, processing_class=own.tokenizer()))
        trainers[-1].train()
    assert history(trainers[0]) == history(trainers[1])
    assert equal(weights(trainers[0].model), weights(trainers[1].model))
    assert "in the backward" in str(trainers[1].model.plan.updates)


@pytest.mark.parametrize("kind", ["dpo", pytest.param("sft", marks=pytest.mark.long)])
def test_the_loss_of_trl_is_refused_within_the_model(kind: str, tmp_path: Path) -> None:
    with pytest.raises(mtcompile.CaptureError, match=r"chunked_logprob\.py.*\n.*compile the submodules"):
        example("trl_trainers").train(kind, str(tmp_path), "16MiB", compiled={"update": "backward"}, **QUIET, **SMALL)


@pytest.mark.long
def test_a_reference_model_that_trl_loads_from_the_folder_is_used(tmp_path: Path) -> None:
    trl, own = pytest.importorskip("trl"), example("trl_trainers")
    folder = str(tmp_path / "model")
    own.train("sft", str(tmp_path), None, steps=1, layers=1, **QUIET).save_model(folder)
    data = own.Dataset.from_dict({"prompt": own.ASKED, "chosen": own.RIGHT, "rejected": own.WRONG})
    options: dict[str, Any] = {"max_length": 48, "pad_to_multiple_of": 48, "use_cpu": True, "report_to": [], **QUIET}
    trainers = []
    for load in (transformers.AutoModelForCausalLM.from_pretrained, mtcompile.from_pretrained):
        transformers.set_seed(0)
        model = load(folder)
        config = trl.DPOConfig(str(tmp_path / "run"), max_steps=2, logging_steps=1, **options)
        trainers.append(trl.DPOTrainer(model, args=config, train_dataset=data, processing_class=own.tokenizer()))
        trainers[-1].train()
    assert history(trainers[0]) == history(trainers[1]) and isinstance(trainers[1].model, mtcompile.CompiledModule)
    assert equal(weights(trainers[0].model), weights(trainers[1].model))


@pytest.mark.long
def test_adapters_that_trl_adds_to_a_compiled_model_train_as_plain_ones(tmp_path: Path) -> None:
    peft, own = pytest.importorskip("peft"), example("trl_trainers")
    trl = pytest.importorskip("trl")
    data = own.Dataset.from_dict({"messages": [asked + right for asked, right in zip(own.ASKED, own.RIGHT)]})
    options: dict[str, Any] = {"max_steps": 2, "logging_steps": 1, "use_cpu": True, "per_device_train_batch_size": 2}
    options |= {"pad_to_multiple_of": 48, "report_to": []}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    trainers = []
    for memory in (None, "16MiB"):
        transformers.set_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(own.WORDS), eos_token_id=1, **sizes))
        if memory is not None:
            model = mtcompile.compile(model, memory=memory)
        config = trl.SFTConfig(str(tmp_path), **options, **QUIET)
        lora = peft.LoraConfig(r=4, target_modules="all-linear")
        trainer = trl.SFTTrainer(model, config, train_dataset=data, processing_class=own.tokenizer(), peft_config=lora)
        trainer.train()
        trainers.append(trainer)
    assert history(trainers[0]) == history(trainers[1])
    assert equal(weights(trainers[0].model), weights(trainers[1].model))
    assert trainers[1].model.get_base_model().plan is not None
