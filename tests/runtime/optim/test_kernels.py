"""Optimizer updates: every kernel gives the same bits, and those are what the written formula and torch.optim say."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtcompile.runtime.optim import device_kernels, formula, host_kernels
from mtcompile.runtime.optim.formula import Update
from mtcompile.runtime.optim.operands import LAYOUTS, Operands, joined, split
from tests.helpers.updates import (
    ADAM,
    STATES,
    UPDATES,
    assert_same_bits,
    cases,
    edge_operands,
    floats,
    laid_out,
    needs_c,
    needs_triton,
    random_operands,
    run,
)

ROOT = Path(__file__).resolve().parents[3]


# ------------------------------------------------------------------------------------------------------------ split, joined


def test_every_high_pattern_with_chosen_low_ones_is_split_and_joined_exactly() -> None:
    high = torch.arange(2**16)[:, None] << 16
    generator = torch.Generator().manual_seed(1)
    low = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    low = torch.cat((low, torch.randint(0, 2**16, (8,), generator=generator)))
    bits = (high | low).flatten()
    master = floats(bits)
    hi, lo = split(master)
    back = joined(hi, lo).view(torch.int32).long() & 0xFFFFFFFF
    seen = bits & 0x7FFFFFFF
    hidden = (seen > 0x7F800000) & ((seen < 0x7F808000) | (seen >= 0x7FFF8000))
    assert torch.equal(back[~hidden], bits[~hidden])
    assert (back[hidden] == 0x7FC00000).all()
    assert torch.equal(hi.isnan(), master.isnan())  # the planes that are computed with show every NaN
    rounded = ((bits + 0x8000) >> 16) & 0xFFFF
    numbers = ~master.isnan()
    assert torch.equal((hi.view(torch.int16).long() & 0xFFFF)[numbers], rounded[numbers])
    ties = (bits & 0xFFFF) == 0x8000
    assert torch.equal(hi[numbers & ~ties], master.bfloat16()[numbers & ~ties])  # torch's rounding, but for ties


def test_random_masters_are_split_and_joined_exactly() -> None:
    master = torch.randn(3, 700, 1000, generator=torch.Generator().manual_seed(2))
    hi, lo = split(master)
    assert (hi.dtype, lo.dtype, hi.shape, lo.shape) == (torch.bfloat16, torch.int16, master.shape, master.shape)
    assert torch.equal(joined(hi, lo), master)
    assert torch.equal(joined(*split(master.transpose(0, 2))), master.transpose(0, 2))


def test_a_master_whose_high_plane_is_infinite_is_kept() -> None:
    hi, lo = split(torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, math.inf, -math.inf]))
    assert hi.isinf().all() and joined(hi, lo).tolist() == [3.4028234663852886e38, -3.4028234663852886e38, math.inf, -math.inf]


def test_split_and_joined_say_what_they_expect() -> None:
    with pytest.raises(ValueError, match=r"expected masters in torch.float32, found torch.float64"):
        split(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"expected torch.bfloat16 and torch.int16 of one shape .* found torch.float32 \[2\]"):
        joined(torch.zeros(2), torch.zeros(2, dtype=torch.int16))


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


# ------------------------------------------------------------------------------------------------------------ operands


def good(layout: str = "fp32", count: int = 8) -> Operands:
    return laid_out(layout, [torch.ones(count), torch.ones(count), torch.zeros(count), torch.zeros(count)])


@pytest.mark.parametrize(
    ("layout", "place", "wrong", "message"),
    [
        ("fp32", 0, torch.ones(8).bfloat16(), "weight to be torch.float32 [8] on cpu, contiguous, found torch.bfloat16 [8]"),
        ("fp32", 0, torch.ones(8).bfloat16(), "a bf16 weight needs its remainder"),
        ("fp32", 0, torch.ones(2, 4), "weight to be torch.float32 [8] on cpu, contiguous, found torch.float32 [2, 4]"),
        ("fp32", 1, torch.ones(7), "grad to be torch.float32 [8] on cpu, contiguous, found torch.float32 [7]"),
        ("fp32", 1, torch.ones(8).bfloat16(), "expected grad to be torch.float32 [8]"),
        ("fp32", 2, torch.ones(8).double(), "m to be torch.float32 [8] on cpu, contiguous, found torch.float64 [8]"),
        ("fp32", 3, torch.ones(16)[::2], "contiguous, found torch.float32 [8] on cpu, strides [2]"),
        ("fp32", 3, torch.ones(8, device="meta"), "contiguous, found torch.float32 [8] on meta"),
        ("split, bf16 gradient", 0, torch.ones(8), "expected weight to be torch.bfloat16 [8]"),
        ("split, bf16 gradient", 1, torch.ones(8).half(), "expected grad to be torch.bfloat16 or torch.float32 [8]"),
        ("split, bf16 gradient", 4, torch.ones(8), "expected remainder to be torch.int16 [8]"),
        ("fp32", 1, torch.ones(8).to_sparse(), "torch.sparse_coo"),
    ],
)  # fmt: skip
def test_wrong_operands_are_refused(layout: str, place: int, wrong: Tensor, message: str) -> None:
    operands = good(layout)
    tensors: list[Any] = [operands.weight, operands.grad, *operands.states, operands.remainder]
    tensors[place] = wrong
    with pytest.raises(ValueError, match=re.escape(message)):
        host_kernels.apply(UPDATES["adamw"], Operands(tensors[0], tensors[1], tuple(tensors[2:4]), tensors[4]))


def test_states_of_another_optimizer_are_refused() -> None:
    with pytest.raises(ValueError, match="expected the states buffer, found 2 tensors"):
        host_kernels.apply(UPDATES["sgd"], good())


def test_overlapping_operands_are_refused() -> None:
    room = torch.zeros(15)
    with pytest.raises(ValueError, match="share no memory, found m and v overlapping"):
        host_kernels.apply(UPDATES["adamw"], Operands(torch.ones(8), torch.ones(8), (room[:8], room[7:])))
    room = torch.zeros(16)
    host_kernels.apply(UPDATES["adamw"], Operands(torch.ones(8), torch.ones(8), (room[:8], room[8:])))


def test_a_step_before_the_first_and_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="expected the first step to be number 1, found step 0"):
        formula.adamw(**ADAM | {"step": 0})
    there = [torch.zeros(8, device="meta") for _ in range(4)]
    with pytest.raises(ValueError, match=r"expected weight to be .* on cpu, contiguous, found torch.float32 \[8\] on meta"):
        host_kernels.apply(UPDATES["adamw"], Operands(there[0], there[1], tuple(there[2:])))


def test_nothing_to_update_is_no_error() -> None:
    for layout in LAYOUTS:
        host_kernels.apply(UPDATES["adamw"], good(layout, 0))


@pytest.mark.parametrize("by", [pytest.param("c", marks=needs_c), "torch"])
def test_autograd_notices_what_was_written_and_only_that(by: Any) -> None:
    weight, grad, m, v = torch.nn.Parameter(torch.ones(8)), torch.ones(8), torch.zeros(8), torch.zeros(8)
    before = [tensor._version for tensor in (weight, grad, m, v)]
    host_kernels.apply(UPDATES["adamw"], Operands(weight, grad, (m, v)), by)
    assert [tensor._version - old for tensor, old in zip((weight, grad, m, v), before)] == [1, 0, 1, 1]
    with torch.inference_mode():
        host_kernels.apply(UPDATES["adamw"], good(), by)


# ------------------------------------------------------------------------------------------------------------ which


def test_it_says_what_runs_and_how_fast() -> None:
    assert host_kernels.which() == (
        "torch" if host_kernels.library() is None else f"C with OpenMP, {torch.get_num_threads()} threads"
    )
    assert host_kernels.gbps(parameters=1000, repeats=1) > 0
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


# ------------------------------------------------------------------------------------------------------------ Triton


def interpreted(names: tuple[str, ...], count: int) -> None:
    """Compares in a process of its own: Triton decides at import whether it interprets."""
    program = (
        "from mtcompile.runtime.optim import device_kernels\n"
        "from tests.helpers.updates import *\n"
        f"for name, layout in itertools.product({names!r}, LAYOUTS):\n"
        f"    for parts in (edge_operands(STATES[name]), random_operands({count}, STATES[name], seed=9)):\n"
        "        results = run(name, layout, parts, kernels=device_kernels)\n"
        "        assert_same_bits(results, run(name, layout, parts, 'torch'))\n"
        "assert device_kernels.proven(torch.device('cpu'))\n"
        "print('same')\n"
    )
    env = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=env)
    assert result.stdout == "same\n", result.stdout + result.stderr


@needs_triton
def test_triton_gives_the_same_bits() -> None:
    interpreted(("adamw", "sgd"), 10_001)


def test_a_device_without_the_kernels_or_with_other_bits_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert not device_kernels.proven.__wrapped__(device)  # Triton launches on GPUs only

    def nearly(update: Update, operands: Operands) -> None:
        host_kernels.apply(update, operands)
        if update.kind == "adamw":
            operands.weight.view(torch.int16)[17] ^= 1

    monkeypatch.setattr(device_kernels, "apply", host_kernels.apply)
    assert device_kernels.proven.__wrapped__(device)
    monkeypatch.setattr(device_kernels, "apply", nearly)
    assert not device_kernels.proven.__wrapped__(device)


@needs_triton
def test_adam_has_no_kernel_on_the_device() -> None:
    with pytest.raises(ValueError, match="expected AdamW or SGD on a GPU, found Adam"):
        device_kernels.apply(UPDATES["adam"], good())


@needs_triton
@pytest.mark.long
def test_triton_gives_the_same_bits_on_many_values() -> None:
    interpreted(("adamw", "adamw, scaled", "sgd", "sgd, first", "nesterov", "nesterov, first"), 100_003)


COMPILES = """
import itertools, re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from mtcompile.runtime.optim import triton_kernels as kernels

POINTERS = {"m_at": "*fp32", "v_at": "*fp32", "buffer": "*fp32"}
for name, (split, half) in itertools.product(("adamw", "sgd"), ((False, False), (True, True), (True, False))):
    for nesterov, first in ((False, False), (True, True)) if name == "sgd" else ((False, False),):
        kernel = getattr(kernels, name)
        flags = {"SPLIT": split, "HALF": half, "NESTEROV": nesterov, "FIRST": first, "BLOCK": kernels.BLOCK}
        flags = {flag: value for flag, value in flags.items() if flag in kernel.arg_names}
        types = {argument: "fp32" for argument in kernel.arg_names} | POINTERS | {"count": "i64"}
        types |= {"weight": "*i16" if split else "*fp32", "grad": "*i16" if half else "*fp32", "remainder": "*i16"}
        if not split:
            flags["remainder"] = None
        types |= {flag: "constexpr" for flag in flags}
        types = {argument: types[argument] for argument in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=types, constexprs=flags)
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
        used = set(re.findall(r"\\b(?:fma|mad|mul|add|sub|neg|div|sqrt)\\.[a-z.]*f32", compiled.asm["ptx"]))
        assert used <= {kind + ".rn.f32" for kind in ("mul", "add", "sub", "div", "sqrt")}, used
        assert ("div.rn.f32" in used) == ("sqrt.rn.f32" in used) == (name == "adamw")
print("rounded")
"""


@needs_triton
@pytest.mark.skipif(not sys.platform.startswith("linux") or platform.machine() != "x86_64", reason="Triton's PTX assembler")
def test_compiled_for_a_gpu_every_operation_is_rounded_once(tmp_path: Path) -> None:
    """Triton's compiler, which needs no GPU: what an interpreter cannot show."""
    (tmp_path / "compiles.py").write_text(COMPILES)
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, str(tmp_path / "compiles.py")], capture_output=True, text=True, env=env)
    assert result.stdout == "rounded\n", result.stdout + result.stderr


def test_device_updates_load_without_triton_and_say_what_they_need() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from mtcompile.runtime.optim import device_kernels, formula, operands\n"
        "weight, grad, buffer = torch.ones(3, 2)\n"
        "update = formula.sgd(lr=1.0, momentum=0.9, first=True)\n"
        "try: device_kernels.apply(update, operands.Operands(weight, grad, (buffer,)))\n"
        "except RuntimeError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.startswith("expected triton to be installed"), result.stdout + result.stderr
