"""Files from strangers: every reader is bounded in time and memory, says what is wrong with a file, and keeps Ctrl-C apart from
damage."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtcompile.checkpoint.shards import stored_tensors
from mtcompile.cli.config_file import _entries
from mtcompile.cli.viz import dumped
from mtcompile.data.records import read_records
from mtcompile.data.windows import read_tokens
from mtcompile.errors import CheckpointError
from mtcompile.machine.presets import named, to_json
from mtcompile.models.loading import configuration
from mtcompile.passes.plan import Decision, Plan, Updates, plan_from_json
from mtcompile.reading import parsed_json, read_bytes, read_text
from mtcompile.runtime.schedule import Buffer, Schedule, ScheduleFormatError, from_json

READERS: dict[str, Callable[[Path], Any]] = {
    "machine.json": lambda path: named(str(path)),
    "schedule.json": lambda path: dumped(str(path)),
    "config.json": configuration,
    "run.yaml": lambda path: list(_entries(path)),
    "records.jsonl": lambda path: list(read_records([path])),
    "records.json": lambda path: list(read_records([path])),
    "records.parquet": lambda path: list(read_records([path])),
    "text.md": lambda path: read_tokens([path], None),
    "tokens.bin": lambda path: read_tokens([path], 256),
    "tokens.npy": lambda path: read_tokens([path], 256),
    "model.safetensors": stored_tensors,
    "model.safetensors.index.json": stored_tensors,
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    if "parquet" in name or "config" in name:
        pytest.importorskip("pyarrow" if "parquet" in name else "transformers")
    path = tmp_path / name

    def pipe() -> None:
        os.mkfifo(path)

    for make in (pipe, lambda: path.symlink_to("/dev/zero"), lambda: path.symlink_to("/proc/self/mem")):
        make()
        with pytest.raises((ValueError, OSError, CheckpointError), match=r"expected|error|Input"):
            READERS[name](path)
        path.unlink()


@pytest.mark.parametrize("name", [name for name in READERS if name.endswith(".json") or name.endswith(".yaml")])
def test_text_that_no_reader_can_hold(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    for text in ("[" * 30_000, '{"a":' * 10_000, '{"name": ' + "9" * 5000 + "}"):
        path.write_text(text)
        with pytest.raises((ValueError, CheckpointError, ScheduleFormatError), match=r"expected|no index"):
            READERS[name](path) if name != "run.yaml" else list(_checked_entries(path))
    with path.open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises((ValueError, CheckpointError), match="at most"):
        READERS[name](path)


def _checked_entries(path: Path) -> Any:
    for _, _, value in _entries(path):
        raise ValueError(f"expected an option's value, found {str(value)[:20]}")


def test_reading_takes_what_there_is_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_bytes(path, 100) == b"x" * 100 and read_text(Path("/proc/self/stat"))
    with pytest.raises(ValueError, match="at most 99 bytes"):
        read_bytes(path, 99)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="UTF-8 text, found something else at byte 0"):
        read_text(path)
    assert parsed_json(f"[{2**63 - 1}, 1.5]", "here") == [2**63 - 1, 1.5]
    for text in ("9" * 400, "-" + "9" * 25, "[" * 100_000, "{", "nul"):
        with pytest.raises(ValueError, match="here: expected JSON"):
            parsed_json(text, "here")


@pytest.mark.parametrize("value", ['"x"', "9" * 400, "-1", "0", "1e999", "NaN", "-Infinity", "1e308", "1e-300", "null", "[]"])
def test_a_machine_with_such_a_number_names_the_field(value: str, tmp_path: Path) -> None:
    whole = json.loads(to_json(named("rtx4090")))
    for field in ("flops", "disk_nbytes", "memory_gbps"):
        if value == "0" and field == "disk_nbytes":
            continue
        path = tmp_path / "machine.json"
        path.write_text(json.dumps({**whole, field: "@"}).replace('"@"', value))
        with pytest.raises(ValueError, match=field if len(value) < 100 else "digits"):
            named(str(path))


SCHEDULE = Schedule((), {"a": Buffer("a", "a", "device", "home", 8, "param")}, {"device": 0}, {"device": 8}, {})
PLAN = Plan(
    (Decision("params", "a", "host", 8, "why", ("v",)),),
    peak_bytes={"device": 1},
    budget_bytes={"host": None},
    updates=Updates(),
)


@pytest.mark.parametrize("value", ['"x"', "9" * 400, "-" + "9" * 400, "1e999", "NaN", "[]", "{}", "[[]]"])
def test_a_schedule_or_a_plan_with_such_a_field_is_refused(value: str) -> None:
    assert from_json(SCHEDULE.to_json()) == SCHEDULE and plan_from_json(PLAN.to_json()) == PLAN
    for text, read, fields in (
        (SCHEDULE.to_json(), from_json, ("nbytes", "version", "offset")),
        (PLAN.to_json(), plan_from_json, ("nbytes", "lookahead", "step_time_us", "narrow", "state_copies", "choice")),
    ):
        for field in fields:
            if f'"{field}": ' not in text:
                continue
            start = text.index(f'"{field}": ') + len(field) + 4
            end = min(place for sign in ",}" if (place := text.find(sign, start)) > 0)
            with pytest.raises(ValueError):
                read(text[:start] + value + text[end:])


def test_a_record_of_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtcompile.data.records._MOST_LINE_NBYTES", 100)
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "a"}\n' + "x" * 101)
    with pytest.raises(ValueError, match="line 2: expected a record of at most 100 bytes"):
        list(read_records([path]))


def test_an_array_that_claims_more_than_it_has(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(10))
    data = (tmp_path / "tokens.npy").read_bytes()
    unclosed = b"(9,),tran_order': False, 'shape':"  # found by fuzzing: an error of Python's tokenizer
    for shape in (unclosed, b"(9999999999,)", b"(-5,)", b"(1e9,)", b"(" * 10 + b"1" + b",)" * 10):
        (tmp_path / "tokens.npy").write_bytes(data.replace(b"(10,)", shape))
        with pytest.raises(ValueError, match="expected"):
            read_tokens([tmp_path / "tokens.npy"], 256)


def test_ctrl_c_in_the_library_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")

    def interrupted(*_: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("could not determine the shape of object type")  # as torch makes of an interrupt

    monkeypatch.setattr(safetensors, "safe_open", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts without
    try:
        with pytest.raises(KeyboardInterrupt):
            stored_tensors(tmp_path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
