"""The errors of mtcompile. Every message says what was expected, what was found, and the smallest next step."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

from mtcompile import knobs
from mtcompile.reading import printable

P = ParamSpec("P")
V = TypeVar("V")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns ``; did you mean ...?`` with the known name that comes nearest; empty if none comes near."""
    return "".join(f"; did you mean {close}?" for close in difflib.get_close_matches(str(name), list(known), 1))


def nearest_file(path: str | Path) -> str:
    """Returns ``; did you mean ...?`` with the file that comes nearest to a missing one, in its folder."""
    folder = Path(path).parent
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(Path(path).name, names, 1)
    return "".join(f"; did you mean {folder / name}?" for name in close)


class MtcompileError(RuntimeError):
    """The base of all errors of this package, except those of a disk, which are OSErrors. Names in them may be from files."""

    def __str__(self) -> str:
        return printable(super().__str__())


class CaptureError(MtcompileError):
    """Raised if the model cannot be captured. The message names the line of your code and the reason."""


class PassError(MtcompileError):
    """Raised if a pass that you registered (``mtcompile.passes.register``) fails, or changes what a step computes. Its cause is
    the error of the pass, or that of the check or proof that its step failed, which names what does not hold."""


class BudgetError(MtcompileError):
    """Raised if no plan fits a budget. ``minimum_bytes``: the smallest value of that budget found to work. ``tier``: whose
    budget that is: "device", "host" or "disk"."""

    def __init__(self, message: str, minimum_bytes: int, tier: str = "device") -> None:
        super().__init__(message)
        self.minimum_bytes, self.tier = minimum_bytes, tier


class StepError(MtcompileError):
    """Raised if a step is used in a way that would give wrong numbers, such as weights changed between forward and backward, or
    a second backward before ``optimizer.step()`` with ``update="backward"``. Also raised for a loss or gradient that is not
    finite (``nonfinite="stop"``), and for questions that need a step that has not run yet."""


class CheckpointError(MtcompileError):
    """Raised if a checkpoint is damaged, is of another model, or cannot be written because another process writes into its
    folder. Nothing has changed then."""


def ends_device(error: BaseException) -> bool:
    """Tells whether an error has ended the use of the GPU by this process, as an address out of range in a kernel does: all
    later calls fail with the same error, wherever they are."""
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and ("CUDA error" in text or "device-side assert" in text)
        and "out of memory" not in text
    )


def device_ended(where: str, cause: str) -> MtcompileError:
    """Makes the error that a failed GPU is unusable from now on. ``where``: it failed; ``cause``: its error's first line."""
    return MtcompileError(
        f"the GPU failed in {where}: {cause}\n  it cannot be used by this process any more: start again from the last "
        "checkpoint; CUDA_LAUNCH_BLOCKING=1 shows the kernel that failed"
    )


def told_briefly(function: Callable[P, V]) -> Callable[P, V]:
    """Lets errors of mtcompile leave a function without the frames that they came through, unless MT_DEBUG is set. The cause of
    a PassError stays: it is about the user's own pass."""

    @functools.wraps(function)
    def brief(*args: P.args, **kwargs: P.kwargs) -> V:
        try:
            return function(*args, **kwargs)
        except MtcompileError as error:
            if knobs.debug():
                raise
            raise error.with_traceback(None) from (error.__cause__ if isinstance(error, PassError) else None)

    return brief


def shows_part(name: str) -> str:
    """Returns why a tensor that is a view of a larger one cannot be read by place."""
    return (
        f"forward calls as_strided on {name}, which is a view of part of its storage; expected a tensor that covers its whole "
        f"storage: pass {name}.clone()"
    )
