"""Hugging Face Trainer with a compiled model: ``mtcompile.compile`` is the only line that is added.

python examples/hf_trainer.py                # a small Llama with random weights, on the standard library's own sources
python examples/hf_trainer.py --plain        # the same training without mtcompile: the same losses
python examples/hf_trainer.py --backward     # updates weights during the backward: the same losses again
python examples/hf_trainer.py --resume       # goes on from the last checkpoint, with the same bits

Needs transformers and accelerate: pip install "mtcompile[hf]".
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import mtcompile


class Sources(Dataset[dict[str, torch.Tensor]]):
    """Windows of the bytes of a few modules of the standard library."""

    def __init__(self, window: int = 64) -> None:
        text = b"".join((Path(argparse.__file__).parent / name).read_bytes() for name in ("argparse.py", "ast.py", "os.py"))
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, window, window)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def train(
    folder: str,
    memory: str | None,
    steps: int = 8,
    resume: bool = False,
    compiled: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainer:
    """Trains, and returns the Trainer. ``memory``: the device budget; None for a plain run. ``compiled``: more options of
    ``mtcompile.compile``; ``arguments``: of ``TrainingArguments``."""
    set_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=256, use_cache=False
    )
    model: Any = LlamaForCausalLM(config)
    if memory is not None:
        model = mtcompile.compile(model, memory=memory, **(compiled or {}))
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "lr_scheduler_type": "cosine", "report_to": [], **arguments}
    settings = TrainingArguments(folder, max_steps=steps, logging_steps=1, save_steps=4, **options)
    trainer = Trainer(model, settings, train_dataset=Sources(), eval_dataset=torch.utils.data.Subset(Sources(), range(8)))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="hf-run")
    parser.add_argument("--memory", default="2MiB")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    compiled = {"update": "backward"} if given.backward else {}
    trainer = train(given.folder, None if given.plain else given.memory, given.steps, given.resume, compiled)
    print("losses:", [row["loss"] for row in trainer.state.log_history if "loss" in row])
    if not given.plain:
        report = trainer.model.memory_report()
        print(f"device: {report['peak_device_bytes'] / 2**20:.2f} MiB at most, state: {report['state_bytes'] / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
