"""Modules of equal state are traced once. Uses Dynamo's private APIs, as ``torch_private`` does.

Dynamo walks through the Python code of every layer. Here the operations that a call of a module adds to the graph are copied
instead, with the parameters of another module, where Dynamo would find exactly that. Dynamo itself still walks through what
lies between the modules: their order and number, and what they are called with, are as it finds them.

A call is copied only if all that it could read is as it was in the call before it:

- the modules' state is equal (``equal_state``), except for ints that the traced call never looked at;
- arguments are tensors of the same description, constants, tuples of them, or the same object from outside of the forward;
- the forward has changed nothing that was there before it, torch's global state and the ``with`` statements around are the
  same, and both calls come from the same place in the code;
- the traced call only adds plain operations to the graph, and returns tensors; in place it changes only what it made itself
  and does not return.

The guards of the traced module are repeated for the other: whoever changes any module later gets a new capture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from mtcompile.torch_private.dynamo import replace_method
from mtcompile.torch_private.equal_state import Pairs, pairs_of
from mtcompile.torch_private.thread_setting import ThreadSetting

_SEEN = (2, 13)  # the minor version of torch whose Dynamo has been read for this; in others every module is traced
_MOST_CALLS = 4  # of one class from one place, which others are compared with
_FEWEST = 3  # operations of a call that is worth copying
_GUARDS = {
    *("TYPE_MATCH", "EQUALS_MATCH", "CONSTANT_MATCH", "BOOL_MATCH", "NONE_MATCH", "NOT_NONE_MATCH", "ID_MATCH", "CLASS_MATCH"),
    *("FUNCTION_MATCH", "CLOSURE_MATCH", "BUILTIN_MATCH", "HASATTR", "NOT_PRESENT_IN_GENERIC_DICT", "DICT_CONTAINS"),
    *("SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK", "EMPTY_NN_MODULE_HOOKS_DICT", "NN_MODULE", "MODULE_MATCH"),
    *("DUPLICATE_INPUT", "TYPE_MATCH_NO_HASH", "DICT_NOT_CONTAINS"),
}
_META = {"example_value", "nn_module_stack", "stack_trace", "source_fn_stack", "creation_timestamp"}
_WITHOUT_VALUE = (
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    operator.setitem,
)
_WRITES = ("copy_", "scatter_", "fill_", "zero_", "masked_fill_", "index_copy_", "add_", "mul_", "div_", "setitem")


@dataclass(slots=True)
class Copies:
    """Whether captures may copy calls of equal modules, how many they have copied, and how often they have asked whether two
    modules are the same."""

    allowed: bool = True
    made: int = 0
    compared: int = 0


_copying: ThreadSetting[Copies | None] = ThreadSetting(None)


class _NotEqual(Exception):
    """Raised where a call cannot be shown to be like another one."""


@contextlib.contextmanager
def copying_equal_modules(copies: Copies) -> Iterator[None]:
    """Captures inside, in this thread, trace calls of equal modules once, if ``copies`` allows it."""
    allowed = copies.allowed and tuple(map(int, torch.__version__.split(".")[:2])) == _SEEN
    if allowed:
        _replace_calls()
    with _copying.during(copies if allowed else None):
        yield


@dataclass(frozen=True, slots=True)
class _Around:
    """What surrounds a call. ``places``: the code that leads to it, and where in each. ``kept``: the objects of Dynamo's for
    the ``with`` statements and modes around it. ``state``: torch's global state. ``changes``: how often the forward has changed
    something from outside."""

    places: tuple[tuple[Any, int], ...]
    kept: tuple[Any, ...]
    state: Any
    changes: int

    @staticmethod
    def of(tx: Any) -> _Around:
        places, kept = [], [*tx.symbolic_torch_function_state.mode_stack, *_notes(tx.output).within]
        each = tx
        while each is not None:
            places.append((each.f_code, each.instruction_pointer))
            kept += [block.with_context for block in each.block_stack if block.with_context is not None]
            kept += each.active_generic_context_managers
            each = getattr(each, "parent", None)
        return _Around(tuple(places), tuple(kept), torch._C._dynamo.guards.GlobalStateGuard(), len(_notes(tx.output).changed))

    def is_like(self, other: _Around) -> bool:
        """Tells whether a call here, now, is surrounded like that other one was."""
        same = len(self.kept) == len(other.kept) and all(map(operator.is_, self.kept, other.kept))
        return same and self.places == other.places and self.changes == other.changes and other.state.check()


@dataclass(slots=True)
class _Call:
    """A traced call of a module. ``nodes``: what it added to the graph, without inputs."""

    variable: Any
    around: _Around
    args: Any
    result: Any
    nodes: tuple[fx.Node, ...]
    facts: _Facts | None = None
    fails: bool = False


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of a traced call that may be copied. ``inputs``: the graph's inputs that are tensors of the module.
    ``guards``: those of the module, without those of tensors, which Dynamo makes. ``looked``: the sources in the module that
    Dynamo made variables of. ``touched``: the names of these, and of what is guarded. ``returned``: the storages of the
    result."""

    inputs: tuple[fx.Node, ...]
    guards: tuple[Any, ...]
    looked: tuple[Any, ...]
    touched: frozenset[str]
    returned: frozenset[int]


