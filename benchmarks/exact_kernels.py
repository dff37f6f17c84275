"""Steps by exact kernels beside eager ones, Inductor's, plain PyTorch and torch.compile, in turn in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.exact_kernels --json benchmarks/results/exact-kernels-2-cores.json

A time is the CPU time of this process for a forward and a backward: the median of ``--steps``. ``first_cpu_s``: that of the
first step, with capture, planning, and compilers. Name an empty folder by TORCHINDUCTOR_CACHE_DIR to compile everything.
``equal``: gradients with the bits of plain PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mtcompile
from benchmarks.run import about
from mtcompile.models.decoders import Decoder
from mtcompile.models.shapes import Shape

DECODERS = {
    "decoder-256": (Shape(256, 768, 4, 4, 2, 1024, head_dim=64, dtype=torch.bfloat16), 4, 128),
    "decoder-512": (Shape(512, 1408, 4, 8, 4, 1024, head_dim=64, dtype=torch.bfloat16), 2, 256),
    "decoder-512-long": (Shape(512, 1408, 2, 8, 8, 1024, head_dim=64, dtype=torch.bfloat16), 1, 1024),
}
PEERS = ("plain", "torch.compile", "eager", "exact", "inductor")


def decoder(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    shape, batch, seq = DECODERS[name]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Decoder(shape).train()
    torch.set_default_dtype(torch.float32)
    tokens = torch.randint(0, shape.vocabulary, (2, batch, seq))
    return model, (tokens[0], tokens[1])


def cpu_s() -> float:
    """The CPU seconds of this process, and of compilers that it has started and waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def runs(model: nn.Module, peers: list[str]) -> Iterator[tuple[str, Any, nn.Module]]:
    for peer in peers:
        trained = copy.deepcopy(model)
        called: Any = trained
        if peer == "torch.compile":
            called = torch.compile(trained, fullgraph=True)
        elif peer != "plain":
            called = mtcompile.compile(trained, memory="4GiB", kernels=peer)
        yield peer, called, trained


def measured(name: str, peers: list[str], steps: int) -> list[dict[str, Any]]:
    model, batch = decoder(name)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], None]] = {}
    gradients: dict[str, list[Tensor]] = {}
    for peer, called, trained in runs(model, peers):

        def step(called: Any = called, trained: nn.Module = trained) -> None:
            for parameter in trained.parameters():
                parameter.grad = None
            called(*batch).backward()

        began = cpu_s()
        step()
        rows[peer] = {"case": name, "peer": peer, "first_cpu_s": round(cpu_s() - began, 2)}
        gradients[peer] = [parameter.grad.detach().clone() for parameter in trained.parameters() if parameter.grad is not None]
        equal = sum(map(torch.equal, gradients[peer], gradients["plain"])) if "plain" in gradients else 0
        rows[peer] |= {"equal": equal, "of": len(gradients[peer])}
        if (plan := getattr(trained, "plan", None)) is not None:
            rows[peer]["fused"] = "".join(re.findall(r"fused are (\d+%)", " ".join(plan.notes)))
        calls[peer] = step
    for _ in range(4):  # the runs in which chains are compared
        for step in calls.values():
            step()
    times: dict[str, list[float]] = {peer: [] for peer in calls}
    for _ in range(steps):
        for peer, step in calls.items():
            began = time.process_time()
            step()
            times[peer].append(time.process_time() - began)
    return [row | {"step_cpu_ms": round(1e3 * statistics.median(times[peer]), 2)} for peer, row in rows.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="*", choices=DECODERS, default=list(DECODERS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    rows = []
    for name in args.cases:
        for row in measured(name, args.peers, args.steps):
            print(row)
            rows.append(row)
    if args.json:
        args.json.write_text(json.dumps({**about(), "results": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
