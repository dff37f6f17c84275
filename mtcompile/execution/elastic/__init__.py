"""Elastic plans: the times of the last steps feed the cost model, and a plan that suits them takes over between steps."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol


class Replanner(Protocol):
    """Replaces the plans of a session by better ones. ``changes``: a line for each."""

    changes: list[str]

    def before_step(self, known: MutableMapping[Any, Any]) -> None:
        """Called between steps, with the compiled steps of the program that runs next."""
