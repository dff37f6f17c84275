"""Optimizer updates: every kernel gives the same bits, and those are what the written formula and torch.optim say."""

from __future__ import annotations

import ctypes
import itertools
import math
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtcompile.runtime.optim import formula, host_kernels
from mtcompile.runtime.optim.operands import LAYOUTS, Operands, joined, split
from tests.helpers.updates import (
    ADAM,
    STATES,
    UPDATES,
    assert_same_bits,
    cases,
    edge_operands,
    floats,
    good,
    laid_out,
    needs_c,
    random_operands,
    run,
)

ROOT = Path(__file__).resolve().parents[3]


# ------------------------------------------------------------------------------------------------------------ bits


@needs_c
@cases()
def test_c_gives_the_bits_of_torch(name: str, layout: str) -> None:
    for parts in (edge_operands(STATES[name]), random_operands(100_003, STATES[name])):
        assert_same_bits(run(name, layout, parts, "c"), run(name, layout, parts, "torch"))


@needs_c
@pytest.mark.long
@cases()
def test_c_gives_the_bits_of_torch_on_many_values(name: str, layout: str) -> None:
    parts = random_operands(10**7, STATES[name], seed=3)
    assert_same_bits(run(name, layout, parts, "c"), run(name, layout, parts, "torch"))


@needs_c
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("gcc"), reason="no gcc for x86-64")
@pytest.mark.slow
@pytest.mark.parametrize("machine", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_bits_do_not_depend_on_the_instruction_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str) -> None:
    """v3 has fused multiply-adds; the first one has four floats in a vector."""
    path = tmp_path / f"{machine}.so"
    flags = ["-std=gnu11", "-fopenmp", "-fPIC", "-shared", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
    source = str(ROOT / "runtime/optim/update.c")
    if subprocess.run(["gcc", *flags, f"-march={machine}", "-DCLONES=", source, "-o", str(path)]).returncode:
        pytest.skip(f"gcc does not know {machine}")
    if machine != "x86-64" and not cpu_can("avx2" if machine == "x86-64-v3" else "avx512bw"):
        pytest.skip(f"the processor is no {machine}")
    monkeypatch.setattr(host_kernels, "built", lambda: path)
    host_kernels.library.cache_clear()
    try:
        for name, layout in itertools.product(UPDATES, LAYOUTS):
            parts = edge_operands(STATES[name])
            assert_same_bits(run(name, layout, parts, "c"), run(name, layout, parts, "torch"))
    finally:
        host_kernels.library.cache_clear()


def cpu_can(flag: str) -> bool:
    path = Path("/proc/cpuinfo")
    return path.exists() and flag in path.read_text().split()


@pytest.mark.parametrize("by", [pytest.param("c", marks=needs_c), "torch"])
@cases(("adamw", "nesterov"))
def test_bits_do_not_depend_on_threads_and_alignment(name: str, layout: str, by: str) -> None:
    parts = random_operands(150_001, STATES[name], seed=4)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(name, layout, parts, by))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    assert_same_bits(run(name, layout, [part[1:] for part in parts], by), [result[1:] for result in results[0]])


def test_a_nan_is_stored_as_one_and_shows_in_the_high_plane() -> None:
    nans = floats(torch.tensor([0x7F810001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00000]))
    for layout, by in itertools.product(LAYOUTS, ("torch", *(["c"] if host_kernels.library() else []))):
        results = run("adamw", layout, [torch.ones(4), nans, torch.zeros(4), torch.zeros(4)], by)
        assert all((result == 0x7FC00000).all() for result in results[:3])


def test_a_scale_of_one_changes_nothing_and_another_multiplies_the_gradient_first() -> None:
    weight, grad, m, v = random_operands(1000, 2, seed=5)
    halves = [weight, grad * 0.5, m, v]
    expected = run("adamw", "fp32", [weight, grad, m, v])
    assert_same_bits(run(formula.adamw(**ADAM, scale=1.0), "fp32", [weight, grad, m, v]), expected)
    assert_same_bits(run(formula.adamw(**ADAM, scale=0.5), "fp32", [weight, grad, m, v]), run("adamw", "fp32", halves))


# ------------------------------------------------------------------------------------------------------------ other references


def masters_by_hand(weight: Tensor, grads: list[Tensor]) -> Iterator[Tensor]:
    """Yields fp32 masters after each AdamW step: the formula of formula.adamw written out again, on fp32 tensors."""

    def single(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64).float()

    lr, beta1, beta2, decay = ADAM["lr"], ADAM["beta1"], ADAM["beta2"], ADAM["weight_decay"]
    w, m, v = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for step, g in enumerate(grads, 1):
        m = m + single(1 - beta1) * (g - m)
        v = single(beta2) * v + (single(1 - beta2) * g) * g
        root = v.double().sqrt().float()  # torch.sqrt of fp32 is not rounded to nearest on every processor
        d = root * single(1 / (1 - beta2**step) ** 0.5) + single(ADAM["eps"])
        w = single(1 - lr * decay) * w
        w = w - (single(lr / (1 - beta1**step)) * m) / d
        yield w


@pytest.mark.parametrize("by", [pytest.param("c", marks=needs_c), "torch"])
def test_200_steps_of_split_adamw_are_those_of_fp32_masters(by: Any) -> None:
    generator = torch.Generator().manual_seed(6)
    count = 5000
    sign = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    master = (torch.rand(count, generator=generator) + 0.5) * sign  # stays away from zero: relative errors mean something
    grads = [torch.randn(count, generator=generator).bfloat16() * 0.01 for _ in range(200)]
    theirs = torch.nn.Parameter(master.clone())
    scalars = {key: value for key, value in ADAM.items() if key != "step"}
    betas = (scalars.pop("beta1"), scalars.pop("beta2"))
    optimizer = torch.optim.AdamW([theirs], betas=betas, **scalars)
    hi, lo = split(master)
    m, v = torch.zeros(count), torch.zeros(count)
    for step, (grad, expected) in enumerate(zip(grads, masters_by_hand(master, [g.float() for g in grads])), 1):
        host_kernels.apply(formula.adamw(**ADAM | {"step": step}), Operands(hi, grad, (m, v), lo), by)
        assert torch.equal(joined(hi, lo), expected), step
        theirs.grad = grad.float()
        optimizer.step()
    error = ((joined(hi, lo) - theirs.detach()) / theirs.detach()).abs().max()
    assert error < 1e-6, error
    assert (theirs.detach() - master).abs().min() > 0  # something was learned


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dampening", [0.0, 0.25])
def test_sgd_is_torchs(nesterov: bool, dampening: float) -> None:
    if nesterov and dampening:
        pytest.skip("torch refuses dampening with nesterov")
    scalars = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "dampening": dampening, "nesterov": nesterov}
    compare_with_torch(formula.sgd, torch.optim.SGD, scalars, scalars)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_and_adamw_are_torchs(decay: float) -> None:
    own = {"lr": 1e-3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": decay}
    theirs = {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": decay}
    compare_with_torch(formula.adam, torch.optim.Adam, own, theirs)
    compare_with_torch(formula.adamw, torch.optim.AdamW, own, theirs)


def compare_with_torch(update: Any, optimizer: Any, own: dict[str, Any], theirs: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.rand(1000, generator=generator) + 0.5
    other = torch.nn.Parameter(weight.clone())
    stepper = optimizer([other], **theirs)
    sgd = update is formula.sgd
    states = tuple(torch.full((1000,), math.nan if sgd else 0.0) for _ in range(1 if sgd else 2))
    for step in range(1, 21):
        other.grad = torch.randn(1000, generator=generator) * 0.1
        counted = {"first": step == 1} if sgd else {"step": step}
        host_kernels.apply(update(**own, **counted), Operands(weight, other.grad.clone(), states))
        stepper.step()
    assert ((weight - other) / other).abs().max() < 1e-6


def test_updates_below_bf16_resolution_are_not_lost() -> None:
    count, steps = 1000, 100
    scalars = ADAM | {"lr": 1e-5, "weight_decay": 0.0}
    master = torch.rand(count, generator=torch.Generator().manual_seed(8)) + 1.0
    hi, lo = split(master)
    plain, pure = hi.float() * 0 + master, torch.nn.Parameter(hi.clone())
    optimizer = torch.optim.AdamW([pure], lr=1e-5, weight_decay=0.0)
    moments = [(torch.zeros(count), torch.zeros(count)) for _ in range(2)]
    grad = torch.full((count,), 0.125, dtype=torch.bfloat16)
    for step in range(1, steps + 1):
        update = formula.adamw(**scalars | {"step": step})
        host_kernels.apply(update, Operands(hi, grad, moments[0], lo))
        host_kernels.apply(update, Operands(plain, grad.float(), moments[1]))
        pure.grad = grad
        optimizer.step()
    assert torch.equal(joined(hi, lo), plain)
    moved = master - plain
    assert moved.min() > 0.9 * steps * 1e-5 and moved.max() < 1.1 * steps * 1e-5
    assert torch.equal(pure.detach(), split(master)[0])  # each step is under half a bf16 unit of the weight: nothing moved


@pytest.mark.parametrize("by", [pytest.param("c", marks=needs_c), "torch"])
def test_autograd_notices_what_was_written_and_only_that(by: Any) -> None:
    weight, grad, m, v = torch.nn.Parameter(torch.ones(8)), torch.ones(8), torch.zeros(8), torch.zeros(8)
    before = [tensor._version for tensor in (weight, grad, m, v)]
    host_kernels.apply(UPDATES["adamw"], Operands(weight, grad, (m, v)), by)
    assert [tensor._version - old for tensor, old in zip((weight, grad, m, v), before)] == [1, 0, 1, 1]
    with torch.inference_mode():
        host_kernels.apply(UPDATES["adamw"], good(), by)


# ------------------------------------------------------------------------------------------------------------ which


def test_it_says_what_runs_and_how_much_it_moves() -> None:
    assert host_kernels.which() == (
        "torch" if host_kernels.library() is None else f"C with OpenMP, {torch.get_num_threads()} threads"
    )
    assert [host_kernels.moved_nbytes(2, layout) for layout in LAYOUTS] == [28, 26, 28]


def test_without_the_library_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = random_operands(100, 2)
    expected = run("adamw", "split, bf16 gradient", parts)
    host_kernels.library.cache_clear()
    try:
        monkeypatch.setattr(host_kernels, "built", lambda: None)
        assert host_kernels.which() == "torch"
        assert_same_bits(run("adamw", "split, bf16 gradient", parts), expected)
        with pytest.raises(RuntimeError, match=r"expected update\.c to have been built"):
            run("adamw", "fp32", parts, "c")
    finally:
        host_kernels.library.cache_clear()


@pytest.mark.parametrize("what", ["broken", "another version"])
def test_a_library_that_cannot_be_used_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    (tmp_path / "some.so").write_bytes(b"no library")
    monkeypatch.setattr(host_kernels, "built", lambda: tmp_path / "some.so")
    if what == "another version":
        monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mt_update_version=lambda: 999))
    host_kernels.library.cache_clear()
    try:
        assert host_kernels.library() is None
    finally:
        host_kernels.library.cache_clear()


@needs_c
def test_the_library_holds_no_fused_multiply_add() -> None:
    """Contraction is the one thing that would change bits on some processors only."""
    path = host_kernels.built()
    try:
        text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True).stdout
    except FileNotFoundError:
        pytest.skip("objdump is not installed")
    assert "Disassembly" in text and not re.search(r"\bv?fn?m(add|sub)", text)


@pytest.mark.parametrize("by", [pytest.param("c", marks=needs_c), "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_updates_in_one_call_have_the_bits_of_one_after_the_other(layout: str, by: Any) -> None:
    """Their threads take chunks of all of them, the last of each a ragged one."""
    sizes = (3, 2**15, 2**15 + 1, 100_003, 0, 1)
    parts = [[part[:size] for part in random_operands(100_003, 2, seed)] for seed, size in enumerate(sizes)]
    together, single = ([laid_out(layout, each) for each in parts] for _ in range(2))
    update = UPDATES["adamw"]
    assert host_kernels.apply_all([(update, operands) for operands in together], by=by) is None
    for operands in single:
        host_kernels.apply(update, operands, by)
    for one, other in zip(together, single, strict=True):
        for a, b in zip((one.weight, *one.states), (other.weight, *other.states), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("by", [pytest.param("c", marks=needs_c), "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_written_where_a_checked_gradient_is_not_finite(layout: str, by: Any) -> None:
    sizes = (40_000, 7, 70_000, 70_000)
    generator = torch.Generator().manual_seed(3)
    tasks = [(UPDATES["adamw"], laid_out(layout, [torch.rand(n, generator=generator) for _ in range(4)])) for n in sizes]
    tensors = [t for _, o in tasks for t in (o.weight, *o.states, *(() if o.remainder is None else (o.remainder,)))]
    before = [tensor.clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    for bad in (math.inf, -math.inf, math.nan):
        for places in ((2, 69_999), (3, 0)), ((3, 33_000), (2, 0)):
            for task, at in places:
                tasks[task][1].grad[at] = bad
            assert host_kernels.apply_all(tasks, checked=True, by=by) == 2
            assert all(map(torch.equal, before, tensors)) and versions == [tensor._version for tensor in tensors]
            for task, at in places:
                tasks[task][1].grad[at] = 0.5
    tasks[1][1].grad[3] = torch.finfo(tasks[1][1].grad.dtype).max
    assert host_kernels.apply_all(tasks, checked=True, by=by) is None
    assert not any(map(torch.equal, before, tensors))
    tasks[0][1].grad[0] = math.inf
    assert host_kernels.apply_all(tasks, by=by) is None  # asked for as it is


def test_updates_leave_threads_to_those_that_issue(monkeypatch: pytest.MonkeyPatch) -> None:
    many = 2**24
    for threads, left in ((1, 1), (2, 2), (4, 3), (8, 6), (64, 62)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert host_kernels._threads(many, 2) == left and host_kernels._threads(many) == threads
