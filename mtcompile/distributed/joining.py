"""Joins a model's ranks when it is compiled, and says what cannot be trained by several of them."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from mtcompile.distributed.connection import connect
from mtcompile.distributed.ranks import Ranks
from mtcompile.errors import MtcompileError
from mtcompile.options import Options


def check_distributable(model: nn.Module) -> None:
    """Raises MtcompileError for a model that something else has already distributed."""
    for module in model.modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"):
            raise MtcompileError(
                f"the model is wrapped in {type(module).__name__}; expected the plain module: mtcompile combines the gradients "
                "of all ranks itself once torch.distributed is initialised"
            )
    tensors = sys.modules.get("torch.distributed.tensor")
    for name, parameter in model.named_parameters() if tensors is not None else ():
        if isinstance(parameter.data, tensors.DTensor) or isinstance(parameter, tensors.DTensor):  # type: ignore[union-attr]
            raise MtcompileError(
                f"{name} is a DTensor, sharded by FSDP2 or tensor parallelism; expected whole parameters: compile the plain "
                "module on every rank, and mtcompile keeps it in host memory"
            )


def ranks_of(process_group: Any, options: Options, model: nn.Module) -> Ranks | None:
    """Returns the ranks that train ``model`` together, after all have got the weights of the first; None for one alone.

    All ranks call it. Raises MtcompileError where their models differ, and ValueError for options that need one rank.
    """
    connection = connect(process_group)
    if connection is None:
        return None
    if options.disk is not None:
        raise ValueError("expected no disk= where several ranks train: weights on disk are not shared between them yet")
    if options.elastic:
        raise ValueError("expected elastic=False where several ranks train: they would have to change plans together")
    if lazy := [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]:
        raise MtcompileError(f"{lazy[0]} is not initialized yet; call the plain model once before mtcompile.compile")
    ranks = Ranks(connection)
    ranks.adopt(model)
    return ranks
