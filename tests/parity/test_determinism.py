"""Comparisons of bits on a GPU run kernels that add in one order. Nothing here needs a GPU."""

from __future__ import annotations

import os

import pytest
import torch

import mtcompile
from mtcompile.parity.determinism import deterministic

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that what is set here goes afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


def test_the_mode_is_strict_and_goes_with_the_comparison() -> None:
    """With ``warn_only=True``, attention would only warn, and go on."""
    with deterministic(CUDA):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_users_own_mode_comes_back() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic(CUDA):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_operation_without_such_a_kernel_is_named() -> None:
    text = (
        "adaptive_avg_pool3d_backward_cuda does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'."
    )
    named = r"^adaptive_avg_pool3d_backward_cuda has no kernel .*\n  expected a model"
    with pytest.raises(mtcompile.StepError, match=named), deterministic(CUDA):
        raise RuntimeError(text)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_workspace_that_allows_several_orders_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(mtcompile.StepError, match=r"expected :4096:8 or :16:8"), deterministic(CUDA):
        pass
