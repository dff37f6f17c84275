"""Prints, as JSON, the operations that eager dispatches and those that mtcompile traces, for each case, on fake CUDA tensors.

Run as ``python -m tests.torch_private.on_cuda_shapes LIBRARY``: the library of cuda_shapes.cpp must be there before torch."""

# ruff: noqa: E402
from __future__ import annotations

import ctypes
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mtcompile.capture.tracing import trace_joint
from mtcompile.passes.step_graph import is_view
from mtcompile.runtime.devices.arena import layout_of
from mtcompile.torch_private import building_without_memory, pytree, without_memory
from mtcompile.torch_private.cudnn import batch_norm, recurrent

CUDA = torch.device("cuda", 0)


class Applied(nn.Module):
    """``function`` of a parameter and other inputs."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.weight, *inputs)


class Scored(nn.Module):
    """The sum of squares of all that ``model`` returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        results = pytree.tree_leaves(self.model(*inputs.values()))
        return sum(result.float().square().sum() for result in results)


def attention(backend: int, **options: Any) -> Callable[..., Tensor]:
    def attend(weight: Tensor, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x * weight, x + weight, x, **options)

    attend.backend = backend
    return attend


def images(*shape: int) -> Tensor:
    return torch.randn(*shape).to(memory_format=torch.channels_last)


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "linear": lambda: (nn.Linear(6, 6), (torch.randn(4, 6),)),
    "convolution": lambda: (nn.Conv2d(4, 6, 3), (torch.randn(2, 4, 8, 8),)),
    "convolution, channels last": lambda: (nn.Conv2d(4, 6, 3), (images(2, 4, 8, 8),)),
    "convolution, depthwise": lambda: (nn.Conv2d(4, 4, 3, groups=4), (torch.randn(2, 4, 8, 8),)),
    "convolution, dilated": lambda: (nn.Conv2d(4, 4, 3, dilation=2), (torch.randn(2, 4, 8, 8),)),
    "convolution of sequences": lambda: (nn.Conv1d(4, 4, 3), (torch.randn(2, 4, 8),)),
    "convolution, transposed": lambda: (nn.ConvTranspose2d(4, 4, 3), (torch.randn(2, 4, 8, 8),)),
    "batch norm of images": lambda: (nn.BatchNorm2d(4), (torch.randn(2, 4, 8, 8),)),
    "batch norm, channels last": lambda: (nn.BatchNorm2d(4), (images(2, 4, 8, 8),)),
    "batch norm of volumes": lambda: (nn.BatchNorm3d(4), (torch.randn(2, 4, 4, 4, 4),)),
    "batch norm of sequences": lambda: (nn.BatchNorm1d(4), (torch.randn(2, 4, 8),)),
    "batch norm of rows": lambda: (nn.BatchNorm1d(4), (torch.randn(8, 4),)),
    "batch norm without statistics": lambda: (nn.BatchNorm2d(4, track_running_stats=False), (torch.randn(2, 4, 8, 8),)),
    "batch norm without weights": lambda: (
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False)),
        (torch.randn(2, 4, 8, 8),),
    ),
    "batch norm in evaluation": lambda: (nn.BatchNorm2d(4).eval(), (torch.randn(2, 4, 8, 8),)),
    "batch norm in half precision": lambda: (nn.BatchNorm2d(4), (torch.randn(2, 4, 8, 8).bfloat16(),)),
    "instance norm": lambda: (nn.InstanceNorm2d(4, affine=True), (torch.randn(2, 4, 8, 8),)),
    "group norm": lambda: (nn.GroupNorm(2, 4), (torch.randn(2, 4, 8, 8),)),
    "layer norm": lambda: (nn.LayerNorm(8), (torch.randn(2, 4, 8),)),
    "root mean square norm": lambda: (nn.RMSNorm(8), (torch.randn(2, 4, 8),)),
    "LSTM": lambda: (nn.LSTM(6, 8), (torch.randn(5, 2, 6),)),
    "LSTM, two layers both ways": lambda: (nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True), (torch.randn(2, 5, 6),)),
    "LSTM without biases": lambda: (nn.LSTM(6, 8, bias=False), (torch.randn(5, 2, 6),)),
    "LSTM with a projection": lambda: (nn.LSTM(6, 8, proj_size=4), (torch.randn(5, 2, 6),)),
    "GRU": lambda: (nn.GRU(6, 8, 2), (torch.randn(5, 2, 6),)),
    "RNN": lambda: (nn.RNN(6, 8), (torch.randn(5, 2, 6),)),
    "RNN of relu": lambda: (nn.RNN(6, 8, nonlinearity="relu"), (torch.randn(5, 2, 6),)),
    "LSTM cell": lambda: (nn.LSTMCell(6, 8), (torch.randn(2, 6),)),
    "dropout": lambda: (nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)), (torch.randn(4, 6),)),
    "dropout of channels": lambda: (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout2d(0.3)), (torch.randn(2, 4, 8, 8),)),
    "alpha dropout": lambda: (nn.Sequential(nn.Linear(6, 6), nn.AlphaDropout(0.3)), (torch.randn(4, 6),)),
    "embedding": lambda: (nn.Embedding(9, 6), (torch.randint(0, 9, (2, 5)),)),
    "bag of embeddings": lambda: (nn.EmbeddingBag(9, 6), (torch.randint(0, 9, (2, 5)),)),
    "cross entropy": lambda: (Applied(lambda w, y: F.cross_entropy(w, y), 5, 7), (torch.randint(0, 7, (5,)),)),
    "smoothed cross entropy": lambda: (
        Applied(lambda w, y: F.cross_entropy(w, y, label_smoothing=0.1), 5, 7),
        (torch.randint(0, 7, (5,)),),
    ),
    "other losses": lambda: (
        Applied(lambda w, y: F.mse_loss(w, y) + F.smooth_l1_loss(w, y) + F.huber_loss(w, y), 5, 7),
        (torch.randn(5, 7),),
    ),
    "binary cross entropy": lambda: (
        Applied(lambda w, y: F.binary_cross_entropy_with_logits(w, y), 5),
        (torch.rand(5),),
    ),
    "activations": lambda: (
        Applied(lambda w, x: F.gelu(w * x) + F.silu(w) + F.relu(w) + F.leaky_relu(w) + F.elu(w) + F.softplus(w), 5),
        (torch.randn(5),),
    ),
    "prelu and glu": lambda: (nn.Sequential(nn.PReLU(), nn.GLU()), (torch.randn(4, 6),)),
    "softmax": lambda: (Applied(lambda w: w.softmax(-1) + w.log_softmax(0), 4, 6), ()),
    "pooling": lambda: (nn.Sequential(nn.Conv2d(4, 4, 1), nn.MaxPool2d(2), nn.AvgPool2d(2)), (torch.randn(2, 4, 8, 8),)),
    "adaptive pooling": lambda: (nn.Sequential(nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(3)), (torch.randn(2, 4, 8, 8),)),
    "interpolation, nearest": lambda: (
        Applied(lambda w: F.interpolate(w, scale_factor=2), 2, 3, 4, 4),
        (),
    ),
    "interpolation, bilinear": lambda: (
        Applied(lambda w: F.interpolate(w, scale_factor=2, mode="bilinear"), 2, 3, 4, 4),
        (),
    ),
    "interpolation, bicubic": lambda: (
        Applied(lambda w: F.interpolate(w, scale_factor=2, mode="bicubic"), 2, 3, 4, 4),
        (),
    ),
    "padding": lambda: (Applied(lambda w: F.pad(w, (1, 1, 1, 1), mode="reflect"), 2, 3, 4, 4), ()),
    "products": lambda: (
        Applied(lambda w, x: torch.einsum("bij,bjk->bik", w, x) + torch.baddbmm(x, w, x), 2, 4, 4),
        (torch.randn(2, 4, 4),),
    ),
    "indexing": lambda: (
        Applied(lambda w, i: w[i] + w.gather(0, i[:, None].expand(-1, 6)) + w.index_select(0, i), 9, 6),
        (torch.randint(0, 9, (5,)),),
    ),
    "sums": lambda: (Applied(lambda w: w.cumsum(0) + w.std(0) + w.norm() + w.logsumexp(1, True) + w.prod(), 4, 6), ()),
    "attention, products": lambda: (Applied(attention(0), 2, 4, 16, 8), (torch.randn(2, 4, 16, 8),)),
    "attention, flash": lambda: (Applied(attention(1), 2, 4, 16, 8), (torch.randn(2, 4, 16, 8),)),
    "attention, memory-efficient": lambda: (Applied(attention(2), 2, 4, 16, 8), (torch.randn(2, 4, 16, 8),)),
    "attention, cuDNN": lambda: (Applied(attention(3), 2, 4, 16, 8), (torch.randn(2, 4, 16, 8),)),
    "a layer of a transformer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (torch.randn(2, 4, 8),)),
}


