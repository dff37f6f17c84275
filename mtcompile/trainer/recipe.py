"""The settings of a training, and what is checked of them before anything takes time."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtcompile import checkpoint, knobs
from mtcompile.checkpoint.files import refuse_others, try_folder
from mtcompile.checkpoint.shards import stored_tensors
from mtcompile.checkpoint.signatures import private_key
from mtcompile.data.encoding import TooLong
from mtcompile.errors import StepError
from mtcompile.models.shapes import check_shape
from mtcompile.sizes import parse_bytes
from mtcompile.trainer import adapters, methods

_PATIENCE_S = 10.0  # with the first processes of other machines, which try the same folder
FINAL_RATE = 0.1  # share of the highest learning rate at the end of the cosine


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a training. ``model``: a built-in shape, a Hugging Face config.json, or a folder of pretrained weights;
    ``data``: files and folders (none: the standard library's sources); ``memory``, ``host``, ``disk``: bytes as text;
    ``clip``: 0 for no clipping; ``evaluate_every`` and ``save_every``: in steps, ``save_minutes``: in minutes, 0 for never;
    ``keep``: how many of the last checkpoints; ``resume``, ``save``: folders; ``allow_change``: options that may differ
    from those before ``resume``; ``signing_key``: a file; ``metrics``: a file of JSON lines; ``lora``: the rank of
    adapters, 0 for none; ``base_bits``: None or 4; ``lora`` and what goes with it, ``packing``, ``too_long``,
    ``chat_template``, ``allow_new``: for a folder. The others are ``compile``'s and AdamW's. If ``seq``, ``steps`` or
    ``lr`` is None, ``length``, ``steps_of`` and ``rate`` say what is taken."""

    model: str
    data: tuple[Path, ...] = ()
    vocab: int | None = None
    allow_new: tuple[str, ...] = ()
    chat_template: Path | None = None
    packing: bool = True
    too_long: TooLong = "stop"
    batch: int = 8
    seq: int | None = None
    steps: int | None = None
    epochs: float | None = None
    lr: float | None = None
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    accumulate: int = 1
    precision: str = "model"
    update: str = "step"
    method: str = "sft"
    beta: float | None = None
    reward: str | None = None
    completions: int = 8
    new_tokens: int = 256
    lora: int = 0
    lora_alpha: int | None = None
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    dora: bool = False
    base_bits: int | None = None
    run_ahead: bool = False
    kernels: str = "auto"
    memory: str | None = None
    host: str | None = None
    disk: str | None = None
    device: str | None = None
    evaluate_every: int = 50
    seed: int = 0
    metrics: Path | None = None
    save: Path | None = None
    save_every: int = 0
    save_minutes: float = 0.0
    keep: int = 2
    resume: Path | None = None
    allow_change: tuple[str, ...] = ()
    signing_key: Path | None = None

    @property
    def pretrained(self) -> bool:
        """Tells whether ``model`` is a folder of weights."""
        return Path(self.model).is_dir()

    @property
    def length(self) -> int:
        """The tokens of a row: ``seq``, else 128, or 1,024 for pretrained weights."""
        return self.seq or (1024 if self.pretrained else 128)

    @property
    def rate(self) -> float:
        """The highest learning rate: ``lr``, else 1e-3, 2e-5 for pretrained weights, 1e-4 for adapters, or TRL's."""
        if self.lr is not None or self.method == "sft":
            return self.lr if self.lr is not None else 1e-4 if self.lora else 2e-5 if self.pretrained else 1e-3
        return methods.RATE * 10 if self.lora else methods.RATE

    def steps_of(self, rows: int) -> int:
        """Returns the steps in all: ``steps``, else ``epochs`` over that many rows, else 100."""
        return self.steps or (100 if self.epochs is None else math.ceil(self.epochs * rows / self.batch))

    def settings(self, steps: int) -> dict[str, Any]:
        """Returns option -> value of what decides the bits of a training of so many steps, beside the model, data and seed."""
        names = (
            "batch",
            "warmup",
            "weight_decay",
            "clip",
            "accumulate",
            "precision",
            "kernels",
            "method",
            "beta",
            "reward",
            "completions",
            "new_tokens",
            "lora",
            "lora_dropout",
            "dora",
            "base_bits",
        )
        values = {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}
        values |= {"--lora-alpha": adapters.alpha(self), "--lora-targets": ",".join(adapters.targets(self))}
        if self.method != "sft":  # TRL's losses differ in last bits between the two
            values["--update"] = self.update
        return {"--seq": self.length, "--steps": steps, "--lr": self.rate, **values}


