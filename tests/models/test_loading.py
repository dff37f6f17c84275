"""Models named on the command line: a configuration builds a model, or says what is wrong; nothing is fetched or imported."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

pytest.importorskip("transformers")

from mtcompile.models.loading import build_model, model_named

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The addresses that were asked for. None can be reached."""
    asked: list[object] = []

    def refuse(*address: object, **options: object) -> NoReturn:
        asked.append(address)
        raise OSError("there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return asked


def built(folder: Path, fields: object) -> torch.nn.Module:
    path = folder / "config.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return build_model(model_named(str(path)), 1, 4)[0]


def test_a_configuration_builds_its_model(tmp_path: Path) -> None:
    model = built(tmp_path, {**SMALL, "dtype": "bfloat16"})
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and torch.get_default_dtype() == torch.float32
    of_folder = build_model(model_named(str(tmp_path)), 1, 4)[0]
    assert type(of_folder) is type(model) and of_folder.config.to_dict() == model.config.to_dict()  # type: ignore[operator]


_ENCODER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
_LAYER = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}
_HALVES = {f"{half}_{what}": n for half in ("encoder", "decoder") for what, n in _LAYER.items()}
_IDS = {f"{what}_token_id": n for n, what in enumerate(("pad", "bos", "eos", "decoder_start"))}
_WRITES = {**_IDS, "vocab_size": 64, "d_model": 32}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_TEXT = {**SMALL, "model_type": "qwen2_5_vl_text", "num_attention_heads": 4, "rope_parameters": _ROPE}
_SEES = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
ARCHITECTURES: dict[str, dict[str, Any]] = {  # class -> what its configuration says
    "T5ForConditionalGeneration": {"model_type": "t5", "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, **_WRITES},
    "WhisperForConditionalGeneration": {
        "model_type": "whisper", "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 8,
        **_HALVES, **_WRITES,
    },
    "ViTForImageClassification": {"model_type": "vit", "image_size": 32, "patch_size": 8, **_ENCODER},
    "BertForQuestionAnswering": {"model_type": "bert", "vocab_size": 64, **_ENCODER},
    "BertForTokenClassification": {"model_type": "bert", "vocab_size": 64, **_ENCODER},
    "BertForSequenceClassification": {"model_type": "bert", "vocab_size": 64, **_ENCODER},
    "Qwen2_5_VLForConditionalGeneration": {"model_type": "qwen2_5_vl", "text_config": _TEXT, "vision_config": _SEES},
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:.* is planned for text alone")
def test_a_configuration_builds_the_class_that_it_names_with_inputs_of_its_own(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**ARCHITECTURES[name], "architectures": [name]}))
    model, data = build_model(model_named(str(tmp_path)), 2, 4)
    assert type(model).__name__ == name and all(value.shape[0] == 2 for value in data.values())
    assert model(**data).loss.isfinite()


def test_images_that_are_not_planned_are_named(tmp_path: Path) -> None:
    name = "Qwen2_5_VLForConditionalGeneration"
    (tmp_path / "config.json").write_text(json.dumps({**ARCHITECTURES[name], "architectures": [name]}))
    with pytest.warns(UserWarning, match=f"{name} is planned for text alone"):
        build_model(model_named(str(tmp_path)), 2, 4)


@pytest.mark.parametrize("name", ["ViTForImageClassification", "LlamaModel", "Nobody", "AutoModel", "system", 3])
def test_an_architecture_that_is_not_of_this_configuration_is_left_to_its_type(name: object, tmp_path: Path) -> None:
    assert type(built(tmp_path, {**SMALL, "architectures": [name]})).__name__ == "LlamaForCausalLM"


def test_a_model_of_other_inputs_is_told_how_to_be_planned(tmp_path: Path) -> None:
    sound = {"model_type": "wav2vec2", "vocab_size": 32, **_ENCODER, "architectures": ["Wav2Vec2ForCTC"]}
    with pytest.raises(ValueError, match=r"found Wav2Vec2ForCTC, which takes input_values: write a file\.py:factory"):
        built(tmp_path, sound)
    with pytest.raises(ValueError, match=r"expected .* to say of which size the model's inputs are"):
        built(tmp_path, {"model_type": "speech_to_text", "architectures": ["Speech2TextForConditionalGeneration"]})


def test_code_that_a_configuration_names_is_not_run(tmp_path: Path, connections: list[object]) -> None:
    code = {"AutoConfig": "else/where--file.Config", "AutoModelForCausalLM": "else/where--file.Model"}
    model = built(tmp_path, {**SMALL, "auto_map": code, "trust_remote_code": True, "_name_or_path": "else/where"})
    assert type(model).__name__ == "LlamaForCausalLM" and not connections


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**SMALL, "_attn_implementation": "else/where"}, "_attn_implementation: expected an implementation by name"),
        ({**SMALL, "attn_implementation": {"text_config": "else/where"}}, "attn_implementation: expected"),
        ({"model_type": "timm_backbone", "use_pretrained_backbone": True}, "use_pretrained_backbone: expected"),
        ({"model_type": "llava", "vision_config": {"pretrained": True}}, "pretrained: expected false"),
        ({**SMALL, "dtype": "load"}, "expected a dtype of floating-point numbers"),
        ({**SMALL, "vocab_size": "many"}, "a model of type llama, found Field 'vocab_size' expected int, got str"),
        ({**SMALL, "hidden_size": -1}, r"of type llama, found The hidden size \(-1\) is not a multiple.*: correct the file"),
        ({**SMALL, "use_cache": "yes"}, "found Field 'use_cache' expected bool, got str"),
        ({**SMALL, "num_attention_heads": 0}, "a value that Transformers fails on .ZeroDivisionError: integer"),
        ({"hidden_size": 32}, "a model_type that Transformers knows, such as llama, found .*config.json with none"),
        ({**SMALL, "model_type": "lama"}, "with 'lama'; did you mean llama"),
        ({**SMALL, "a": json.loads("[" * 900 + "]" * 900)}, "nested too deep"),
        ({**SMALL, "vocab_size": -5}, "vocab_size: expected a whole number above 0, found -5"),
        ({**SMALL, "vocab_size": 10**400}, "a whole number of 401 digits, which 64 bits do not hold"),
        ({**SMALL, "num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 10,000, found 1e\\+09"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer: expected at most 10,000"),
        ({"model_type": "llava", "text_config": {**SMALL, "num_hidden_layers": 1e9}}, "num_hidden_layers: expected at most"),
        ({**SMALL, "hidden_act": "unheard"}, "to configure a causal language model, found that it raised KeyError"),
        ({"model_type": "../x"}, "expected a Hugging Face config file with a model_type"),
        ([SMALL], "expected a Hugging Face config file with a model_type, found .* instead of an object of fields"),
        ("[" * 100_000, "expected a Hugging Face config file with a model_type"),
    ],
)
def test_what_builds_no_model(tmp_path: Path, connections: list[object], fields: object, words: str) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own; libraries raise it
    try:
        with pytest.raises(ValueError, match=words):
            built(tmp_path, fields)
    finally:
        sys.setrecursionlimit(limit)
    assert not connections
