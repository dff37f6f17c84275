"""What mtcompile raises. Every message says what was expected, what was found and the smallest next step."""

from __future__ import annotations


class MtcompileError(RuntimeError):
    """Base of all errors of this package."""


class CaptureError(MtcompileError):
    """The model cannot be captured as one graph; the message holds the user's line and the reason."""


class BudgetError(MtcompileError):
    """No plan fits the budget. ``minimum_bytes``: the smallest budget of that tier that works."""

    def __init__(self, message: str, minimum_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes


class StepError(MtcompileError):
    """A step was used in a way that cannot give right numbers: a second backward, a second training forward while one
    is alive, weights changed between forward and backward."""