def check(recipe: Recipe) -> None:
    """Raises ValueError, or OSError and CheckpointError for a folder that checkpoints cannot be saved into, before anything
    takes time."""
    ranks = knobs.processes()
    if recipe.batch % (recipe.accumulate * ranks):
        among = f", of which each of {ranks} ranks takes a part" if ranks > 1 else ""
        multiple = f"accumulate={recipe.accumulate}" + (f" times {ranks} ranks" if ranks > 1 else "")
        raise ValueError(f"expected a batch that is a multiple of {multiple}, found {recipe.batch}{among}")
    if recipe.run_ahead and recipe.update != "backward":
        raise ValueError("expected --run-ahead with --update backward only")
    if recipe.steps is not None and recipe.epochs is not None:
        raise ValueError(f"expected either --steps or --epochs, found --steps {recipe.steps} and --epochs {recipe.epochs:g}")
    if recipe.epochs is not None and not 0 < recipe.epochs < math.inf:
        raise ValueError(f"expected --epochs to be a number above 0, found {recipe.epochs:g}")
    for option, value in (("--lr", recipe.rate), ("--weight-decay", recipe.weight_decay), ("--clip", recipe.clip)):
        if not 0 <= value < math.inf:
            raise ValueError(f"expected {option} to be a number of 0 or more, found {value:g}")
    for option, size in (("--memory", recipe.memory), ("--host", recipe.host)):
        parse_bytes(size, option)  # or it raises ValueError
    if recipe.metrics is not None and recipe.metrics.is_dir():
        raise ValueError(f"expected --metrics to name a file, found the folder {recipe.metrics}")
    if recipe.save_every and recipe.save is None:
        raise ValueError(f"expected --save with --save-every {recipe.save_every}, found no folder to save into")
    if not 0 <= recipe.save_minutes < math.inf:
        raise ValueError(f"expected --save-minutes to be a number of 0 or more, found {recipe.save_minutes:g}")
    if recipe.save_minutes and recipe.save is None:
        raise ValueError(f"expected --save with --save-minutes {recipe.save_minutes:g}, found no folder to save into")
    if recipe.keep != 2 and recipe.save is None:
        raise ValueError(f"expected --save with --keep {recipe.keep}, found no folder to save into")
    if recipe.signing_key is not None:
        if recipe.save is None:
            raise ValueError(f"expected --save with --signing-key {recipe.signing_key}, found no folder to save into")
        private_key(recipe.signing_key)
    _check_kind(recipe)
    adapters.check_adapters(recipe, recipe.model)
    methods.check_method(recipe, recipe.model)
    if recipe.resume is not None:
        checkpoint.inspect(recipe.resume)
    elif recipe.allow_change:
        raise ValueError(f"expected --allow-change {recipe.allow_change[0]} with --resume, found no --resume")
    if unknown := sorted({_option(name) for name in recipe.allow_change} - recipe.settings(0).keys()):
        raise ValueError(f"expected --allow-change to name one of {', '.join(recipe.settings(0))}, found {unknown[0]}")
    if recipe.metrics is not None:
        recipe.metrics.parent.mkdir(parents=True, exist_ok=True)
    if recipe.save is not None:
        recipe.save.mkdir(parents=True, exist_ok=True)
        if not knobs.process_here():  # the other ranks of a machine would wait for its lock
            try_folder(recipe.save, _PATIENCE_S if ranks > 1 else 0)
            if recipe.resume is None:
                refuse_others(recipe.save)


