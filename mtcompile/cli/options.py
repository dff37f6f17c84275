"""Options that several commands share: each group is one dataclass, which ``flattened`` turns into options of a command."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from mtcompile.cli.checks import check_at_once

Precision = Literal["model", "fp32", "bf16-master32", "bf16"]
Update = Literal["step", "backward"]
Kernels = Literal["auto", "eager", "exact", "inductor"]
TooLong = Literal["stop", "cut", "drop"]
Method = Literal["sft", "dpo", "kto", "grpo"]
Fragments = Literal["auto", "exact", "split"]
Effort = Literal["quick", "normal", "thorough"]


def _count_or_auto(value: Any) -> int | str:
    """Parses a number of 1 or more, or auto; the default, too, which is a number already."""
    text = str(value)
    if text == "auto":
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise typer.BadParameter(f"expected a whole number of 1 or more, or auto, found {text}")


def path_given(text: Any) -> Path:
    """Parses a path; an empty one, as of a variable of the shell that is not set, would be the current folder."""
    if not str(text):
        raise typer.BadParameter("expected the path of a file or folder, found an empty text")
    return Path(text)


# Options that the groups below have in common, and --json, which commands take by themselves.
Batch = Annotated[int, typer.Option(min=1, help="sequences per step")]
Seq = Annotated[int, typer.Option(min=1, help="tokens per sequence")]
Host = Annotated[str | None, typer.Option(help="bytes of host memory (default: what there is, less 5 %)")]
Disk = Annotated[
    str | None, typer.Option(help="a folder and bytes of disk for what the host has no room for: /mnt/nvme:400GiB")
]
PrecisionOption = Annotated[
    Precision, typer.Option("--precision", help="dtypes of weights and optimizer state; model: those of the model")
]
UpdateOption = Annotated[
    Update, typer.Option("--update", help="update parameters after the backward (step) or as gradients arrive (backward)")
]
RunAhead = Annotated[bool, typer.Option(help="with --update backward: let updates continue during the next forward")]
Accumulate = Annotated[int, typer.Option(min=1, help="micro-batches per batch, run region by region")]
Device = Annotated[str | None, typer.Option(help="cuda:1, cpu, ... (default: the GPU if there is one)")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The step that ``plan``, ``explain``, ``trace``, ``graph`` and ``viz`` plan: options of ``mtcompile.plan``."""

    batch: Batch = 1
    seq: Seq = 2048
    memory: Annotated[
        str | None, typer.Option(help="bytes of device memory: 16GiB, 141GB or a number (default: the machine's)")
    ] = None
    host: Host = None
    disk: Annotated[str | None, typer.Option(help="bytes of disk for what the host has no room for (default: no disk)")] = None
    machine: Annotated[str, typer.Option(help="a preset such as rtx4090, a .json file, or this (this machine)")] = "h200-sxm"
    precision: PrecisionOption = "model"
    optimizer: Annotated[
        str,
        typer.Option(
            help="optimizer whose state is planned: adamw, adam, sgd-momentum, sgd, or a class of torch.optim such as muon"
        ),
    ] = "adamw"
    lora: Annotated[int, typer.Option(min=0, help="freeze the model and train LoRA adapters of this rank (0: no adapters)")] = 0
    base_bits: Annotated[
        int | None, typer.Option(help="4, with --lora: the base in bitsandbytes' 4 bits, but for embeddings and head (QLoRA)")
    ] = None
    update: UpdateOption = "step"
    max_grad_norm: Annotated[
        float | None,
        typer.Option(help="with --update backward: clip gradients to this norm; updates then wait for all gradients"),
    ] = None
    run_ahead: RunAhead = False
    accumulate: Annotated[
        Any,
        typer.Option(
            parser=_count_or_auto,
            metavar="N|auto",
            help="micro-batches per batch, run region by region (auto: the fastest number)",
        ),
    ] = 1
    fragments: Annotated[
        Fragments,
        typer.Option(
            help="cut weights into fragments: where no sum is split (exact), if nothing fits whole (auto); any (split)"
        ),
    ] = "auto"
    effort: Annotated[
        Effort | None, typer.Option(help="what planning may cost (default: MT_EFFORT, or normal)", show_default=False)
    ] = None


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """The training that ``train``, ``verify`` and ``bench`` run on this machine."""

    memory: Annotated[
        str | None, typer.Option(help="bytes of device memory: 16GiB, 141GB or a number (default: what is free)")
    ] = None
    batch: Batch = 8
    precision: PrecisionOption = "model"
    update: UpdateOption = "step"
    accumulate: Accumulate = 1
    kernels: Annotated[
        Kernels, typer.Option(help="exact: fused, with the bits of eager; auto: eager, for now; inductor: within rounding")
    ] = "auto"
    device: Device = None