class Dispatched(TorchDispatchMode):
    """Notes each operation that eager dispatches, without views and what moves or makes no values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(name_of(func))
        if func is torch.ops.aten._cudnn_rnn_backward.default:  # torch has no shapes for it
            x, weights, hx, cx = (args[i] for i in (0, 1, 4, 5))
            return (*(None if t is None else torch.empty_like(t) for t in (x, hx, cx)), list(map(torch.empty_like, weights)))
        return func(*args, **(kwargs or {}))


def name_of(target: Any) -> str:
    return "" if not isinstance(target, torch._ops.OpOverload) or _views(target) else str(target)


def _views(target: Any) -> bool:
    results = target._schema.returns
    return target.namespace == "prim" or bool(results and results[0].alias_info and not results[0].alias_info.is_write)


def on_cuda(model: nn.Module, data: tuple[Tensor, ...]) -> tuple[Scored, dict[str, Tensor]]:
    return Scored(model).to(CUDA), {f"x{i}": value.to(CUDA) for i, value in enumerate(data)}


def compared(name: str) -> dict[str, Any]:
    with building_without_memory():
        model, data = on_cuda(*CASES[name]())
    torch.ops.cuda_shapes.choose_attention(getattr(getattr(model.model, "function", None), "backend", 0))
    with without_memory(), Dispatched() as eager:
        model(**data).backward()
    joint, _ = trace_joint(model, data, CUDA)
    traced = [name_of(node.target) for node in joint.graph.nodes if node.op == "call_function" and not is_view(node)]
    return {"eager": list(filter(None, eager.names)), "traced": list(filter(None, traced))}


def layouts_of_a_run(run: Any, args: Any) -> list[Any]:
    """What a GPU would show of a recurrent layer: one reserves 96 bytes here."""
    x, weights, _, hx, cx, *others = args
    if run is recurrent._run:
        _, hidden, projected, _, _, _, both = others
        output = x.new_empty(*x.shape[:2], (projected or hidden) * (2 if both else 1))
        cell = x.new_empty(0) if cx is None else cx
        results = [output, hx, cell, x.new_empty(96, dtype=torch.uint8), x.new_empty(sum(w.numel() for w in weights))]
    else:
        results = [value for value, needed in zip((x, hx, cx), others[-1], strict=False) if needed] + list(weights)
    return [layout_of(value) for value in results]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.backends.cudnn.is_acceptable = lambda tensor: True  # as nn.RNNBase asks about its weights' layout
    state = torch.zeros(16, dtype=torch.uint8)
    torch.cuda.get_rng_state = lambda device=None: state
    torch.cuda.set_rng_state = lambda state, device=None: None
    torch.cuda.current_device = lambda: 0
    batch_norm.reserve_nbytes = lambda x: 64
    recurrent.layouts_of_a_run = layouts_of_a_run
    names = sys.argv[2:] or list(CASES)
    json.dump({name: compared(name) for name in names}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
