"""Puts the loss head, a linear layer and its cross-entropy, in chunks of tokens, to avoid whole-batch logits.

Each chunk's logits are made, reduced to a sum of losses and dropped; the backward makes them again, chunk by chunk. If the
model returns its logits, as Transformers models do, the forward makes them whole, and each chunk reads its rows of them. All of
it is plain ATen in the joint graph, so everything after plans, proves and runs it like any other operations.

The row-wise operations see the same rows; what differs from the whole is the order of summation over chunks, in the
loss, the weight's and the bias's gradient (and what a matrix product of fewer rows rounds otherwise).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mtcompile.passes.analysis.kernels import drop_dead
from mtcompile.passes.analysis.memory import owner
from mtcompile.passes.joint.loss_weights import MEAN, SUM
from mtcompile.passes.joint.shapes import result_of
from mtcompile.passes.step_graph import is_view, storage_nbytes

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True, slots=True)
class _Backward:
    """The logits' gradient g, and the products that are all that reads it."""

    loss: fx.Node  # nll_loss_backward
    softmax: fx.Node
    casts: tuple[fx.Node, ...]
    for_x: tuple[fx.Node, ...]  # mm(g, w')
    for_weight: tuple[fx.Node, ...]  # mm(g.t(), x)
    for_bias: tuple[fx.Node, ...]  # g.sum(0)


@dataclass(frozen=True, slots=True)
class _Head:
    """A recognised head: x (tokens, width), logits = product(x) then casts, and their loss."""

    product: fx.Node  # mm(x, w) or addmm(bias, x, w)
    casts: tuple[fx.Node, ...]
    returned: fx.Node | None  # product(x) after some of the casts, if the model returns it
    casts_after_returned: tuple[fx.Node, ...]
    softmax: fx.Node
    loss: fx.Node  # nll_loss_forward
    backward: _Backward | None

    @property
    def x(self) -> fx.Node:
        return self.product.args[-2]


def chunk_loss(joint: fx.GraphModule, chunks: int) -> int:
    """Rewrites, in place, every loss head of a normalized joint graph whose logits nothing else reads, though the model may
    return them. Returns how many there were."""
    heads = [head for head in _heads(joint.graph) if _is_wide(head)] if chunks > 1 else []
    for head in heads:
        _rewrite(joint.graph, head, chunks)
    if heads:
        drop_dead(joint.graph)
        joint.graph.lint()
        joint.recompile()
    return len(heads)


def head_nbytes(joint: fx.GraphModule) -> int:
    """Returns the most bytes that a whole loss head holds at once; 0 if there is none. A backward holds three tensors of the
    size of the logits: log-probabilities, their gradient and that of the logits. Only chunks make these smaller."""
    logits, trains = largest_logits(joint), any(n.target is aten._log_softmax_backward_data.default for n in joint.graph.nodes)
    return 0 if logits is None else storage_nbytes(logits) * (3 if trains else 1)


def recomputed_products(joint: fx.GraphModule) -> list[fx.Node]:
    """Returns the products of a normalized joint graph that its backward makes again where loss heads are in chunks."""
    return [head.product for head in _heads(joint.graph) if head.backward is not None and _is_wide(head)]


def largest_logits(joint: fx.GraphModule) -> torch.Tensor | None:
    """Returns the largest logits, rows of classes; None if there are none."""
    logits = [_val(node) for node in joint.graph.nodes if node.target is aten._log_softmax.default]
    return max(logits, key=storage_nbytes, default=None)


def narrow_logits(joint: fx.GraphModule) -> torch.Tensor | None:
    """Returns the largest logits of a normalized joint graph that stay whole only for their type; None if there are none. Sums
    of the chunks' losses would be rounded to the logits' precision."""
    logits = [_val(head.softmax) for head in _heads(joint.graph) if not _is_wide(head)]
    return max((each for each in logits if each.shape[0] > 1), key=storage_nbytes, default=None)


def returned_logits(joint: fx.GraphModule) -> torch.Tensor | None:
    """Returns the largest logits that a normalized joint graph returns along with the loss and that could otherwise be in
    chunks; None if there are none."""
    logits = [_val(head.returned) for head in _heads(joint.graph) if head.returned is not None and _is_wide(head)]
    return max(logits, key=storage_nbytes, default=None)


def _heads(graph: fx.Graph) -> list[_Head]:
    recognised = [_recognise(node) for node in graph.nodes]
    return [head for head in recognised if head is not None and _backward_point(graph, head.backward) is not None]


def _is_wide(head: _Head) -> bool:
    return _val(head.softmax).dtype in (torch.float32, torch.float64)


