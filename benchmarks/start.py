"""How long the first step takes: CPU seconds from ``compile`` to the end of a forward and backward, beside torch.compile.

    python -m benchmarks.start --json out.json            # all models; --only llama-32 toy
    python -m benchmarks.start --kernels inductor         # compiled kernels, as torch.compile's are

Each start is a process of its own, on one thread, with torch's compilers imported before. ``cold``: with an empty cache;
``warm``: the same again, with what the cold start left there. Seconds of child processes, such as a C++ compiler's, are
counted. mtcompile's budget is half of the training state, or, where that does not fit, what its refusal names. All runs are on
the CPU, so no figure says how long a GPU's kernels take to compile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import Case, make
from benchmarks.run import about

PEERS = ("mtcompile", "torch.compile")
Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Cells(nn.Module):
    """An LSTM cell that runs in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(16, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 32)
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], (h, c))
        return self.head(h)  # type: ignore[no-any-return]


def _toy() -> Made:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), (torch.randn(8, 64),), {}


def _encoder() -> Made:
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 6), (torch.randn(4, 16, 64),), {}


def _gpt(layers: int) -> Made:
    model, tokens, targets = make(Case("start", layers, 128, 4, 4, 64))
    return model, (tokens, targets), {}


def _transformers(kind: str, layers: int, **sizes: Any) -> Made:
    """A causal language model as Transformers makes it by default: it returns keys and values for a cache."""
    import transformers

    common = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = getattr(transformers, f"{kind}Config")(**common, **heads, **sizes)
    tokens = torch.randint(0, 256, (2, 16))
    return getattr(transformers, f"{kind}ForCausalLM")(config), (), {"input_ids": tokens, "labels": tokens}


def _without_cache(made: Made) -> Made:
    """As the Trainer calls it: no keys and values are returned."""
    model, args, kwargs = made
    return model, args, {**kwargs, "use_cache": False}


def _vit() -> Made:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)
    images = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}
    return transformers.ViTForImageClassification(config), (), images


MODELS: dict[str, Callable[[], Made]] = {
    "toy": _toy,
    "encoder-6": _encoder,
    "cells-39": lambda: (Cells(), (torch.randn(4, 39, 16),), {}),
    "gpt-6": lambda: _gpt(6),
    "gpt-24": lambda: _gpt(24),
    "llama-12": lambda: _transformers("Llama", 12),
    "llama-32": lambda: _transformers("Llama", 32),
    "llama-80": lambda: _transformers("Llama", 80),
    "llama-12-no-cache": lambda: _without_cache(_transformers("Llama", 12)),
    "llama-32-no-cache": lambda: _without_cache(_transformers("Llama", 32)),
    "llama-80-no-cache": lambda: _without_cache(_transformers("Llama", 80)),
    "qwen3-moe-4": lambda: _transformers(
        "Qwen3Moe", 4, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, head_dim=8
    ),
    "vit-6": _vit,
}


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def first_step(peer: str, name: str, kernels: str) -> float:
    """Returns the CPU seconds of a first step in this process."""
    import torch._dynamo
    import torch._inductor.compile_fx

    import mtcompile.compiler

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    state = 4 * sum(p.nbytes for p in model.parameters())

    def step(call: Callable[..., Any]) -> None:
        made = call(*args, **kwargs)
        loss = getattr(made, "loss", made)
        (loss if loss.numel() == 1 else loss.square().mean()).backward()

    began = _cpu_s()
    if peer == "torch.compile":
        step(torch.compile(model))
    else:
        compiled = mtcompile.compile(model, memory=state // 2, kernels=kernels)
        try:
            step(compiled)
        except mtcompile.BudgetError as refused:
            model, args, kwargs = MODELS[name]()
            began = _cpu_s()
            step(mtcompile.compile(model, memory=refused.minimum_bytes, kernels=kernels))
    return _cpu_s() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=[*MODELS], help="these models (default: all)")
    parser.add_argument("--kernels", default="auto", help="mtcompile's kernels (default: auto)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(first_step(*args.child, args.kernels))
        return 0
    rows = []
    for name in args.only:
        row: dict[str, Any] = {"model": name}
        for peer in PEERS:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    command = [sys.executable, "-m", "benchmarks.start", "--kernels", args.kernels, "--child", peer, name]
                    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "MT_CACHE": cache, "MT_PROGRESS": "0"}
                    made = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
                    row[f"{peer} {state}"] = round(float(made.stdout.splitlines()[-1]), 2)
        rows.append(row)
        print("  ".join(f"{key} {value}" if key != "model" else f"{value:12}" for key, value in row.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**about(), "kernels": args.kernels, "cpu_s": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
