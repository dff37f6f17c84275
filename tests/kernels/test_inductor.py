"""Kernels compiled by Inductor: near the eager ones, the same random numbers, equal bits whatever moves, bytes kept."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.kernels import inductor
from mtcompile.kernels.compile_pool import worker
from mtcompile.kernels.eager import EagerKernels
from mtcompile.kernels.measure import Measured
from mtcompile.kernels.random import with_explicit_state, with_generator
from mtcompile.kernels.zeros.run import example_inputs
from mtcompile.machine.device import allocator_peak
from mtcompile.passes.step_graph import is_random, kernel_of, regions
from tests.helpers.models import Gpt, Small, tokens
from tests.helpers.tracing import trace, traced_case
from tests.helpers.training import adamw, minimum_bytes, train

pytestmark = pytest.mark.slow  # it compiles many models


def data() -> dict[str, torch.Tensor]:
    return {"tokens": tokens(4)}


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return Gpt(layers=1)


def features() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 32, generator=torch.Generator().manual_seed(4))}


def block() -> torch.nn.Module:
    """Few kernels, each of which a C++ compiler compiles for a second or more."""
    return Small(blocks=1, norm=nn.LayerNorm)


def run(
    model: torch.nn.Module, memory: int | None, kernels: str, inputs: dict[str, torch.Tensor] | None = None
) -> tuple[Any, Any]:
    torch.compiler.reset()
    copied = copy.deepcopy(model)
    optimizer = adamw(copied.parameters())
    compiled = mtcompile.compile(copied, memory=memory, optimizer=optimizer, kernels=kernels)
    return train(compiled, optimizer, data() if inputs is None else inputs, steps=2), compiled


@pytest.mark.parametrize("make", [block, pytest.param(small, marks=pytest.mark.long)])
def test_inductor_kernels_from_the_floor_to_resident(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model, inputs = make(), features() if make is block else data()
    eager, compiled = run(model, None, "eager", inputs)
    half = compiled.memory_report()["planned_peak_device_bytes"] // 2
    floor = minimum_bytes(model, inputs)
    by_kernels: dict[Any, Any] = {}
    for memory in (None, *[half] * (make is small), int(floor * 1.3)):
        rows, compiled = run(model, memory, "inductor", inputs)
        for row, expected in zip(rows[:-1], eager[:-1], strict=True):
            for one, other in zip(row, expected, strict=True):
                # Adam's first steps are the gradient's sign, so a rounded gradient near zero moves a weight by 2 lr.
                assert one is not None and other is not None and (one - other).abs().max() <= 2.1e-2
        assert torch.allclose(rows[0][0], eager[0][0], rtol=1e-4)  # type: ignore[arg-type]
        assert torch.equal(rows[-1][0], eager[-1][0])  # type: ignore[arg-type]  # the generator's state
        report = compiled.memory_report()
        assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"]
        runs = [i.kernel for i in compiled.schedule.instructions if i.op == "run"]
        if memory is None:
            assert len(runs) == 2  # everything fits: one forward and one backward region
        assert "by Inductor" in compiled.plan.numerics
        earlier = by_kernels.setdefault(tuple(sorted({k.split("_")[1] for k in runs})), rows)
        assert all(torch.equal(a, b) for r, e in zip(rows, earlier, strict=True) for a, b in zip(r, e, strict=True))  # type: ignore[arg-type]
    assert "stays eager" not in capfd.readouterr().err


_WITH_WORKERS = """
import torch
from mtcompile.kernels import compile_pool
from tests.kernels.test_inductor import data, minimum_bytes, run, small
compile_pool.usable_cpus = lambda: 4  # a machine with cores for it
model = small()
rows, compiled = run(model, int(minimum_bytes(model, data()) * 1.3), "inductor")
counted = torch._dynamo.utils.counters["inductor"]
kernels = {i.kernel for i in compiled.schedule.instructions if i.op == "run"}
print(len(kernels), counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"], float(rows[-2][0].sum()))
"""


@pytest.mark.long
def test_workers_compile_into_the_disk_cache(tmp_path: Path) -> None:
    """Every kernel is then loaded, none compiled in the process itself; a second start starts no worker."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    said = []
    for _ in range(2):
        started = subprocess.run([sys.executable, "-c", _WITH_WORKERS], capture_output=True, text=True, check=True, env=env)
        kernels, loaded, compiled, _ = started.stdout.splitlines()[-1].split()
        assert int(kernels) == int(loaded) >= 3 and compiled == "0"
        assert len(list(tmp_path.glob("mtcompile/*"))) == int(kernels)
        said.append(started.stdout)
    assert said[0] == said[1]


def test_workers_import_nothing_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("open('executed', 'w')")
    (tmp_path / "json.py").write_text("open('executed', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with worker() as started:
        assert started.stdin is not None and started.stdout is not None
        started.stdin.write("no graph\n")
        started.stdin.close()
        assert started.stdout.readline() == "GraphFormatError\n"
    assert not (tmp_path / "executed").exists()


@pytest.mark.long
def test_random_operations_are_those_of_the_plain_run() -> None:
    for name in ("gpt2", "t5"):
        traced = traced_case(name)
        for region in regions(traced.step):
            kernel = kernel_of(traced.step, region)
            if not any(is_random(node) for node in kernel.graph.nodes):
                continue
            inputs = []
            for node in kernel.graph.find_nodes(op="placeholder"):
                val = node.meta["val"]
                tensor = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)
                inputs.append(tensor.normal_() if val.is_floating_point() else tensor.zero_())
            torch.manual_seed(2)
            expected, state = kernel(*inputs), torch.get_rng_state()
            torch.manual_seed(2)
            drawn = with_generator(with_explicit_state(kernel, "cpu"), "cpu")(*inputs)
            assert torch.equal(torch.get_rng_state(), state)
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(expected, drawn, strict=True))