def _recognise(softmax: fx.Node) -> _Head | None:
    if softmax.target is not aten._log_softmax.default or softmax.args[1] not in (1, -1) or softmax.args[2]:
        return None
    shape = _val(softmax).shape
    if len(shape) != 2:
        return None
    product, _, returned, _ = from_x = _up(softmax.args[0])
    if product.target not in (aten.mm.default, aten.addmm.default) or product.kwargs or len(_readers(product)) != 1:
        return None
    if returned is not None and not _val(returned).is_contiguous():
        return None
    users = {user.target: user for user in softmax.users}
    loss = users.pop(aten.nll_loss_forward.default, None)
    if loss is None or loss.args[2] is not None or loss.args[3] != MEAN or _val(product).shape != shape:
        return None
    if len(softmax.users) == 1:
        return _Head(*from_x, softmax, loss, None)
    loss_back = users.pop(aten.nll_loss_backward.default, None)
    softmax_back = users.pop(aten._log_softmax_backward_data.default, None)
    if len(softmax.users) != 3 or loss_back is None or softmax_back is None:
        return None
    gradient, casts_back = _down(softmax_back)
    if loss_back.args[3:5] != (None, MEAN) or list(loss_back.users) != [softmax_back] or _val(gradient).shape != shape:
        return None
    parts = _products(gradient, product.args[-2])
    return parts and _Head(*from_x, softmax, loss, _Backward(loss_back, softmax_back, casts_back, *parts))


def _up(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...], fx.Node | None, tuple[fx.Node, ...]]:
    """Follows reshapes and casts with one reader back to the value they come from: that value, the casts, the last value that
    the model returns, and the casts after that."""
    returned, casts, remaining = None, list[fx.Node](), list[fx.Node]()
    while True:
        if returned is None and len(node.users) > len(_readers(node)):
            returned, remaining = node, list(casts)
        if node.op != "call_function" or len(_readers(node)) != 1 or not (node.target in _RESHAPES or _is_cast(node)):
            return node, tuple(reversed(casts)), returned, tuple(reversed(remaining))
        casts += [node] if _is_cast(node) else []
        node = node.args[0]


def _readers(node: fx.Node) -> list[fx.Node]:
    """The users of a value, except the graph's output."""
    return [user for user in node.users if user.op != "output"]


