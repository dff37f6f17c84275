"""The parts that all commands share: exit codes, errors told in one sentence, a progress bar, and planning a named model."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from mtcompile import knobs, progress
from mtcompile.cli.options import StepOptions, in_flags, values
from mtcompile.errors import BudgetError, MtcompileError, StepError
from mtcompile.reading import is_panic, printable

if TYPE_CHECKING:
    from rich.console import Console

    from mtcompile.forecast.result import Forecast
    from mtcompile.passes.planning.problem import Planned

FINE = 0
FAILED, WRONG, DOES_NOT_FIT, BAD, DIFFERENT = 1, 2, 3, 4, 5
INTERRUPTED = 130
_WIDTH = 128  # of tables that do not go to a terminal

Model = Annotated[
    str,
    typer.Argument(
        help="a built-in shape (gpt-11m, llama-8b, ...), a Hugging Face config.json or its folder, or file.py:factory"
    ),
]


class Commands(TyperGroup):
    """Ends every command with a sentence and an exit code, whatever stopped it. MT_DEBUG=1 shows the traceback instead."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        try:
            return super().make_context(*args, **more)
        except KeyboardInterrupt as error:
            raise _interrupted("mtcompile", error) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                if not knobs.debug():
                    knobs.panics_in_one_line()
                with _quiet(), _warnings_in_one_line(ctx):
                    return super().invoke(ctx)
            finally:
                sys.stdout.flush()  # a full disk is noticed here, not after the exit code has been given
        except KeyboardInterrupt as error:
            raise _interrupted(_name(ctx), error) from None
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            if isinstance(error, (typer.Abort, BrokenPipeError)) or hasattr(error, "exit_code") or _debugged():
                raise
            sentence, code = sentence_and_code(error)
            sentence = in_flags(sentence, _options_of(self.commands.get(ctx.invoked_subcommand or "")))
            if isinstance(error, OSError):
                _drop_output()
            print(f"{_name(ctx)}: {printable(sentence)}", file=sys.stderr)
            raise typer.Exit(code) from None


def _interrupted(name: str, error: KeyboardInterrupt) -> typer.Exit:
    print(": ".join(filter(None, (f"{name}: interrupted", str(error)))), file=sys.stderr)
    return typer.Exit(INTERRUPTED)


def _options_of(command: Any) -> list[str]:
    """Returns the names of a command's options as arguments of Python."""
    parameters = getattr(command, "params", ())
    return [each.name for each in parameters if f"--{each.name.replace('_', '-')}" in each.opts]


def _name(context: Any) -> str:
    return f"mtcompile {context.invoked_subcommand or ''}".rstrip()


def _debugged() -> bool:
    try:
        return bool(knobs.debug())
    except ValueError:  # which is the error
        return False


@contextlib.contextmanager
def _warnings_in_one_line(context: Any) -> Iterator[None]:
    """Lets warnings print as other messages do, without the line of Python; MT_DEBUG=1 shows it. Names may be from files."""
    before = warnings.formatwarning

    def formatted(message: Warning | str, *place: Any, **options: Any) -> str:
        return printable(before(message, *place, **options) if _debugged() else f"{_name(context)}: {message}\n")

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Turns off torch's logs of errors and tracebacks, which commands tell in one sentence."""
    before = logging.root.manager.disable
    if not knobs.debug():
        logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def sentence_and_code(error: BaseException) -> tuple[str, int]:
    """Returns what an error says to a user, and the exit code."""
    if isinstance(error, BudgetError):
        return str(error), DOES_NOT_FIT
    if isinstance(error, MemoryError):
        return str(error) or "memory ran out: expected free memory on the host; free some", DOES_NOT_FIT
    if is_panic(error):
        reason = str(error).strip().partition("\n")[0][:200]
        return f"expected files that can be read, found one on which the library that reads it fails: {reason}", WRONG
    if isinstance(error, StepError):
        return str(error), FAILED
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        where = error.filename or "the output"
        return f"no space left for {where} ({error.strerror}): free some, or write elsewhere", WRONG
    if isinstance(error, OSError) and error.strerror:
        return f"expected a file that can be used, found {error.filename or 'one'}: {error.strerror}", WRONG
    if isinstance(error, (MtcompileError, ValueError, OSError)):
        return str(error), WRONG
    reason = (str(error).strip().splitlines() or ["no reason given"])[0]
    return f"unexpected {type(error).__name__}: {reason}. MT_DEBUG=1 in front of the command shows the traceback", FAILED


def _drop_output() -> None:
    """Drops output that is still buffered for a full disk: it would fail again when Python ends, with another exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor, in tests
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    """Returns a console on stdout, of a fixed width if that is not a terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a bar on stderr while that is a terminal, and removes it at the end. Yields a function of (text, done, total)."""
    if not sys.stderr.isatty():
        yield lambda text, done, of: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with progress.silently(), Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda text, done, of: bar.update(task, description=text, completed=done, total=of or None)


@contextlib.contextmanager
def ending_soon() -> Iterator[None]:
    """Leaves the garbage of what is imported and runs inside to the end of the process: looking for it takes a third of the
    time of imports, and seconds after a search."""
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.disable()
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        gc.freeze()  # both together make all objects old without a look at them
        gc.unfreeze()
        gc.enable()


def forecast_of(model: str, options: StepOptions, **more: Any) -> Forecast:
    """Plans a step of a model named on the command line; ``more``: further options of ``mtcompile.plan``."""
    with ending_soon(), progress_bar("planning") as progress:
        from mtcompile.forecast.solve import plan
        from mtcompile.models.loading import model_named

        return plan(model_named(model), progress=progress, **values(options), **more)


def with_process(forecast: Forecast) -> Forecast:
    """Returns the forecast with the RAM that a training process takes: this one, which planned the step, holds the rest."""
    from mtcompile.machine.device import process_nbytes
    from mtcompile.runtime.pages import give_back

    if forecast.planned is None or forecast.scaling is not None:
        return forecast
    give_back()
    return replace(forecast, process_bytes=process_nbytes() + forecast.peak_bytes["host"])


def told(forecast: Forecast) -> str:
    """Returns what a forecast says, in the options of the command line."""
    return in_flags(str(forecast), [field.name for field in fields(StepOptions)] + ["solve", "kernels"])


def fitting_forecast(model: str, options: StepOptions, force: bool = False, hint: str = "") -> tuple[Forecast, Planned]:
    """Plans a step, and ends the command with ``hint`` if it does not fit, unless ``force`` asks for the leanest plan. Returns
    the forecast and its plan."""
    forecast = forecast_of(model, options, force=force)
    if forecast.planned is None:
        print(f"{told(forecast)}\n{hint}".rstrip(), file=sys.stderr)
        raise typer.Exit(DOES_NOT_FIT)
    return forecast, forecast.planned
