"""Records: the forms of the field are read alike, and what is wrong is said with the file, the line and the field."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from mtcompile.data.records import Record, read_records, record_of

SAID = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        ({"messages": SAID}, SAID),
        ({"conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}], "id": 7}, SAID),
        ({"conversations": SAID}, SAID),
        ({"instruction": "1 + 1?", "output": "2"}, SAID),
        ({"instruction": "1 + 1?", "input": "", "output": "2"}, SAID),
        ({"instruction": "Add", "input": "1, 1", "output": "2"}, [{"role": "user", "content": "Add\n\n1, 1"}, SAID[1]]),
        (
            {"system": "Be terse", "conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]},
            [{"role": "system", "content": "Be terse"}, *SAID],
        ),
    ],
)
def test_conversations_of_all_forms_are_messages(value: dict[str, Any], messages: list[dict[str, str]]) -> None:
    assert record_of(value, "here") == Record("here", messages=tuple(messages))


def test_calls_of_tools_need_no_content() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    record = record_of({"messages": [SAID[0], called], "tools": [{"name": "add"}]}, "here")
    assert record.messages[1] == {**called, "content": ""} and record.tools == [{"name": "add"}]


def test_files_of_all_kinds_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "é"}}\n\n{json.dumps({"messages": SAID})}\n')
    (tmp_path / "b.json").write_text(json.dumps([{"text": "b"}]))
    (tmp_path / "c.md").write_text("c\n")
    (tmp_path / "d.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "e.txt").write_text("")
    (tmp_path / ".hidden.jsonl").write_text("{")
    records = list(read_records([tmp_path]))
    assert [record.text for record in records] == ["é", "", "b", "c\n"] and records[1].messages == tuple(SAID)
    assert [record.place for record in records] == [
        f"{tmp_path}/a.jsonl, line 1", f"{tmp_path}/a.jsonl, line 3", f"{tmp_path}/b.json, record 1", f"{tmp_path}/c.md",
    ]  # fmt: skip


def test_records_are_known_by_any_case_of_suffix(tmp_path: Path) -> None:
    line = json.dumps({"messages": SAID}) + "\n"
    for name in ("a.ndjson", "b.JSONL", "c.jsonl.txt"):
        (tmp_path / name).write_text(line * 2)
    (tmp_path / "d.csv").write_text('instruction,input,output\n"a, ""quoted""\nline",,"""b"""\n\nc,d,e\n')
    (tmp_path / "e.TSV").write_text("\ufeffinstruction\toutput\na,b\tc\n")
    records = list(read_records([tmp_path]))
    assert [record.messages for record in records[:6]] == [tuple(SAID)] * 6
    said = [tuple(message["content"] for message in record.messages) for record in records[6:]]
    assert said == [('a, "quoted"\nline', '"b"'), ("c\n\nd", "e"), ("a,b", "c")]
    assert [record.place.removeprefix(f"{tmp_path}/") for record in records[6:]] == [
        "d.csv, line 3",
        "d.csv, line 5",
        "e.TSV, line 2",
    ]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("instruction,output\na,b\nc\n", "line 3: expected 2 fields, as in the first line, found more or fewer"),
        ("instruction,output\na,b,c\n", "line 2: expected 2 fields, as in the first line, found more or fewer"),
        ("instruction;output\na;b\n", "line 2: expected the fields of one form .*found instruction;output"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, rows: str, said: str) -> None:
    (tmp_path / "a.csv").write_text(rows)
    with pytest.raises(ValueError, match=f"a.csv, {said}"):
        list(read_records([tmp_path / "a.csv"]))


def test_a_long_cell_of_a_table_is_read_whole(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"text\n{'x' * (limit + 1)}\n")
    (record,) = read_records([tmp_path / "a.csv"])
    assert len(record.text) == limit + 1 and csv.field_size_limit() == limit


def test_parquet_is_read_by_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": SAID, "text": None}, {"messages": None, "text": "plain"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = read_records([tmp_path / "a.parquet"])
    assert first.messages == tuple(SAID) and (second.text, second.place) == ("plain", f"{tmp_path}/a.parquet, row 2")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"b\.parquet: expected a Parquet file, found"):
        list(read_records([tmp_path / "b.parquet"]))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a",}', "expected JSON, found something else (Illegal trailing comma before end of object at column 13)"),
        ('{"text": "a"', "(Expecting ',' delimiter at column 13)"),
        ("[1, 2]", "expected an object with fields such as messages or text, found a list"),
        ("[" * 100_000, "expected JSON, found something else"),
        (b"\xff\xfe", "expected UTF-8 text, found something else at byte 0"),
        ('{"question": "a", "answer": "b"}', "expected the fields of one form (messages; conversations; "),
        ('{"question": "a", "answer": "b"}', "found question, answer: rename the fields"),
        ('{"mesages": []}', "found mesages; did you mean messages by mesages?"),
        ('{"instruction": "a", "ouput": "b"}', "did you mean output by ouput?"),
        ("{}", "found none"),
        ('{"text": 3}', "text: expected text, found a number"),
        ('{"messages": "hello"}', "messages: expected a list of messages, found text"),
        ('{"messages": []}', "expected a message of an assistant, which is what is trained, found no message"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "which is what is trained, found user"),
        ('{"messages": ["hello"]}', "messages[0]: expected an object with role and content, found text"),
        ('{"messages": [{"content": "a"}]}', "messages[0].role: expected text, found no such field among content"),
        (
            '{"messages": [{"role": "bot", "content": "a"}]}',
            "messages[0].role: expected one of system, user, assistant, tool, ",
        ),
        ('{"messages": [{"role": "user"}]}', "messages[0].content: expected text, found no such field among role"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "messages[0].content: expected text, found a list"),
        ('{"messages": [{"role": "user", "content": null}]}', "messages[0].content: expected text, found null"),
        ('{"conversations": [{"value": "a"}]}', "conversations[0].from: expected text, found no such field among value"),
        ('{"conversations": [{"from": "alien", "value": "a"}]}', "conversations[0].from: expected one of system, user, "),
        ('{"conversations": [{"from": "gpt", "value": 1}]}', "conversations[0].value: expected text, found a number"),
        ('{"instruction": "a", "output": null}', "output: expected text, found null"),
        ('{"instruction": "a", "input": 2, "output": "b"}', "input: expected text, found a number"),
        ('{"prompt": "a", "completion": "b", "label": true}', "found one with a label: give --method kto, or leave out"),
        ('{"prompt": "a", "completion": [{}]}', "completion: expected text, found a list"),
        ('{"prompt": [], "completion": "b"}', "completion: expected a list of messages, found text"),
        ('{"prompt": [{"role": "user", "content": "a"}], "completion": []}', "a message of an assistant, which is what is"),
        ('{"messages": [], "tools": "add"}', "tools: expected a list, found text"),
    ],
)
def test_what_is_wrong_is_said_with_its_line_and_field(tmp_path: Path, line: str | bytes, said: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "fine"}\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(ValueError) as raised:
        list(read_records([file]))
    message = str(raised.value)
    assert message.startswith(f"{file}, line 2: ") and (said in message or "trailing comma" in said), message


def test_files_without_records_are_refused(tmp_path: Path) -> None:
    for name, text, said in (
        ("a.jsonl", "", "expected records, found an empty file"),
        ("b.jsonl", "\n \n", "expected records, found none"),
        ("c.json", "[]", "expected records, found none"),
        ("c.csv", "instruction,output\n", "expected records, found none"),
        ("f.csv", 'instruction,output\n"a,b\n', "expected a table with a line of names, found: unexpected end of data"),
        ("d.json", '{"text": "a"}', "expected a list of records, found an object"),
        ("e.json", '{"text": "a"}\n{"text": "b"}\n', "one object per line belongs into a .jsonl file"),
        ("f.txt", "", "expected text, found an empty file"),
        ("g.bin", "ab", "found a file of tokens"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=rf"{name}: .*{said}"):
            list(read_records([tmp_path / name]))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (r'{"text": "a \ud800 b"}', r"line 1: text: expected text, found half of a character \(.ud800\) at 2"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "line 1: expected JSON"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}',
            r"messages\[1\].weight: expected all messages of the assistant to be trained",
        ),
    ],
    ids=["half a character", "digits", "weight"],
)
def test_records_that_only_look_right(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=said):
        list(read_records([path]))