def _check_kind(recipe: Recipe) -> None:
    """Raises ValueError for settings that do not go with pretrained weights or with random ones, whichever the model has."""
    if not recipe.pretrained:
        if not recipe.model.endswith(".json"):
            if os.sep in recipe.model:
                stored_tensors(recipe.model)  # says that nothing is downloaded
            check_shape(recipe.model)
        only = {"chat_template": recipe.chat_template, "too_long": recipe.too_long != "stop", "allow_new": recipe.allow_new}
        for name, value in only.items():
            if value:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"expected {option} with a folder of pretrained weights, found the model {recipe.model}")
        return
    if not recipe.data:
        raise ValueError(
            f"expected --data to train the weights of {recipe.model} on (.jsonl, .json, .parquet or text), found none"
        )
    if recipe.vocab is not None:
        raise ValueError(f"expected no --vocab: the tokens are those of the tokenizer in {recipe.model}, found {recipe.vocab}")
    if recipe.length < 2:
        raise ValueError(f"expected --seq of 2 or more, found {recipe.length}")
    folder, save = Path(recipe.model).resolve(), recipe.save and recipe.save.resolve()
    if save == folder or (save == folder.parent and checkpoint.latest(folder) is not None):
        raise ValueError(
            f"expected --save to name a folder of its own, found {recipe.save}, which is or holds the model: old checkpoints "
            "are deleted there"
        )


def check_resumed(recipe: Recipe, steps: int, digest: str | None = None) -> None:
    """Raises ValueError unless the training can go on where the checkpoint ends. ``digest``: of the data, if it has one."""
    if recipe.resume is None:
        return
    before = checkpoint.inspect(recipe.resume)
    if (seed := before.extra.get("seed")) != recipe.seed:
        raise ValueError(f"expected seed {seed}, as {before.path} was trained with, found {recipe.seed}")
    of_reward = "" if recipe.reward is None else f", and {recipe.reward.rpartition(':')[0]} as it was"
    if digest is not None and before.extra.get("data", digest) != digest:
        raise ValueError(
            f"expected the data that {before.path} was trained on, cut into the same rows, found other rows: give the same "
            f"--data, --seq, --packing and --too-long{of_reward}; or leave --resume out and take that folder as the model, for "
            "a new run"
        )
    if before.step >= steps:
        raise ValueError(
            f"expected more steps than the {before.step} that {before.path} has been trained for, found {steps}: "
            "raise --steps or --epochs"
        )
    _compare(recipe, recipe.settings(steps), before.extra.get("settings"), before.path)


def _compare(recipe: Recipe, now: Mapping[str, Any], then: Any, path: Path) -> None:
    """Raises ValueError for settings that differ from those before and may not. Warns if those are not known."""
    if not isinstance(then, dict):
        warnings.warn(f"{path} does not say with which options it was trained: give the same ones", stacklevel=2)
        return
    allowed = {_option(name) for name in recipe.allow_change}
    differ = {name: then[name] for name in now if name not in allowed and name in then and then[name] != now[name]}
    if differ:
        found = ", ".join(f"{name} {now[name]} ({value} there)" for name, value in differ.items())
        raise ValueError(
            f"expected the options that {path} was trained with, found {found}: give the same, for the bits of a run that was "
            f"not interrupted, or let them differ: {' '.join(f'--allow-change {name[2:]}' for name in differ)}"
        )


def _option(name: str) -> str:
    return "--" + name.removeprefix("--").replace("_", "-")


def loss_not_finite(step: int, loss: float) -> StepError:
    return StepError(f"the loss of step {step} is {loss}; nothing was changed. Lower --lr, or give a longer --warmup")


def learning_rate(recipe: Recipe, steps: int, step: int) -> float:
    """Returns the rate of a step: a linear warm-up, then a cosine down to a tenth of the highest rate."""
    if step <= recipe.warmup:
        return recipe.rate * step / recipe.warmup
    share = (step - recipe.warmup) / max(1, steps - recipe.warmup)
    return recipe.rate * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
