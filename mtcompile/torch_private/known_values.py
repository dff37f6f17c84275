"""Python values that a forward takes from tensors, where these come from the inputs of the call alone: ``mask.any().item()``.

Dynamo cannot branch on what a tensor holds. But what is computed from the call's inputs and the model's buffers, and from no
parameter, is known when the call begins. A capture takes such a value as it is then, and notes where it came from; each later
call computes it again before anything runs. Where it is another one, ``OtherValues`` is raised, and the caller captures again.

Where a batch runs as micro-batches, each takes the branches of the whole batch: its truth values, whatever its own are.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mtcompile.errors import MtcompileError
from mtcompile.passes.generators import rng_preserved
from mtcompile.torch_private.autograd import storage_id
from mtcompile.torch_private.dynamo import replace_method
from mtcompile.torch_private.lazy_modules import Drawing
from mtcompile.torch_private.thread_setting import ThreadSetting

_MARK = "mtcompile expects "  # begins the message of a check that stands for a noted value until the capture is done
_MOST_NBYTES = 1 << 24  # of all tensors that a value is computed by: they are beside the budget
_CHANGING = ("batch_norm", "instance_norm")  # functions that change buffers, which their schemas do not say
_IN_PLACE = ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "iand", "ior", "ixor", "ipow")
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class OtherValues(MtcompileError):
    """Raised before anything runs when values that a capture took from its inputs are others in this call."""


class Shaped(Protocol):
    """An operation of known shape in place of one whose shape its ``masks`` decide. ``function`` takes the values that
    ``counting`` has for the masks, each expanded to a shape if there is one, and then what the operation takes."""

    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def masks(self) -> Sequence[tuple[fx.Node, tuple[int, ...] | None]]: ...
    @property
    def counting(self) -> Callable[..., Any]: ...


@dataclass(frozen=True, slots=True)
class _Taking:
    types: tuple[type, ...] = ()
    shaped: Callable[[fx.Node], Shaped | None] = lambda node: None
    captures: bool = False


_taking = ThreadSetting(_Taking())
_noted: ThreadSetting[list[bool | int] | None] = ThreadSetting(None)
_followed: ThreadSetting[Sequence[bool | int] | None] = ThreadSetting(None)


@contextlib.contextmanager
def taking_known_values(types: tuple[type, ...], shaped: Callable[[fx.Node], Shaped | None]) -> Iterator[None]:
    """Captures inside, in this thread, take values of these types (bool, int) that the call's inputs decide. Where ints are
    taken, ``shaped`` may replace operations by others of known shape."""
    _replace_methods()
    with _taking.during(_Taking(types, shaped, True)):
        yield


@contextlib.contextmanager
def noting_values() -> Iterator[list[bool | int]]:
    """Yields a list, to which what runs inside adds the values that its captures took, once it has compared them."""
    noted: list[bool | int] = []
    with _noted.during(noted):
        yield noted


@contextlib.contextmanager
def following(values: Sequence[bool | int]) -> Iterator[None]:
    """Captures and calls inside are of a micro-batch: they take the truth values that its whole batch has noted."""
    with _followed.during(values):
        yield


def _as_followed(own: bool | int, place: int) -> bool | int:
    """Returns the value at a place in the order of captures: the whole batch's, where it is a truth value there, too."""
    followed = _followed.value or ()
    return followed[place] if place < len(followed) and type(own) is type(followed[place]) is bool else own


def known_value(tx: Any, variable: Any) -> bool | int | None:
    """The value of a tensor of one element that is being captured, where the call's inputs decide it; else None."""
    if not _taking.value.types or tx.output.current_tracer is not tx.output.root_tracer:
        return None
    node = variable.proxy.node
    cone = _cone(node)
    if not _is_decided(node, cone):
        return None
    value: bool | int
    drawing = Drawing()
    try:
        with drawing:
            value = _value_now(node, cone)
    except Exception:  # an operation that cannot run on these devices, changes that cannot be followed, ...
        return None
    if drawing.drew:
        return None
    if _asks_inputs(cone):
        value = _as_followed(value, len(_marks(node.graph)))
    mark = tx.output.create_proxy("call_function", torch._assert_async, (variable.proxy, f"{_MARK}{value!r}"), {})
    mark.node.meta["cone"] = cone
    return value


