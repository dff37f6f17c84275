"""The command line: ``mtcompile plan MODEL`` and ``mtcompile doctor``; more in ``cli_explain`` and ``cli_viz``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from mtcompile import cli_explain
from mtcompile.cli_viz import viz

FINE = FITS = 0  # exit codes
WRONG, DOES_NOT_FIT, BAD = 2, 3, 4
_WIDTH = 128  # of tables that do not go to a terminal
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


class Optimizer(str, Enum):
    adamw = "adamw"
    adam = "adam"
    sgd_momentum = "sgd-momentum"
    sgd = "sgd"


class Precisions(str, Enum):
    model = "model"
    fp32 = "fp32"
    bf16_master32 = "bf16-master32"
    bf16 = "bf16"


class Update(str, Enum):
    step = "step"
    backward = "backward"


class Solve(str, Enum):
    batch = "batch"
    seq = "seq"
    memory = "memory"


@app.callback()
def main() -> None:
    """Train models larger than the device's memory: see README.md."""


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="a built-in shape (llama-8b), a Hugging Face config.json or file.py:factory")],
    batch: Annotated[int, typer.Option(min=1, help="sequences per step")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="tokens per sequence")] = 2048,
    memory: Annotated[str, typer.Option(help="device bytes: 16GiB, 141GB or a number (default: the machine's)")] = "",
    host: Annotated[str, typer.Option(help="host bytes (default: no limit)")] = "",
    machine: Annotated[str, typer.Option(help="a preset such as h200-sxm or rtx4090, this, or a .json file")] = "h200-sxm",
    precision: Annotated[Precisions, typer.Option(help="of weights and optimizer state; model: as it says")] = Precisions.model,
    optimizer: Annotated[Optimizer, typer.Option(help="whose state there is")] = Optimizer.adamw,
    update: Annotated[Update, typer.Option(help="after the backward, or as gradients arrive")] = Update.step,
    max_grad_norm: Annotated[
        float | None, typer.Option(help="with --update backward: clipped to it, so updates wait for all gradients")
    ] = None,
    run_ahead: Annotated[bool, typer.Option(help="with --update backward: updates go on behind the next forward")] = False,
    accumulate: Annotated[int, typer.Option(min=1, help="micro-batches that the batch is run as, region by region")] = 1,
    policy: Annotated[list[str] | None, typer.Option(help="compare with a fixed strategy, or all; may be repeated")] = None,
    solve: Annotated[Solve | None, typer.Option(help="plan the largest that fits; memory: the least that works")] = None,
    force: Annotated[bool, typer.Option(help="show the leanest plan though it does not fit")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Say what a training step will need and take, without allocating anything.

    Exit code 0: it fits; 3: it does not; 2: something asked for is wrong.

    A factory takes (batch, seq) and returns (module, keyword arguments); it is called where tensors take no memory.
    """
    from mtcompile.errors import MtcompileError
    from mtcompile.forecast import plan as forecast
    from mtcompile.passes.policies import POLICIES

    policies = tuple(POLICIES) if "all" in (policy or ()) else tuple(policy or ())
    options: dict[str, Any] = {
        "batch": batch,
        "seq": seq,
        "memory": memory or None,
        "host": host or None,
        "machine": machine,
        "precision": precision.value,
        "optimizer": optimizer.value,
        "update": update.value,
        "max_grad_norm": max_grad_norm,
        "run_ahead": run_ahead,
        "accumulate": accumulate,
        "policies": policies,
        "solve": solve.value if solve else None,
        "force": force,
    }
    try:
        with _progress() as tell:
            made = forecast(_model(model), tell=tell, **options)
    except (ValueError, MtcompileError) as error:
        print(f"mtcompile plan: {error}", file=sys.stderr)
        raise typer.Exit(WRONG) from None
    print(made.to_json(indent=1) if as_json else made)
    raise typer.Exit(FITS if made.feasible else DOES_NOT_FIT)


app.command()(viz)


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="measure less, in a few seconds")] = False,
    save: Annotated[Path | None, typer.Option(help="also write a machine file, for mtcompile plan --machine FILE")] = None,
    device: Annotated[str, typer.Option(help="cuda:1, cpu, ... (default: the GPU if there is one)")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Measure this machine, and say what its speeds mean for training and what would kill a run here.

    The speeds are remembered: mtcompile plan MODEL --machine this.

    Exit code 0: nothing is bad; 4: a limit is bad, and its row says what to do; 2: something asked for is wrong.
    """
    from rich.console import Console

    from mtcompile import doctor as its
    from mtcompile.device import choose

    try:
        if save is not None and save.suffix != ".json":
            raise ValueError(f"expected --save to name a .json file, found {save}")
        report = its.examine(choose(device or None), quick, lambda text: print(text, file=sys.stderr))
        if as_json:
            print(report.to_json(indent=1))
        else:
            its.show(report, Console() if sys.stdout.isatty() else Console(width=_WIDTH))
        if save is not None:
            its.save(report, save)
    except ValueError as error:
        print(f"mtcompile doctor: {error}", file=sys.stderr)
        raise typer.Exit(WRONG) from None
    raise typer.Exit(BAD if report.bad else FINE)


cli_explain.register(app)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while somebody looks; gone afterwards."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("planning", total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of or None)


def _model(text: str) -> str | Callable[[int, int], Any]:
    """A built-in shape's name, or what makes (module, arguments) of a batch and sequence. Raises ValueError."""
    path, _, factory = text.partition(":")
    if not factory and not text.endswith(".json"):
        return text

    def make(batch: int, seq: int) -> Any:
        return _from_file(path, factory)(batch, seq) if factory else _from_config(text, batch, seq)

    make.__name__ = text
    return make


def _from_file(path: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path) if path.endswith(".py") else None
    if spec is None or spec.loader is None or not Path(path).exists():
        raise ValueError(f"expected file.py:factory, found no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"expected a function {name!r} in {path}, found none")
    return getattr(module, name)


def _from_config(path: str, batch: int, seq: int) -> Any:
    """A causal language model of a Hugging Face configuration, with random weights: nothing is fetched."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError("a Hugging Face configuration needs the package transformers: pip install transformers") from None
    import torch

    try:
        fields = json.loads(Path(path).read_text())
        config = AutoConfig.for_model(**{"use_cache": False, **fields})
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"expected a Hugging Face config file with a model_type, found {path}: {error}") from None
    dtype = getattr(torch, str(fields.get("dtype") or fields.get("torch_dtype") or "float32"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(before)
    tokens = torch.zeros((batch, seq), dtype=torch.int64)
    return model, {"input_ids": tokens, "labels": tokens}
