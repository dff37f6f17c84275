"""Tokens of conversations: what the assistant says is trained and nothing else, whatever way the template has of writing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from mtcompile.data.encoding import conversation, encode, load_tokenizer
from mtcompile.data.records import Record, record_of
from tests.data.folders import CHAT, SPECIAL, folder_of, tokenizer_of

pytest.importorskip("transformers")
AddedToken = pytest.importorskip("tokenizers").AddedToken
TALK = (
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "Four."},
    {"role": "assistant", "content": "Yes: Four."},
)
IN_BRACKETS = (  # of Llama 2: no word for the assistant, contents are trimmed, an answer ends with the end token
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
WITHOUT_END = (  # nothing ends a turn; no prompt for an answer
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
)
THINKING = (  # of Qwen 3: the last answer has a block of its own, earlier ones lose theirs
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1].lstrip('\n') %}"
    "{% elif m['role'] == 'assistant' and '</think>' not in text %}{% set text = '<think>\n\n</think>\n\n' + text %}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + text + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
GENERATION = (  # says itself what the assistant generates
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{% generation %}{{ m['content'] + '<|end|>' }}"
    "{% endgeneration %}{% else %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)


def trained_parts(tokenizer: Any, messages: Any = TALK) -> tuple[str, list[str]]:
    """Returns a conversation's text, and its trained stretches."""
    ids, trained = conversation(Record("here", messages=tuple(messages)), tokenizer)
    parts: list[list[int]] = []
    for number, (token, target) in enumerate(zip(ids.tolist(), trained.tolist(), strict=True)):
        if target:
            if not (number and trained[number - 1]):
                parts.append([])
            parts[-1].append(token)
    return tokenizer.decode(ids.tolist()), [tokenizer.decode(part) for part in parts]


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (CHAT, ["Four.<|end|>", "Yes: Four.<|end|>"]),
        (IN_BRACKETS, ["Four. <|end|>", "Yes: Four. <|end|>"]),
        (WITHOUT_END, ["Four.", "Yes: Four."]),
        (THINKING, ["Four.<|end|>", "<think>\n\n</think>\n\nYes: Four.<|end|>"]),
        (GENERATION, ["Four.<|end|>", "Yes: Four.<|end|>"]),
    ],
    ids=["turns", "brackets", "without end", "thinking", "generation"],
)
def test_the_assistants_words_and_their_end_are_trained(template: str, parts: list[str]) -> None:
    text, trained = trained_parts(tokenizer_of(template))
    assert [part.strip() for part in trained] == parts
    assert text.count("Four.") == 3  # the user's is not trained


@pytest.mark.long
@pytest.mark.parametrize("template", [CHAT, IN_BRACKETS, THINKING, GENERATION])
def test_words_are_found_in_tokens_of_sentencepiece_models_too(template: str) -> None:
    """Their tokens begin with the space before a word, and letters that they do not know are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    model.train([str(Path(__file__).parents[1] / "conftest.py")], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|end|>", pad_token="<|pad|>", extra_special_tokens=SPECIAL[1:4]
    )
    tokenizer.chat_template = template
    messages = ({"role": "user", "content": "Zwei?"}, {"role": "assistant", "content": "Größe: zwei ✓"}, *TALK[3:])
    first, second = trained_parts(tokenizer, messages)[1]
    assert first.strip().replace(" <|", "<|") == "Größe: zwei ✓<|end|>"
    assert second.replace(" <|", "<|").endswith("Yes: Four.<|end|>") and "Four.Yes" not in second


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=12).filter(lambda text: "\ue000" not in text), min_size=2, max_size=6))
def test_whatever_is_said_the_assistants_half_is_trained(contents: list[str]) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(contents)]
    _, trained = trained_parts(tokenizer_of(), messages)
    assert trained == [text + "<|end|>" for text in contents[1::2]]


def test_by_hand() -> None:
    """Each token's target, written down."""
    tokenizer = tokenizer_of()
    ids, trained = conversation(Record("here", messages=(TALK[1], TALK[2])), tokenizer)
    role, said, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>", "<|end|>"])
    asked, told, line = (tokenizer(text)["input_ids"] for text in ("Two and two?", "Four.", "\n"))
    assert ids.tolist() == [role, *asked, end, *line, said, *told, end, *line]
    assert trained.tolist() == [False] * (len(asked) + 2 + len(line) + 1) + [True] * (len(told) + 1) + [False] * len(line)


def test_reasoning_that_a_template_drops_is_not_missed() -> None:
    messages = ({**TALK[1]}, {"role": "assistant", "content": "<think>\n2+2\n</think>\n\nFour."}, *TALK[3:])
    _, trained = trained_parts(tokenizer_of(THINKING), messages)
    assert trained == ["Four.<|end|>", "<think>\n\n</think>\n\nYes: Four.<|end|>"]


def test_calls_of_tools_are_trained() -> None:
    template = CHAT.replace(
        "message['content'] +", "message['content'] + (message.tool_calls | tojson if message.tool_calls else '') +"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    _, trained = trained_parts(tokenizer_of(template), (TALK[1], call, {"role": "tool", "content": "4"}, TALK[2]))
    assert [part.strip() for part in trained] == ['[{"name": "add"}]<|end|>', "Four.<|end|>"]


def test_alpaca_and_share_gpt_encode_as_messages_do() -> None:
    tokenizer = tokenizer_of()
    forms = (
        {"messages": list(TALK[1:3])},
        {"conversations": [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}]},
        {"instruction": "Two and two?", "input": "", "output": "Four."},
    )
    encoded = [conversation(record_of(form, "here"), tokenizer) for form in forms]
    assert len({(tuple(ids), tuple(trained)) for ids, trained in encoded}) == 1


