"""Files from strangers: what is printed of them, and how commands end."""

from __future__ import annotations

import json
import os
import stat
import struct
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn
from typer.testing import CliRunner

import mtcompile
from mtcompile import checkpoint, knobs
from mtcompile.capture.refusals import not_compiled
from mtcompile.checkpoint.files import FORMAT, checksum_of
from mtcompile.checkpoint.shards import stored_tensors
from mtcompile.cli.app import app
from mtcompile.data.records import read_records, record_of
from mtcompile.models.loading import configuration
from mtcompile.reading import printable
from tests.data.folders import chats, folder_of

ESCAPE = "\x1b]0;title\x07\x1b[2J\x9b1m\u202e"


def said(call: Any) -> str:
    with pytest.raises((ValueError, mtcompile.MtcompileError)) as caught:
        call()
    return str(caught.value)


def is_printable(text: str) -> bool:
    return not any(unicodedata.category(character) in ("Cc", "Cf") for character in text if character not in "\n\t")


def changed(path: Path, **parts: Any) -> None:
    """Changes the content of a checkpoint's manifest, with the checksum that then is right."""
    body = json.loads(json.loads((path / "manifest.json").read_text())["content"]) | parts
    text = json.dumps(body)
    whole = {"format": FORMAT, "checksum": checksum_of(text.encode()), "content": text}
    (path / "manifest.json").write_text(json.dumps(whole))


def test_what_may_be_printed_stays_as_it_is() -> None:
    assert printable("a\tb\n日本語 é {}") == "a\tb\n日本語 é {}"
    assert printable("\x1b[2J\r\x07") == "\\x1b[2J\\r\\x07" and is_printable(printable(ESCAPE))


def test_names_from_files_are_printable(tmp_path: Path) -> None:
    strange = tmp_path / f"{ESCAPE.replace('/', '')}.jsonl"
    strange.write_text('{"txt": 1}\n')
    (tmp_path / "config.json").write_text(json.dumps({"model_type": ESCAPE}))
    model = nn.Linear(2, 2)
    path = checkpoint.save(tmp_path / "run", model, step=1)
    data = save({ESCAPE: torch.zeros(1), **load_file(path / "model.safetensors")})
    (path / "model.safetensors").write_bytes(data)
    files = json.loads(json.loads((path / "manifest.json").read_text())["content"])["files"]
    changed(path, files={**files, "model.safetensors": [len(data), checksum_of(data)]})
    for call in (
        lambda: record_of({ESCAPE: 1}, "line 1"),
        lambda: record_of({"messages": [{"role": "user", ESCAPE: "a"}]}, "line 1"),
        lambda: list(read_records([strange])),
        lambda: configuration(tmp_path / "config.json"),
        lambda: checkpoint.load(path, model),
        lambda: mtcompile.from_pretrained(path / "model.safetensors", model),
    ):
        assert is_printable(said(call)), call
    output = CliRunner().invoke(app, ["plan", str(tmp_path / "config.json")])
    assert output.exit_code == 2 and is_printable(output.output.replace("\r", ""))


@pytest.mark.parametrize("part", [{"type": "Replace", "pattern": {"String": ""}, "content": "xx"}])
def test_a_tokenizer_whose_library_panics_ends_the_command_in_a_sentence(part: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    good = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**good, "normalizer": part}))
    data = str(chats(tmp_path / "chats.jsonl"))
    output = CliRunner().invoke(app, ["train", str(folder), "--data", data, "--memory", "64MiB", "--steps", "1"])
    assert output.exit_code == 2 and "its library fails on it" in output.stderr and "Traceback" not in output.output


@pytest.mark.parametrize(
    "fields", [{"num_labels": 10**8}, {"vocab_size": "64"}, {"vocab_size": -1}, {"num_attention_heads": 10**9}]
)
def test_a_configuration_that_asks_for_too_much_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    output = CliRunner().invoke(app, ["plan", str(tmp_path / "config.json")])
    assert output.exit_code == 2 and next(iter(fields)) in output.stderr


def test_a_name_that_a_file_has_twice_is_refused(tmp_path: Path) -> None:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f'{{"weight":{entry},"weight":{entry}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert "expected each name once, found 'weight' twice" in said(lambda: stored_tensors(tmp_path))


@pytest.mark.parametrize(
    ("option", "value"), [("lr", None), ("lr", float("nan")), ("lr", -1.0), ("betas", {"tuple": [0.9, float("inf")]})]
)
def test_options_of_an_optimizer_that_cannot_be_are_refused(option: str, value: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    path = checkpoint.save(tmp_path, model, optimizer, step=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = json.loads(json.loads((path / "manifest.json").read_text())["content"])["state"]
    text = json.dumps(state["optimizer"])
    old = {"lr": '["lr", 0.001]', "betas": '["betas", {"tuple": [0.9, 0.999]}]'}[option]
    assert old in text
    state["optimizer"] = json.loads(text.replace(old, json.dumps([option, value])))
    changed(path, state=state)
    assert f"expected {option} to be like" in said(lambda: checkpoint.load(path, model, optimizer))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_step_below_0_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for entry in optimizer.state.values():
        entry["step"].fill_(-5)
    path = checkpoint.save(tmp_path, model, optimizer, step=1)
    assert "expected step of parameter 0 to be 0 or more" in said(lambda: checkpoint.load(path, model, optimizer))


def test_checkpoints_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = checkpoint.save(tmp_path / "run", nn.Linear(2, 2), step=1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


@pytest.mark.parametrize(("name", "value"), [("MT_DEBUG", "yes"), ("MT_DISK_DAYS", "nan"), ("MT_CHECK_SEED", "-1")])
def test_a_variable_that_is_no_number_is_a_sentence(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    read: Any = {"MT_DEBUG": knobs.debug, "MT_DISK_DAYS": knobs.disk_days}.get(name, knobs.check_seed)
    assert f"expected {name} to be a" in said(read)
    if name == "MT_DEBUG":
        output = CliRunner().invoke(app, ["plan", "gpt-11m"])
        assert output.exit_code == 2 and "expected MT_DEBUG to be a whole number" in output.stderr


def test_memory_that_ran_out_is_told_as_that() -> None:
    around = RuntimeError("in the compiler")
    around.__cause__ = MemoryError("no bytes left")
    with pytest.raises(MemoryError, match=r"memory ran out while the step was captured.*\(no bytes left\)"):
        not_compiled(around, "the backward of this model could not be traced")


def test_dumps_follow_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dump").mkdir()
    (tmp_path / "theirs").write_text("theirs")
    for name in ("plan.json", "schedule.json", "step.txt"):
        (tmp_path / "dump" / f"program0-{os.getpid()}.{name}").symlink_to(tmp_path / "theirs")
    monkeypatch.setenv("MT_DUMP", str(tmp_path / "dump"))
    model = nn.Linear(4, 4)
    compiled: Any = mtcompile.compile(model, memory="1MiB", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    compiled(torch.ones(2, 4)).sum().backward()
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert len(list((tmp_path / "dump").glob("*.json"))) >= 2