def test_a_kernel_that_cannot_be_compiled_stays_eager(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any) -> Any:
        raise NotImplementedError("no such thing")

    monkeypatch.setattr("mtcompile.torch_private.inductor", refuse)
    model = small()
    eager, _ = run(model, None, "eager")
    rows, _ = run(model, None, "inductor")
    said = capfd.readouterr().err
    assert "stays eager: Inductor raised NotImplementedError: no such thing" in said
    assert torch.allclose(rows[0][0], eager[0][0], rtol=1e-5)  # type: ignore[arg-type]


def test_one_set_of_operands_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two had no room on a full GPU, and the kernel stayed eager for it."""
    (kernel, *_) = trace(nn.Linear(1024, 1024), {"input": torch.randn(512, 1024)}).step.children()
    monkeypatch.setattr(inductor, "compile_kernel", lambda kernel, device: kernel.forward)
    monkeypatch.setattr(inductor, "record_compiled", lambda kernel: None)
    monkeypatch.setattr(inductor, "measure", lambda *of: Measured(workspace=len(example_inputs(of[0], of[2]))))
    device = torch.device("cpu")
    with allocator_peak(device) as once:
        operands = example_inputs(kernel, device)
        results = kernel.forward(*operands)
    del operands, results
    with allocator_peak(device) as peak:
        built = inductor._inductor_kernel(kernel, EagerKernels(device), device)
    assert not built.why_eager and once.nbytes is not None and peak.nbytes is not None
    assert peak.nbytes <= once.nbytes + 2**16  # a generator's state among it


def test_an_error_that_ends_the_gpu_does_not_leave_a_kernel_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel, *_) = trace(nn.Linear(4, 4), {"input": torch.randn(2, 4)}).step.children()

    def fails(kernel: Any, device: torch.device) -> Any:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(inductor, "compile_kernel", fails)
    with pytest.raises(RuntimeError, match="misaligned address"):
        inductor._inductor_kernel(kernel, EagerKernels(torch.device("cpu")), torch.device("cpu"))


_DRAWN = """
import random, numpy, torch, mtcompile
from torch import nn
model = mtcompile.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), memory="1GiB", kernels="inductor")
before = random.getstate(), str(numpy.random.get_state())
model(torch.randn(4, 8)).sum().backward()
assert (random.getstate(), str(numpy.random.get_state())) == before
"""


def test_compiling_draws_no_random_numbers(tmp_path: Path) -> None:
    """What is imported first then may draw, in a new process: one that resumes a training would go on with others."""
    env = {**os.environ, "MT_CACHE": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", _DRAWN], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr
