"""Folders as a model hub has them: random weights of a small configuration, a tokenizer trained on the standard library."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import torch

CHAT = (  # each turn is <|role|>content<|end|>
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
VOCABULARY = 384
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}  # fmt: skip


@functools.cache
def _trained() -> str:
    """Returns a byte-level tokenizer as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    sources = Path(argparse.__file__).parent
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(sources / name) for name in ("argparse.py", "ast.py", "os.py")], trainer)
    return str(tokenizer.to_str())


def tokenizer_of(chat_template: str | None = CHAT) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        eos_token="<|end|>",
        pad_token="<|pad|>",
        extra_special_tokens=SPECIAL[1:4],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def folder_of(path: Path, chat_template: str | None = CHAT, dtype: torch.dtype = torch.float32, config: Any = None) -> Path:
    """Writes weights, configuration and tokenizer into a folder. Without a configuration: those of a small Llama."""
    import transformers

    torch.manual_seed(0)
    config = config or transformers.LlamaConfig(**SIZES)
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(path)  # type: ignore[no-untyped-call]
    tokenizer_of(chat_template).save_pretrained(path)
    return path


def chats(path: Path, count: int = 12) -> Path:
    """Writes conversations of several lengths, in the form of messages, ShareGPT and Alpaca in turn."""
    words = (Path(argparse.__file__)).read_text(encoding="utf-8").split()
    lines: list[dict[str, Any]] = []
    for number in range(count):
        asked, told = (" ".join(words[start : start + 2 + number % 5]) for start in (40 + 9 * number, 300 + 7 * number))
        lines.append(
            (
                {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]},
                {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": told}]},
                {"instruction": asked, "input": "", "output": told},
            )[number % 3]
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
