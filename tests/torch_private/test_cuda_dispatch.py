"""A trace on a GPU runs the kernels that eager runs there: for each case of on_cuda_shapes.py, what mtcompile traces is
compared with what eager dispatches, on fake CUDA tensors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.device.second import built

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA's own hooks"),
]
SOURCE = Path(__file__).with_name("cuda_shapes.cpp")
QUICK = ("batch norm of images", "LSTM, two layers both ways", "attention, cuDNN")

# What a trace calls in place of what eager calls, and why that runs the same kernel.
SAME_KERNEL = {
    "mtcompile.cudnn_batch_norm": "aten.cudnn_batch_norm",  # on copies of the running statistics, which it returns
    "mtcompile.cudnn_rnn": "aten._cudnn_rnn",  # weights are packed inside, where eager finds them packed
    "mtcompile.cudnn_rnn_backward": "aten._cudnn_rnn_backward",
    "aten._native_batch_norm_legit_functional": "aten.native_batch_norm",  # one kernel, which returns the new statistics
}
# Operations that only make, fill or copy values. Eager copies gradients to their parameters' strides; a trace returns them so.
MOVES = ("empty", "empty_like", "new_empty", "new_empty_strided", "full", "fill", "ones_like", "clone", "copy", "_unsafe_view")


def run_on_cuda_shapes(*names: str) -> dict[str, dict[str, list[str]]]:
    command = [sys.executable, "-m", "tests.torch_private.on_cuda_shapes", str(built(SOURCE)), *names]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def kernels(operations: list[str]) -> Counter[str]:
    """How often each kernel runs: operations without their overloads, in place or not."""
    packets = (re.sub(r"_?\.\w+$", "", name) for name in operations)
    same = (SAME_KERNEL.get(packet, packet) for packet in packets)
    return Counter(packet for packet in same if packet.partition(".")[2] not in MOVES)


def assert_same_kernels(*names: str) -> None:
    cases = run_on_cuda_shapes(*names)
    assert len(cases) == len(names) or (not names and len(cases) > 40)
    counts = {name: (kernels(case["eager"]), kernels(case["traced"])) for name, case in cases.items()}
    assert {name: (eager - traced, traced - eager) for name, (eager, traced) in counts.items() if eager != traced} == {}
    assert all(eager for eager, _ in counts.values())


def test_traces_run_the_kernels_of_eager() -> None:
    assert_same_kernels(*QUICK)


@pytest.mark.long
def test_all_cases() -> None:
    assert_same_kernels()
