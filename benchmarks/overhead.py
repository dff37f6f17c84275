"""CPU seconds of a steady step that fits whole, beside plain PyTorch's: GPT-2 shapes with tiny batches, eager kernels.

    OMP_NUM_THREADS=1 python -m benchmarks.overhead --shapes 2x64,12x64,12x256   # layers x width; needs transformers

Each round times a few steps of each in turn; what is printed is the median round. Losses must be equal at the end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import mtcompile

WARM_UP = 8


def stepper(layers: int, width: int, update: str) -> Callable[[], torch.Tensor]:
    """Returns a function that makes one training step. ``update``: "plain" for plain PyTorch."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": layers, "n_embd": width, "n_head": 4, "vocab_size": 1024, "n_positions": 128}
    config = transformers.GPT2Config(**sizes, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, use_cache=False)
    model: Any = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if update != "plain":
        model = mtcompile.compile(model, memory="8GiB", optimizer=optimizer, update=update, kernels="eager")
    tokens = torch.randint(0, 1024, (2, 32))

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="2x64,12x64,12x256")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    args = parser.parse_args()
    for shape in args.shapes.split(","):
        layers, width = map(int, shape.split("x"))
        steps = {update: stepper(layers, width, update) for update in ("plain", "step", "backward")}
        for step in steps.values():
            for _ in range(WARM_UP):
                step()
        took: dict[str, list[float]] = {update: [] for update in steps}
        for _ in range(args.rounds):
            for update, step in steps.items():
                began = time.process_time()
                for _ in range(args.steps):
                    step()
                took[update].append((time.process_time() - began) / args.steps)
        ms = {update: 1e3 * statistics.median(seconds) for update, seconds in took.items()}
        print(f"{shape}: " + ", ".join(f"{update} {ms[update]:.2f} ms ({ms[update] / ms['plain']:.2f})" for update in ms))
        losses = [float(step()) for step in steps.values()]
        if len(set(losses)) > 1:
            raise SystemExit(f"expected equal losses, found {losses}")


if __name__ == "__main__":
    main()