def _give_shape(tx: Any, node: fx.Node) -> None:
    """Replaces an operation whose shape a mask decides by one of known shape, where the call's inputs decide the mask."""
    from torch._dynamo.variables.builder import wrap_fx_proxy

    def variable(target: Any, mask: fx.Node, *args: Any) -> Any:
        kind = "call_method" if isinstance(target, str) else "call_function"
        return wrap_fx_proxy(tx, tx.output.create_proxy(kind, target, (fx.Proxy(mask, tx.output.current_tracer), *args), {}))

    if node.op not in ("call_function", "call_method") or (shaped := _taking.value.shaped(node)) is None:
        return
    counts = []
    for mask, shape in shaped.masks:
        mask = mask if shape is None else variable("expand", mask, *shape).proxy.node
        if (count := known_value(tx, variable(shaped.counting, mask))) is None:
            return
        counts.append(count)
    node.op, node.target, node.args = "call_function", shaped.function, (counts, *node.args)


def is_mask(index: Any) -> TypeGuard[torch.Tensor]:
    """Tells whether an index chooses the elements where it is true."""
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.dim() > 0


def _fills(value: torch.Tensor, target: torch.Tensor) -> bool:
    """Tells whether torch fills the places of a mask with one value, for which it needs no shape, and casts it."""
    return getattr(value, "constant", None) is not None or (value.numel() == 1 and value.dtype != target.dtype)


def _unmasked(tx: Any, key: Any, shape: Sequence[int]) -> Any:
    """The index ``key`` with each mask replaced by the places that it selects; ``key`` itself, if the call's inputs do not
    decide all masks."""
    from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable

    indices = []
    for index in key.items if isinstance(key, TupleVariable) else [key]:
        value = index.proxy.node.meta.get("example_value") if isinstance(index, TensorVariable) else None
        if not is_mask(value):
            indices.append(index)
        elif index is key and value.shape != tuple(shape)[: value.dim()]:  # torch has a message for it
            return key
        elif known_value(tx, index.call_method(tx, "count_nonzero", [], {})) is None:
            return key
        else:
            places = index.call_method(tx, "nonzero", [], {"as_tuple": ConstantVariable.create(True)})
            indices += places.unpack_var_sequence(tx)
    return TupleVariable(indices)


def _cone(result: fx.Node) -> list[fx.Node]:
    """The nodes that ``result`` is computed by, with what has changed any of them in place, in their order."""
    nodes, needed, todo = list(result.graph.nodes), set[fx.Node](), [result]
    while todo:
        if (node := todo.pop()) in needed:
            continue
        needed.add(node)
        todo += node.all_input_nodes
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value._version:
            todo += [each for each in nodes if _changes(each, value)]
    return [node for node in nodes if node in needed]


