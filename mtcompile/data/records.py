"""Records of JSON lines, JSON lists, CSV, Parquet and text files: plain text, or a conversation in a form of the field.

{"text": "..."}
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}               ShareGPT
{"instruction": "...", "input": "...", "output": "..."}                                               Alpaca
{"prompt": "...", "completion": "..."}                       TRL; of texts or lists of messages; the prompt is not trained
"""

from __future__ import annotations

import csv
import difflib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtcompile.capture.refusals import first_line
from mtcompile.data.files import files_of, is_text, text_of
from mtcompile.reading import printable, read_bytes, regular_nbytes

_MOST_LINE_NBYTES = 1 << 26  # of a record
_LONG_NBYTES = 1 << 23  # of a text that is read piece by piece
_MOST_LIST_NBYTES = 1 << 30  # Python's objects take several times as much
_PARQUET_ROWS = 256  # that are in memory at a time
_ROLES = ("system", "user", "assistant", "tool")
_ROLE_OF = {  # in ShareGPT's "from"
    **{name: name for name in _ROLES},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"},
    **{"observation": "tool", "function_response": "tool"},
}
_KINDS = {str: "text", dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}


@dataclass(frozen=True, slots=True)
class Record:
    """One record. ``place``: its file and line, for errors. ``messages``: of a conversation, as chat templates take them; if
    there are none, it is ``text``, or that of a ``file``, if it is long. ``tools``: descriptions of functions, for the
    template. ``prompt``: the text before ``text``, and ``prompts``: the first messages, which are not trained."""

    place: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: list[Any] | None = None
    file: Path | None = None
    prompt: str = ""
    prompts: int = 0


def read_records(paths: Sequence[Path]) -> Iterator[Record]:
    """Reads .jsonl, .ndjson, .json, .csv, .tsv and .parquet files of records, in any case of letters and also with .txt behind,
    and other files as one text each. In folders, files that are not text are left out. Raises ValueError with the file, the
    line and the field, and OSError."""
    for file in files_of(paths):
        if file.suffix in (".bin", ".npy"):
            raise ValueError(
                f"{file}: expected text or records (.jsonl, .json, .csv, .parquet), found a file of tokens: "
                "only random weights are trained on tokens"
            )
        if _suffix(file) in _READERS:
            yield from (record_of(value, place) for place, value in _values(file))
        elif regular_nbytes(file) > _LONG_NBYTES:
            if is_text(file, strict=file in paths):
                yield Record(printable(file), file=file)
        elif text := text_of(file, strict=file in paths).decode():
            yield Record(printable(file), text)
        elif file in paths:
            raise ValueError(f"{file}: expected text, found an empty file")


