"""Samples packed into rows of one length: several documents to a row that do not see one another, or one to a row."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtcompile.data.batch import HELD_OUT, Batch, Order, in_batches
from mtcompile.data.encoding import Samples

IGNORED = -100  # the label of a token that is no target


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of ``seq`` tokens. ``rows``: the samples of each row; the rows to train on come first. ``packed``: a row has several
    samples, and ``mask`` makes the attention mask from the number of each token's sample. Otherwise padding follows the one
    sample."""

    samples: Samples
    seq: int
    rows: list[list[int]]
    trained: Order
    padding: int
    packed: bool
    mask: Callable[[Tensor], Any] | None = None

    @staticmethod
    def cut(samples: Samples, seq: int, batch: int, *, packed: bool, padding: int = 0, held_out: bool = False) -> Rows:
        """Puts samples into rows. ``held_out``: the last 5 % of the samples are not trained on. Raises ValueError if there are
        too few rows."""
        last = max(1, int(len(samples) * HELD_OUT)) if held_out else 0
        lengths = samples.lengths.tolist()
        first = len(samples) - last
        parts = [range(first), range(first, len(samples))]
        trained, evaluated = (
            [[part[n] for n in row] for row in pack([lengths[n] for n in part], seq)] if packed else [[n] for n in part]
            for part in parts
        )
        if len(trained) < batch:
            aside = f", beside {last} samples held out" if last else ""
            raise ValueError(
                f"expected at least {batch} rows of {seq} tokens for a batch of {batch}{aside}, found {len(trained)}: give "
                "more --data, or a smaller --batch or --seq"
            )
        return Rows(samples, seq, trained + evaluated, Order(len(trained)), padding, packed)

    def batch(self, step: int, batch: int, seed: int) -> Batch:
        """Returns the arguments of a model of Transformers: ``input_ids`` and ``labels`` of shape (batch, seq), and for packed
        rows ``position_ids`` and an ``attention_mask``, as ``Source`` says."""
        return self._batch(self.trained.rows(step, batch, seed))

    def evaluation(self, batch: int, most: int) -> Iterator[Batch]:
        first, count = self.trained.count, len(self.rows) - self.trained.count
        yield from (self._batch([first + n for n in rows]) for rows in in_batches(count, batch, most))

    def _batch(self, rows: Sequence[int]) -> Batch:
        shape = len(rows), self.seq
        tokens, labels = np.full(shape, self.padding, np.int64), np.full(shape, IGNORED, np.int64)
        positions, documents = np.zeros(shape, np.int64), np.zeros(shape, np.int64)  # 0: padding
        for line, row in enumerate(rows):
            end = 0
            for number, sample in enumerate(self.rows[row], 1):
                here = slice(self.samples.starts[sample], self.samples.starts[sample + 1])
                ids, trained = self.samples.tokens[here], self.samples.trained[here]
                place = line, slice(end, end + len(ids))
                tokens[place], labels[place] = ids, np.where(trained, ids, IGNORED)
                positions[place], documents[place] = np.arange(len(ids)), number
                end += len(ids)
            positions[line, end:] = np.arange(self.seq - end)
        arguments = {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels), "use_cache": False}
        if self.packed:
            assert self.mask is not None, "packed rows need a mask"  # without it, samples would see one another
            arguments["position_ids"] = torch.from_numpy(positions)
            arguments["attention_mask"] = self.mask(torch.from_numpy(documents))
        return Batch(arguments, int((documents > 0).sum()), int((labels != IGNORED).sum()))

    @property
    def count(self) -> int:
        """The rows to train on."""
        return self.trained.count

    @property
    def digest(self) -> str:
        """Returns a checksum of the rows: it tells whether a training goes on with the same data."""
        import xxhash

        whole = xxhash.xxh3_128(f"{self.seq} {self.trained.count} {self.packed}".encode())
        for array in (self.samples.tokens, self.samples.trained, self.samples.starts):
            whole.update(np.ascontiguousarray(array).data)
        return str(whole.hexdigest())

    def __str__(self) -> str:
        tokens, targets = len(self.samples.tokens), int(self.samples.trained.sum())
        share = tokens / (len(self.rows) * self.seq)
        long = f"; {self.samples.too_long:,} conversations were too long" * (self.samples.too_long > 0)
        return (
            f"{len(self.samples):,} samples of {tokens:,} tokens, {targets:,} of them targets, in {len(self.rows):,} rows of "
            f"{self.seq:,} ({share:.0%} filled), {len(self.rows) - self.trained.count:,} of them held out{long}"
        )


def pack(lengths: Sequence[int], seq: int) -> list[list[int]]:
    """Puts samples into rows of at most ``seq`` tokens: the longest first, each into the fullest row that has room for it.
    Returns the samples of each row."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # tokens that are free -> the rows
    rooms: list[int] = []  # in order
    for sample in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        index = bisect.bisect_left(rooms, lengths[sample])
        if index == len(rooms):
            row, room = len(rows), seq
            rows.append([])
        else:
            room = rooms[index]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[index]
        rows[row].append(sample)
        if left := room - lengths[sample]:
            if left not in with_room:
                bisect.insort(rooms, left)
                with_room[left] = []
            with_room[left].append(row)
    return rows
