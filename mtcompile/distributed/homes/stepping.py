"""``optimizer.step()`` of parameters that lie once for all ranks of a host: each of them updates a share of every one.

    rank 0   backward, clipping │ update, gather │           backward ...       gradients are each rank's own, and equal
    rank 1      backward, clipping │ update, gather │        backward ...       │ all ranks wait for all

At the first of the two meetings, all ranks have ended their reads of the old weights, and tell what they are going to do;
behind the second, all shares are written. Each of several hosts updates a part of every parameter, whose state it alone has,
and an all-gather brings the other parts. PyTorch's own step then finds no gradients of these parameters, and updates what is
left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile import torch_private
from mtcompile.distributed.homes.shares import HostShares
from mtcompile.distributed.ranks import Ranks
from mtcompile.errors import StepError
from mtcompile.optim.backward.kernels import Backward
from mtcompile.optim.master_weights import Masters
from mtcompile.optim.state_sizes import is_elementwise
from mtcompile.optim.update_options import UpdateOptions
from mtcompile.optim.wholeness import Wholeness
from mtcompile.optim.written_update import grad_scaling

_OPTIONS = UpdateOptions(nonfinite="continue")  # a step uses gradients as they are


class StepsInShares:
    """The steps of one model's ``optimizer``, the last that was bound. ``parameters``: returns the model's, by name.
    ``shares``: None until there are any. ``compared``: values that ranks compare before their next backward."""

    def __init__(
        self,
        ranks: Ranks,
        masters: Masters | None,
        wholeness: Wholeness,
        parameters: Callable[[], Mapping[str, nn.Parameter]],
    ) -> None:
        self.ranks, self.masters, self.wholeness = ranks, masters, wholeness
        self.shares: HostShares | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.compared: Mapping[str, Tensor] = {}
        self._parameters = parameters
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []

    @torch_private.never_captured
    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Updates this rank's shares before the optimizer's own step. A closure computes gradients, so it is called here, and
        the optimizer's step gets its loss. Raises StepError on all ranks, before anything has changed, unless all do the
        same."""
        positional = len(args) > 1
        closure = args[1] if positional else kwargs.get("closure")
        if self.shares is None and (closure is None or not is_elementwise(optimizer)):
            return None
        with self.ranks.phase():
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()  # its forward may be the first of all, from which on there are shares
            if self.shares is not None:
                self._step(optimizer, self.shares)
        if closure is None:
            return None
        self.wholeness.updating(optimizer)  # the closure has ended the watch that its step began
        return ((args[0], lambda: loss, *args[2:]), kwargs) if positional else (args, {**kwargs, "closure": lambda: loss})

    @torch_private.never_captured
    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Gives parameters the gradients back that the optimizer's own step was not to see."""
        self.wholeness.updated(optimizer)
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden = []

    def _step(self, optimizer: torch.optim.Optimizer, shares: HostShares) -> None:
        self._hidden = []  # of a step that failed: what has been loaded since then has none
        groups: dict[int, tuple[int, Mapping[str, Any]]]
        groups = {id(p): (index, group) for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        shared = {name: p for name, p in self._parameters().items() if name in shares.names and id(p) in groups}
        if not shared:  # such as of an optimizer for other parameters, bound earlier
            return
        rows = {name: parameter for name, parameter in shared.items() if parameter.grad is not None}
        self._check(optimizer, shares, rows)
        scale, skips = grad_scaling(optimizer)
        grads = {name: _dense(parameter) for name, parameter in rows.items()}
        self.ranks.agree_on_update((_about(optimizer, rows), scale, skips), grads)
        if not rows or (skips and self.masters is not None):  # torch's own kernels look at ``found_inf``
            return
        threads, factor = torch.get_num_threads(), None  # torch's own kernels look at ``grad_scale`` themselves
        if self.masters is not None and scale != 1.0:
            factor = torch.tensor(scale, dtype=torch.float64)
        backward = Backward(self.wholeness.steps + 1, _OPTIONS, optimizer, self.masters, rows, groups, threads)
        self.wholeness.updating(optimizer)
        with torch.no_grad():
            shares.update(backward, grads, factor)
            self.ranks.end_updates([] if shares.elsewhere is None else list(rows.values()))
        torch.autograd.graph.increment_version(list(rows.values()))  # also where this rank had no share
        shares.updated(self.masters)
        self.ranks.remember(self.compared)
        self._hidden = [(parameter, parameter.grad) for parameter in rows.values() if parameter.grad is not None]
        for parameter in rows.values():
            parameter.grad = None

    def _check(self, optimizer: torch.optim.Optimizer, shares: HostShares, rows: Mapping[str, nn.Parameter]) -> None:
        """Raises StepError for what an update in shares cannot take. Nothing has changed then."""
        if optimizer is not self.optimizer:
            raise StepError(
                "another optimizer was bound to the model after this one, whose state the ranks of this host share; expected "
                "the step of the one bound last. MT_RANKS_SHARE=0 gives each rank weights and state of its own"
            )
        shares.check()
        self.ranks.check_unchanged(self.compared)
        for name, parameter in rows.items():
            if parameter.grad is None or parameter.grad.layout != torch.strided or parameter.grad.device != parameter.device:
                raise StepError(
                    f"{name}: expected a dense gradient on {parameter.device} where the ranks of a host update shares of it, "
                    "found another; MT_RANKS_SHARE=0 gives each rank weights of its own"
                )
            shares.check_state(name, parameter, optimizer.state.get(parameter, {}))
        if self.masters is not None:
            self.masters.check(optimizer, rows.values())


def _dense(parameter: nn.Parameter) -> Tensor:
    """Returns a parameter's gradient, with the parameter's layout."""
    assert parameter.grad is not None
    grad = parameter.grad.detach()
    return grad if grad.stride() == parameter.stride() else torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)


def _about(optimizer: torch.optim.Optimizer, rows: Mapping[str, nn.Parameter]) -> tuple[Any, ...]:
    """Returns what an update is made with besides gradients: the options of each group, and the steps of each parameter."""
    options = [sorted((key, _plain(value)) for key, value in g.items() if key != "params") for g in optimizer.param_groups]
    groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    steps = [(groups[id(p)], _plain(optimizer.state.get(p, {}).get("step"))) for p in rows.values()]
    return type(optimizer).__name__, options, steps


def _plain(value: Any) -> Any:
    """Returns the value of an option as all ranks show it; None for one that only its own rank may know."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str) else None