def _down(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Follows reshapes and casts to the value that the gradients' products read; that value and the casts."""
    casts: list[fx.Node] = []
    while len(node.users) == 1 and ((user := next(iter(node.users))).target in _RESHAPES or _is_cast(user)):
        node = user
        casts += [node] if _is_cast(node) else []
    return node, tuple(casts)


def _is_cast(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype", "layout", "device"}


def _products(gradient: fx.Node, x: fx.Node) -> tuple[tuple[fx.Node, ...], ...] | None:
    """The products (for x, for the weight, for the bias) if they are all that reads the logits' gradient; else None."""
    for_x: list[fx.Node] = []
    for_weight: list[fx.Node] = []
    for_bias: list[fx.Node] = []
    for user in gradient.users:
        if user.target is aten.mm.default and user.args[0] is gradient and user.args[1] is not gradient:
            for_x.append(user)
        elif user.target is aten.sum.dim_IntList and list(user.args[1]) == [0] and user.args[2:] == (True,):
            for_bias.append(user)
        elif user.target is aten.t.default and all(
            u.target is aten.mm.default and u.args[0] is user and u.args[1] is x for u in user.users
        ):
            for_weight += user.users
        else:
            return None
    return tuple(for_x), tuple(for_weight), tuple(for_bias)


def _rewrite(graph: fx.Graph, head: _Head, chunks: int) -> None:
    first = _backward_point(graph, head.backward)
    rows = _val(head.softmax).shape[0]
    size = -(-rows // min(chunks, rows))
    bounds = [(start, min(start + size, rows)) for start in range(0, rows, size)]
    target, ignored = head.loss.args[1], head.loss.args[4]

    with graph.inserting_before(head.loss):
        add = adder(graph, head.product)
        sums, weights = [], []
        for start, end in bounds:
            logarithms = _logarithms(add, head, head.returned, start, end)
            labels = _rows(add, target, start, end)
            loss = add(aten.nll_loss_forward.default, logarithms, labels, None, SUM, ignored, val=_val(head.loss))
            sums.append(add(operator.getitem, loss, 0))
            weights.append(add(operator.getitem, loss, 1))
        weight = total(add, weights)
        loss = add(aten.div.Tensor, total(add, sums), weight, val=_val(head.loss)[0])
    for user in list(head.loss.users):
        if user.args[1] == 0:
            loss.meta.update(_marks(user))
        user.replace_all_uses_with(loss if user.args[1] == 0 else weight)

    back = head.backward
    if back is None:
        return
    with graph.inserting_before(first):
        add = adder(graph, back.softmax)
        pieces: dict[fx.Node, list[fx.Node]] = {end: [] for end in (*back.for_x, *back.for_weight, *back.for_bias)}
        for start, end in bounds:
            logarithms = _logarithms(add, head, None, start, end)
            tangent, counted = back.loss.args[0], back.loss.args[6]
            labels = _rows(add, target, start, end)
            rows, operands = end - start, (tangent, logarithms, labels, None, MEAN, ignored, counted)
            gradient = add(aten.nll_loss_backward.default, *operands, val=_alike(back.loss, rows))
            gradient.meta.update(_marks(back.loss))
            operands = (gradient, logarithms, *back.softmax.args[2:])
            gradient = add(aten._log_softmax_backward_data.default, *operands, val=_alike(back.softmax, rows))
            for cast in back.casts:
                gradient = add(cast.target, gradient, val=_alike(cast, rows), **cast.kwargs)
            for node in back.for_x:
                operands = (gradient, viewed(add, node.args[1]))
                pieces[node].append(add(aten.mm.default, *operands, val=_alike(node, rows)))
            for node in back.for_weight:
                turned = add(aten.t.default, gradient)
                operands = (*pieces[node], turned, _rows(add, head.x, start, end))
                product = aten.addmm.default if pieces[node] else aten.mm.default
                pieces[node] = [add(product, *operands, val=_alike(node))]
            for node in back.for_bias:
                pieces[node].append(add(node.target, gradient, *node.args[1:], val=_alike(node), **node.kwargs))
        for node, parts in pieces.items():
            whole = add(aten.cat.default, parts, val=_alike(node)) if node in back.for_x else total(add, parts)
            node.replace_all_uses_with(whole)


def _backward_point(graph: fx.Graph, back: _Backward | None) -> fx.Node | None:
    """The node before which the gradients can be made: after all they read and before all that reads them; None where there is
    none."""
    if back is None:
        return graph.output_node()
    order = {node: position for position, node in enumerate(graph.nodes)}
    ends = (*back.for_x, *back.for_weight, *back.for_bias)
    first = min((user for end in ends for user in end.users), key=order.__getitem__, default=graph.output_node())
    weights = [owner(node.args[1]) for node in back.for_x]  # views of them are made again where they are needed
    operands = [back.softmax, *weights, *(node.args[1] for node in back.for_weight)]
    return first if all(order[node] < order[first] for node in operands) else None


Add = Callable[..., fx.Node]


def adder(graph: fx.Graph, like: fx.Node) -> Add:
    """A function that appends an operation, whose result is ``val`` or, without one, known by running it on tensors without
    content (fake ones of a trace, or those of a graph read from text); phase and place are those of ``like``."""
    fake_mode: Any = getattr(_val(like), "fake_mode", None)
    mode, on_meta = fake_mode or nullcontext(), fake_mode is None

    def add(target: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        if val is None:
            vals: Any = fx.node.map_arg(args, _val)
            known = {k: v for k, v in kwargs.items() if k != "device"}
            with mode, torch.no_grad():
                val = result_of(target, vals, known) if on_meta else target(*vals, **known)
        node.meta.update({k: v for k, v in like.meta.items() if k in ("phase", "seq_nr", "module_path")}, val=val)
        return node

    return add


def _logarithms(add: Add, head: _Head, whole: fx.Node | None, start: int, end: int) -> fx.Node:
    """The chunk's log-softmax, from its rows of the ``whole`` logits, or of x if these are None."""
    if whole is None:
        operands = (*head.product.args[:-2], _rows(add, head.x, start, end), head.product.args[-1])
        logits = add(head.product.target, *operands, val=_alike(head.product, end - start))
    else:
        logits = _rows(add, add(aten.view.default, whole, list(_val(head.softmax).shape)), start, end)
    for cast in head.casts if whole is None else head.casts_after_returned:
        logits = add(cast.target, logits, val=_alike(cast, end - start), **cast.kwargs)
    return add(head.softmax.target, logits, *head.softmax.args[1:], val=_alike(head.softmax, end - start))


def _rows(add: Add, node: fx.Node, start: int, end: int) -> fx.Node:
    return add(aten.slice.Tensor, node, 0, start, end)


def _marks(node: fx.Node) -> dict[str, Any]:
    """The marks that say how micro-batches' parts of a loss are put together (see ``batch.once``)."""
    return {mark: node.meta[mark] for mark in ("reduces", "weighs") if mark in node.meta}


def _alike(node: fx.Node, rows: int | None = None) -> torch.Tensor | None:
    """The value of ``node``, of so many rows of a matrix; None if it is not in row-major order. Shape functions need not be
    called for it: many are written in Python, and they load Dynamo."""
    val = _val(node)
    return val.new_empty(val.shape if rows is None else (rows, val.shape[-1])) if val.is_contiguous() else None


def viewed(add: Add, node: fx.Node) -> fx.Node:
    """Makes the same view here; a value that is no view is left as it is."""
    return add(node.target, viewed(add, node.args[0]), *node.args[1:], **node.kwargs) if is_view(node) else node


def total(add: Add, parts: list[fx.Node]) -> fx.Node:
    """The sum of the parts, added in their order one after the other."""
    return functools.reduce(lambda one, other: add(aten.add.Tensor, one, other, val=_alike(one)), parts)


def _val(node: Any) -> torch.Tensor:
    return node.meta["val"]
