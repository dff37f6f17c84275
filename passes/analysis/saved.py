"""Finds the values that a step keeps between its forward and its backward, and between its blocks."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from mtcompile.passes.step_graph import is_region, results


def saved_values(region: fx.Node, reads: Callable[[fx.Node, fx.Node], bool] = lambda user, value: True) -> list[fx.Node]:
    """Results of a forward region that only the backward reads: what recomputation makes unnecessary to keep. ``reads``: says
    of a user whether it counts as a reader of a value."""
    return [
        value
        for value in results(region)
        if value.meta["role"] == "activation"
        and (readers := [user for user in value.users if reads(user, value)])
        and all(is_region(user) and user.meta["phase"] == "backward" for user in readers)
    ]


def crossing_values(region: fx.Node) -> list[fx.Node]:
    """Results of a forward region that later forward regions read as well: what goes from block to block."""
    return [
        value
        for value in results(region)
        if value.meta["role"] == "activation" and any(user.meta.get("phase") == "forward" for user in value.users)
    ]


def made_again_inside(region: fx.Node) -> list[fx.Node]:
    """Crossing values that are made again wherever they wait, if any saved value is: the same backward reads them."""
    last = max((user for value in saved_values(region) for user in value.users), default=None)
    return [
        value
        for value in crossing_values(region)
        if last is not None and any(user.meta.get("phase") == "backward" and user >= last for user in value.users)
    ]
