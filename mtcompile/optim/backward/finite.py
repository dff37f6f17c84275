"""Whether the numbers of a backward may be used: of its loss, and of gradients on a device for which nobody waits.

The kernels that look at a loss and at the gradients of a block write flags on the device. One of them, for the whole backward,
is read by each update there: from the first value that is not finite on, none of them changes anything. The flags also go home,
behind the kernels that write them. What the host updates has crossed to it later, so that the host has all flags by then that
were written before. So the thread that issues kernels goes on until it has issued the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mtcompile.errors import StepError
from mtcompile.torch_private import largest_magnitudes

Loss = tuple[Tensor | None, Tensor]  # an output that is still alive, and the gradient that arrives at it
_LEAST_SCALE = 256.0  # a loss multiplied by a power of two from here on is taken to come from a GradScaler


def losses_of(outputs: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> list[Loss]:
    """Returns the outputs of one element at which gradients arrive."""
    pairs = zip(outputs, tangents, strict=True)
    return [(output, tangent) for output, tangent in pairs if tangent is not None and tangent.numel() == 1]


def check_loss(factor: float, value: float | None, nonfinite: str) -> None:
    """Raise StepError for a scaled loss, and for one that is not finite where ``nonfinite`` is "stop"."""
    if (factor := abs(factor)) >= _LEAST_SCALE and math.frexp(factor)[0] == 0.5:
        raise StepError(
            f'the loss was multiplied by {factor:g}, as a GradScaler does; with update="backward" gradients are used '
            'as they arrive. Leave the scaler out, which bf16 and fp32 do not need, or use update="step"'
        )
    if nonfinite == "stop" and value is not None and not math.isfinite(value):
        raise StepError(
            f'the loss is {value}; nothing was changed. Skip this batch (del loss), or pass nonfinite="skip" or "continue"'
        )


def nonfinite_flags(tensors: Sequence[Tensor]) -> tuple[list[int], Tensor]:
    """Returns positions of tensors on one device that have elements, and for each 1 if it has a value that is not finite, else
    0, as fp32 there. Waits for nothing."""
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (tensor.detach() for tensor in tensors)]
    dtypes: dict[torch.dtype, list[int]] = {}
    for position, tensor in enumerate(real):
        if tensor.numel():
            dtypes.setdefault(tensor.dtype, []).append(position)
    flags = list[Tensor]()
    for positions in dtypes.values():
        largest = torch.stack(largest_magnitudes([real[position] for position in positions]))
        flags.append((largest - largest).nan_to_num_(nan=1.0).to(torch.float32))
    return [position for positions in dtypes.values() for position in positions], torch.cat(flags) if flags else torch.empty(0)


class Driven(Protocol):
    """A device that runs behind the threads which issue to it. ``api``: the calls that it makes."""

    where: torch.device
    api: Any

    def arena(self, tier: Any, nbytes: int) -> Tensor:
        """Return ``nbytes`` of a tier's memory."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Gradients that were looked at together. ``start``: of their flags at home; ``places``: of each, its place among these
    gradients and the name of its parameter."""

    start: int
    places: tuple[tuple[int, str], ...]


class DeviceFlags:
    """The flags of the backward of one model that runs or ran last. ``found``: fp32 on the device, 0 as long as updates there
    may change something."""

    def __init__(self, device: Driven) -> None:
        self._device = device
        self._home = torch.empty(0, dtype=torch.float64)  # pinned: the factor and value of each loss, then flags of gradients
        self.found: Tensor | None = None
        self._blocks: dict[tuple[str, ...], _Block] = {}
        self._losses, self._nonfinite = 0, "stop"
        self._began: Any = None
        self._written: Any = None

    def begin(self, losses: Sequence[Loss], parameters: int, nonfinite: str) -> None:
        """Starts with the flags of losses on the device. ``parameters``: how many there are."""
        if len(self._home) < (count := 2 * len(losses) + parameters):
            self._home = self._device.arena("host", count * self._home.element_size()).view(torch.float64)
        self._home.zero_()
        self._blocks, self._losses, self._nonfinite = {}, len(losses), nonfinite
        refused = []
        for number, (output, tangent) in enumerate(losses):
            factor = tangent.detach().reshape(()).abs()
            refused.append((factor >= _LEAST_SCALE) & (torch.frexp(factor.float()).mantissa == 0.5))
            self._home[2 * number].copy_(factor, non_blocking=True)
            if output is not None:
                value = output.detach().reshape(())
                self._home[2 * number + 1].copy_(value, non_blocking=True)
                refused += [value.isfinite().logical_not()] if nonfinite == "stop" else []
        any_refused = torch.stack(refused).any() if refused else torch.zeros((), device=self._device.where)
        self.found = any_refused.to(torch.float32)
        self._began = self._written = self._mark()

    def look_at(self, names: Sequence[str], grads: Sequence[Tensor]) -> None:
        """Flags gradients that are not finite. Waits for nothing."""
        order, flags = nonfinite_flags(grads)
        start = 2 * self._losses + sum(len(block.places) for block in self._blocks.values())
        block = _Block(start, tuple((place, names[place]) for place in order))
        block = self._blocks.setdefault(tuple(names), block)  # a backward for which memory was short starts again
        if order:
            self._home[block.start : block.start + len(order)].copy_(flags, non_blocking=True)
            if self._nonfinite == "stop":
                assert self.found is not None
                torch.maximum(self.found, flags.amax(), out=self.found)
        self._written = self._mark()

    def wait(self, began: bool = False) -> None:
        """Waits until all flags are at home that have been issued; or those of losses alone."""
        if (event := self._began if began else self._written) is not None:
            self._device.api.block(event)

    def check_losses(self) -> None:
        """Raises StepError as ``check_loss``, as far as flags are at home."""
        for factor, value in self._home[: 2 * self._losses].view(-1, 2).tolist():
            check_loss(factor, value, self._nonfinite)

    def first(self) -> str | None:
        """Returns the name of the first parameter that was found whose gradient is not finite, as far as flags are at home."""
        for block in list(self._blocks.values()):  # the thread that issues goes on
            flags = self._home[block.start : block.start + len(block.places)].tolist()
            if any(flags):
                return min(place for place, flag in zip(block.places, flags, strict=True) if flag)[1]
        return None

    def outcome(self) -> tuple[bool, list[str]]:
        """Tells whether updates behind these flags have changed anything, and names the parameters whose updates they have
        forbidden, once they are at home."""
        refused, forbidden, blocks = False, list[str](), list(self._blocks.items())  # the thread that issues goes on
        try:
            self.check_losses()
        except StepError:
            refused = True
        for names, block in blocks:
            flags = self._home[block.start : block.start + len(block.places)]
            refused |= self._nonfinite == "stop" and bool(flags.any())
            forbidden += names if refused else ()
        return len(forbidden) < sum(len(names) for names, _ in blocks), forbidden

    def end(self) -> None:
        """Forgets the backward."""
        self._blocks, self._losses, self.found = {}, 0, None

    def _mark(self) -> Any:
        api = self._device.api
        event = api.new_event()
        api.record(event, api.current_stream())
        return event
