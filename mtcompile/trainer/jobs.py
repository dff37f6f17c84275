"""The job that a recipe describes: a compiled model, its optimizer, and the data, which is read before the weights are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtcompile import checkpoint, progress
from mtcompile.api import compile
from mtcompile.checkpoint.adapters import check_base
from mtcompile.checkpoint.provenance import note_training
from mtcompile.data.boundaries import check_packing, document_mask
from mtcompile.data.encoding import TOKENIZER_FILES, encode, load_tokenizer
from mtcompile.data.files import files_of
from mtcompile.data.folder import check_folder
from mtcompile.data.packing import Rows
from mtcompile.data.records import read_records
from mtcompile.data.windows import Windows, read_tokens
from mtcompile.machine.device import choose
from mtcompile.models.loading import configuration, language_model, returning_loss
from mtcompile.models.placing import Room
from mtcompile.models.pretrained import from_pretrained
from mtcompile.optim.precision import precision_named
from mtcompile.reading import panics_as_errors, read_bytes
from mtcompile.trainer.adapters import with_adapters
from mtcompile.trainer.by_trl import check_positions, read_examples, trainer_of
from mtcompile.trainer.recipe import Recipe, check, check_resumed
from mtcompile.trainer.together import ALONE, RowsOfRank, Together, device_of_rank, join


@dataclass(frozen=True, slots=True)
class Job:
    """A training that is ready to run. ``steps``: in all; ``extra``, ``files``: what checkpoints hold beside the
    state; ``about``: the data in words, if there is something to say; ``together``: the ranks that run it; ``trainer``: of
    TRL, with an optimizer and data of its own, instead of ``optimizer`` and ``data``."""

    recipe: Recipe
    steps: int
    model: Any
    optimizer: Any
    data: Any
    extra: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)
    about: str = ""
    together: Together = ALONE
    trainer: Any = None


def prepared(recipe: Recipe) -> Job:
    """Reads the data, makes or loads the model, and compiles it; under torchrun, as one of several ranks. Raises ValueError,
    OSError and what ``compile`` raises."""
    check(recipe)
    together = join()
    job = _fine_tuning(recipe) if recipe.pretrained else _from_scratch(recipe)
    if recipe.warmup > job.steps and not together.rank:
        rises = f"the rate rises for --warmup {recipe.warmup} steps, and the run has {job.steps}"
        warnings.warn(f"{rises}: it never reaches --lr {recipe.rate:g}", stacklevel=2)
    # What goes on beside a model as it was before the first step: adapters, and losses that compare with it.
    beside = recipe.lora or recipe.method in ("dpo", "kto")
    if not together.rank and (recipe.save is not None or (beside and recipe.resume is not None)):
        options = {name: value for name, value in asdict(recipe).items() if value not in (None, ())}
        with progress.doing("hashing the weights and the data"):
            note_training(job.model, files_of(recipe.data), options)
        if beside and recipe.resume is not None:
            before = checkpoint.inspect(recipe.resume)
            check_base(before.path, before.provenance, job.model)
    if together.rank:  # each rank draws its dropout from a generator of its own
        torch.manual_seed(recipe.seed + together.rank)
    return job if together.count == 1 else replace(job, data=RowsOfRank(job.data, together), together=together)


def _from_scratch(recipe: Recipe) -> Job:
    stream, vocabulary = read_tokens(recipe.data, recipe.vocab)
    windows = Windows.cut(stream, recipe.length, recipe.batch)
    steps = recipe.steps_of(windows.trained.count)
    digest = windows.digest if recipe.save or recipe.resume else ""
    check_resumed(recipe, steps, digest)
    torch.manual_seed(recipe.seed)
    masters = precision_named(recipe.precision).split
    module, model_vocabulary = language_model(recipe.model, Room.of(recipe.host, recipe.disk), masters)
    if vocabulary > model_vocabulary:
        raise ValueError(f"expected a model with a vocabulary of {vocabulary} or more for this data, found {model_vocabulary}")
    optimizer = _optimizer(recipe, module)
    model: Any = compile(module.train(), optimizer=optimizer, **_options(recipe))
    return Job(recipe, steps, model, optimizer, windows, _extra(recipe, steps, digest))


def _fine_tuning(recipe: Recipe) -> Job:
    folder = Path(recipe.model)
    check_folder(folder)
    tokenizer, sft = load_tokenizer(folder, recipe.chat_template), recipe.method == "sft"
    with progress.doing("tokenizing"), panics_as_errors(f"a tokenizer in {folder}"):
        read: Any = _rows if sft else read_examples
        data = read(recipe, tokenizer, lambda largest: _vocabulary(folder, tokenizer, largest))
    steps, digest = recipe.steps_of(data.count), data.digest
    check_resumed(recipe, steps, digest)
    torch.manual_seed(recipe.seed)

    def prepare(model: Any) -> Any:
        if not model.can_generate():
            kind = type(model).__name__
            raise ValueError(f"expected a causal language model in {folder}, found {kind}, which has no language-model head")
        if sft and recipe.packing:
            with progress.doing("checking that packed samples stay apart"):
                check_packing(model, recipe.length)
        if not sft:
            check_positions(model, recipe)
        model = returning_loss(model.train()) if sft else model.train()
        return with_adapters(model, recipe) if recipe.lora else model

    model = from_pretrained(folder, prepare=prepare, allow_new=recipe.allow_new, base_bits=recipe.base_bits, **_options(recipe))
    files = {name: read_bytes(folder / name) for name in TOKENIZER_FILES if (folder / name).exists()}
    if recipe.chat_template is not None:
        files["chat_template.jinja"] = read_bytes(recipe.chat_template)
    trained, count = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (False, True))
    about = f"{data}; training {trained:,} of {count:,} parameters" if recipe.lora else str(data)
    if not sft:
        trainer = trainer_of(recipe, model, data, tokenizer, steps)
        return Job(recipe, steps, model, None, None, _extra(recipe, steps, digest), files, about, trainer=trainer)
    rows = replace(data, mask=lambda documents: document_mask(model.config, documents, model.dtype))
    optimizer = _optimizer(recipe, model)
    model.bind(optimizer)
    return Job(recipe, steps, model, optimizer, rows, _extra(recipe, steps, digest), files, about)


def _extra(recipe: Recipe, steps: int, digest: str) -> dict[str, Any]:
    """Returns what checkpoints say of the training, which ``check_resumed`` compares."""
    return {"seed": recipe.seed, "data": digest, "settings": recipe.settings(steps)}


def _vocabulary(folder: Path, tokenizer: Any, largest: int) -> int:
    """Returns the size of a folder's vocabulary. Raises ValueError unless its model knows the ``largest`` token."""
    config, _ = configuration(folder / "config.json")
    vocabulary = int(config.get_text_config().vocab_size)
    if largest >= vocabulary:
        raise ValueError(
            f"expected tokens below {vocabulary}, the vocabulary of {folder}/config.json, found {largest} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}): save the tokenizer that belongs to the weights there"
        )
    return vocabulary


