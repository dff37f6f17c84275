"""How often Python looks for garbage while a model is captured, and as before after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from mtcompile.references import collecting_seldom


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    usual = gc.get_threshold()
    yield
    gc.set_threshold(*usual)


@pytest.mark.parametrize("usual", [(700, 10, 10), (0, 10, 10), (10**6, 5, 5)])
def test_the_users_thresholds_come_back(usual: tuple[int, int, int]) -> None:
    gc.set_threshold(*usual)
    with pytest.raises(ValueError, match="failed"), collecting_seldom():
        with collecting_seldom():
            inside = gc.get_threshold()
        raise ValueError("failed")
    assert gc.get_threshold() == usual and gc.isenabled()
    assert inside == ((50_000, 10, 10) if usual[0] == 700 else usual)


def test_another_thread_may_end_first_or_last() -> None:
    usual = gc.get_threshold()
    first, second = collecting_seldom(), collecting_seldom()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == usual