@pytest.mark.parametrize(("prompt", "answer"), [("Two and two?", " Four."), ("Two?\n", "Four.<|end|>"), ("", "Four.")])
def test_of_a_prompt_and_its_completion_the_completion_and_its_end_are_trained(prompt: str, answer: str) -> None:
    tokenizer = tokenizer_of()
    samples = encode([record_of({"prompt": prompt, "completion": answer}, "here")], tokenizer, 64)
    asked, said = (tokenizer(text)["input_ids"] for text in (prompt, answer.removesuffix("<|end|>")))
    assert samples.tokens.tolist() == [*asked, *said, tokenizer.eos_token_id]
    first = len(asked) or 1  # the first token of a sample is no target
    assert samples.trained.tolist() == [False] * first + [True] * (len(asked) + len(said) + 1 - first)


@pytest.mark.parametrize("template", [CHAT, IN_BRACKETS, WITHOUT_END, THINKING, GENERATION])
@pytest.mark.parametrize("turns", [1, 3])
def test_of_a_prompt_of_messages_no_answer_is_trained(template: str, turns: int) -> None:
    tokenizer, talk = tokenizer_of(template), [*TALK, *TALK[1:] * turns]
    record = record_of({"prompt": talk[:-3], "completion": talk[-3:]}, "here")
    ids, trained = conversation(record, tokenizer)
    whole, as_messages = conversation(record_of({"messages": talk}, "here"), tokenizer)
    assert ids.tolist() == whole.tolist() and set(np.flatnonzero(trained)) < set(np.flatnonzero(as_messages))
    kept = tokenizer.decode(ids[trained].tolist())
    assert kept.count("Four.") == 2 and kept.count("Yes: Four.") == 1 and "Two" not in kept


def test_long_text_is_cut_so_that_each_token_is_a_target_once() -> None:
    tokenizer = tokenizer_of()
    text = "import argparse, ast, os; " * 20
    whole = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    samples = encode([Record("here", text), Record("there", "")], tokenizer, 16)
    assert samples.lengths.max() == 16 and len(samples) == -(-(len(whole) - 1) // 15)
    targets = samples.tokens[samples.trained]
    assert targets.tolist() == whole[1:]


def test_long_conversations_are_refused_cut_or_dropped() -> None:
    tokenizer = tokenizer_of()
    records = [Record("line 1", messages=TALK[1:3]), Record("line 2", messages=TALK)]
    long = len(conversation(records[1], tokenizer)[0])
    short = len(conversation(records[0], tokenizer)[0])
    for more, others in ([], ""), ([records[1]], rf" \(1 more are too long, the longest of {long}\)"):
        with pytest.raises(
            ValueError, match=rf"line 2: expected at most 24 tokens, found {long}{others}: give --seq {long}, or"
        ):
            encode(records + more, tokenizer, 24)
    dropped = encode(records, tokenizer, 24, "drop")
    assert dropped.lengths.tolist() == [short] and dropped.too_long == 1
    assert encode(records, tokenizer, 24, "cut").lengths.tolist() in ([short, 24], [short])  # without a target it is left out
    with pytest.raises(ValueError, match="expected tokens to train on in the data, found none"):
        encode(records, tokenizer, 2, "cut")


def test_templates_that_cannot_serve_are_refused_with_the_records_place() -> None:
    def said(template: str | None, messages: Any = TALK) -> str:
        with pytest.raises(ValueError) as raised:
            conversation(Record("data.jsonl, line 7", messages=tuple(messages)), tokenizer_of(template))
        assert str(raised.value).startswith("data.jsonl, line 7: ")
        return str(raised.value)

    assert "expected a chat template for conversations, found none" in said(None)
    assert "refuses these messages: no system" in said("{{ raise_exception('no system') }}")
    assert "refuses these messages" in said("{% for m in messages %}{{ m }}")  # it does not end
    assert "refuses these messages" in said("{{ messages.__class__.__mro__[1].__subclasses__() }}")  # the sandbox
    assert "expected a chat template that shows this message once" in said("{{ messages[0]['content'] }}")
    assert "expected no character U+E000" in said(CHAT, (TALK[1], {"role": "assistant", "content": "\ue000"}))


def test_a_tokenizer_is_read_from_the_folder_and_nothing_of_it_is_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", chat_template=None)
    own = tmp_path / "own.jinja"
    own.write_text(CHAT)
    assert load_tokenizer(folder).chat_template is None and load_tokenizer(folder, own).chat_template == CHAT
    text = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(text.replace("{", '{"auto_map": {"AutoTokenizer": ["own.Own", null]},', 1))
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="found one that cannot be loaded"):
        load_tokenizer(folder)


QWEN = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.tool_calls %}{{ '<|im_start|>assistant' }}{% for c in m.tool_calls %}{{ '\n' + c.function.name }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("special", [True, False])
def test_a_turn_ends_once_also_behind_calls_of_tools_and_at_tokens_that_are_not_special(special: bool) -> None:
    tokenizer = tokenizer_of(QWEN)
    tokenizer.add_tokens([AddedToken(name, special=special, normalized=False) for name in ("<|im_start|>", "<|im_end|>")])
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    answer = {"role": "assistant", "content": "seven"}
    talk = [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "7"}, answer]
    assert trained_parts(tokenizer, record_of({"messages": talk}, "here").messages)[1] == ["f<|im_end|>", "seven<|im_end|>"]


def test_a_template_whose_turns_end_with_text_is_said() -> None:
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"}]
    with pytest.warns(UserWarning, match="will not learn where to stop"):
        encode([record_of({"messages": talk}, "f, line 1")], tokenizer, 64)