def _changes(node: fx.Node, value: torch.Tensor) -> bool:
    """Tells whether a node changes its first operand, which shares the memory of ``value``."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op not in ("call_function", "call_method") or not (name in _IN_PLACE or name.endswith("_")):
        return False
    first = node.args[0].meta.get("example_value") if node.args and isinstance(node.args[0], fx.Node) else None
    return isinstance(first, torch.Tensor) and storage_id(first) == storage_id(value)


def _asks_inputs(cone: Sequence[fx.Node]) -> bool:
    return any(node.op == "placeholder" for node in cone)


def _marks(graph: fx.Graph) -> list[fx.Node]:
    """The marks of a graph whose values its inputs decide; the values of others are constants."""
    checks = graph.find_nodes(op="call_function", target=torch._assert_async)
    return [n for n in checks if str(n.args[1]).startswith(_MARK) and _asks_inputs(n.meta["cone"])]


def _is_decided(node: fx.Node, cone: Sequence[fx.Node]) -> bool:
    """Tells whether a node stands for one number that the call's inputs decide, as they are when it begins."""
    val = node.meta.get("example_value")
    if not isinstance(val, torch.Tensor) or val.numel() != 1 or val.dtype not in _INTEGERS:
        return False
    if (bool if val.dtype is torch.bool else int) not in _taking.value.types:
        return False
    if any(each.target is torch.amp.autocast_mode._enter_autocast for each in node.graph.nodes):
        return False
    values = [each.meta.get("example_value") for each in cone]
    nbytes = sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
    return nbytes <= _MOST_NBYTES and all(map(_is_known, cone, values))


def _is_known(node: fx.Node, value: Any) -> bool:
    if node.op == "placeholder":
        example = getattr(node.meta.get("grapharg"), "example", None)
        if not isinstance(example, torch.Tensor) or isinstance(example, torch.nn.Parameter) or example.requires_grad:
            return False
        return not any(getattr(user.target, "__name__", "") in _CHANGING for user in node.users)
    return node.op in ("call_function", "call_method")


def _value_now(result: fx.Node, cone: Sequence[fx.Node]) -> Any:
    """Computes ``result`` from the inputs of the call that is being captured. Raises ValueError where what has changed a value
    in place was not all found: then versions are others than in the capture."""
    values: dict[fx.Node, Any] = {}
    with torch.no_grad(), rng_preserved("cpu"):
        for node in cone:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "placeholder":
                values[node] = node.meta["grapharg"].example.data  # counts changes from here on, as the capture does
                if node.meta["example_value"]._version:  # the forward changes it, and nobody may see that here
                    values[node] = values[node].clone()
            elif node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        for node, value in values.items():
            traced = node.meta.get("example_value")
            if not isinstance(traced, torch.Tensor) or (node.op == "placeholder" and not traced._version):
                continue
            if traced._version != value._version:
                raise ValueError(node)
        return values[result].item()


def _extracted(graph: fx.Graph, marks: Sequence[fx.Node]) -> fx.GraphModule:
    """A graph that returns the number that each mark stands for."""
    cone = {node for mark in marks for node in mark.meta["cone"]}
    extracted, copies, numbers = fx.Graph(), dict[fx.Node, fx.Node](), []
    for node in graph.nodes:
        if node in cone:
            copies[node] = extracted.node_copy(node, copies.__getitem__)
            if node.op == "placeholder" and node.meta["example_value"]._version:
                copies[node] = extracted.call_method("clone", (copies[node],))
        elif node in marks:
            numbers.append(extracted.call_method("item", (copies[node.args[0]],)))
    extracted.output(tuple(numbers))
    return fx.GraphModule(torch.nn.Module(), extracted)


@dataclass(frozen=True, slots=True)
class _Expectations:
    """The values that a capture took. ``positions``: which inputs of its graph ``module`` computes them from."""

    module: fx.GraphModule
    positions: tuple[int, ...]
    values: tuple[Any, ...]

    def check(self, inputs: Sequence[Any]) -> None:
        with torch.no_grad(), rng_preserved("cpu"):
            own = self.module(*(inputs[position] for position in self.positions))
        if tuple(map(_as_followed, own, range(len(own)))) != self.values:
            raise OtherValues("a value that forward takes from its inputs differs from the captured one")
        if _noted.value is not None:
            _noted.value.extend(self.values)


