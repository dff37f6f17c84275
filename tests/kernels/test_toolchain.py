"""Which kernels a model gets that does not choose."""

from __future__ import annotations

import torch

from mtcompile.kernels.chains.build import ExactKernels
from mtcompile.kernels.inductor import InductorKernels
from mtcompile.kernels.toolchain import chosen_kernels, toolchain_for
from mtcompile.options import KERNELS, Options
from mtcompile.torch_private.kernels import strict_numerics

CPU = torch.device("cpu")


def test_auto_is_eager_until_exact_kernels_are_measured_on_a_gpu() -> None:
    assert Options().kernels == "auto" and chosen_kernels("auto") == "eager"
    assert all(chosen_kernels(kernels) == kernels for kernels in KERNELS if kernels != "auto")


def test_each_kind_of_kernels_has_what_compiles_it() -> None:
    compiling = [toolchain_for(CPU, kernels).compiling for kernels in ("eager", "exact", "inductor")]
    assert [type(each) for each in compiling] == [type(None), ExactKernels, InductorKernels]


def test_this_torch_has_a_strict_mode() -> None:
    """Its names are those of Inductor's private settings."""
    strict = strict_numerics()
    assert strict.get("numerics") == "strict" or strict.get("emulate_precision_casts") is True
    assert strict["cpp.enable_floating_point_contract_flag"] == "off"
    if "numerics" not in strict:
        assert strict["eager_numerics.division_rounding"] and strict["eager_numerics.disable_ftz"]
