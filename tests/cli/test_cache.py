"""``mtcompile cache`` lists and clears what is mtcompile's, and follows no link."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from mtcompile import cache as cached_on_disk
from mtcompile.cached import files
from mtcompile.cached.kept import KINDS
from mtcompile.cli.app import app
from mtcompile.cli.cache import Kind

KEY = "0123456789abcdef" * 4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two plans, a machine and a compiled kernel."""
    monkeypatch.setenv("MT_CACHE", str(tmp_path / "cache"))
    files.write("plans", KEY, "one")
    files.write("plans", KEY[::-1], "two")
    cached_on_disk.write_machine("mine", "{}")
    kernel = tmp_path / "cache" / "inductor" / "x7" / "kernel.so"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"1234")
    return tmp_path / "cache"


def told(*arguments: str) -> dict[str, dict[str, Any]]:
    made = CliRunner().invoke(app, ["cache", *arguments, "--json"])
    assert made.exit_code == 0, made.output
    return {row["kind"]: row for row in json.loads(made.stdout)["kinds"]}


def test_it_lists_number_bytes_and_last_use_of_each_kind(folder: Path) -> None:
    os.utime(folder / "inductor" / "x7" / "kernel.so", (2e9, 1e9))
    rows = told()
    assert tuple(rows) == get_args(Kind) and {kind for kind, row in rows.items() if row["files"]} == {
        "plans",
        "machines",
        "inductor",
    }
    sizes = [path.stat().st_size for path in (folder / "plans").iterdir()]
    assert (rows["plans"]["files"], rows["plans"]["nbytes"]) == (2, sum(sizes))
    assert (rows["inductor"]["nbytes"], rows["inductor"]["last_used"]) == (4, 2e9)
    text = CliRunner().invoke(app, ["cache", "plans"]).stdout.splitlines()
    assert text[0] == str(folder) and len(text) == 2 and re.search(r"plans +2 files +\d+ B  20\d\d-", text[1])


def test_every_kind_that_is_written_is_listed() -> None:
    written = re.findall(r'files\.(?:write|path_of)\("(\w+)"', Path(cached_on_disk.__file__).read_text())
    assert {*written, "answers", "inductor"} == set(KINDS) == set(get_args(Kind))


def test_it_clears_one_kind_or_all(folder: Path) -> None:
    assert told("plans", "--clear")["plans"]["files"] == 2  # what there was
    assert not (folder / "plans").exists() and {row["files"] for row in told("plans").values()} == {0}
    assert sum(row["files"] for row in told().values()) == 2
    told("--clear")
    assert list(folder.iterdir()) == []
    assert files.read("plans", KEY) is None
    files.write("plans", KEY, "again")
    assert files.read("plans", KEY) == "again"


def test_what_is_not_mtcompiles_stays(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    kept = [
        mine / f"{KEY}.txt",
        folder / "plans" / "plan of the house.txt",
        folder / "inductor" / "README",
        folder / "notes.txt",
    ]
    for path in kept:
        path.write_text("mine")
    (folder / "joints").symlink_to(mine)  # where a kind's folder would be
    (folder / "plans" / f"{'a' * 64}.txt").symlink_to(kept[0])
    (folder / "inductor" / "x7" / "link").symlink_to(mine)
    (folder / "inductor" / "ab").symlink_to(mine)
    assert told()["joints"]["files"] == 0 and told()["plans"]["files"] == 2
    told("--clear")
    assert all(path.read_text() == "mine" for path in kept)
    assert (folder / "joints").is_symlink() and not (folder / "inductor" / "x7").exists()


def test_without_a_cache_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_CACHE", "0")
    assert CliRunner().invoke(app, ["cache", "--clear"]).stdout == "MT_CACHE=0: nothing is cached\n"
    assert told() == {}


def test_it_needs_no_torch(folder: Path) -> None:
    program = (
        "import sys; from mtcompile.cli.app import app; app(['cache'], standalone_mode=False); print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False" and str(folder) in ran.stdout
