"""LoRA with PEFT on a frozen base: the base is read, never updated, so it has no gradients, no optimizer state, no copy home.

python examples/peft_lora.py                # a small Llama with random weights, on the standard library's own sources
python examples/peft_lora.py --plain        # the same training without mtcompile: the same losses
python examples/peft_lora.py --save lora    # writes lora/adapter and lora/merged, which plain PEFT and Transformers load

Needs peft: pip install "mtcompile[hf]".
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import mtcompile

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 256, "use_cache": False}


def base(layers: int) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES))


def train(memory: str | None, layers: int = 6, steps: int = 8, **options: Any) -> tuple[Any, list[float]]:
    """Trains the adapters. Returns the model and the losses. ``memory``: the device budget; None for a plain run."""
    model = get_peft_model(base(layers), LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.1))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    if memory is not None:
        model = mtcompile.compile(model, memory=memory, optimizer=optimizer, **options)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    losses = []
    for step in range(steps):
        tokens = text[step * 32 : (step + 1) * 32].view(1, 32)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="1500KiB")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    model, losses = train(None if given.plain else given.memory)
    print("losses:", [round(loss, 4) for loss in losses])
    if not given.plain:
        report = model.memory_report()
        state = report["gradients_bytes"] + report["optimizer_bytes"]
        print(f"weights: {report['weights_bytes'] / 2**20:.2f} MiB; gradients and optimizer state: {state / 2**20:.2f} MiB")
        print(f"device: {report['peak_device_bytes'] / 2**20:.2f} MiB at most")
    if given.save:
        model.save_pretrained(given.save / "adapter")
        model.merge_and_unload().save_pretrained(given.save / "merged")


if __name__ == "__main__":
    main()