def _rows(recipe: Recipe, tokenizer: Any, vocabulary_with: Callable[[int], int]) -> Rows:
    """Reads the data, as tokens of the folder's tokenizer. Raises ValueError and OSError."""
    samples = encode(read_records(recipe.data), tokenizer, recipe.length, recipe.too_long)
    vocabulary = vocabulary_with(int(samples.tokens.max()))
    padding = next((n for n in (tokenizer.pad_token_id, tokenizer.eos_token_id) if n is not None and n < vocabulary), 0)
    held_out = recipe.evaluate_every > 0
    return Rows.cut(samples, recipe.length, recipe.batch, packed=recipe.packing, padding=padding, held_out=held_out)


def _optimizer(recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
    """Returns AdamW with weight decay on matrices only."""
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=recipe.rate, betas=(0.9, 0.95))


def _options(recipe: Recipe) -> dict[str, Any]:
    """Returns the options of ``compile``."""
    backward = recipe.update == "backward"
    same = ("memory", "host", "disk", "precision", "accumulate", "update", "run_ahead", "kernels")
    accumulated = {} if recipe.method == "sft" else {"accumulate": 1}  # TRL's trainers do it
    return {
        **{name: getattr(recipe, name) for name in same},
        **accumulated,
        "device": choose(device_of_rank(recipe.device)).where,
        "max_grad_norm": recipe.clip or None if backward else None,
    }
