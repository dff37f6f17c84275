"""Windows of a stream: each token once an epoch, in an order of its own; text and files of tokens are one stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mtcompile.data.batch import Batch
from mtcompile.data.windows import Windows, read_tokens


def pair(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    assert batch.tokens == batch.targets == batch.arguments["tokens"].numel()
    return batch.arguments["tokens"], batch.arguments["targets"]


def test_windows_take_every_token_once_in_an_order_of_each_epoch() -> None:
    stream = np.arange(16 * 100 + 1, dtype=np.uint16)
    windows = Windows.cut(stream, 16, batch=5)
    assert (windows.trained.count, windows.held_out) == (95, 5)
    epochs = []
    for epoch in range(2):
        batches = [pair(windows.batch(step, 5, seed=3)) for step in range(1 + 19 * epoch, 20 + 19 * epoch)]
        assert all(torch.equal(inputs + 1, targets) for inputs, targets in batches)
        epochs.append(torch.cat([targets.flatten() for _, targets in batches]))
        assert torch.equal(epochs[-1].sort().values, torch.arange(1, 95 * 16 + 1))
    assert not torch.equal(*epochs)
    assert torch.equal(pair(windows.batch(7, 5, seed=3))[0], pair(Windows.cut(stream, 16, 5).batch(7, 5, seed=3))[0])
    held = torch.cat([pair(batch)[1].flatten() for batch in windows.evaluation(2, 8)])
    assert torch.equal(held, torch.arange(95 * 16 + 1, 99 * 16 + 1))  # whole batches only: a program is of one size
    assert sum(1 for _ in windows.evaluation(2, 1)) == 1
    assert [len(pair(batch)[1]) for batch in windows.evaluation(9, 8)] == [5]
    with pytest.raises(ValueError, match="expected at least 97 tokens"):
        Windows.cut(stream[:50], 16, batch=5)


def test_text_and_tokens_are_one_stream(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("hidden")
    (folder / "b.txt").write_text("é")
    (folder / "a.txt").write_text("one ")
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    stream, vocabulary = read_tokens([folder], None)
    assert bytes(stream) == "one é".encode() and vocabulary == 256
    np.save(tmp_path / "more.npy", np.array([3, 70000], np.int64))
    np.array([1, 2], np.uint32).tofile(tmp_path / "some.bin")
    stream, vocabulary = read_tokens([tmp_path / "some.bin", tmp_path / "more.npy"], 70001)
    assert list(stream) == [1, 2, 3, 70000] and vocabulary == 70001
    np.save(tmp_path / "square.npy", np.zeros((2, 2), np.int64))
    np.save(tmp_path / "objects.npy", np.array([{"code": 1}], object), allow_pickle=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "odd.bin").write_bytes(b"123")
    for paths, size, said in (
        (["more.npy"], None, "expected --vocab"),
        (["more.npy"], 70000, "expected tokens from 0 to 69999"),
        (["more.npy", "notes"], 70001, "found both"),
        (["square.npy"], 10, "expected one row of whole numbers"),
        (["objects.npy"], 10, "expected an array of numbers"),
        (["empty.npy"], 10, "expected an array of numbers"),
        (["odd.bin"], 10, "expected tokens of 2 bytes"),
        (["empty"], None, "expected files in the folder"),
        (["notes/image.png"], None, "expected UTF-8 text"),
    ):
        with pytest.raises(ValueError, match=said):
            read_tokens([tmp_path / path for path in paths], size)
    stream, vocabulary = read_tokens((), None)
    assert len(stream) > 2**20 and vocabulary == 256
