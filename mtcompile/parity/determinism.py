"""Kernels that give the same bits in every run, for comparisons of bits on a GPU."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from mtcompile import knobs
from mtcompile.errors import StepError


@contextlib.contextmanager
def deterministic(where: torch.device) -> Iterator[None]:
    """Lets every kernel on a GPU add in one order, for both sides of a comparison: torch's strict mode, since with
    ``warn_only=True`` flash, memory-efficient and cuDNN attention go on adding in any.

    Raises StepError, naming the operation, where one has no such kernel."""
    if where.type == "cpu":
        yield
        return
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if not knobs.products_in_one_order():
        raise StepError(
            "CUBLAS_WORKSPACE_CONFIG lets cuBLAS add in several orders; expected :4096:8 or :16:8, or the variable unset, to "
            "compare bits"
        )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it would measure algorithms, and choose another one in another run
    try:
        yield
    except RuntimeError as error:
        if refused := re.search(r"(\S+) does not have a deterministic implementation", str(error)):
            raise StepError(
                f"{refused[1]} has no kernel on a GPU that adds in one order, so its bits differ from run to run, in plain "
                'PyTorch too\n  expected a model without it, to compare bits: leave it out or compare on the CPU (device="cpu")'
            ) from error
        raise
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.backends.cudnn.benchmark = benchmark