@dataclass(frozen=True, slots=True)
class ComparisonOptions(TrainingOptions):
    """The plain and the compiled training that ``verify`` and ``bench`` compare."""

    memory: Annotated[
        str | None,
        typer.Option(help="bytes of device memory for the compiled model (default: half of the fully resident size)"),
    ] = None
    batch: Batch = 2
    seq: Seq = 128
    max_grad_norm: Annotated[float | None, typer.Option(help="clip the gradients of both models to this norm")] = None


@dataclass(frozen=True, slots=True)
class RecipeOptions(TrainingOptions):
    """The fields of a ``trainer.Recipe`` but for the model."""

    data: Annotated[
        list[Path] | None,
        typer.Option(
            parser=path_given,
            metavar="PATH",
            help="a file or a folder; may be repeated. For a folder of weights: records (.jsonl, .ndjson, .json, .csv, .tsv, "
            ".parquet) or text. For random weights: text, or .bin/.npy tokens (default: Python's own sources)",
        ),
    ] = None
    vocab: Annotated[int | None, typer.Option(min=1, help="size of the vocabulary of .bin and .npy files")] = None
    allow_new: Annotated[
        list[str] | None,
        typer.Option(
            help="for a folder of weights: a tensor or module, such as lm_head, that may be missing there; it is then "
            "initialized. May be repeated. Other weights that are missing, or have no place in the model, stop the command"
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        typer.Option(
            parser=path_given, metavar="PATH", help="a Jinja file to use instead of the chat template of the folder of weights"
        ),
    ] = None
    packing: Annotated[
        bool, typer.Option(help="for a folder of weights: put several samples into a row; they do not attend to one another")
    ] = True
    too_long: Annotated[
        TooLong, typer.Option(help="for a conversation of more than --seq tokens: stop the command, cut it, or drop it")
    ] = "stop"
    seq: Annotated[int | None, typer.Option(min=1, help="tokens per sequence (default: 128; 1024 for a folder of weights)")] = (
        None
    )
    host: Host = None
    disk: Disk = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="steps in all, with those before --resume, where more need --allow-change steps (default: 100)"
        ),
    ] = None
    epochs: Annotated[float | None, typer.Option(min=0, help="passes over the data, instead of --steps: 3, or 0.5")] = None
    lr: Annotated[
        float | None,
        typer.Option(min=0, help="highest learning rate (default: 1e-3; for a folder of weights 2e-5, with --lora 1e-4)"),
    ] = None
    warmup: Annotated[int, typer.Option(min=0, help="steps up to the highest rate, before a cosine down to a tenth")] = 20
    weight_decay: Annotated[float, typer.Option(min=0, help="weight decay of matrices")] = 0.1
    clip: Annotated[float, typer.Option(min=0, help="clip the gradients to this norm; 0: no clipping")] = 1.0
    run_ahead: RunAhead = False
    method: Annotated[
        Method,
        typer.Option(
            help="for a folder of weights: learn what answers say (sft), or by TRL which are better: dpo, from rows with "
            "prompt, chosen and rejected; kto, from rows with prompt, completion and label; grpo, from --reward for its answers"
        ),
    ] = "sft"
    beta: Annotated[
        float | None,
        typer.Option(min=0, help="for --method dpo and kto: what it costs to leave the first model (default: 0.1; for grpo 0)"),
    ] = None
    reward: Annotated[
        str | None,
        typer.Option(
            help="for --method grpo: file.py:function, TRL's reward function, which returns a number for each completion"
        ),
    ] = None
    completions: Annotated[int, typer.Option(min=2, help="for --method grpo: answers to each prompt, which are compared")] = 8
    new_tokens: Annotated[int, typer.Option(min=1, help="for --method grpo: the most tokens of an answer")] = 256
    lora: Annotated[
        int,
        typer.Option(min=0, help="for a folder of weights: freeze them and train LoRA adapters of this rank (0: no adapters)"),
    ] = 0
    lora_alpha: Annotated[
        int | None, typer.Option(min=1, help="adapters count this much, divided by their rank (default: twice the rank)")
    ] = None
    lora_targets: Annotated[
        list[str] | None,
        typer.Option(help="modules that get adapters: q_proj,v_proj (default: all-linear, all linear layers but the head)"),
    ] = None
    lora_dropout: Annotated[float, typer.Option(min=0, help="dropout of what adapters take in")] = 0.0
    dora: Annotated[bool, typer.Option("--dora", help="with --lora: train the magnitudes of weights apart (DoRA)")] = False
    base_bits: Annotated[
        int | None, typer.Option(help="4, with --lora: quantize the linear layers of the base by bitsandbytes (QLoRA)")
    ] = None
    evaluate_every: Annotated[
        int, typer.Option(min=0, help="steps between evaluations on held-out data, the last 5 %; 0: never")
    ] = 50
    seed: Annotated[int, typer.Option(min=0, help="seed of new weights, of dropout and of the order of the data")] = 0
    metrics: Annotated[
        Path | None, typer.Option(parser=path_given, metavar="PATH", help="a file for one JSON object per step")
    ] = None
    save: Annotated[
        Path | None,
        typer.Option(
            parser=path_given,
            metavar="PATH",
            help="a folder for checkpoints; one is written at the end, and if an error ends the training",
        ),
    ] = None
    save_every: Annotated[int, typer.Option(min=0, help="steps between checkpoints; 0: only at the end")] = 0
    save_minutes: Annotated[float, typer.Option(min=0, help="minutes between checkpoints; 0: only at the end")] = 0.0
    keep: Annotated[int, typer.Option(min=1, help="the last checkpoints that are kept; older ones are deleted")] = 2
    resume: Annotated[
        Path | None, typer.Option(parser=path_given, metavar="PATH", help="a folder that --save wrote, to continue from")
    ] = None
    allow_change: Annotated[
        list[str] | None,
        typer.Option(help="an option, such as lr, that may differ from the training that --resume continues; may be repeated"),
    ] = None
    signing_key: Annotated[
        Path | None,
        typer.Option(
            parser=path_given,
            metavar="PATH",
            help="a file with a private Ed25519 key (PEM or OpenSSH), which signs the checkpoints",
        ),
    ] = None