@functools.cache
def _replace_calls() -> None:
    """Lets Dynamo ask here first. Outside ``copying_equal_modules``, nothing is changed."""
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import builtin, object_protocol
    from torch._dynamo.variables.ctx_manager import WithExitFunctionVariable
    from torch._dynamo.variables.nn_module import UnspecializedBuiltinNNModuleVariable, UnspecializedNNModuleVariable

    kinds = UnspecializedNNModuleVariable, UnspecializedBuiltinNNModuleVariable

    def calling(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if _copying.value is None or type(variable) not in kinds or not _may_copy(variable, tx):
                return plain(variable, tx, args, kwargs)
            return _copied_or_traced(plain, variable, tx, args, kwargs)

        return call_function

    def changing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def change(effects: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
            output = effects.output_graph_weakref()
            if output is not None and _is_from_outside(variable):
                _notes(output).changed.append(variable)
            return plain(effects, variable, *args, **kwargs)

        return change

    def entering(plain: Callable[..., Any]) -> Callable[..., Any]:
        def setup_or_before_with(tx: Any, inst: Any) -> Any:
            result = plain(tx, inst)
            _notes(tx.output).within.append(object())
            return result

        return setup_or_before_with

    def leaving(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call_function(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            del _notes(tx.output).within[-1:]
            return plain(variable, tx, *args, **kwargs)

        return call_function

    def identifying(plain: Callable[..., Any]) -> Callable[..., Any]:
        def identify(variable: Any, tx: Any) -> Any:
            _notes(tx.output).identified.append(None)
            return plain(variable, tx)

        return identify

    def comparing(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def vt_identity_compare(left: Any, right: Any) -> Any:
            if _copying.value is not None and all(isinstance(each, UnspecializedNNModuleVariable) for each in (left, right)):
                _copying.value.compared += 1
            return plain(left, right)

        return vt_identity_compare

    replace_method(UnspecializedNNModuleVariable, "call_function", calling)
    replace_method(InstructionTranslatorBase, "setup_or_before_with", entering)
    replace_method(WithExitFunctionVariable, "call_function", leaving)
    for name in ("get_id", "hash_impl"):
        replace_method(UnspecializedNNModuleVariable, name, identifying)
    for owner in (object_protocol, builtin):
        owner.vt_identity_compare = comparing(owner.vt_identity_compare)  # type: ignore[attr-defined]
    for name in ("store_attr", "mutation"):
        replace_method(SideEffects, name, changing)


def _is_from_outside(variable: Any) -> bool:
    """Tells whether Dynamo's variable stands for something that was there before the forward."""
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    return not isinstance(variable.mutation_type, (AttributeMutationNew, ValueMutationNew))


def _may_copy(variable: Any, tx: Any) -> bool:
    module, output = variable.value, tx.output
    if variable.source is None or output.export or output.current_tracer is not output.root_tracer:
        return False
    own = not type(module).__module__.startswith("torch.nn.modules")
    return own or bool(module._modules)


@dataclass(frozen=True, slots=True)
class _Notes:
    """What is noted of one capture. ``changed``: the variables of what was there before the forward, once for each time that
    the forward has changed them. ``within``: an object for each ``with`` statement that is entered. ``identified``: an entry
    for each time that the forward has asked for the id or hash of a module. ``calls``: what is traced."""

    changed: list[Any] = field(default_factory=list)
    within: list[object] = field(default_factory=list)
    identified: list[Any] = field(default_factory=list)
    calls: dict[Any, list[_Call]] = field(default_factory=dict)


def _notes(output: Any) -> _Notes:
    return output.__dict__.setdefault("mt_notes", _Notes())  # type: ignore[no-any-return]


def _copied_or_traced(plain: Callable[..., Any], variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    around, notes = _Around.of(tx), _notes(tx.output)
    calls = notes.calls.setdefault((type(variable.value), around.places), [])
    for call in reversed(calls):
        with contextlib.suppress(_NotEqual):
            copy = _Copy(call, variable, tx, (args, kwargs), around)
            if _copying.value is not None:
                _copying.value.made += 1
            return copy.made()
    graph = tx.output.graph
    before = graph._root.prev  # the last node
    copies, identified = _copying.value or Copies(), len(notes.identified)
    compared = copies.compared
    result = plain(variable, tx, args, kwargs)
    if (len(notes.identified), copies.compared) != (identified, compared):
        return result  # which of several modules it is may have decided
    if len(calls) < _MOST_CALLS and len(_notes(tx.output).changed) == around.changes and not before._erased:
        nodes, node = [], before.next if before is not graph._root else next(iter(graph.nodes), graph._root)
        while node is not graph._root:
            if node.op != "placeholder":
                nodes.append(node)
            node = node.next
        if len(nodes) >= _FEWEST:
            calls.append(_Call(variable, around, (args, kwargs), result, tuple(nodes)))
    return result


def _facts(call: _Call, tx: Any) -> _Facts:
    """Raises _NotEqual for a call that no copy can be made of."""
    if call.fails:
        raise _NotEqual
    if call.facts is None:
        call.fails = True
        call.facts = _found(call, tx.output)
        call.fails = False
    return call.facts


def _found(call: _Call, output: Any) -> _Facts:
    from torch._guards import Source

    module, own_name = call.variable.value, re.compile(re.escape(call.variable.source.name) + r"(?!\w)")

    def is_own(source: Any) -> bool:
        return own_name.search(_name(source)) is not None

    tensors = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    inputs = []
    for node in output.graph.find_nodes(op="placeholder"):
        if (argument := node.meta.get("grapharg")) is None or is_own(argument.source) != (id(argument.example) in tensors):
            raise _NotEqual  # a tensor of the module that was found on another way, or one that it does not register
        if is_own(argument.source):
            inputs.append(node)
            if str(id(module)) not in node.meta.get("nn_module_stack", ()) or "stack_trace" not in node.meta:
                raise _NotEqual  # an input that something outside of the module has taken before
    guards: dict[Any, Any] = {}
    looked = tuple(source for source in output.root_tracer.traced_sources if is_own(source))
    touched = set(map(_name, looked))
    for guard in output.guards:
        keywords = getattr(guard.create_fn, "keywords", {})
        sources = [guard.originating_source, *(value for value in keywords.values() if isinstance(value, Source))]
        if any(map(is_own, sources)):
            touched |= {_name(source) for source in sources}
            if (kind := guard.create_fn_name()) == "TENSOR_MATCH":
                continue
            if kind not in _GUARDS or getattr(guard.create_fn, "args", None):
                raise _NotEqual
            guards[guard.originating_source, kind, repr(keywords)] = guard
    returned = frozenset(_storage(node.meta["example_value"]) for node in _argument_nodes(call.result))
    _check_nodes(call, inputs, returned)
    _check_result(call.result, call)
    return _Facts(tuple(inputs), tuple(guards.values()), looked, frozenset(touched), returned)


def _check_nodes(call: _Call, inputs: list[fx.Node], returned: frozenset[int]) -> None:
    known = {*inputs, *_argument_nodes(call.args)}
    shared = returned.union(_storage(tensor) for node in known for tensor in _tensors_in(node.meta["example_value"]))
    for node in call.nodes:
        if node._erased or node.op not in ("call_function", "call_method") or not set(node.meta) <= _META:
            raise _NotEqual
        if isinstance(node.target, torch._ops.HigherOrderOperator) or (_changes_operand(node) and not _writes(node)):
            raise _NotEqual
        if not known.issuperset(node.all_input_nodes):
            raise _NotEqual
        known.add(node)
        if str(id(call.variable.value)) not in node.meta.get("nn_module_stack", ()) or not _META.issubset(
            {*node.meta, "example_value"}
        ):
            raise _NotEqual
        if node.meta.get("example_value") is None and node.target not in _WITHOUT_VALUE:
            raise _NotEqual
    for node in known:
        for tensor in _tensors_in(node.meta.get("example_value")):  # none that others see was changed, and none is a constant
            if tensor.layout is not torch.strided or getattr(tensor, "constant", None) is not None:
                raise _NotEqual
            if tensor._version and _storage(tensor) in shared:
                raise _NotEqual


def _check_result(result: Any, call: _Call) -> None:
    from torch._dynamo.variables import ConstantVariable, ListVariable, TensorVariable, TupleVariable

    if type(result) in (TupleVariable, ListVariable):
        for item in result.items:
            _check_result(item, call)
    elif type(result) is TensorVariable:
        argument = any(result is each for each in _arguments(call.args))
        if not argument and (result.proxy.node not in call.nodes or result.source is not None):
            raise _NotEqual
    elif type(result) is not ConstantVariable:
        raise _NotEqual


def _arguments(args: Any) -> Iterator[Any]:
    """Yields the tensors among arguments."""
    from torch._dynamo.variables import ListVariable, TensorVariable, TupleVariable

    if isinstance(args, (list, tuple, dict)):
        for each in args.values() if isinstance(args, dict) else args:
            yield from _arguments(each)
        return
    args = _realized(args)
    if type(args) in (TupleVariable, ListVariable):
        yield from _arguments(args.items)
    elif type(args) is TensorVariable:
        yield args


def _argument_nodes(args: Any) -> Iterator[fx.Node]:
    return (variable.proxy.node for variable in _arguments(args))


class _Copy:
    """A copy of a traced call for another module. All checks come before anything changes."""

    def __init__(self, call: _Call, variable: Any, tx: Any, args: Any, around: _Around) -> None:
        self.call, self.variable, self.tx = call, variable, tx
        self.nodes: dict[fx.Node, fx.Node] = {}  # of the traced call, or what it reads -> in the copy
        self.variables: dict[int, Any] = {}  # by the ids of the traced call's arguments
        self.storages: dict[int, torch.Tensor] = {}  # of the traced call -> the first tensor of the copy's
        self.elements: dict[int, torch.Tensor] = {}  # the same, of what only the copy's own nodes read
        if not around.is_like(call.around):
            raise _NotEqual
        self.match(call.args, args)
        pairs = pairs_of(call.variable.value, variable.value)
        if pairs is None:
            raise _NotEqual
        self.pairs: Pairs = pairs
        self.facts = _facts(call, tx)
        self.returned = self.facts.returned
        changed, known = set(map(id, _notes(tx.output).changed)), tx.output.side_effects.id_to_variable
        if changed and any(id(known.get(number)) in changed for number in pairs.seen):
            raise _NotEqual
        ours, theirs = call.variable.source, variable.source
        self.sources = {_named(ours, ours.name): _named(theirs, theirs.name)}
        if any(value in tx.output.side_effects for value in pairs.of.values() if isinstance(value, torch.Tensor)):
            raise _NotEqual  # a tensor that is in the graph already
        for _, name in pairs.numbers:
            if any(re.search(rf"\b{re.escape(name)}\b", touched.removeprefix(ours.name)) for touched in self.facts.touched):
                raise _NotEqual
        self.inputs = [(node, self.moved(node.meta["grapharg"].source)) for node in self.facts.inputs]
        self.guards = [self.moved_guard(guard) for guard in self.facts.guards]

    # ------------------------------------------------------------------------------------------------------- arguments

    def match(self, ours: Any, theirs: Any) -> None:
        """Compares arguments, and notes which tensors correspond."""
        from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable

        if isinstance(ours, dict):
            if list(ours) != list(theirs):
                raise _NotEqual
            ours, theirs = list(ours.values()), list(theirs.values())
        if isinstance(ours, (list, tuple)):
            if len(ours) != len(theirs):
                raise _NotEqual
            for one, other in zip(ours, theirs, strict=True):
                self.match(one, other)
            return
        ours, theirs = _realized(ours), _realized(theirs)
        if type(ours) is not type(theirs):
            raise _NotEqual
        if type(ours) is TensorVariable:
            self.match_tensors(ours, theirs)
            if self.variables.setdefault(id(ours), theirs) is not theirs:
                raise _NotEqual
        elif type(ours) is TupleVariable:
            self.match(ours.items, theirs.items)
        elif type(ours) is ConstantVariable:
            if type(ours.value) is not type(theirs.value) or repr(ours.value) != repr(theirs.value):
                raise _NotEqual
        elif ours is not theirs or ours.source is None:
            raise _NotEqual

    def match_tensors(self, ours: Any, theirs: Any) -> None:
        one, other = ours.proxy.node, theirs.proxy.node
        if (ours.source is None) != (theirs.source is None) or self.nodes.setdefault(one, other) is not other:
            raise _NotEqual
        if len(self.nodes) != len(set(self.nodes.values())):
            raise _NotEqual
        first, second = one.meta["example_value"], other.meta["example_value"]
        if type(first) is not type(second) or _about(first) != _about(second):
            raise _NotEqual
        self.note_storage(first, second)

    def note_storage(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        if _storage(self.storages.setdefault(_storage(ours), theirs)) != _storage(theirs):
            raise _NotEqual

    # ---------------------------------------------------------------------------------------------------------- guards

    def moved(self, source: Any) -> Any:
        """What a source is for the other module."""
        from torch._guards import ChainedSource, Source

        if (known := self.sources.get(source)) is None:
            if not isinstance(source, ChainedSource):
                return source
            changes = {
                field.name: self.moved(value)
                for field in dataclasses.fields(source)
                if isinstance(value := getattr(source, field.name), Source)
            }
            known = self.sources[source] = dataclasses.replace(source, **changes)
        return known

    def moved_guard(self, guard: Any) -> Any:
        """What a guard of the traced module is for the other one."""
        from torch._guards import Guard, Source

        create, source = guard.create_fn, self.moved(guard.originating_source)
        keywords = {key: self.moved(v) if isinstance(v, Source) else v for key, v in getattr(create, "keywords", {}).items()}
        if source == guard.originating_source and all(v == create.keywords[key] for key, v in keywords.items()):
            raise _NotEqual
        create = functools.partial(create.func, **keywords) if keywords else create
        return Guard(source, create, stack=guard.stack, user_stack=guard.user_stack)

    # ------------------------------------------------------------------------------------------------------- the copy

    def made(self) -> Any:
        """Adds the copy to Dynamo's graph. Returns the variable of its result."""
        from torch._dynamo.guards import install_guard
        from torch._dynamo.variables.builder import VariableBuilder

        for node, source in self.inputs:
            tensor = self.pairs.of[id(node.meta["grapharg"].example)]
            copy = self.nodes[node] = VariableBuilder(self.tx, source)(tensor).as_proxy().node
            self.describe(copy, node)
            self.note_storage(node.meta["example_value"], self.nodes[node].meta["example_value"])
        install_guard(*self.guards)
        self.tx.output.root_tracer.traced_sources.update(map(self.moved, self.facts.looked))  # for modules around this one
        tracer = self.tx.output.root_tracer
        with torch.no_grad():
            for node in self.call.nodes:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.nodes.__getitem__)
                *outer, (name, target) = node.meta["source_fn_stack"]
                copy = self.nodes[node] = tracer.create_node(node.op, node.target, args, kwargs, _stem(name))
                self.describe(copy, node)
                copy.meta["source_fn_stack"] = [*outer, (copy.name, target)]
                if node.name != name:  # by the variable that holds it
                    copy._rename(_stem(node.name))
                if "example_value" in node.meta:
                    value = node.meta["example_value"]
                    copy.meta["example_value"] = torch.utils._pytree.tree_map_only(torch.Tensor, self.like, value)
        return self.result(self.call.result)

    def describe(self, copy: fx.Node, node: fx.Node) -> None:
        """Says of a copied node which modules and lines it is of."""
        copy.meta["stack_trace"] = node.meta["stack_trace"]
        stack = node.meta.get("nn_module_stack", {})
        if (first := str(id(self.call.variable.value))) not in stack:
            raise AssertionError(f"expected a node of the copied module, found one of {list(stack.values())}")
        before, after = stack[first][0], _module_path(self.variable.get_nn_module_stack_source().name)
        moved = dict(self.tx.nn_module_stack)
        for key in list(stack)[list(stack).index(first) :]:
            number, at, count = key.partition("@")
            path, cls = stack[key]
            moved[f"{id(self.pairs.of[int(number)])}{at}{count}"] = after + path.removeprefix(before), cls
        copy.meta["nn_module_stack"] = moved

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor like one of the traced call's: a view of what corresponds to that one's base."""
        storage = _storage(tensor)
        if (base := self.storages.get(storage)) is not None:
            return self.view(base, tensor)
        if (elements := self.elements.get(storage)) is None:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            elements = self.elements[storage] = torch.empty(size, dtype=tensor.dtype, device="meta")
        if elements.dtype != tensor.dtype:
            elements = elements.view(tensor.dtype)
        part = elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        fake: Any = FakeTensor
        made = functools.partial(fake, self.tx.fake_mode, part, tensor.device)
        if tensor.requires_grad:
            with torch.enable_grad():
                value = _NewTensor.apply(torch.empty((), device="meta", requires_grad=True), made)  # type: ignore[no-untyped-call]
        else:
            value = made()
        if tensor._version:
            torch._C._autograd._unsafe_set_version_counter((value,), (tensor._version,))
        if storage in self.returned:
            self.storages[storage] = value
        return value  # type: ignore[no-any-return]

    def view(self, base: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad(), self.tx.fake_mode:
            if base.dtype != tensor.dtype:
                base = base.view(tensor.dtype)
            base = base if tensor.requires_grad else base.detach()
            return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def result(self, result: Any) -> Any:
        from torch._dynamo.variables import ListVariable, TensorVariable, TupleVariable, builder
        from torch._dynamo.variables.base import ValueMutationNew

        if type(result) is TupleVariable:
            return TupleVariable([self.result(item) for item in result.items])
        if type(result) is ListVariable:
            return ListVariable([self.result(item) for item in result.items], mutation_type=ValueMutationNew())
        if type(result) is not TensorVariable:
            return result
        if id(result) not in self.variables:
            tracer, node = self.tx.output.root_tracer, self.nodes[result.proxy.node]
            variable: Any = builder.handle_traced_output(
                node.meta.pop("example_value"), self.tx, tracer.proxy(node), {}, None, TensorVariable
            )
            variable._is_name_set = result._is_name_set
            tracer.record_proxyable_vt(variable)
            self.variables[id(result)] = variable
        return self.variables[id(result)]


class _NewTensor(torch.autograd.Function):
    """A tensor that requires grad and is no leaf, as results of operations are."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, made: Callable[[], torch.Tensor]) -> torch.Tensor:
        return made()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def _realized(variable: Any) -> Any:
    from torch._dynamo.variables import LazyVariableTracker

    if isinstance(variable, LazyVariableTracker) and variable.is_realized():
        return variable.realize()
    return variable


def _stem(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _name(source: Any) -> str:
    """The name of a source; of one that has none, that of what it was found in."""
    try:
        return str(source.name)
    except NotImplementedError:
        return f"{_name(source.base)}.?" if hasattr(source, "base") else ""


def _named(source: Any, name: str) -> Any:
    """The innermost source of that name: Dynamo wraps some in others of the same name."""
    while getattr(getattr(source, "base", None), "name", None) == name:
        source = source.base
    return source


def _module_path(name: str) -> str:
    return re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]", r".\2", name)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    leaves = [leaf for leaf in leaves if leaf is not None]
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise _NotEqual
    return leaves


def _about(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise _NotEqual
    kind = tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf, tensor._is_view(), tensor._version
    return tensor.shape, tensor.stride(), tensor.storage_offset(), *kind, tensor.is_conj(), tensor.is_neg()


def _writes(node: fx.Node) -> bool:
    """Tells whether an operation changes no more than the elements of its first operand."""
    return _name_of(node) in _WRITES and "out" not in node.kwargs


def _name_of(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _changes_operand(node: fx.Node) -> bool:
    """Tells whether an operation is named as one that changes an operand. Versions of tensors tell of others, too."""
    name = _name_of(node)
    return (name.endswith("_") and not name.endswith("__")) or name in ("setitem", "set_data") or "out" in node.kwargs
