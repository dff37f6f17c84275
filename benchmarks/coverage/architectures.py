"""The architectures of the installed Transformers as subjects: built small from their configurations, with random weights."""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.coverage.compare import NotBuilt, Subject
from benchmarks.coverage.configs import RULES, shrunk
from benchmarks.coverage.inputs import IGNORED, Data, guesses

# The heads of each family; an architecture is entered with the first of them that it has.
FAMILIES = {
    "audio": ("CTC", "SPEECH_SEQ_2_SEQ", "AUDIO_CLASSIFICATION"),
    "multimodal": (
        "IMAGE_TEXT_TO_TEXT", "ZERO_SHOT_IMAGE_CLASSIFICATION", "VISUAL_QUESTION_ANSWERING", "DOCUMENT_QUESTION_ANSWERING",
    ),
    "sequence to sequence": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "masked": ("MASKED_LM",),
    "causal": ("CAUSAL_LM",),
    "vision": (
        "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "OBJECT_DETECTION",
        "UNIVERSAL_SEGMENTATION", "IMAGE_TO_IMAGE", "MASKED_IMAGE_MODELING", "BACKBONE",
    ),
}  # fmt: skip
_FIRST = (  # what most people train
    "llama", "gpt2", "qwen2", "qwen3", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "t5",
    "bart", "bert", "roberta", "distilbert", "electra", "albert", "deberta-v2", "vit", "clip", "whisper", "wav2vec2",
    "mamba", "mamba2", "gpt_neox", "opt", "bloom", "falcon", "olmo", "qwen2_moe", "qwen3_moe", "deepseek_v2",
    "deepseek_v3", "mbart", "pegasus", "marian", "mt5", "xlm-roberta", "modernbert", "swin", "convnext", "deit", "beit",
    "dinov2", "resnet", "segformer", "siglip", "blip", "llava", "hubert",
)  # fmt: skip
_MOST_PARAMETERS = 30_000_000


def entries() -> list[str]:
    """Returns ``causal/llama``, ...: the common ones, then the rest in their first families, then their other families."""
    first: dict[str, str] = {}
    others = []
    for family in FAMILIES:
        for kind in _classes(family):
            if kind in first:
                others.append(f"{family}/{kind}")
            else:
                first[kind] = f"{family}/{kind}"
    common = [first[kind] for kind in _FIRST if kind in first]
    return [*common, *(entry for kind, entry in first.items() if kind not in _FIRST), *others]


@functools.cache
def _classes(family: str) -> dict[str, str]:
    """Returns the class name of each kind of model in a family."""
    try:
        from transformers.models.auto import modeling_auto
    except ImportError:
        return {}
    classes: dict[str, str] = {}
    for head in FAMILIES[family]:
        for kind, name in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}).items():
            classes.setdefault(kind, name if isinstance(name, str) else name[0])
    return classes


def build(entry: str) -> Subject:
    """Builds an entry's model with seeded weights, its inputs and the options that its name draws."""
    recipe = _recipe(entry)
    data = copy.deepcopy(recipe.data)
    module = recipe.module()
    return Subject(module, kwargs=data, autocast=recipe.option == "autocast", about=recipe.about)


@dataclass(frozen=True, slots=True)
class _Recipe:
    model_class: Any
    config: Any
    rule: str
    data: Data
    option: str = ""

    def module(self) -> Any:
        torch.manual_seed(1)
        module = self.model_class(copy.deepcopy(self.config)).train()
        if self.option == "bf16 weights":
            module = module.to(torch.bfloat16)
        if self.option == "gradient checkpointing":
            module.gradient_checkpointing_enable()
        return module

    @property
    def about(self) -> str:
        return ", ".join(filter(None, (self.model_class.__name__, self.option)))


@functools.cache
def _recipe(entry: str) -> _Recipe:
    """Finds a small configuration and inputs with which plain PyTorch trains, and an option that it has. Raises NotBuilt."""
    family, kind = entry.split("/")
    name = _classes(family)[kind]
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class = getattr(transformers, name)
    config_class = getattr(model_class, "config_class", None) or CONFIG_MAPPING[kind]
    problems = []
    for rule in RULES:
        try:
            config = shrunk(config_class, rule)
            _check_size(model_class, config)
            torch.manual_seed(1)
            model = model_class(copy.deepcopy(config)).train()
        except Exception as error:
            problems.append(f"{rule.__name__}: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
            continue
        for data in guesses(model, family):
            recipe = _Recipe(model_class, config, rule.__name__, data)
            if problem := _problem(recipe):
                problems.append(f"{rule.__name__}, {', '.join(data)}: {problem}")
            else:
                return next((r for r in _with_options(recipe, entry) if not _problem(r)), recipe)
    raise NotBuilt("; ".join(problems[-3:]) or "no inputs are known for it")


def _check_size(model_class: Any, config: Any) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if count > _MOST_PARAMETERS:
        raise NotBuilt(f"{count:,} parameters")


def _problem(recipe: _Recipe) -> str:
    """Returns why plain PyTorch does not train a recipe, or nothing."""
    from benchmarks.coverage.compare import train

    try:
        data = copy.deepcopy(recipe.data)
        results = train(Subject(recipe.module(), kwargs=data, autocast=recipe.option == "autocast"), steps=1)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return "" if any(name.startswith("gradient ") for name in results) else "nothing gets a gradient"


def _with_options(recipe: _Recipe, entry: str) -> Iterator[_Recipe]:
    """Yields the recipe with one option: the one that the entry's name draws, then those after it."""
    options: list[tuple[str, Callable[[_Recipe], Data | None]]] = [
        ("", lambda r: r.data),
        ("padding mask", _padded),
        ("autocast", lambda r: r.data),
        ("-100 labels", _unlabelled),
        ("bf16 weights", _in_bf16),
        ("inputs_embeds", _embedded),
        ("gradient checkpointing", lambda r: r.data if r.model_class.supports_gradient_checkpointing else None),
    ]
    start = zlib.crc32(entry.encode()) % len(options)
    for option, change in options[start:] + options[:start]:
        data = change(recipe)
        if data is not None:
            yield _Recipe(recipe.model_class, recipe.config, recipe.rule, data, option)


def _padded(recipe: _Recipe) -> Data | None:
    ids = recipe.data.get("input_ids")
    if ids is None:
        return None
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    return {**recipe.data, "attention_mask": mask}


def _unlabelled(recipe: _Recipe) -> Data | None:
    labels = recipe.data.get("labels")
    if labels is None or labels.ndim != 2:
        return None
    return {**recipe.data, "labels": labels.clone().index_fill_(1, torch.tensor([0, 2]), IGNORED)}


def _embedded(recipe: _Recipe) -> Data | None:
    if set(recipe.data) - {"labels", "input_ids"} or "input_ids" not in recipe.data:
        return None
    with torch.no_grad():
        embeddings = recipe.module().get_input_embeddings()(recipe.data["input_ids"])
    return {**{k: v for k, v in recipe.data.items() if k != "input_ids"}, "inputs_embeds": embeddings.detach()}


def _in_bf16(recipe: _Recipe) -> Data:
    floats = torch.float32
    return {k: v.to(torch.bfloat16) if getattr(v, "dtype", None) == floats else v for k, v in recipe.data.items()}
