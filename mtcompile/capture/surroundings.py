"""Checks the contexts of torch that a call stands in, and that a compiled model cannot follow."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mtcompile import torch_private
from mtcompile.errors import StepError

_MOST_LOOKS = 4  # a loop within one autocast shows at its second step


class Surroundings:
    """Remembers what the calls of one model have seen. Raises StepError before anything runs."""

    def __init__(self) -> None:
        self._probe = torch.nn.Parameter(torch.zeros(1, 1))
        self._versions: tuple[int, ...] = ()
        self._looks = 0

    def check_call(self, parameters: Iterable[torch.Tensor], trains: bool) -> None:
        """``trains``: whether the call saves values for a backward."""
        if trains and (hook := torch_private.saving_hook()) is not None:
            raise StepError(
                f"the call stands in torch.autograd.graph.saved_tensors_hooks({hook}, ...), which a compiled model would pass "
                "by: its plan decides what is saved, and where. Leave the context out, or call the plain model in it"
            )
        if (mode := torch_private.dispatch_mode()) is not None:
            raise StepError(
                f"the call stands in {mode}, a TorchDispatchMode, which would see how a plan is made, and then none of the "
                "operations of a plain run. Call the model outside of it, or call the plain model in it"
            )
        if (mode := torch_private.function_mode()) is not None:
            raise StepError(
                f"the call stands in {mode}, a TorchFunctionMode, which would also see the torch functions that make and "
                "run a plan. Call the model outside of it, or call the plain model in it"
            )
        if self._looks < _MOST_LOOKS and torch_private.caches_casts():
            self._check_casts(parameters)

    def _check_casts(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raises StepError if weights have changed since plain autocast cast them: it would go on with the old ones."""
        self._looks += 1
        versions = tuple(parameter._version for parameter in parameters)
        changed, self._versions = versions != self._versions, versions
        before = float(self._probe.detach())
        if float(torch_private.cast_of(self._probe)) != before and changed:
            raise StepError(
                "the weights have changed since torch.autocast was entered, and plain PyTorch would go on with the copies that "
                "it cast before. Enter torch.autocast for each forward anew, or with cache_enabled=False"
            )
        with torch.no_grad():
            self._probe.fill_(before + 1.0)
