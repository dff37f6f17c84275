"""A linear layer over a weight that arrives in fragments: right in Triton's interpreter, where nothing is read too early."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mtcompile.kernels.arriving import Arriving, linear, send
from tests.helpers.updates import needs_triton

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240  # a flag that nobody sets would be waited for without end

INTERPRETED = """
import random, threading, time
import torch
from torch.nn import functional as F
from mtcompile.kernels.arriving import Arriving, linear, send

torch.manual_seed(0)

def numbers(*shape, dtype):
    return torch.randint(-3, 4, shape).to(dtype)  # whose sums are exact in any order

def arriving(weight, rows, step=1, count=0):
    count = count or max(1, len(weight) // rows)
    return Arriving(torch.full_like(weight, torch.nan), rows, torch.zeros(count, dtype=torch.int32), step)

def send_later(slot, source, order):
    for i in order:
        time.sleep(random.random() * 0.02)
        start, end = slot.fragments[i]
        slot.weight[start:end] = source[start:end]
        slot.flags[i] = slot.step

# tokens, in, out, rows of a fragment: ragged, of one row, of tiles that two or three fragments share, and without tokens
SHAPES = [((5,), 64, 200, 48), ((2, 37), 33, 129, 64), ((1,), 7, 3, 48), ((17,), 130, 190, 20), ((0,), 8, 96, 48)]
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for place, (tokens, columns, rows, of_fragment) in enumerate(SHAPES):
        x, source = numbers(*tokens, columns, dtype=dtype), numbers(rows, columns, dtype=dtype)
        bias = numbers(rows, dtype=dtype) if place % 2 else None
        exact = F.linear(x.double(), source.double(), None if bias is None else bias.double()).to(dtype)
        slot = arriving(source, of_fragment)
        send(slot, source)
        assert torch.equal(linear(x, slot, bias), exact), (dtype, tokens)

        late = arriving(source, of_fragment, count=-(-rows // of_fragment))  # a smaller one at the end
        order = random.Random(place).sample(range(len(late.flags)), len(late.flags))
        sender = threading.Thread(target=send_later, args=(late, source, order))
        sender.start()
        assert torch.equal(linear(x, late, bias), exact), (dtype, tokens, order)  # it is NaN where read too early
        sender.join()

x, source = torch.randn(9, 100), torch.randn(150, 100)
slot = arriving(source, 48)
send(slot, source)
torch.testing.assert_close(linear(x, slot), F.linear(x, source))

early = arriving(source, 48)
early.flags.fill_(1)  # flags lie
assert linear(x, early).isnan().all()

slot = Arriving(slot.weight, 48, slot.flags, 2)  # those of step 1 do not count
slot.flags[0], slot.flags[2] = 2, 3
try:
    linear(x, slot, tries=3)
    print("read too early")
except RuntimeError as error:
    print(error)
send(slot, 2 * source)
torch.testing.assert_close(linear(x, slot, tries=1), F.linear(x, 2 * source))
"""

COMPILED = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from mtcompile.kernels.arriving_triton import linear

flags = {"BIAS": True, "TRIES": 0, "WIDE": False, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}
types = {name: "i32" for name in linear.arg_names} | {name: "*bf16" for name in ("x", "weight", "bias", "y")}
types |= {"flags": "*i32", "missing": "*i32"} | {name: "constexpr" for name in flags}
source = ASTSource(fn=linear, signature={name: types[name] for name in linear.arg_names}, constexprs=flags)
compiled = compile(source, target=GPUTarget("cuda", 90, 32))
structured, ptx = compiled.asm["ttgir"], compiled.asm["ptx"]
waits = [found.start() for found in re.finditer(r"tt.atomic_rmw .*acquire.*sys", structured)]
tiles = [found.start() for found in re.finditer(r"(?:tt.load|ttg.async_copy_global_to_local) .*cacheModifier = cg", structured)]
barrier = structured.index("barrier", waits[-1])
assert tiles and barrier < min(tiles), structured
assert re.search(r"(?:ld|atom)\\.global[\\w.]*acquire", ptx) and "ld.global.cg" in ptx, ptx
assert not re.search(r"st\\.[\\w.]*(?:sys|release)", ptx), "a flag is written"
print("waits")
"""


@needs_triton
@pytest.mark.slow
def test_tiles_are_read_when_they_have_arrived() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=LIMIT_S)
    late = "expected all fragments in step 2, rows 48 to 96 had not arrived; call send before linear\n"
    assert result.stdout == late, result.stdout + result.stderr


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux") or platform.machine() != "x86_64", reason="Triton's PTX assembler")
def test_compiled_for_a_gpu_it_waits_before_it_reads(tmp_path: Path) -> None:
    """Triton's compiler, which needs no GPU: what an interpreter cannot show."""
    (tmp_path / "compiles.py").write_text(COMPILED)
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "compiles.py")]
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LIMIT_S)
    assert result.stdout == "waits\n", result.stdout + result.stderr


def slot(rows: int = 48, step: int = 1, flags: torch.Tensor | None = None, **layout: Any) -> Arriving:
    weight = torch.zeros(200, 8, **layout)
    return Arriving(weight, rows, torch.zeros(4, dtype=torch.int32) if flags is None else flags, step)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"rows": 0}, "at least one row"),
        ({"rows": 100}, r"int32 flags, 1 to 2, found \[4\]"),
        ({"flags": torch.zeros(4)}, r"int32 flags, 1 to 5, found \[4\] of torch.float32"),
        ({"step": 0}, "a step from 1"),
        ({"step": 2**31}, "a step from 1"),
        ({"dtype": torch.float64}, "float32, float16 or bfloat16"),
    ],
)
def test_what_does_not_belong_together_is_refused(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=f"expected .*{expected}.*; try "):
        slot(**wrong)


def test_a_source_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a contiguous source like"):
        send(slot(), torch.zeros(8, 200))


@needs_triton
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a weight on a GPU, found cpu; try"):
        linear(torch.zeros(3, 8), slot())