def read_rows(paths: Sequence[Path], columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads the place and the columns of each row of files of records, for a trainer of TRL. In folders, other files are left
    out. Raises ValueError with the file, the line and the field, and OSError."""
    first: dict[str, str] = {}
    for file in files_of(paths):
        if _suffix(file) in _READERS:
            for place, value in _values(file):
                row = _row(value, place, columns)
                kinds = {name: _kind(column) for name, column in row.items() if name != "tools"}
                if kinds != (first := first or kinds):
                    raise ValueError(f"{place}: expected the fields of the first row ({_told(first)}), found {_told(kinds)}")
                yield place, row
        elif file in paths:
            raise ValueError(
                f"{file}: expected rows of {', '.join(columns)} (.jsonl, .json, .csv, .parquet), found another file"
            )


def _told(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in kinds.items())


def _row(value: Any, place: str, columns: Sequence[str]) -> dict[str, Any]:
    """Returns the columns of a row: text, or messages; ``label``: whether it is good. Two conversations may begin with their
    prompt, which is then no column."""
    if not isinstance(value, dict):
        raise ValueError(f"{place}: expected an object with {', '.join(columns)}, found {_kind(value)}")
    row: dict[str, Any] = {} if len(columns) > 1 else dict(value)  # rewards may look at other columns
    for name in columns:
        if name == "label":
            good = {"true": True, "false": False}.get(str(value.get(name)).lower())
            if good is None:
                raise ValueError(f"{place}: label: expected true or false, found {value.get(name)!r:.80}")
            row[name] = good
        elif isinstance(value.get(name), list):
            row[name] = [_message(item, f"{place}: {name}[{n}]") for n, item in enumerate(value[name])]
            if not row[name]:
                raise ValueError(f"{place}: {name}: expected messages, found none")
        elif name != "prompt" or name in value or not isinstance(value.get("chosen"), list):
            row[name] = _string(value, name, place)
    return row | ({"tools": json.dumps(value["tools"])} if value.get("tools") else {})


def _values(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields the place and the value of each record of a file. Raises ValueError if it has none."""
    if not regular_nbytes(file):
        raise ValueError(f"{file}: expected records, found an empty file")
    empty = True
    for place, value in _READERS[_suffix(file)](file):
        yield place, value
        empty = False
    if empty:
        raise ValueError(f"{file}: expected records, found none")


def _suffix(file: Path) -> str:
    return Path(file.name.lower().removesuffix(".txt")).suffix


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as opened:
        for number in itertools.count(1):
            place = f"{printable(file)}, line {number}"
            line = opened.readline(_MOST_LINE_NBYTES + 1)
            if not line:
                return
            if len(line) > _MOST_LINE_NBYTES:
                raise ValueError(f"{place}: expected a record of at most {_MOST_LINE_NBYTES:,} bytes a line, found more")
            if line.strip():
                yield place, _parsed(line.strip(), place, "fix or delete the line")


def _list(file: Path) -> Iterator[tuple[str, Any]]:
    values = _parsed(read_bytes(file, _MOST_LIST_NBYTES), printable(file), "one object per line belongs into a .jsonl file")
    if not isinstance(values, list):
        raise ValueError(f"{file}: expected a list of records, found {_kind(values)}")
    yield from ((f"{printable(file)}, record {number}", value) for number, value in enumerate(values, 1))


def _table(file: Path) -> Iterator[tuple[str, Any]]:
    delimiter, before = "\t" if _suffix(file) == ".tsv" else ",", csv.field_size_limit(_MOST_LINE_NBYTES)
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            rows = csv.DictReader(opened, delimiter=delimiter, strict=True)
            for row in rows:
                place = f"{printable(file)}, line {rows.line_num}"
                if None in row or None in row.values():
                    raise ValueError(
                        f"{place}: expected {len(rows.fieldnames or ())} fields, as in the first line, found more or fewer"
                    )
                yield place, dict(row)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected UTF-8 text, found something else near byte {error.start}") from None
    except csv.Error as error:
        raise ValueError(f"{file}: expected a table with a line of names, found: {error}") from None
    finally:
        csv.field_size_limit(before)


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(f"{file}: Parquet files need the package pyarrow: pip install pyarrow") from None
    number = 0
    try:
        with ParquetFile(file) as opened:
            for batch in opened.iter_batches(_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{printable(file)}, row {number}", {name: value for name, value in row.items() if value is not None}
    except ArrowException as error:
        raise ValueError(f"{file}: expected a Parquet file, found: {error}") from None


def _parsed(data: bytes, place: str, step: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: expected UTF-8 text, found something else at byte {error.start}") from None
    except (ValueError, RecursionError) as error:  # a plain ValueError: a number of thousands of digits
        where = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else first_line(error)
        raise ValueError(f"{place}: expected JSON, found something else ({where}): {step}") from None


_READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    **{".jsonl": _lines, ".ndjson": _lines, ".json": _list},
    **{".csv": _table, ".tsv": _table, ".parquet": _parquet},
}


def record_of(value: Any, place: str) -> Record:
    """Returns the record that a JSON object is. Raises ValueError with ``place`` and the name of the field."""
    if not isinstance(value, dict):
        raise ValueError(f"{place}: expected an object with fields such as messages or text, found {_kind(value)}")
    tools = value.get("tools")
    if not isinstance(tools, list | None):
        raise ValueError(f"{place}: tools: expected a list, found {_kind(tools)}")
    for fields, read in _FORMS:
        if all(field in value for field in fields):
            return replace(read(value, place), tools=tools)
    names = printable(", ".join(map(str, value))) or "none"
    known = sorted({field for fields, _ in _FORMS for field in fields})
    meant = {name: close[0] for name in value if (close := difflib.get_close_matches(str(name).lower(), known, 1, 0.7))}
    step = "".join(f"; did you mean {right} by {printable(name)}?" for name, right in meant.items() if name != right)
    forms = "; ".join(" and ".join(fields) for fields, _ in _FORMS)
    raise ValueError(f"{place}: expected the fields of one form ({forms}), found {names}{step or ': rename the fields'}")


def _text(value: Mapping[str, Any], place: str) -> Record:
    return Record(place, _string(value, "text", place))


def _messages(value: Mapping[str, Any], place: str) -> Record:
    return _conversation(place, *_listed(value, "messages", place))


def _completion(value: Mapping[str, Any], place: str) -> Record:
    if "label" in value:
        raise ValueError(
            f"{place}: expected completions to learn, found one with a label: give --method kto, or leave out the field, and "
            "the rows that are not to be learned"
        )
    if not isinstance(value["prompt"], list):
        return Record(place, _string(value, "completion", place), prompt=_string(value, "prompt", place))
    prompt, said = _listed(value, "prompt", place), _conversation(place, *_listed(value, "completion", place))
    return replace(said, messages=(*prompt, *said.messages), prompts=len(prompt))


def _listed(value: Mapping[str, Any], field: str, place: str) -> tuple[dict[str, Any], ...]:
    return tuple(_message(item, f"{place}: {field}[{n}]") for n, item in enumerate(_items(value, field, place)))


def _message(item: Any, place: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ValueError(f"{place}: expected an object with role and content, found {_kind(item)}")
    role = _string(item, "role", place, ".")
    if role not in _ROLES:
        raise ValueError(f"{place}.role: expected one of {', '.join(_ROLES)}, found {role!r:.80}")
    if item.get("tool_calls") and item.get("content") is None:
        return {**item, "content": ""}
    _string(item, "content", place, ".")
    for field in ("weight", "train"):
        if field in item and item[field] not in (1, None):
            raise ValueError(
                f"{place}.{field}: expected all messages of the assistant to be trained, found {item[field]!r:.80}: delete the "
                "field"
            )
    return item


def _share_gpt(value: Mapping[str, Any], place: str) -> Record:
    messages = [{"role": "system", "content": _string(value, "system", place)}] if value.get("system") else []
    for number, item in enumerate(_items(value, "conversations", place)):
        where = f"{place}: conversations[{number}]"
        if isinstance(item, dict) and "role" in item:
            messages.append(_message(item, where))
            continue
        if not isinstance(item, dict):
            raise ValueError(f"{where}: expected an object with from and value, found {_kind(item)}")
        name = _string(item, "from", where, ".")
        if name not in _ROLE_OF:
            raise ValueError(f"{where}.from: expected one of {', '.join(_ROLE_OF)}, found {name!r:.80}")
        messages.append({"role": _ROLE_OF[name], "content": _string(item, "value", where, ".")})
    return _conversation(place, *messages)


def _alpaca(value: Mapping[str, Any], place: str) -> Record:
    system = [{"role": "system", "content": _string(value, "system", place)}] if value.get("system") else []
    asked = [_string(value, "instruction", place), _string(value, "input", place) if value.get("input") else ""]
    question = "\n\n".join(part for part in asked if part)
    answer = {"role": "assistant", "content": _string(value, "output", place)}
    return _conversation(place, *system, {"role": "user", "content": question}, answer)


_FORMS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any], str], Record]], ...] = (
    (("messages",), _messages),
    (("conversations",), _share_gpt),
    (("instruction", "output"), _alpaca),
    (("prompt", "completion"), _completion),
    (("text",), _text),
)


def _conversation(place: str, *messages: dict[str, Any]) -> Record:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        given = ", ".join(dict.fromkeys(roles)) or "no message"
        raise ValueError(f"{place}: expected a message of an assistant, which is what is trained, found {given}")
    return Record(place, messages=messages)


def _items(value: Mapping[str, Any], field: str, place: str) -> list[Any]:
    items = value[field]
    if not isinstance(items, list):
        raise ValueError(f"{place}: {field}: expected a list of messages, found {_kind(items)}")
    return items


def _string(value: Mapping[str, Any], field: str, place: str, joint: str = ": ") -> str:
    if field not in value:
        fields = printable(", ".join(value)) or "none"
        raise ValueError(f"{place}{joint}{field}: expected text, found no such field among {fields}")
    text = value[field]
    if not isinstance(text, str):
        raise ValueError(f"{place}{joint}{field}: expected text, found {_kind(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}{joint}{field}: expected text, found half of a character (\\u{ord(text[error.start]):x}) at "
            f"{error.start}: fix or delete the record"
        ) from None
    return text


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)
