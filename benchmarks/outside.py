"""Peers that are packages of their own, measured where they are installed and never required: DeepSpeed's ZeRO-3 with
everything offloaded, and MegaTrain's own trainer (arXiv 2604.05091). Both keep AdamW's state on the host.

Written from their documentation. DeepSpeed 0.19.8 has run with it, on an H100; MegaTrain has *not yet run*.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mtcompile.models.shapes import Shape

LR = 1e-4
_WORLD = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
_DEEPSPEED, _MEGATRAIN = "pip install deepspeed", "pip install -e . in a clone of MegaTrain's repository"
Prepared = tuple[nn.Module, Callable[[Tensor, Tensor], Any], Any]


class NotInstalled(RuntimeError):
    """Raised where a peer's package is missing; a table shows it in the peer's row."""


def check_installed(peer: str) -> None:
    """Raises NotInstalled for a peer whose package is missing, before anything is built for it."""
    if peer == "deepspeed zero3 offload":
        _package("deepspeed", _DEEPSPEED)
    elif peer == "megatrain":
        _package("infinity", _MEGATRAIN)


class Loss:
    """A loss whose backward is its trainer's."""

    def __init__(self, value: float, backward: Callable[[], object]) -> None:
        self._value, self._backward = value, backward

    def backward(self) -> None:
        self._backward()

    def item(self) -> float:
        return self._value


class Stepper:
    """An optimizer whose step is its trainer's, which zeroes gradients itself."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step

    def step(self) -> None:
        self._step()

    def zero_grad(self) -> None:
        return


def deepspeed_zero3(model: Any, device: torch.device, memory: int | None) -> Prepared:
    """ZeRO-3 in a world of one: parameters, gradients and optimizer on the host, blocks checkpointed."""
    deepspeed = _package("deepspeed", _DEEPSPEED)
    for name, value in _WORLD.items():
        os.environ.setdefault(name, value)
    model.recompute, model.loss_chunks = True, 32
    offload = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,  # for its own statistics only
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload, "overlap_comm": True},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]

    def call(tokens: Tensor, targets: Tensor) -> Loss:
        loss = engine(tokens, targets)
        return Loss(float(loss.detach()), lambda: engine.backward(loss))

    return engine, call, Stepper(engine.step)


def megatrain(model: Any, device: torch.device, memory: int | None) -> Prepared:
    """MegaTrain's trainer over a Transformers model of the same shape, with random weights. It runs forward and backward in
    one call, which is its loss's here; its clipping is left out, as that of all peers is."""
    infinity = _package("infinity", _MEGATRAIN)
    settings = _package("infinity.config", _MEGATRAIN)
    peer = infinity.CPUMasterModel(
        _transformers_model(model.shape),
        settings.CPUMasterConfig(dataset_path="unused", attn_implementation="sdpa", device=device.index or 0, learning_rate=LR),
    )
    try:
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        optimizer = adam(peer.get_parameters(), lr=LR, adamw_mode=True)
    except ImportError:
        optimizer = torch.optim.AdamW(peer.get_parameters(), lr=LR, fused=True)

    def call(tokens: Tensor, targets: Tensor) -> Loss:
        ids = tokens.cpu()  # labels are shifted by the model
        value, _, _ = peer.forward_and_backward(ids, torch.ones_like(ids), ids.clone())
        return Loss(float(value), lambda: None)

    def step() -> None:
        optimizer.step()
        peer._sync_params_to_gpu()
        peer.zero_grad()
        optimizer.zero_grad()

    return peer, call, Stepper(step)


def _transformers_model(shape: Shape) -> nn.Module:
    """A Llama of that shape: the same products, norms and attention as ours."""
    transformers = _package("transformers", 'pip install "mtcompile[hf]"')
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
    )
    made: nn.Module = transformers.LlamaForCausalLM(config).to(shape.torch_dtype)
    return made


def _package(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise NotInstalled(f"{name} is not installed: {install}") from None
