"""What is remembered between runs: the search and the tracing are left out, the proof is not; what differs starts anew."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import mtcompile
from mtcompile import compiler
from mtcompile.cached import files
from mtcompile.cached.files import source_digest
from mtcompile.capture.joint import joint_graph
from mtcompile.passes.planning import candidates
from tests.helpers.models import Gpt, tokens
from tests.helpers.training import adamw, minimum_bytes, same, train

pytestmark = pytest.mark.slow  # it compiles many models


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """One entry per climb of candidates; plans are remembered in ``tmp_path``."""
    monkeypatch.setenv("MT_CACHE", str(tmp_path))
    made: list[int] = []
    search = candidates.searched
    monkeypatch.setattr(candidates, "searched", lambda *args: (made.append(1), search(*args))[1])
    return made


def run(model: torch.nn.Module, memory: int) -> tuple[Any, Any]:
    torch.compiler.reset()
    copied = copy.deepcopy(model)
    optimizer = adamw(copied.parameters())
    compiled = mtcompile.compile(copied, memory=memory, optimizer=optimizer)
    return train(compiled, optimizer, {"tokens": tokens(4)}, steps=2), compiled


def rows(compiled: Any) -> list[str]:
    """The schedule, kernels by the hash of what they compute: their numbers count what the search has looked at."""
    return re.sub(r"k\d+_", "k_", str(compiled.schedule)).splitlines()


def test_the_second_run_does_not_search(searches: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Gpt(layers=1)
    monkeypatch.setenv("MT_CACHE", "0")
    memory = int(minimum_bytes(model, {"tokens": tokens(4)}) * 1.2)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("MT_CACHE", str(tmp_path))
    searches.clear()
    proofs = []
    prove = compiler.verify
    monkeypatch.setattr(compiler, "verify", lambda schedule: (proofs.append(1), prove(schedule))[1])
    expected, first = run(model, memory)
    found, second = run(model, memory)
    assert len(searches) == 1 and len(proofs) == 2
    assert same(expected, found) and second.plan == first.plan and rows(second) == rows(first)

    _, resident = run(model, 2**30)
    for file in tmp_path.glob("plans/*"):  # a plan that does not fit here
        files.write("plans", file.stem, resident.plan.to_json())
    again, third = run(model, memory)
    assert len(searches) == 2 and same(expected, again) and rows(third) == rows(first)
    for file in tmp_path.glob("plans/*"):
        files.write("plans", file.stem, "{")
    assert same(expected, run(model, memory)[0]) and len(searches) == 3


def flipped(file: Path, other: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def linked(file: Path, other: Path) -> None:
    file.rename(other)
    file.symlink_to(other)


def exchanged(file: Path, other: Path) -> None:
    files.write("plans", "1" * 64, "another plan")
    os.replace(file.with_stem("1" * 64), file)


@pytest.mark.parametrize("spoil", [flipped, linked, exchanged, lambda file, other: file.chmod(0o666)])
def test_doubt_is_a_miss(spoil: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MT_CACHE", str(tmp_path / "cache"))
    key = "0" * 64
    files.write("plans", key, "a plan")
    assert files.read("plans", key) == "a plan"
    (file,) = (tmp_path / "cache" / "plans").iterdir()
    spoil(file, tmp_path / "other")
    assert files.read("plans", key) is None


class Scaled(torch.nn.Module):
    """Its graph depends on an attribute, its parts on the names of its modules."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x).relu() * self.scale, 0.5)
        return x.square().mean()


def test_what_is_remembered_is_not_traced_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MT_CACHE", str(tmp_path / "first"))
    traced: list[int] = []
    trace = joint_graph
    monkeypatch.setattr(compiler, "joint_graph", lambda *args: (traced.append(1), trace(*args))[1])

    def loss_of(scale: float, x: torch.Tensor, autocast: bool = False) -> tuple[torch.Tensor, ...]:
        torch.compiler.reset()
        model = mtcompile.compile(Scaled(scale), memory="1MiB")
        plain = Scaled(scale)
        results = []
        for one in (model, plain):
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = one(x)
            loss.backward()
            results.append(loss.detach())
        assert torch.allclose(*results, rtol=1e-2 if autocast else 1e-5)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, rtol=2e-2 if autocast else 1e-5, atol=1e-3 if autocast else 1e-7)  # type: ignore[arg-type]
        return (results[0], *(p.grad for p in model.parameters()))  # type: ignore[return-value]

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    first = loss_of(2.0, x)
    assert len(traced) == 1
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    monkeypatch.setenv("MT_CACHE", str(tmp_path / "second"))  # of which this process remembers nothing
    again = loss_of(2.0, x)
    assert len(traced) == 1
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    loss_of(3.0, x)
    assert len(traced) == 2
    loss_of(2.0, x[:3])
    assert len(traced) == 3
    loss_of(2.0, x, autocast=True)
    assert len(traced) == 4


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the three source folders, linked to each other as in a checkout. Returns the package's folder."""
    root = Path(__file__).resolve().parents[1]
    for name in ("mtcompile", "passes", "runtime"):
        shutil.copytree(root / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("passes", "runtime"):
        assert os.path.samefile(tmp_path / "mtcompile" / name, tmp_path / name)
    return tmp_path / "mtcompile"


@pytest.mark.parametrize(
    "name",
    [
        "cache.py",
        "machine/presets.py",
        "passes/planning/planner.py",
        "passes/plan/plan.py",
        "runtime/optim/update.c",
        "runtime/sim.py",
    ],
)
def test_a_change_to_any_source_changes_the_digest(checkout: Path, name: str) -> None:
    before = source_digest(checkout)
    (checkout / "passes" / "__pycache__").mkdir(exist_ok=True)
    (checkout / "passes" / "__pycache__" / "plan.pyc").write_bytes(b"compiled")
    assert source_digest(checkout) == before
    with (checkout / name).open("a") as file:
        file.write("\n")
    assert source_digest(checkout) != before


def test_links_and_folders_give_the_same_digest_and_circles_end(checkout: Path, tmp_path: Path) -> None:
    installed = shutil.copytree(checkout, tmp_path / "site-packages" / "mtcompile")  # links become folders, as in a wheel
    assert source_digest(installed) == source_digest(checkout)
    before = source_digest(checkout)
    (checkout / "passes" / "planning" / "back").symlink_to(checkout)
    assert source_digest(checkout) == before
    (checkout / "passes" / "rewrites" / "added.py").write_text("")
    assert source_digest(checkout) != before


def test_a_plan_of_a_known_shape_loads_neither_dynamo_nor_sympy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They take as long to load as torch itself, and only a trace or a search for sizes needs them."""
    monkeypatch.setenv("MT_CACHE", str(tmp_path))
    options = {"batch": 32, "seq": 1024, "machine": "rtx3090", "update": "backward", "advise": True}
    assert mtcompile.plan("gpt-11m", memory="12GiB", **options).feasible  # all of it, its head in chunks
    plan = f"mtcompile.plan('gpt-11m', memory='12.1GiB', **{options!r})"
    program = f"import mtcompile, sys; print({plan}.feasible, 'torch._dynamo' in sys.modules, 'sympy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "False", "False"]
