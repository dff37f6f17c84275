"""Options of ``mtcompile.compile`` are read as they are written."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import mtcompile
from mtcompile.options import parse_bytes


@pytest.mark.parametrize("size", ["16GiB", "16GB", 17179869184, "1.5 MiB"])
def test_sizes_are_read_as_bytes(size: Any) -> None:
    expected = {"16GiB": 2**34, "16GB": 16 * 10**9, 17179869184: 2**34, "1.5 MiB": 3 * 2**19}
    assert parse_bytes(size) == expected[size]


def test_text_without_a_unit_that_must_mean_gib_is_refused() -> None:
    with pytest.raises(ValueError, match='did you mean "24GiB"'):
        parse_bytes("24")
    assert (parse_bytes("24B"), parse_bytes(24), parse_bytes("1048576")) == (24, 24, 1 << 20)


@pytest.mark.parametrize("bad", ["16 potatoes", "-1GiB", "", 0, -5, "GiB"])
def test_a_bad_size_is_refused_with_what_is_expected(bad: Any) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        mtcompile.compile(nn.Linear(2, 2), memory=bad)
