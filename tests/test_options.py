"""Options of ``mtcompile.compile`` are read as they are written."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import mtcompile
from mtcompile.sizes import parse_bytes


@pytest.mark.parametrize("size", ["16GiB", "16GB", 17179869184, "1.5 MiB"])
def test_sizes_are_read_as_bytes(size: Any) -> None:
    expected = {"16GiB": 2**34, "16GB": 16 * 10**9, 17179869184: 2**34, "1.5 MiB": 3 * 2**19}
    assert parse_bytes(size) == expected[size]


def test_text_without_a_unit_that_must_mean_gib_is_refused() -> None:
    with pytest.raises(ValueError, match='did you mean "24GiB"'):
        parse_bytes("24")
    assert (parse_bytes("24B"), parse_bytes(24), parse_bytes("1048576")) == (24, 24, 1 << 20)


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GiB", "8388608TiB", 10**400, float("inf"), float("nan"), "1e400"])
def test_a_size_that_nothing_has_is_refused_with_the_option(size: Any) -> None:
    """Found with 400 digits, of which no number could be made. The message does not repeat them."""
    for option in ("memory", "host"):
        with pytest.raises(ValueError, match=f"^{option}: expected a size") as error:
            mtcompile.compile(nn.Linear(2, 2), **{option: size})
        assert len(str(error.value)) < 150


@pytest.mark.parametrize("bad", ["16 potatoes", "-1GiB", "", 0, -5, "GiB"])
def test_a_bad_size_is_refused_with_what_is_expected(bad: Any) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        mtcompile.compile(nn.Linear(2, 2), memory=bad)
