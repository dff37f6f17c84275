"""Answers of ``mtcompile plan`` are kept, and given again to the same question alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtcompile.cached.answers import Answer, keep_answer, key_of, known_answer
from mtcompile.cli.app import app

QUESTION = {"batch": 1, "memory": None, "machine": "rtx4090"}


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has not loaded torch, and an empty cache."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("MT_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("new_process")
def test_an_answer_is_given_to_its_question_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = tmp_path / "machine.json"
    described.write_text('{"flops": 1e12}')

    def keys() -> list[str | None]:
        changed = ({}, {"batch": 2}, {"memory": "1GiB"}, {"machine": str(described)})
        return [key_of("gpt-11m", {**QUESTION, **change}) for change in changed] + [key_of("llama-8b", QUESTION)]

    first = keys()
    keep_answer(first[0], Answer("text", "{}", True))
    assert len(set(first)) == len(first) and None not in first and keys() == first
    assert known_answer(first[0]) == Answer("text", "{}", True) and not any(map(known_answer, first[1:]))
    described.write_text('{"flops": 2e12}')
    assert [before == now for before, now in zip(first, keys(), strict=True)] == [True, True, True, False, True]
    monkeypatch.setenv("MT_DISK_DAYS", "3")
    assert not set(keys()) & set(first)


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize(
    ("model", "more", "variable"),
    [
        ("own.py:make", {}, ""),
        ("config.json", {}, ""),
        ("gpt-11m", {"machine": "this"}, ""),
        ("gpt-11m", {}, "MT_DEBUG"),
        ("gpt-11m", {}, "MT_DUMP"),
    ],
)
def test_answers_that_depend_on_more_are_not_kept(
    model: str, more: dict[str, Any], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    assert key_of(model, {**QUESTION, **more}) is None


@pytest.mark.usefixtures("new_process")
def test_the_command_prints_the_answer_that_it_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = "0" * 64
    monkeypatch.setattr("mtcompile.cli.plan.key_of", lambda *_: key)
    keep_answer(key, Answer("as before", '{"as": "before"}', False))
    (file,) = tmp_path.rglob("*.txt")
    for arguments, printed in ((["gpt-11m"], "as before\n"), (["gpt-11m", "--json"], '{"as": "before"}\n')):
        result = CliRunner().invoke(app, ["plan", *arguments])
        assert (result.exit_code, result.output) == (3, printed)
    file.write_text(file.read_text().replace("before", "after"))
    assert known_answer(key) is None


def test_a_process_that_has_loaded_torch_keeps_no_answers() -> None:
    import torch  # noqa: F401

    assert key_of("gpt-11m", QUESTION) is None
