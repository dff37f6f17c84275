"""The options of ``update="backward"``, checked."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

NONFINITE = ("stop", "skip", "continue")


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """``compile``'s options of the same names, for ``update="backward"``. ``limit_name``: what the user of a trainer knows its
    ``max_grad_norm`` by; "" where the trainer gave none."""

    max_grad_norm: float | None = None
    run_ahead: bool = False
    nonfinite: str = "stop"
    limit_name: str = field(default="", compare=False)

    @property
    def needs_all_gradients(self) -> bool:
        """True where no update may start before the last gradient is there."""
        return self.max_grad_norm is not None or self.nonfinite == "skip"


def update_options(update: str, max_grad_norm: float | None, run_ahead: bool, nonfinite: str) -> UpdateOptions | None:
    """Check the options; None for ``update="step"``. Raises ValueError."""
    if update not in ("step", "backward"):
        raise ValueError(f"expected update to be step or backward, found {update!r}")
    if nonfinite not in NONFINITE:
        raise ValueError(f"expected nonfinite to be one of {', '.join(NONFINITE)}, found {nonfinite!r}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"expected max_grad_norm above 0, found {max_grad_norm!r}")
    options = UpdateOptions(max_grad_norm, run_ahead, nonfinite)
    if update == "backward":
        return options
    if options != UpdateOptions():
        names = " and ".join(field.name for field in fields(options) if getattr(options, field.name) != field.default)
        step = 'pass update="backward" too' + ("; or clip before optimizer.step()" if max_grad_norm is not None else "")
        raise ValueError(f'expected update="backward" with {names}, found update="step": {step}')
    return None
