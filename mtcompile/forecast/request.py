"""What ``mtcompile.plan`` is asked, and the step it is asked about: traced without memory, its loss head in chunks, its
micro-batches, and its candidate plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import torch
from torch import fx, nn

from mtcompile import cache
from mtcompile.capture.joint import trace_settings
from mtcompile.capture.tracing import Traced, trace
from mtcompile.models.decoders import SHAPES, fake
from mtcompile.optim.precision import Precision
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.joint.accumulate import Micro, repeat, weights_of
from mtcompile.passes.joint.build import build
from mtcompile.passes.joint.loss_head import chunk_loss
from mtcompile.passes.planning.planner import BIT_EQUAL, Candidates, Tell
from mtcompile.passes.step_graph import copy_step, placeholders, storage_nbytes
from mtcompile.torch_private import without_memory

_LARGE_HEAD, MOST_CHUNKS = 0.02, 64  # a loss head whose logits take more than that part of the device is cut


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, but for the sizes."""

    model: str | nn.Module | Callable[..., Any]
    data: Mapping[str, Any] | None
    precision: Precision
    optimizer: str
    machine: Machine
    budgets: Budgets
    policies: tuple[str, ...]
    force: bool
    tell: Tell
    accumulate: int


@dataclass(frozen=True, slots=True)
class Sized:
    """A step of some batch and sequence, and its candidate plans. ``whole``: as captured, with its loss head in one piece."""

    candidates: Candidates
    whole: Traced
    joint: fx.GraphModule
    step: fx.GraphModule
    tokens: int
    chunks: int


def sized_step(question: Question, batch: int, seq: int, like: Sized | None = None) -> Sized:
    """``like``: the same step at another size, from which the chunks of the loss head and the cut into regions are taken."""
    question.tell("capturing the step", 0, 0)
    traced, data = _traced(question, batch // question.accumulate, seq)
    chunks = like.chunks if like else _chunks(traced, question.budgets.device)
    return chunked(question, traced, tokens_of(data) * question.accumulate, chunks, like)


def chunked(question: Question, traced: Traced, tokens: int, chunks: int, like: Sized | None = None) -> Sized:
    joint = copy_step(traced.joint)
    whole = chunks == 1 or not chunk_loss(joint, chunks)
    if question.accumulate > 1:
        joint = _repeated(joint, traced, question)
    step = traced.step if whole and not like and question.accumulate == 1 else build(joint, like=like.joint if like else None)
    numerics = f"{question.precision.contract()}; {BIT_EQUAL}"
    if not whole:
        numerics += f"; the loss head's sums over tokens in {chunks} chunks"
    if question.accumulate > 1:
        numerics += f"; {question.accumulate} micro-batches, their gradients added up in their order"
    store = cache.searched_plans(step, question.budgets, "by shapes", question.machine, numerics)
    candidates = Candidates(step, question.machine, question.budgets, numerics=numerics, tell=question.tell, store=store)
    return Sized(candidates, traced, joint, step, tokens, MOST_CHUNKS if whole and chunks > 1 else chunks)


def _repeated(joint: fx.GraphModule, traced: Traced, question: Question) -> fx.GraphModule:
    """Of as many micro-batches as asked for. Raises ValueError for what has no meaning over several."""
    rows = list(zip(joint.meta["inputs"], placeholders(joint.graph), strict=True))
    taken = [(spec, node.meta["val"]) for spec, node in rows if spec.role not in ("tangent", "constant")]
    fronts = [val.shape[0] for spec, val in taken if spec.role == "input" and val.dim()]
    batch = max(fronts, default=1)
    split = tuple(spec.index for spec, val in taken if spec.role == "input" and val.dim() and val.shape[0] == batch)
    micro = Micro(question.accumulate, split, 1 + max(spec.index for spec, _ in taken), question.precision.split)
    try:
        return repeat(joint, micro, weights_of(traced.joint, micro))
    except NotImplementedError as error:
        raise ValueError(f"accumulate={question.accumulate}: the model has {error}") from None


def _traced(question: Question, batch: int, seq: int) -> tuple[Traced, Mapping[str, Any]]:
    model, data = question.model, question.data
    with without_memory():
        if isinstance(model, str):
            tokens = torch.zeros((batch, seq), dtype=torch.int64)
            return _traced_shape(model, question.precision, tokens)
        made = model if isinstance(model, nn.Module) else model(batch, seq) if takes_sizes(model) else model()
        module, data = made if isinstance(made, tuple) else (made, data)
        if data is None:
            raise ValueError("expected data=, the module's keyword arguments, for a model that is not a built-in shape")
        return _trace(module, data, question.precision), data


def _trace(module: nn.Module, data: Mapping[str, Any], precision: Precision) -> Traced:
    if precision.weights is not None:
        _cast(module, precision.weights)
    torch.compiler.reset()
    return trace(module.train(), dict(data))


def _traced_shape(name: str, precision: Precision, tokens: torch.Tensor) -> tuple[Traced, Mapping[str, Any]]:
    """A built-in shape's step, which is remembered between runs: its sources are ours."""
    data = {"tokens": tokens, "targets": tokens}
    key = repr((SHAPES[name], precision, tuple(tokens.shape), trace_settings(tokens.device)))
    joint = cache.read_joint(key)
    if joint is not None:
        return Traced(joint, build(joint), ()), data
    traced = _trace(fake(SHAPES[name]), data, precision)
    cache.write_joint(key, traced.joint)
    return traced, data


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """As ``module.to(dtype)``, which fails on tensors without memory; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.is_floating_point():
                cast = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                setattr(part, name, made.setdefault(id(parameter), cast))
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(dtype))


def takes_sizes(model: Any) -> bool:
    """Whether it is a function of (batch, seq)."""
    if isinstance(model, nn.Module) or not callable(model):
        return False
    taken = inspect.signature(model).parameters.values()
    return sum(p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in taken) == 2


def _chunks(traced: Traced, device: int | None) -> int:
    """Of the loss head: one, unless its logits would take a large part of the device; then so many that one does not."""
    nbytes = head_nbytes(traced)
    if device is None or nbytes < device * _LARGE_HEAD:
        return 1
    return int(min(MOST_CHUNKS, 2 ** ceil(log2(nbytes / max(1.0, device * _LARGE_HEAD)))))


def head_nbytes(traced: Traced) -> int:
    """Of the largest logits; 0 where there are none."""
    wide = [n for n in traced.joint.graph.nodes if n.target is torch.ops.aten._log_softmax.default]
    return max((storage_nbytes(node.meta["val"]) for node in wide), default=0)


def tokens_of(data: Mapping[str, Any]) -> int:
    """Integers of the largest integer input, which is what a language model calls tokens; else samples."""
    tensors = [v for v in data.values() if isinstance(v, torch.Tensor)]
    whole = [t.numel() for t in tensors if not t.is_floating_point()]
    return max(whole, default=tensors[0].shape[0] if tensors and tensors[0].dim() else 1)
