"""Weights in bitsandbytes' 4 bits (nf4, as QLoRA has them): linear layers of Transformers, but the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtcompile.reading import check_package


def four_bits_of(folder: Path, config: Any, base_bits: int | None) -> dict[str, Any]:
    """Returns the arguments by which Transformers reads weights of a folder in 4 bits, on the host; none, if they stay as they
    are. Raises ValueError for other quantized weights, and without bitsandbytes."""
    there = getattr(config, "quantization_config", None)
    if there is None and base_bits is None:
        return {}
    if there is not None:
        fields = there if isinstance(there, dict) else there.to_dict()
        if fields.get("quant_method") != "bitsandbytes" or not fields.get("load_in_4bit"):
            raise ValueError(
                f"expected weights that are not quantized, or in bitsandbytes' 4 bits, found a quantization_config of "
                f"{fields.get('quant_method')!r} in {folder}/config.json: take the folder with the original weights"
            )
    check_package("bitsandbytes", "base_bits=4" if there is None else f"{folder}, whose weights have 4 bits,", "qlora")
    return {"device_map": {"": "cpu"}} if there is not None else {"device_map": {"": "cpu"}, "quantization_config": qlora()}


def qlora() -> Any:
    """Returns QLoRA's configuration: nf4, scales quantized too, products in bf16."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def names_in_four_bits(model_class: Any, config: Any) -> set[str]:
    """Returns the names of the weights of a model that Transformers gives 4 bits."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    with torch.device("meta"):
        model = model_class(config)
    kept = get_keys_to_not_convert(model)
    linear = (name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D)))
    return {f"{name}.weight" for name in linear if should_convert_module(name, kept)}


def keep_unpacked(model: nn.Module) -> None:
    """Keeps bitsandbytes from packing weights again, for processors with AVX512-BF16, in the first evaluation: a training could
    not go on with them."""
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
