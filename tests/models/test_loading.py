"""Models named on the command line: a configuration builds a model, or says what is wrong; nothing is fetched or imported."""

from __future__ import annotations

import json
import socket
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
        ({**SMALL, "vocab_size": "many"}, "expected a Hugging Face config file"),
        ({**SMALL, "vocab_size": -5}, "vocab_size: expected a whole number above 0, found -5"),
        ({**SMALL, "vocab_size": 10**400}, "a whole number of 401 digits, which 64 bits do not hold"),
        ({**SMALL, "num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 10,000, found 1e\\+09"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer: expected at most 10,000"),
        ({"model_type": "llava", "text_config": {**SMALL, "num_hidden_layers": 1e9}}, "num_hidden_layers: expected at most"),
        ({**SMALL, "hidden_act": "unheard"}, "to configure a causal language model, found that it raised KeyError"),
        ({"model_type": "../x"}, "expected a Hugging Face config file with a model_type"),
        ([SMALL], "expected a Hugging Face config file with a model_type"),
        ("[" * 100_000, "expected a Hugging Face config file with a model_type"),
    ],
)
def test_what_builds_no_model(tmp_path: Path, connections: list[object], fields: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        built(tmp_path, fields)
    assert not connections
