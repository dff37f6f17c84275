"""Turns records into tokens, by a folder's tokenizer and chat template, and finds those to train: the assistant's.

A chat template renders a whole conversation as text. If it has ``{% generation %}`` blocks, they say where a message of the
assistant begins and ends. Otherwise that is found by rendering again: the message begins after what the template gives as the
prompt for it, and ends where the text changes if something is appended to its content. The token that ends its turn is trained
too.
"""

from __future__ import annotations

import re
import warnings
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mtcompile import progress
from mtcompile.capture.refusals import first_line
from mtcompile.data.folder import check_tokenizer
from mtcompile.data.records import Record
from mtcompile.data.streaming import WINDOW, text_pieces, tokens_of
from mtcompile.reading import FEW_NBYTES, limited_time, panics_as_errors, read_text

TooLong = Literal["stop", "cut", "drop"]
_FEW = 4  # messages of the assistant that are found one by one
_MOST_RENDERED = 2000
_MOST_AT_ONCE = 1 << 22  # characters that are tokenized in one call, at some 300 bytes for each
_MOST_TEMPLATE_S = 60.0
_MARK = "\ue000"  # a character for private use, which no record should have
_UNKNOWN_PLACE = (
    "expected a chat template that shows this message once, as it is, found one that leaves it out, changes or repeats it: "
    "give --chat-template a template that has {% generation %} blocks"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *(
        "chat_template.json",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "tokenizer.model",
        "spiece.model",
        "generation_config.json",
    ),
)


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens of all samples, one after the other, of which the ``n``-th begins at ``starts[n]``. ``trained``: whether a token
    is a target; the first of a sample never is. ``too_long``: conversations that were cut or dropped."""

    tokens: Any
    trained: Any
    starts: Any
    too_long: int = 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Any:
        return np.diff(self.starts)


def load_tokenizer(folder: Path, chat_template: Path | None = None) -> Any:
    """Returns the tokenizer of a folder, with the chat template of a file instead of its own if one is given. No code of the
    folder is run and nothing is downloaded. Raises ValueError."""
    check_tokenizer(folder)
    from transformers import AutoTokenizer

    try:
        with panics_as_errors("a tokenizer"):
            tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"expected a tokenizer in {folder}, found one that cannot be loaded: {first_line(error)}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"expected {folder} to have a fast tokenizer, of the library tokenizers, found {type(tokenizer).__name__}: save "
            "the model's fast tokenizer there"
        )
    if chat_template is not None:
        tokenizer.chat_template = read_text(chat_template, FEW_NBYTES)
    return tokenizer


def encode(records: Iterable[Record], tokenizer: Any, seq: int, too_long: TooLong = "stop") -> Samples:
    """Returns the samples of records, each of at most ``seq`` tokens. Text that is longer is cut into several, which overlap by
    one token, so that each token but the first is a target once. ``too_long``: what to do with a conversation, or a prompt and
    its completion, that is longer. Samples without targets are left out. Raises ValueError with the record's place."""
    samples = _Growing()
    added, has_end, place = _added(tokenizer), True, ""
    long: list[tuple[str, int]] = []
    for number, record in enumerate(records, 1):
        progress.tell(f"tokenizing, {number:,} records")
        if not (record.messages or record.prompt):
            for ids in _cut(_text(record, tokenizer), seq):
                samples.add(ids, np.arange(len(ids)) > 0)
            continue
        ids, trained = conversation(record, tokenizer, seq) if record.messages else completion(record, tokenizer)
        if record.messages and not place and trained.any():
            has_end, place = not added.isdisjoint(ids[: len(trained)][trained].tolist()), record.place
        if len(ids) > seq:
            long.append((record.place, len(ids)))
        if len(ids) <= seq or too_long == "cut":
            samples.add(ids[:seq], trained[:seq])
    if long and too_long == "stop":
        (place, count), most = long[0], max(count for _, count in long)
        others = f" ({len(long) - 1} more are too long, the longest of {most})" * (len(long) > 1)
        raise ValueError(
            f"{place}: expected at most {seq} tokens, found {count}{others}: give --seq {most}, or --too-long cut or drop"
        )
    if not has_end:
        warnings.warn(
            f"{place}: the chat template ends the assistant's messages with text, not with a token of the tokenizer's own: the "
            "model will not learn where to stop. Give --chat-template a template with such a token",
            stacklevel=2,
        )
    if not samples.lengths:
        raise ValueError("expected tokens to train on in the data, found none: give more --data, or a longer --seq")
    return samples.taken(len(long))


