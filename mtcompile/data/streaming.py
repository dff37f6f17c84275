"""Text of any length as tokens, piece by piece: with the tokens of the whole text, in the memory of one piece.

    text    ──────────────────────────────────────────────────────────
    window  [ . . . . . . . . . . . . . . . . ]
    next                            [ . . . . . . . . . . . . . . . . ]
                                        ↑ the cut: here, and for a while before and behind, both have the same tokens

A tokenizer looks at a few characters around each token. So where two windows that begin at different places agree on a stretch
of tokens, they agree with the whole text, too. Where they agree nowhere, the windows grow.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mtcompile import progress

WINDOW = 1 << 16  # characters that are tokenized at a time
_OVERLAP = 1 << 11  # characters that two windows have in common
_AGREE = 12  # tokens on each side of a cut
_PIECE_NBYTES = 1 << 22


def text_pieces(file: Path) -> Iterator[str]:
    """Yields the text of a file, piece by piece. Raises ValueError for what is not UTF-8, and OSError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with file.open("rb") as opened:
        place = 0
        while True:
            piece = opened.read(_PIECE_NBYTES)
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                raise ValueError(f"expected UTF-8 text, found something else near byte {place + error.start}") from None
            if text:
                yield text
            if not piece:
                return
            place += len(piece)


def tokens_of(pieces: Iterable[str], tokenizer: Any) -> Iterator[Any]:
    """Yields the tokens of a text that comes in pieces, as arrays: those of the tokenizer's call with the whole text, special
    tokens included."""
    source, size, text, begin = iter(pieces), WINDOW, "", 0
    ends, before = False, None
    after: list[int] = []
    starts = ids = np.zeros(0, np.int64)  # of the window before, from the start of the text
    first = 0  # of its tokens: those before have been yielded
    while True:
        while not ends and len(text) < size + _PIECE_NBYTES // 8:
            piece = next(source, None)
            ends = piece is None
            text += piece or ""
        last = ends and len(text) <= size
        window = text if last else text[:size]
        new_ids, new_starts = _encoded(window, tokenizer)
        new_starts += begin
        if before is None:
            before, after = _special(tokenizer, window[:_OVERLAP])
            yield np.array(before, np.int32)
            cut, here = 0, 0
        else:
            cut, here = _agreement(starts, ids, new_starts, new_ids)
            if cut < 0:
                raise ValueError(
                    f"expected text whose tokens depend on the {_OVERLAP:,} characters around them, found other tokens for "
                    f"those from character {begin:,} on, if it is cut there: give it white space, or as several shorter texts"
                )
            yield ids[first:cut].astype(np.int32)
        if last:
            yield new_ids[here:].astype(np.int32)
            yield np.array(after, np.int32)
            return
        starts, ids, first = new_starts, new_ids, here
        progress.tell(f"tokenizing, {begin + size:,} characters")
        text, begin = text[size - _OVERLAP :], begin + size - _OVERLAP


def _encoded(window: str, tokenizer: Any) -> tuple[Any, Any]:
    encoded = tokenizer(window, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return np.array(encoded["input_ids"], np.int64), np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)[:, 0]


def _special(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Returns the special tokens that a tokenizer puts before and after a text."""
    plain, whole = tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer(text)["input_ids"]
    for place in range(len(whole) - len(plain) + 1):
        if whole[place : place + len(plain)] == plain:
            return whole[:place], whole[place + len(plain) :]
    return [], []


def _agreement(starts: Any, ids: Any, new_starts: Any, new_ids: Any) -> tuple[int, int]:
    """Returns the place of one token in the tokens of two windows that overlap, such that those around it are the same; -1, -1
    if there is none."""
    low = int(np.searchsorted(starts, new_starts[0] if len(new_starts) else 0))
    pairs = np.stack((starts, ids), 1)
    new_pairs = np.stack((new_starts, new_ids), 1)
    middle = (low + len(ids)) // 2
    for place in sorted(range(low + _AGREE, len(ids) - _AGREE), key=lambda n: abs(n - middle)):
        there = int(np.searchsorted(new_starts, starts[place]))
        around, new_around = pairs[place - _AGREE : place + _AGREE], new_pairs[max(there - _AGREE, 0) : there + _AGREE]
        if len(around) == len(new_around) and (around == new_around).all():
            return place, there
    return -1, -1
