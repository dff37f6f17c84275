"""Weights of a folder: every tensor with its bytes, or an error that names the file; nothing outside the folder is opened."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mtcompile.checkpoint.shards import stored_tensors
from mtcompile.errors import CheckpointError

TENSORS = {
    "matrix": torch.randn(3, 5), "none": torch.empty(0, 4), "one": torch.tensor(3), "half": torch.randn(7).bfloat16(),
    "flags": torch.tensor([True, False]), "double": torch.randn(2, dtype=torch.float64),
}  # fmt: skip


def write(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def row(start: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def test_every_tensor_is_read_with_its_bytes(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = stored_tensors(tmp_path)
    assert stored.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        tensor = stored[name].read()
        assert torch.equal(tensor, expected) and tensor.dtype == expected.dtype and tensor.data_ptr() % 64 == 0


def test_numbers_are_converted_as_torch_converts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtcompile.checkpoint.shards._PIECE_NBYTES", 16)  # several pieces, the last not full
    save_file(TENSORS, tmp_path / "model.safetensors")
    for name, each in stored_tensors(tmp_path).items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            expected = TENSORS[name].to(dtype) if TENSORS[name].is_floating_point() else TENSORS[name]
            assert torch.equal(each.read(dtype), expected) and each.read(dtype).dtype == expected.dtype


def test_shards_are_found_through_their_index_and_through_links(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir(), folder.mkdir()
    weight_map = {}
    for number, name in enumerate(TENSORS):
        save_file({name: TENSORS[name]}, blobs / str(number))
        (folder / f"{number}.safetensors").symlink_to(blobs / str(number))  # as the hub's cache has them
        weight_map[name] = f"{number}.safetensors"
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for path in (folder, index):
        assert all(torch.equal(each.read(), TENSORS[name]) for name, each in stored_tensors(path).items())


@pytest.mark.parametrize(
    "weight_map",
    [{"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": "model.bin"}, {"a": 3}, {}, [], {"a": "b.safetensors"}],
)
def test_an_index_that_names_other_files_is_refused(weight_map: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index of weights|names a file|expected a file"):
        stored_tensors(folder)


def test_an_index_and_its_shards_agree(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "1.safetensors"}}))
    with pytest.raises(CheckpointError, match="expected b, which the index says is there"):
        stored_tensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "A": "2.safetensors"}}))
    with pytest.raises(CheckpointError, match="expected A"):
        stored_tensors(tmp_path)
    save_file({"a": torch.ones(1), "A": torch.ones(1)}, tmp_path / "2.safetensors")
    with pytest.raises(CheckpointError, match=r"a is in .*1.safetensors and in .*2.safetensors"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": row(0, 8)}, b"1234567"),  # fewer bytes than it says
        ({"a": row(0, 4)}, b"12345678"),  # more
        ({"a": row(0, 8, [2**62, 2**62])}, b"12345678"),
        ({"a": row(0, 8, [-8])}, b"12345678"),
        ({"a": row(0, 8), "b": row(4, 8)}, b"12345678"),  # overlapping
        ({"a": row(0, 2), "b": row(4, 8)}, b"12345678"),  # with a gap
        ({"a": row(0, 8, [2], "F999")}, b"12345678"),
        ({"a": row(0, 8, [16], "F4")}, b"12345678"),
        (b"[" * 100_000, b""),
        (b"", b""),
        (b"{}", b"x"),
    ],
)
def test_a_file_that_is_not_what_its_header_says_is_refused(header: Any, data: bytes, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        stored_tensors(tmp_path)


def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 2**40))
        file.truncate(2**40 + 8)  # takes no space on the disk
    with pytest.raises(CheckpointError, match="cannot be used"):
        stored_tensors(tmp_path)


def test_a_file_that_changes_after_its_header_was_read_is_noticed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 500)
    with pytest.raises(CheckpointError, match="expected 4000 bytes of a: the file has become shorter"):
        stored["a"].read()


def test_what_is_no_folder_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"expected a local folder .* Nothing is downloaded.*hf download some/model --local-dir"
    ):
        stored_tensors("some/model")
    with pytest.raises(CheckpointError, match=r"expected model.safetensors, or model.safetensors.index.json"):
        stored_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found pytorch_model.bin, which could run code"):
        stored_tensors(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")  # to open it would wait for ever
    with pytest.raises(CheckpointError, match="to be a file"):
        stored_tensors(tmp_path)
