"""What calls without gradients cost beside plain PyTorch: a token of ``generate``, with parameters on the device and streamed.

    python -m benchmarks.generation --json out.json     # about two minutes; needs transformers

*Resident*: a small Llama on the emulated device, with room for all of it; plain and compiled in turns, medians of a token's
time. The compiled model has generated once before: its first calls are measured.

*Streamed*: a larger one, within a quarter of its weights, on the emulated device throttled to a link; a token's time over the
time that the weights take on that link.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import mtcompile
from benchmarks.run import about
from mtcompile.passes.analysis.cost import Machine

TOKENS, ROUNDS = 32, 5
LINK = Machine("throttled", flops=1e12, memory_gbps=20.0, h2d_gbps=0.5, d2h_gbps=0.5, host_gbps=10.0, issue_us=5.0)


def llama(width: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = width // 64
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=4096,
    )
    return LlamaForCausalLM(config).eval()


def token_ms(model: Any, tokens: int) -> tuple[float, torch.Tensor]:
    """Milliseconds per token of one greedy generation, and its tokens."""
    prompt = torch.arange(1, 17)[None]
    started = time.perf_counter()
    output = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return (time.perf_counter() - started) / tokens * 1e3, output


def resident() -> dict[str, Any]:
    plain = llama(256, 6)
    model = mtcompile.compile(copy.deepcopy(plain), memory="1GiB", device="cpu")
    rows: list[tuple[float, float]] = []
    for _ in range(ROUNDS + 1):
        (plain_ms, expected), (compiled_ms, tokens) = token_ms(plain, TOKENS), token_ms(model, TOKENS)
        assert torch.equal(expected, tokens)
        rows.append((plain_ms, compiled_ms))
    first, *later = rows
    ratio = statistics.median(compiled / plain for plain, compiled in later)
    return {
        "plain_ms": round(statistics.median(plain for plain, _ in later), 2),
        "compiled_ms": round(statistics.median(compiled for _, compiled in later), 2),
        "ratio": round(ratio, 3),
        "first_ratio": round(first[1] / first[0], 3),
    }


def streamed() -> dict[str, Any]:
    plain = llama(768, 8)
    weights = sum(parameter.nbytes for parameter in plain.parameters())
    model = mtcompile.compile(copy.deepcopy(plain), memory=weights // 4, device="cpu", throttle=LINK)
    expected = token_ms(plain, 8)[1]
    assert torch.equal(token_ms(model, 8)[1], expected)
    times = [token_ms(model, 8)[0] for _ in range(ROUNDS)]
    transfer_ms = weights / LINK.h2d_gbps / 1e6
    return {
        "weights_bytes": weights,
        "memory_bytes": weights // 4,
        "peak_bytes": model.memory_report()["peak_device_bytes"],
        "transfer_ms": round(transfer_ms, 1),
        "token_ms": round(statistics.median(times), 1),
        "ratio": round(statistics.median(times) / transfer_ms, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = {"about": about(), "resident": resident(), "streamed": streamed()}
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
