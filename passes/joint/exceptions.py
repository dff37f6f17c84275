"""The contract of a joint graph in words: which attention it calls, and where it cannot have the bits of plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from mtcompile.passes.step_graph import inputs_of, outputs_of, restride
from mtcompile.runtime.schedule import Role, listed

aten = torch.ops.aten

BIT_EQUAL = "every value and gradient bit-equal to plain PyTorch (eager kernels)"
DIFFERENTIATED = (  # in place of that
    "every value equal to plain PyTorch's (eager kernels), and every gradient of a forward without create_graph=True; with it, "
    "gradients are added up in another order, and their last bits may differ"
)
_FUSED = "kernels by Inductor: within rounding of plain PyTorch, and the same bits whatever moves (for the same variants)"

# Plain backward formulas of these look at the values, where a trace takes the formula that is right for any.
_DEPENDS_ON_VALUES = (aten.prod.default, aten.prod.dim_int, aten.cumprod.default)
_listed = functools.partial(listed, most=12)


@dataclass(frozen=True, slots=True)
class Contract:
    """The contract for the values of a step, in ``sentences``; ``differing``: the exceptions to that of equal bits."""

    sentences: tuple[str, ...] = (BIT_EQUAL,)
    differing: tuple[str, ...] = ()

    def __str__(self) -> str:
        excepted = f", except ({') and ('.join(self.differing)})" if self.differing else ""
        return "; ".join(sentence + excepted * (sentence == BIT_EQUAL) for sentence in self.sentences)

    def between(self, before: str = "", after: str = "") -> Contract:
        """The same with a sentence before it, and one after it, where they are given."""
        return replace(self, sentences=tuple(filter(None, (before, *self.sentences, after))))


def contract(joint: fx.GraphModule, fuses: bool, changed: list[str]) -> Contract:
    """Returns what holds for the values of a normalized joint graph. ``fuses``: its kernels fuse operations; ``changed``: what
    cutting it changes."""
    attention = [f"attention by {kernels}"] if (kernels := _attention_kernels(joint)) else []
    if fuses:
        return Contract((*attention, _FUSED, *changed))
    return Contract((*attention, BIT_EQUAL), (*exceptions(joint), *changed))


def of_all(parts: Sequence[Contract]) -> Contract:
    """Returns the contract for a forward in several parts: each sentence and exception of each part once."""
    return Contract(_once(part.sentences for part in parts), _once(part.differing for part in parts))


def _once(sentences: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sentence for each in sentences for sentence in each))


def exceptions(joint: fx.GraphModule) -> list[str]:
    """Returns a sentence for each reason why values or gradients of a normalized joint graph may differ from plain PyTorch in
    their last bits, with the modules, operations or parameters that it holds for."""
    sentences = []
    if told := joint.meta.get("told", ()):
        sentences.append(
            f"{_listed(told)}: told that the model is compiled, for the branch of a plain run could not be captured"
        )
    if operations := list(dict.fromkeys(_by_values(joint))):
        sentences.append(f"the gradient of {_listed(operations)}: its plain formula depends on the values")
    if unordered := joint.meta.get("unordered", ()):
        sentences.append(f"the gradient of {_listed(unordered)}: those of the views of it that are returned are added up first")
    is_part = joint.meta.get("is_part", False)
    elsewhere = "with another use in forward or in the loss" if is_part else "with a loss term on it outside the model"
    if shared := [f"{name} ({len(uses)} uses)" for name, uses in _uses(joint, "param")]:
        sentences.append(f"{elsewhere}, the gradient of {_listed(shared)}: its uses are added up first")
    elsewhere = "if used elsewhere in forward too" if is_part else "if used outside the model too"
    also = " and of what it was computed from" if is_part else ""
    if shared := [f"{name} ({len(uses)} uses)" for name, uses in _uses(joint, "input")]:
        sentences.append(f"{elsewhere}, the gradient of {_listed(shared)}{also}: its uses in it are added up first")
    if cast := [f"{name} (to {dtype})" for name, dtype in _cast_at_each_use(joint)]:
        sentences.append(f"if autocast casts it, the gradient of {_listed(cast)}: plain PyTorch adds its uses up in that dtype")
    return sentences


_ATTENTION = {  # parts of the names of ATen's operations -> the backend, as torch.nn.attention.SDPBackend names it
    "_flash_attention": "flash",
    "_efficient_attention": "memory-efficient",
    "_cudnn_attention": "cuDNN",
    "_fused_attention_overrideable": "overrideable",
}


def _attention_kernels(joint: fx.GraphModule) -> str:
    """Names the backends that torch chose for ``scaled_dot_product_attention``; "" if no call takes one: that of plain products
    has no operation of its own."""
    calls = [str(n.target) for n in joint.graph.nodes if n.op == "call_function" and "_scaled_dot_product" in str(n.target)]
    chosen = [name for call in calls if "backward" not in call for part, name in _ATTENTION.items() if part in call]
    return ", ".join(dict.fromkeys(chosen))


def _by_values(joint: fx.GraphModule) -> Iterator[str]:
    """The operations, with their modules, whose backward is in the graph and takes another formula than a plain run's."""
    for node in joint.graph.nodes:
        if node.target in _DEPENDS_ON_VALUES and node.meta["phase"] == "forward" and _has_backward(node):
            operation = str(node.target).split(".")[1]
            yield f"{operation} in {node.meta['module_path']}" if node.meta.get("module_path") else operation


def _has_backward(node: fx.Node) -> bool:
    """Tells whether something of the backward reads an operation's result or operand."""
    return any(user.meta["phase"] == "backward" for value in (node, *node.all_input_nodes) for user in value.users)


def _cast_at_each_use(joint: fx.GraphModule) -> Iterator[tuple[str, str]]:
    """(parameter, dtype) of those that are cast to one lower precision more than once, as a trace under autocast does."""
    for name, uses in _uses(joint, "param"):
        casts = [str(use.kwargs.get("dtype")).removeprefix("torch.") for use in uses if use.target is aten._to_copy.default]
        for dtype in dict.fromkeys(casts):
            if casts.count(dtype) > 1 and dtype in ("bfloat16", "float16"):
                yield name, dtype


def _uses(joint: fx.GraphModule, role: Role) -> Iterator[tuple[str, list[fx.Node]]]:
    """(parameter or other input, what reads it in the forward) of those whose gradient is added up from several, in the order
    that a backward of this graph alone adds them."""
    inputs = {spec.index: node for spec, node in inputs_of(joint) if spec.role == role}
    for spec, value in outputs_of(joint):
        if spec.kind != "grad" or spec.index not in inputs:
            continue
        uses = [user for user in inputs[spec.index].users if user.meta["phase"] == "forward"]
        while value.target is restride:
            value = value.args[0]
        if len(uses) > 1 and value.target is aten.add.Tensor and value.meta["phase"] == "backward":
            yield spec.name, uses
