"""TRL's trainers for ``mtcompile train --method``: their data, losses and arithmetic, with a model that is compiled here."""

from __future__ import annotations

import functools
import inspect
import json
import math
import reprlib
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtcompile.capture.refusals import first_line
from mtcompile.data.batch import HELD_OUT, MOST_EVALUATED
from mtcompile.data.records import read_rows
from mtcompile.errors import StepError
from mtcompile.models.loading import load_function
from mtcompile.reading import read_bytes
from mtcompile.trainer.methods import COLUMNS
from mtcompile.trainer.recipe import FINAL_RATE, Recipe, loss_not_finite


@dataclass(frozen=True, slots=True)
class Examples:
    """Rows as TRL takes them, the last of them ``held_out``. ``answers``: to each in a batch; ``digest``: of all their tokens;
    ``too_long``: how many were cut or dropped."""

    trained: Any
    held_out: Any
    answers: int
    digest: str
    seq: int
    too_long: int

    @property
    def count(self) -> int:
        return len(self.trained) * self.answers

    def __str__(self) -> str:
        long = f"; {self.too_long:,} were too long" * (self.too_long > 0)
        return f"{len(self.trained):,} rows of at most {self.seq:,} tokens, {len(self.held_out):,} more held out{long}"


def from_logits(kind: Any) -> Any:
    """Returns a trainer of TRL, derived from ``kind``, whose model and reference compute log-probabilities, and what TRL logs
    beside them, from logits, within the model: one program. TRL's own lines cannot be captured."""

    class FromLogits(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            _score_from_logits(self.model)

        def compute_ref_log_probs(self, model: Any, *args: Any, **options: Any) -> Any:  # the constructor may need them
            _score_from_logits(model)
            return super().compute_ref_log_probs(model, *args, **options)

    return FromLogits


def _score_from_logits(model: Any) -> None:
    """Replaces what TRL has put in place of a model's ``forward``, once."""
    scored = model.get_base_model() if hasattr(model, "get_base_model") else model
    tiled = scored.forward
    if hasattr(tiled, "scores_from_logits"):
        return

    @functools.wraps(type(scored).forward)
    def forward(itself: Any, *args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **inputs: Any) -> Any:
        if not fused_lm_head or labels is None:
            return tiled(*args, **inputs, **({} if labels is None else {"labels": labels}))
        from trl.trainer.utils import FusedCausalLMOutput

        outputs, next_labels = tiled(*args, **inputs), labels[:, 1:]
        logits, ignored = outputs.logits[:, :-1].float(), next_labels == -100
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.gather(-1, next_labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            means, is_top1 = logits.mean(-1), logits.argmax(-1) == next_labels
        shown = {"log_probs": chosen, "entropy": entropy, "mean_logits": means, "is_top1": is_top1}
        shown = {name: value.masked_fill(ignored, 0) for name, value in shown.items()}
        return FusedCausalLMOutput(**shown, aux_loss=getattr(outputs, "aux_loss", None))

    forward.scores_from_logits = True  # type: ignore[attr-defined]
    scored.forward = MethodType(forward, scored)


def read_examples(recipe: Recipe, tokenizer: Any, vocabulary_with: Callable[[int], int]) -> Examples:
    """Reads the rows of a recipe, and tokenizes them once, as TRL will. Raises ValueError with a row's place, and OSError."""
    import datasets
    import trl
    import xxhash

    datasets.disable_progress_bars()
    if recipe.reward is not None:
        reward_of(recipe.reward)  # one that is misspelled is refused before anything takes time
    read = list(read_rows(recipe.data, COLUMNS[recipe.method]))
    if not read:
        raise ValueError(f"expected rows of {', '.join(COLUMNS[recipe.method])} in the data, found none: give more --data")
    columns = dict.fromkeys(name for _, row in read for name in row)  # from_list leaves out what the first row has not
    kind = getattr(trl, f"{recipe.method.upper()}Trainer")
    settings = SimpleNamespace(dataset_num_proc=None, max_length=None)
    itself = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False)
    try:
        whole = datasets.Dataset.from_list([{name: row.get(name) for name in columns} for _, row in read])
        if recipe.method == "grpo":
            tokenized = whole.map(lambda row: {"prompt_ids": _prompt(row, tokenizer)})
        else:
            tokenized = kind._prepare_dataset(itself, whole, tokenizer, settings, "data")
    except Exception as error:  # a template raises errors of its own
        raise ValueError(
            f"expected rows with values of one type in each column, which the tokenizer takes, found {first_line(error)}"
        ) from None
    parts = sorted(name for name in tokenized.column_names if name.endswith("_ids") and name != "prompt_ids")
    prompts = np.array([len(ids) for ids in tokenized["prompt_ids"]])
    if not parts and not prompts.all():
        raise ValueError(f"{read[int(np.argmin(prompts))][0]}: prompt: expected text, found no token")
    lengths = prompts + (np.max([[len(ids) for ids in tokenized[name]] for name in parts], 0) if parts else recipe.new_tokens)
    long = np.flatnonzero(lengths > recipe.length)
    if len(long) and recipe.too_long == "stop":
        raise ValueError(
            f"{read[long[0]][0]}: expected at most {recipe.length} tokens, found {lengths[long[0]]} ({len(long) - 1} more rows "
            f"are too long, the longest of {lengths.max()}): give --seq {lengths.max()}, or --too-long cut or drop"
        )
    kept = np.flatnonzero(prompts < recipe.length if recipe.too_long == "cut" else lengths <= recipe.length)
    held_out = max(1, int(len(kept) * HELD_OUT)) if recipe.evaluate_every and parts else 0
    answers = 1 if parts else recipe.completions
    if (first := len(kept) - held_out) * answers < recipe.batch:
        aside = f", beside {held_out} held out" if held_out else ""
        long_too = f" that are not too long ({len(long)} are: give --seq {lengths.max()})" if len(long) else ""
        raise ValueError(
            f"expected at least {recipe.batch // answers} rows for a batch of {recipe.batch}{aside}, found "
            f"{max(0, first)}{long_too}: give more --data, or a smaller --batch"
        )
    digest, largest = xxhash.xxh3_128(f"{recipe.length} {first}".encode()), 0
    for name in ("prompt_ids", *parts):
        for ids in tokenized.select(kept)[name]:
            largest = max(largest, *ids, 0)
            digest.update(np.array([len(ids), *ids], np.int32).data)
    for position in kept:  # labels, and what a reward may look at
        digest.update(json.dumps(read[position][1], sort_keys=True, default=repr).encode())
    if recipe.reward is not None:
        digest.update(read_bytes(Path(recipe.reward.partition(":")[0])))
    vocabulary_with(largest)
    most = kept[first : first + MOST_EVALUATED * recipe.batch]
    return Examples(whole.select(kept[:first]), whole.select(most), answers, str(digest.hexdigest()), recipe.length, len(long))


def reward_of(name: str) -> Callable[..., Any]:
    """Returns the function ``file.py:function``. What it raises, and what is not a finite number or None for each completion,
    ends the step with a StepError that names it. Raises ValueError if there is no such function."""
    function = load_function(*name.rsplit(":", 1))
    if inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    def reward(**given: Any) -> list[float | None]:
        try:
            values = list(function(**given))
        except (Exception, SystemExit) as error:
            raise StepError(
                f"--reward {name} raised {type(error).__name__}: {first_line(error)}; the step was not made"
            ) from error
        known = [value for value in values if value is not None]
        try:
            are_finite = all(map(math.isfinite, known))
        except TypeError:
            are_finite = False
        if len(values) != (count := len(given["completions"])) or not known or not are_finite:
            raise StepError(
                f"expected --reward {name} to return {count} finite numbers, one for each completion (None: not judged), found "
                f"{reprlib.repr(values)}; the step was not made"
            )
        return values

    return reward


def check_positions(model: Any, recipe: Recipe) -> None:
    """Raises ValueError if a model that has learned its positions has fewer than rows are padded to."""
    names = ("wpe", "embed_positions", "position_embeddings")
    learned = any(name.rpartition(".")[2] in names for name, part in model.named_modules() if isinstance(part, nn.Embedding))
    length = recipe.length
    if recipe.method == "grpo":  # questions and answers are padded to multiples of this
        length = -(-length // recipe.new_tokens) * recipe.new_tokens
    if learned and (most := getattr(model.config, "max_position_embeddings", length)) < length:
        raise ValueError(
            f"expected rows of at most {most} tokens, the positions of {recipe.model}, found {length}: lower --seq"
        )


def _prompt(row: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """Returns the tokens of a prompt, of which GRPO generates answers."""
    if isinstance(row["prompt"], str):
        return list(tokenizer(row["prompt"])["input_ids"])
    return list(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"])


def arguments_of(recipe: Recipe, steps: int, held_out: int) -> dict[str, Any]:
    """Returns a recipe of so many steps in the words of TRL's configurations. All rows have one length, which is planned once.
    The reference is the model itself: without its adapters, or as it was before the first step."""
    rows = recipe.batch // recipe.accumulate
    own: dict[str, Any] = {"max_length": recipe.length, "pad_to_multiple_of": recipe.length}
    own["precompute_ref_log_probs"] = not recipe.lora
    if recipe.method == "grpo":
        own = {"num_generations": recipe.completions, "max_completion_length": recipe.new_tokens}
        own["pad_to_multiple_of"] = recipe.new_tokens
    return {
        **{"per_device_train_batch_size": rows, "per_device_eval_batch_size": max(1, min(rows, held_out))},
        "dataloader_drop_last": True,
        **{"gradient_accumulation_steps": recipe.accumulate, "max_steps": steps, "max_grad_norm": recipe.clip},
        **{"learning_rate": recipe.rate, "weight_decay": recipe.weight_decay, "adam_beta2": 0.95, "seed": recipe.seed},
        **{"warmup_steps": recipe.warmup, "lr_scheduler_type": "cosine_with_min_lr"},
        "lr_scheduler_kwargs": {"min_lr_rate": FINAL_RATE},
        **own,
        **({} if recipe.beta is None else {"beta": recipe.beta}),
        **{"bf16": False, "gradient_checkpointing": False, "disable_dropout": not recipe.lora_dropout},
        **({"eval_strategy": "steps", "eval_steps": recipe.evaluate_every} if held_out else {}),
        **{"logging_steps": 1, "logging_nan_inf_filter": False, "save_strategy": "no", "disable_tqdm": True, "report_to": []},
    }


def trainer_of(recipe: Recipe, model: Any, examples: Examples, tokenizer: Any, steps: int) -> Any:
    """Returns the trainer of TRL for a recipe's method. If updates are in the backward, its loss is from logits. It ends at a
    loss that is not finite, before anything has changed."""
    import trl
    from transformers import PrinterCallback

    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing`", FutureWarning)  # TRL's own arguments

    kind, settings = (getattr(trl, f"{recipe.method.upper()}{what}") for what in ("Trainer", "Config"))

    class FiniteTrainer(from_logits(kind) if recipe.update == "backward" else kind):  # type: ignore[misc]
        def compute_loss(self, model: Any, *args: Any, **options: Any) -> Any:
            found = super().compute_loss(model, *args, **options)
            value = float((found[0] if isinstance(found, tuple) else found).detach())
            if model.training and not math.isfinite(value):
                raise loss_not_finite(self.state.global_step + 1, value)
            return found

        def _load_from_checkpoint(self, *_: Any, **__: Any) -> None:
            """Reads nothing: ``saves`` does, and no pickles."""

        _load_optimizer_and_scheduler = _load_rng_state = _load_scaler = _load_from_checkpoint

    with tempfile.TemporaryDirectory() as folder:  # nothing is saved there
        held_out = examples.held_out if len(examples.held_out) else None
        given = arguments_of(recipe, steps, len(examples.held_out))
        arguments = settings(folder, **given, use_cpu=model.device.type == "cpu")
        data = {"train_dataset": examples.trained, "eval_dataset": held_out}
        rewards = {} if recipe.reward is None else {"reward_funcs": reward_of(recipe.reward)}
        trainer = FiniteTrainer(model, args=arguments, processing_class=tokenizer, **data, **rewards)
    trainer.remove_callback(PrinterCallback)
    return trainer
