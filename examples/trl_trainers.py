"""TRL's trainers, as released, with a compiled model: ``mtcompile.compile`` is the only line that is added.

python examples/trl_trainers.py sft             # a small Llama with random weights, on sums as chats
python examples/trl_trainers.py packed          # the same chats, several in one row
python examples/trl_trainers.py whole           # packed, with the model's own loss: one program, with updates in the backward
python examples/trl_trainers.py dpo             # right answers against wrong ones; the reference model is compiled too
python examples/trl_trainers.py whole-dpo       # the same from logits: one program, with updates in the backward
python examples/trl_trainers.py grpo --plain    # rewards digits in what the model generates; here without mtcompile

Needs trl: pip install "mtcompile[hf]" trl.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import mtcompile
from mtcompile.trainer.by_trl import from_logits

WORDS = ["<pad>", "<eos>", *(chr(code) for code in range(32, 127))]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
ASKED = [[{"role": "user", "content": f"{a} + {b}?"}] for a in range(8) for b in range(8)]
RIGHT = [[{"role": "assistant", "content": str(a + b)}] for a in range(8) for b in range(8)]
WRONG = [[{"role": "assistant", "content": "?"}]] * 64


def tokenizer() -> Any:
    """Makes a tokenizer with a word for each letter."""
    letters = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE)


def digits(completions: list[Any], **columns: Any) -> list[float]:
    """Rewards each digit of an answer."""
    return [float(sum(letter.isdigit() for letter in answer[0]["content"])) for answer in completions]


class WholeSFTTrainer(SFTTrainer):
    """TRL's data and arguments, and the loss of the model itself: mtcompile captures it in one program."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, *args, **kwargs)


WholeDPOTrainer = from_logits(DPOTrainer)  # TRL's loss and all that it logs: mtcompile captures the model in one program


def train(
    kind: str,
    folder: str,
    memory: str | None,
    steps: int = 3,
    layers: int = 3,
    compiled: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Trains, and returns the trainer. ``memory``: the device budget; None for a plain run. ``compiled``: more options of
    ``mtcompile.compile``; ``arguments``: of the trainer."""
    set_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": layers, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, bos_token_id=None, eos_token_id=1, **sizes)
    )
    reference: Any = copy.deepcopy(model)
    if memory is not None and kind.startswith("backbone"):  # the head and the loss are TRL's, beside the plan
        model.model = mtcompile.compile(model.model, memory=memory, **(compiled or {}))
    elif memory is not None:
        model = mtcompile.compile(model, memory=memory, **(compiled or {}))
        reference = mtcompile.compile(reference, memory=memory)
    common: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": steps, "logging_steps": 1, "report_to": []}
    common |= {"output_dir": folder, "learning_rate": 1e-3, "use_cpu": not torch.cuda.is_available(), **arguments}
    trainer: Any
    if kind.endswith("dpo"):
        data = Dataset.from_dict({"prompt": ASKED, "chosen": RIGHT, "rejected": WRONG})
        options = DPOConfig(max_length=48, pad_to_multiple_of=48, **common)
        own_log_probs = WholeDPOTrainer if kind == "whole-dpo" else DPOTrainer
        trainer = own_log_probs(model, reference, options, train_dataset=data, processing_class=tokenizer())
    elif kind == "grpo":
        options = GRPOConfig(max_completion_length=4, num_generations=2, **common)
        data = Dataset.from_dict({"prompt": ASKED})
        trainer = GRPOTrainer(model, digits, options, train_dataset=data, processing_class=tokenizer())
    else:  # rows of one length, which is planned once
        data = Dataset.from_dict({"messages": [asked + right for asked, right in zip(ASKED, RIGHT)]})
        options = SFTConfig(max_length=48, packing=kind in ("packed", "whole"), pad_to_multiple_of=48, **common)
        own_loss = WholeSFTTrainer if kind == "whole" else SFTTrainer
        trainer = own_loss(model, options, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["sft", "packed", "whole", "dpo", "whole-dpo", "grpo"])
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    update = {"update": "backward"} if given.kind.startswith("whole") else {}
    history = train(given.kind, "trl-run", None if given.plain else "16MiB", compiled=update).state.log_history
    print("losses:", [row["loss"] for row in history if "loss" in row])