def values(options: Any) -> dict[str, Any]:
    """Returns the fields of an options dataclass by name."""
    return {field.name: getattr(options, field.name) for field in fields(options)}


def in_flags(text: str, options: Iterable[str]) -> str:
    """Writes Python arguments as a command's options: ``update="backward"`` as ``--update backward``, ``run_ahead=True`` as
    ``--run-ahead``. ``options``: the names of those that the command has; other arguments stay."""
    names = "|".join(sorted(map(re.escape, options), reverse=True))

    def flag(found: re.Match[str]) -> str:
        value = (found[2] or "").strip("\"'")
        return f"--{found[1].replace('_', '-')}" + (f" {value}" if value not in ("", "True") else "")

    pattern = rf"""(?<![\w.-])({names})=("[^"]*"|'[^']*'|\w+(?:\.\w+)*)?"""
    return re.sub(pattern, flag, text) if names else text


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the parameter of a command that is a dataclass by one keyword parameter per field, with the field's default and
    annotation, so that typer lists each field as an option. The command is called with the dataclass."""
    own = inspect.signature(command, eval_str=True)
    (options,) = (p for p in own.parameters.values() if is_dataclass(p.annotation))
    group: Any = options.annotation
    hints = get_type_hints(group, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name]) for f in fields(group)]
    parameters: list[inspect.Parameter] = []
    for parameter in own.parameters.values():
        parameters += shared if parameter is options else [parameter.replace(kind=keyword)]

    @functools.wraps(command)
    def flat(**arguments: Any) -> None:
        grouped = group(**{field.name: arguments.pop(field.name) for field in fields(group)})
        check_at_once(arguments.get("model"), grouped)
        command(**arguments, **{options.name: grouped})

    flat.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat
