"""What the commands share: exit codes, choices, and errors as sentences."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from mtcompile import knobs
from mtcompile.errors import BudgetError, MtcompileError, StepError

if TYPE_CHECKING:
    from mtcompile.forecast.result import Forecast

FINE = 0
FAILED, WRONG, DOES_NOT_FIT, BAD, DIFFERENT = 1, 2, 3, 4, 5
INTERRUPTED = 130
WIDTH = 128  # of tables that do not go to a terminal

# Of every command that plans a step.
Model = Annotated[str, typer.Argument(help="a built-in shape (llama-8b), a Hugging Face config.json or file.py:factory")]
Batch = Annotated[int, typer.Option(min=1, help="sequences per step")]
Seq = Annotated[int, typer.Option(min=1, help="tokens per sequence")]
Memory = Annotated[str, typer.Option(help="device bytes: 16GiB, 141GB or a number (default: the machine's)")]
Host = Annotated[str, typer.Option(help="host bytes (default: no limit)")]
Machine = Annotated[str, typer.Option(help="a preset such as h200-sxm or rtx4090, this, or a .json file")]
Accumulate = Annotated[int, typer.Option(min=1, help="micro-batches that the batch is run as, region by region")]


class Precisions(str, Enum):
    model = "model"
    fp32 = "fp32"
    bf16_master32 = "bf16-master32"
    bf16 = "bf16"


class Update(str, Enum):
    step = "step"
    backward = "backward"


class Kernels(str, Enum):
    eager = "eager"
    inductor = "inductor"


class Commands(TyperGroup):
    """Ends every command with a sentence and an exit code, whatever stopped it. MT_DEBUG=1 shows the traceback instead."""

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                with _quiet():
                    return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # a full disk is noticed here, not after the exit code has been given
        except Exception as error:
            if isinstance(error, (typer.Abort, BrokenPipeError)) or hasattr(error, "exit_code") or knobs.debug():
                raise
            sentence, code = told(error)
            if isinstance(error, OSError):
                _drop_output()
            print(f"{_name(ctx)}: {sentence}", file=sys.stderr)
            raise typer.Exit(code) from None
        except KeyboardInterrupt:
            print(f"{_name(ctx)}: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


def _name(context: Any) -> str:
    return f"mtcompile {context.invoked_subcommand or ''}".rstrip()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's logs of errors, tracebacks among them, that are then raised and said in a sentence."""
    before = logging.root.manager.disable
    if not knobs.debug():
        logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def told(error: Exception) -> tuple[str, int]:
    """What an error says to a user, and the exit code."""
    if isinstance(error, BudgetError):
        return str(error), DOES_NOT_FIT
    if isinstance(error, StepError):
        return str(error), FAILED
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = error.filename or "what is written"
        return f"no space left for {where} ({error.strerror}): free some, or write elsewhere", WRONG
    if isinstance(error, OSError) and error.strerror:
        return f"expected a file that can be used, found {error.filename or 'one'}: {error.strerror}", WRONG
    if isinstance(error, (MtcompileError, ValueError, OSError)):
        return str(error), WRONG
    reason = (str(error).strip().splitlines() or ["no reason given"])[0]
    return f"unexpected {type(error).__name__}: {reason}. MT_DEBUG=1 in front of the command shows the traceback", FAILED


def _drop_output() -> None:
    """What is still buffered for a full disk would fail once more when Python ends, with another exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor, in tests
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while somebody looks; gone afterwards."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of or None)


def asked(model: str, **options: Any) -> Forecast:
    """What ``mtcompile.plan`` says of a model named on the command line; an empty option is none."""
    from mtcompile.forecast.solve import plan
    from mtcompile.models.loading import model_named

    options = {key: None if value == "" else value for key, value in options.items()}
    with progress("planning") as tell:
        return plan(model_named(model), progress=tell, **options)


def planned(model: str, force: bool = False, hint: str = "", **options: Any) -> Forecast:
    """The same, of a step that fits. Ends the command where nothing does, with a ``hint``; with ``force`` there is the leanest
    plan then."""
    found = asked(model, force=force, **options)
    if not (found.feasible or force):
        print(f"{found}\n{hint}".rstrip(), file=sys.stderr)
        raise typer.Exit(DOES_NOT_FIT)
    return found
