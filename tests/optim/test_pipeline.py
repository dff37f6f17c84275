"""A pipeline reads ahead as far as it has memory, keeps the order, and tells what failed."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from mtcompile.optim.pipeline import Pipeline


def run(pipeline: Pipeline[int], wanted: str, ahead: str, log: list[str]) -> None:
    """Takes values by one letter each, as the number of the set that they are in, and writes them."""

    def read(name: str, number: int) -> int:
        log.append(f"read {name}")
        return number

    pipeline.expect([(name, partial(read, name)) for name in (*wanted, *ahead)])
    for name in wanted:
        with pipeline.taken() as (_, submit):
            submit(partial(log.append, f"wrote {name}"))


def test_what_was_expected_is_read_once_and_what_comes_instead_anew() -> None:
    pipeline, log = Pipeline[int](3), list[str]()
    run(pipeline, "ab", "cd", log)
    run(pipeline, "cd", "ef", log)
    run(pipeline, "eg", "", log)  # in place of f
    pipeline.end()
    assert [each for each in log if each.startswith("wrote")] == [f"wrote {name}" for name in "abcdeg"]
    assert [each for each in log if each.startswith("read") and each != "read f"] == [f"read {name}" for name in "abcdeg"]


def test_all_sets_come_back_from_changes_that_fail() -> None:
    pipeline, log = Pipeline[int](2), list[str]()
    for _ in range(4):
        pipeline.expect([("a", lambda number: number)])
        with pytest.raises(ValueError), pipeline.taken():
            raise ValueError
    run(pipeline, "abc", "", log)
    pipeline.end()
    assert log[-1] == "wrote c"


@pytest.mark.parametrize("last", [False, True])
def test_a_write_that_failed_is_told_by_the_next_one_or_at_the_end(last: bool) -> None:
    pipeline, failed = Pipeline[int](2), threading.Event()

    def fail() -> None:
        failed.set()
        raise OSError("full")

    pipeline.expect([(name, lambda number: number) for name in "abc"])
    with pipeline.taken() as (_, submit):
        submit(fail)
    assert failed.wait(5)
    with pytest.raises(OSError, match="full"):
        if last:
            pipeline.end()
        else:
            for _ in range(2):  # the second has waited for the set of the first
                with pipeline.taken():
                    pass
    pipeline.end()