class _Growing:
    """Samples that come one by one, in arrays that grow by an eighth: none is ever there twice. Those without targets are left
    out."""

    def __init__(self) -> None:
        self.lengths = array("q")
        self._arrays: list[Any] = [np.empty(1024, np.int32), np.empty(1024, bool)]
        self._count = 0

    def add(self, ids: Any, trained: Any) -> None:
        if not trained.any():
            return
        end = self._count + len(ids)
        for grown, values in zip(self._arrays, (ids, trained), strict=True):
            if end > len(grown):
                grown.resize(max(end, len(grown) * 9 // 8), refcheck=False)
            grown[self._count : end] = values
        self._count = end
        self.lengths.append(len(ids))

    def taken(self, too_long: int) -> Samples:
        starts = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(np.frombuffer(self.lengths, np.int64), out=starts[1:])
        tokens, trained = (grown[: self._count] for grown in self._arrays)
        return Samples(tokens, trained, starts, too_long)


def _cut(pieces: Iterable[Any], seq: int) -> Iterator[Any]:
    """Cuts tokens that come in pieces into samples of at most ``seq``, which overlap by one token."""
    waiting = np.zeros(0, np.int32)
    for piece in pieces:
        waiting, start = np.concatenate((waiting, piece)), 0
        while len(waiting) - start > seq:
            yield waiting[start : start + seq]
            start += seq - 1
        waiting = waiting[start:]
    if len(waiting) > 1:
        yield waiting


def _text(record: Record, tokenizer: Any) -> Iterator[Any]:
    """Yields the tokens of a text, with the one that ends it, in pieces. Raises ValueError with the record's place."""
    end, last = tokenizer.eos_token_id, None
    backend = tokenizer.backend_tokenizer
    # A search over a whole text, not over its words, adds up scores that round otherwise from another place.
    whole = type(backend.model).__name__ == "Unigram" and backend.pre_tokenizer is None
    if record.file is None and len(record.text) <= (_MOST_AT_ONCE if whole else WINDOW):
        pieces: Iterable[Any] = [np.array(tokenizer(record.text)["input_ids"], np.int32)]
    elif record.file is None and len(record.text) <= _MOST_AT_ONCE:
        try:
            pieces = list(tokens_of([record.text], tokenizer))
        except ValueError:
            pieces = [np.array(tokenizer(record.text)["input_ids"], np.int32)]
    else:
        pieces = tokens_of([record.text] if record.file is None else text_pieces(record.file), tokenizer)
    try:
        for piece in pieces:
            last = int(piece[-1]) if len(piece) else last
            yield piece
    except ValueError as error:
        raise ValueError(f"{record.place}: {error}") from None
    if end is not None and last != end:
        yield np.array([end], np.int32)


def completion(record: Record, tokenizer: Any) -> tuple[Any, Any]:
    """Returns the tokens of a prompt and its completion, with the one that ends it, and which of them are targets: those that
    have characters of the completion, and the last. Raises ValueError."""
    whole, end = record.prompt + record.text, tokenizer.eos_token_id
    if len(whole) > _MOST_AT_ONCE:
        raise ValueError(f"{record.place}: expected at most {_MOST_AT_ONCE:,} characters, found {len(whole):,}: split it")
    encoded = tokenizer(whole, return_offsets_mapping=True)
    ids, places = encoded["input_ids"], encoded["offset_mapping"]
    if end is not None and ids[-1:] != [end]:
        ids, places = [*ids, end], [*places, (0, 0)]
    targets = np.array([stop > len(record.prompt) for _, stop in places], bool)
    targets[-1:], targets[:1] = True, False
    return np.array(ids, np.int32), targets


def conversation(record: Record, tokenizer: Any, seq: int | None = None) -> tuple[Any, Any]:
    """Returns the tokens of a conversation, and which of them are targets; of the first ``seq`` only, if it has more. Raises
    ValueError."""
    template = tokenizer.chat_template
    if template is None:
        raise ValueError(
            f"{record.place}: expected a chat template for conversations, found none with the tokenizer: give --chat-template "
            "FILE.jinja, or take the folder of a model that was trained to chat"
        )
    answered = any(message["role"] == "assistant" for message in record.messages[: record.prompts])
    if isinstance(template, str) and _GENERATION.search(template) and not answered:
        _rendered(record, tokenizer, record.messages)  # or it is refused, with the record's place
        encoded = tokenizer.apply_chat_template(
            list(record.messages), tools=record.tools, return_dict=True, return_assistant_tokens_mask=True
        )
        targets = np.array(encoded["assistant_masks"], bool)
    else:
        whole = _rendered(record, tokenizer, record.messages)
        if len(whole) > _MOST_AT_ONCE:
            raise ValueError(
                f"{record.place}: expected a conversation of at most {_MOST_AT_ONCE:,} characters, found {len(whole):,}: split "
                "it"
            )
        encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        behind = None  # what a cut leaves out is not looked at
        if seq is not None and len(encoded["input_ids"]) > seq:
            behind = encoded["offset_mapping"][seq][0]
        targets = _targets(encoded, whole, list(_spans(record, tokenizer, whole, behind)), _added(tokenizer))
    targets[:1] = False
    if not targets.any() and (seq is None or len(targets) <= seq):
        raise ValueError(
            f"{record.place}: expected tokens of the assistant to train on, found none: fill its messages, or delete the record"
        )
    return np.array(encoded["input_ids"], np.int32), targets


def _added(tokenizer: Any) -> set[int]:
    """Returns the tokens that are no pieces of text, such as those that end a turn. Some tokenizers call these not special."""
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


def _targets(encoded: Any, whole: str, spans: Sequence[tuple[int, int]], added: Collection[int]) -> Any:
    """Returns which tokens of a text lie in one of its ``spans``, or are the added token behind one, with the white space
    between them."""
    ids, places = encoded["input_ids"], np.array(encoded["offset_mapping"]).reshape(-1, 2)
    targets = np.zeros(len(ids), bool)
    for start, stop in spans:
        targets[np.searchsorted(places[:, 1], start, "right") : np.searchsorted(places[:, 0], stop)] = True
        behind = end = int(np.searchsorted(places[:, 0], stop))
        while end < len(ids) and ids[end] not in added and not whole[slice(*places[end])].strip():
            end += 1
        if end < len(ids) and ids[end] in added:
            targets[behind : end + 1] = True
    return targets


def _spans(record: Record, tokenizer: Any, whole: str, behind: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields the place of each message of the assistant in the rendered conversation: its first character, and the one behind
    its content. Those of the record's prompt, and messages from the character ``behind`` on, may be left out."""
    roles = [message["role"] for message in record.messages]
    numbers = [number for number, role in enumerate(roles) if role == "assistant" and number >= record.prompts]
    for number in numbers:
        if _MARK in record.messages[number]["content"]:
            raise ValueError(
                f"{record.place}: messages[{number}]: expected no character U+E000, which marks ends of messages, found one: "
                "delete it"
            )
    if len(numbers) > _FEW and (found := _marked_spans(record, tokenizer, whole, numbers)) is not None:
        yield from found
        return
    if len(numbers) > _MOST_RENDERED:
        raise ValueError(
            f"{record.place}: expected at most {_MOST_RENDERED} messages of the assistant with a chat template that changes "
            f"them, or with calls of tools, found {len(numbers)}: give --chat-template one that has {{% generation %}} blocks"
        )
    for number in numbers:
        stop = _end(record, tokenizer, whole, number)
        prompt = _prompt(record, tokenizer, number)
        if prompt and whole.startswith(prompt) and len(prompt) <= stop:
            start = len(prompt)
        else:
            start = _differs(whole, _changed(record, tokenizer, number, _MARK + record.messages[number]["content"]))
        yield start, stop
        if behind is not None and stop >= behind:
            return


def _marked_spans(record: Record, tokenizer: Any, whole: str, numbers: Sequence[int]) -> list[tuple[int, int]] | None:
    """Finds all messages of the assistant by rendering a conversation once more, with marks around them, instead of several
    times for each. Returns None where that does not say for certain where they are."""
    if any(record.messages[number].get("tool_calls") for number in numbers):
        return None
    marked = set(numbers)
    messages = [
        {**message, "content": f"{_MARK}{message['content']}{_MARK}"} if number in marked else message
        for number, message in enumerate(record.messages)
    ]
    parts = _rendered(record, tokenizer, messages).split(_MARK)
    if len(parts) != 2 * len(numbers) + 1 or "".join(parts) != whole:
        return None
    ends = np.cumsum([len(part) for part in parts]).tolist()
    prompt = _prompt(record, tokenizer, numbers[0])
    asked = prompt[len(_rendered(record, tokenizer, record.messages[: numbers[0]])) :] if prompt else ""
    if prompt and not whole.startswith(prompt):
        return None
    found, before = [], 0
    for start, stop in zip(ends[0::2], ends[1::2], strict=False):
        place = whole.rfind(asked, before, start) if asked else -1
        if asked and place < 0:
            return None
        found.append((place + len(asked) if asked else start, stop))
        before = stop
    return found


def _prompt(record: Record, tokenizer: Any, number: int) -> str:
    """Returns what the template gives as the prompt for a message, or nothing if it has no such prompt."""
    before = record.messages[:number]
    try:
        text, prompt = (_rendered(record, tokenizer, before, add_generation_prompt=asked) for asked in (False, True))
    except ValueError:  # a template that wants a user's message first
        return ""
    return prompt if prompt != text else ""


def _end(record: Record, tokenizer: Any, whole: str, number: int) -> int:
    """Returns the place behind a message: behind its content, or behind its calls of tools."""
    message = record.messages[number]
    if not message.get("tool_calls"):
        return _differs(whole, _changed(record, tokenizer, number, message["content"] + _MARK))
    shown = _rendered(record, tokenizer, record.messages[: number + 1])
    if not whole.startswith(shown):
        raise ValueError(f"{record.place}: messages[{number}]: {_UNKNOWN_PLACE}")
    shown = shown.rstrip()
    ends = [token for number in _added(tokenizer) if shown.endswith(token := tokenizer.convert_ids_to_tokens(number))]
    return len(shown) - max(map(len, ends), default=0)


def _changed(record: Record, tokenizer: Any, number: int, content: str) -> str:
    """Renders a conversation with another content of one message. Raises ValueError if the template leaves the message out."""
    messages = [*record.messages]
    messages[number] = {**messages[number], "content": content}
    text = _rendered(record, tokenizer, messages)
    if text.count(_MARK) != 1:
        raise ValueError(f"{record.place}: messages[{number}]: {_UNKNOWN_PLACE}")
    return text


def _differs(one: str, other: str) -> int:
    """Returns the place of the first character in which two texts differ."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _rendered(record: Record, tokenizer: Any, messages: Iterable[dict[str, Any]], **options: Any) -> str:
    """Renders messages by the chat template, in the sandbox of Transformers. Raises ValueError if the template refuses them."""
    try:
        with limited_time(_MOST_TEMPLATE_S, "the chat template"):
            text: str = tokenizer.apply_chat_template(list(messages), tools=record.tools, tokenize=False, **options)
    except Exception as error:  # a template raises errors of its own
        raise ValueError(f"{record.place}: the chat template refuses these messages: {first_line(error)}") from None
    return text
