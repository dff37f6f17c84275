"""Triton's kernels give the host's bits, in its interpreter and as compiled for a GPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mtcompile.runtime.optim import device_kernels, host_kernels
from mtcompile.runtime.optim.formula import Update
from mtcompile.runtime.optim.operands import Operands
from tests.helpers.updates import UPDATES, good, needs_triton

pytestmark = pytest.mark.slow  # it compiles Triton kernels

ROOT = Path(__file__).resolve().parents[3]


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
    interpreted(("adamw", "sgd"), 2_001)


def test_a_device_without_the_kernels_or_with_other_bits_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert not device_kernels.proven.__wrapped__(device)  # Triton launches on GPUs only

    def same(tasks: Sequence[tuple[Update, Operands]], found: torch.Tensor) -> None:
        if not found:
            host_kernels.apply_all(tasks)

    def nearly(tasks: Sequence[tuple[Update, Operands]], found: torch.Tensor) -> None:
        same(tasks, found)
        if not found and tasks[0][0].kind == "adamw":
            tasks[0][1].weight.view(torch.int16)[17] ^= 1

    monkeypatch.setattr(device_kernels, "apply_all", same)
    assert device_kernels.proven.__wrapped__(device)
    monkeypatch.setattr(device_kernels, "apply_all", nearly)
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

for name, (split, half) in itertools.product(("adamw", "sgd"), ((False, False), (True, True), (True, False))):
    for nesterov, first in ((False, False), (True, True)) if name == "sgd" else ((False, False),):
        kernel = getattr(kernels, name)
        flags = {"SPLIT": split, "HALF": half, "NESTEROV": nesterov, "FIRST": first, "BLOCK": kernels.BLOCK}
        flags |= {"ALIGNED": 16, "WIDTH": 8}
        flags = {flag: value for flag, value in flags.items() if flag in kernel.arg_names}
        types = {argument: "fp32" for argument in kernel.arg_names} | {"table": "*i64", "width": "i32", "found": "*fp32"}
        types |= {flag: "constexpr" for flag in flags}
        types = {argument: types[argument] for argument in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=types, constexprs=flags)
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
        used = set(re.findall(r"\\b(?:fma|mad|mul|add|sub|neg|div|sqrt)\\.[a-z.]*f32", compiled.asm["ptx"]))
        moved = set(re.findall(r"\\b(?:ld|st)\\.global\\.[.b0-9v]+", compiled.asm["ptx"]))  # scalars: found and the table's
        assert moved == {"ld.global.v4.b32", "st.global.v4.b32", "ld.global.b32", "ld.global.b64"}, moved
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
