"""Long texts and conversations: the tokens of one call, in bounded memory and time."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtcompile.data.encoding import conversation, encode
from mtcompile.data.records import Record, read_records
from mtcompile.data.streaming import text_pieces, tokens_of
from mtcompile.reading import limited_time
from tests.data.folders import tokenizer_of

tokenizers = pytest.importorskip("tokenizers")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "12345", "日本語", "é", "ü", "🎉", "\n", "\n\n", "", "\t", "foo_bar"]


def drawn(count: int, between: str = " ") -> str:
    source = random.Random(0)
    return between.join(source.choice(WORDS) * source.randint(1, 3) for _ in range(count))


def unigram() -> Any:
    """Words begin with a mark, which is also put before the text, as in models of sentencepiece."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    special = ["<s>", "</s>", "<unk>"]
    made.train_from_iterator(
        [drawn(5000)], trainers.UnigramTrainer(vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=special)
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("make", [tokenizer_of, unigram])
@pytest.mark.parametrize("text", [drawn(25_000), drawn(20_000, "_ "), "hi", ""])
def test_text_in_pieces_has_the_tokens_of_the_whole(make: Any, text: str) -> None:
    tokenizer = make()
    whole = tokenizer(text)["input_ids"]
    parts = [text[:10], *(text[start : start + 999] for start in range(10, len(text), 999))]
    assert np.concatenate(list(tokens_of(parts, tokenizer))).tolist() == whole


def test_a_long_file_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtcompile.data.records._LONG_NBYTES", 1000)
    text, tokenizer = drawn(25_000), tokenizer_of()
    (tmp_path / "a.txt").write_text(text)
    (record,) = read_records([tmp_path / "a.txt"])
    assert record.file == tmp_path / "a.txt" and "".join(text_pieces(record.file)) == text
    samples, whole = encode([record], tokenizer, 128), encode([Record("b", text)], tokenizer, 128)
    assert all(map(np.array_equal, (samples.tokens, samples.starts), (whole.tokens, whole.starts)))
    ids, starts = tokenizer(text)["input_ids"], set(samples.starts[:-1].tolist())
    joined = [ids[0], *(int(t) for n, t in enumerate(samples.tokens) if n not in starts)]
    assert joined[: len(ids)] == ids
    (tmp_path / "b.txt").write_bytes(b"a" * 5000 + b"\xff")
    with pytest.raises(ValueError, match=r"b.txt: expected UTF-8 text, found something else near byte 5000"):
        list(read_records([tmp_path / "b.txt"]))


def dialogue(count: int) -> Record:
    words = ("user", "assistant")
    return Record("x", messages=tuple({"role": words[n % 2], "content": f"the cat {n}"} for n in range(count)))


def test_all_messages_are_found_at_once_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, record = tokenizer_of(), dialogue(40)
    ids, targets = conversation(record, tokenizer)
    monkeypatch.setattr("mtcompile.data.encoding._FEW", 1000)
    assert all(map(np.array_equal, (ids, targets), conversation(record, tokenizer))) and targets.any()


def test_the_time_of_a_conversation_grows_with_its_length() -> None:
    tokenizer, took = tokenizer_of(), []
    for count in (1000, 1000, 4000):
        began = time.process_time()
        conversation(dialogue(count), tokenizer)
        took.append(time.process_time() - began)
    assert took[2] < 10 * max(took[1], 0.02)


def test_a_chat_template_has_a_limit_of_time() -> None:
    words = r"expected the chat template to take at most 0.05 seconds"
    with pytest.raises(TimeoutError, match=words), limited_time(0.05, "the chat template"):
        while True:
            pass
