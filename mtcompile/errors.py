"""The errors of mtcompile. Every message says what was expected, what was found, and the smallest next step."""

from __future__ import annotations


class MtcompileError(RuntimeError):
    """The base of all errors of this package."""


class CaptureError(MtcompileError):
    """Raised if the model cannot be captured. The message names the line of your code and the reason."""


class BudgetError(MtcompileError):
    """Raised if no plan fits a budget. ``minimum_bytes``: the smallest value of that budget that works."""

    def __init__(self, message: str, minimum_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes


class StepError(MtcompileError):
    """Raised if a step is used in a way that would give wrong numbers, such as a second backward of one loss, or weights
    changed between forward and backward. Also raised for a loss or gradient that is not finite (``nonfinite="stop"``), and for
    questions that need a step that has not run yet."""


class CheckpointError(MtcompileError):
    """Raised if a checkpoint is damaged, is of another model, or cannot be written because another process writes into its
    folder. Nothing has changed then."""


def shows_part(name: str) -> str:
    """Returns why a tensor that is a view of a larger one cannot be read by place."""
    return (
        f"forward finds elements of {name} by their place in its storage (as_strided), of which {name} shows only a part; "
        "expected a tensor that fills its storage: pass a copy (clone)"
    )