def expecting_values(graph: fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Takes the notes out of a captured graph. Returns a decorator for what runs it, which first compares the values."""
    nodes = graph.graph
    marks = _marks(nodes)
    for node in nodes.find_nodes(op="call_function", target=torch._assert_async):
        if str(node.args[1]).startswith(_MARK) and node not in marks:
            nodes.erase_node(node)
    if not marks:
        return lambda program: program
    cone = {node for mark in marks for node in mark.meta["cone"]}
    positions = tuple(index for index, node in enumerate(nodes.find_nodes(op="placeholder")) if node in cone)
    values = tuple(ast.literal_eval(str(mark.args[1]).removeprefix(_MARK)) for mark in marks)
    expectations = _Expectations(_extracted(nodes, marks), positions, values)
    for mark in marks:
        nodes.erase_node(mark)

    def expecting(program: Callable[..., Any]) -> Callable[..., Any]:
        def compared(*inputs: Any) -> Any:
            expectations.check(inputs)
            return program(*inputs)

        return compared

    return expecting


@functools.cache
def _replace_methods() -> None:
    """Lets Dynamo ask here first for the values of tensors. Outside ``taking_known_values``, nothing is changed."""
    from torch._dynamo import utils
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables import ConstantVariable, SymNodeVariable, TensorVariable, builder, lists
    from torch._dynamo.variables.base import VariableTracker

    def item(plain: Callable[..., Any]) -> Callable[..., Any]:
        def known(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            value = known_value(tx, variable)
            return plain(variable, tx, *args, **kwargs) if value is None else ConstantVariable.create(value)

        return known

    def tolist(plain: Callable[..., Any]) -> Callable[..., Any]:
        def listed(tx: Any, part: Any) -> Any:
            example = part.proxy.node.meta["example_value"]
            if example.dim() == 0:
                return known_value(tx, part)
            indices = [VariableTracker.build(tx, index) for index in range(example.shape[0])]
            return [listed(tx, part.call_method(tx, "__getitem__", [index], {})) for index in indices]

        def known(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            values = listed(tx, variable) if _taking.value.types else None
            if None in pytree.tree_leaves(values, is_leaf=lambda value: value is None):
                return plain(variable, tx, *args, **kwargs)
            return VariableTracker.build(tx, values)

        return known

    def setitem(plain: Callable[..., Any]) -> Callable[..., Any]:
        def unmasked(variable: Any, tx: Any, key: Any, value: Any) -> Any:
            example = value.proxy.node.meta.get("example_value") if isinstance(value, TensorVariable) else None
            target = variable.proxy.node.meta["example_value"]
            if _taking.value.types and isinstance(example, torch.Tensor) and not _fills(example, target):
                with _taking.during(replace(_taking.value, types=(bool, int))):  # there is no other way
                    key = _unmasked(tx, key, target.shape)
            return plain(variable, tx, key, value)

        return unmasked

    def wrapping(plain: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(target: Any, tx: Any, proxy: Any, *args: Any, **kwargs: Any) -> Any:
            if int in _taking.value.types:
                _give_shape(tx, proxy.node)
            return plain(target, tx, proxy, *args, **kwargs)

        return wrapped

    def contains(plain: Callable[..., Any]) -> Callable[..., Any]:
        def known(items: Any, search: Any, *args: Any, **kwargs: Any) -> Any:
            """Refuses to say whether items have a value where some are not known: Dynamo says that these are others."""
            answer = plain(items := list(items), search, *args, **kwargs)
            if not _taking.value.captures or not search.is_python_constant() or answer.as_python_constant():
                return answer
            if any(isinstance(item, (SymNodeVariable, TensorVariable)) for item in items):
                raise Unsupported("a Python value depends on what tensors hold: whether a list has a value")
            return answer

        return known

    if (plain := getattr(lists, "iter_contains", None)) is not None:
        utils.iter_contains = lists.iter_contains = functools.wraps(plain)(contains(plain))
    builder._wrap_fx_proxy = functools.wraps(builder._wrap_fx_proxy)(wrapping(builder._wrap_fx_proxy))
    for name, replaced in (("method_item", item), ("method_tolist", tolist), ("method___setitem__", setitem)):
        replace_method(TensorVariable, name, replaced)
