"""Dynamo: its settings, its errors, the random numbers that it must not take, and tensors that begin to require grad."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import logging
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from mtcompile import knobs
from mtcompile.errors import CaptureError
from mtcompile.torch_private.patched import patched
from mtcompile.torch_private.thread_setting import ThreadSetting

never_captured = torch._disable_dynamo  # as torch.compiler.disable, which loads Dynamo where a function is defined
set_grad_enabled = torch._C._set_grad_enabled  # what torch.no_grad() is in Dynamo's graphs
_refused = ThreadSetting[str | None](None)  # why random numbers are refused while this thread captures


def capture_settings(signatures: int, in_parts: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Dynamo's settings while a model is called that is captured at most ``signatures`` times: floats and ints of the call
    become constants of the graph (guarded), so that nothing in it is symbolic. ``in_parts``: assertions are left to Python,
    because a part of a forward does not see who catches its errors."""
    from torch._dynamo import config as dynamo_config

    return patched(
        dynamo_config,
        specialize_float=True,
        automatic_dynamic_shapes=False,
        skip_nnmodule_hook_guards=False,  # a hook that comes or goes is another computation
        enable_dynamo_decompositions=False,  # of addcmul_ and the like: they round otherwise
        recompile_limit=signatures,
        accumulated_recompile_limit=8 * signatures,
        allow_rnn=True,  # what their operations are shows in the trace
        use_numpy_random_stream=True,  # numpy's random numbers are refused, not drawn from torch's generator
        rewrite_assert_with_torch_assert=not in_parts,
        record_runtime_overhead=False,  # which calls torch's profiler twice, in every call
    )


def forget_counted_frames() -> None:
    """Ends a count of compiled frames that an interrupted call has left on. While it is on, which torch 2.13 means for calls of
    one graph, Dynamo compiles no part of a call that is made of several, and says nothing."""
    from torch._C._dynamo import eval_frame

    if (count := getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)) is not None:
        count(-1)


def leave_out_of_graphs(functions: Iterable[Callable[..., Any]]) -> None:
    """Let Dynamo leave out calls of functions that only log or warn."""
    from torch._dynamo import config as dynamo_config

    every = {*set.__iter__(dynamo_config.ignore_logging_functions), *functions}
    sorts = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    dynamo_config.ignore_logging_functions = _SortableSet(every) if sorts else every


class _SortableSet(set[Any]):
    """A set whose members are seen by their names: torch before 2.13 sorts the members of the setting above for its log, and
    functions cannot be sorted. These versions look up only methods of loggers in the set: ``warnings.warn`` is refused."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(repr(member) for member in set.__iter__(self)))


def is_compiled(module: torch.nn.Module) -> bool:
    """Tells whether ``torch.compile`` captures a module, or its forward, when it is called."""
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module.forward, "_torchdynamo_orig_callable"):
        return True
    return isinstance(module, getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ()))


def global_module_hooks() -> tuple[tuple[int, ...], ...]:
    """The hooks that all modules have now, by their numbers. Dynamo calls them while it captures, and guards on none."""
    module = torch.nn.modules.module
    kinds = (
        module._global_forward_pre_hooks,
        module._global_forward_hooks,
        module._global_backward_pre_hooks,
        module._global_backward_hooks,
        module._global_buffer_registration_hooks,
        module._global_module_registration_hooks,
        module._global_parameter_registration_hooks,
    )
    return tuple(tuple(kind) for kind in kinds) if any(kinds) else ()


def traced_code() -> set[types.CodeType]:
    """The code of the functions that have been traced, while a backend is called."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return set(getattr(context, "traced_code", ()))


def cause_in_dynamo(error: Exception) -> BaseException | None:
    """The exception behind one that Dynamo raised, or that one itself; None for an exception that is not Dynamo's."""
    from torch._dynamo.exc import InternalTorchDynamoError, TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    internal = error.__context__ if isinstance(error, InternalTorchDynamoError) else None
    return getattr(error, "inner_exception", None) or error.__cause__ or internal or error


def raised_by_captured(error: BaseException) -> type[BaseException] | None:
    """The class of the exception that the captured function raises by itself; None if ``error`` reports something else."""
    from torch._dynamo.exc import observed_exception_map

    cause = error.__cause__
    kinds: list[type[BaseException]] = [kind for kind, of in observed_exception_map.items() if isinstance(cause, of)]
    return max(kinds, key=lambda kind: len(kind.__mro__), default=None)


@contextlib.contextmanager
def mixing_devices(device: torch.device) -> Iterator[None]:
    """Traced inside, tensors of the host that exist already are on ``device``, where parameters will be when they are used, and
    an operation on operands of both computes there."""
    from torch._functorch import config as functorch_config

    if device.type == "cpu":
        yield
        return
    _trace_existing_tensors_there()
    with patched(functorch_config, fake_tensor_prefer_device_type=device.type), _where_traced.during(device):
        yield


_where_traced = ThreadSetting[torch.device | None](None)


def _trace_existing_tensors_there() -> None:
    """Puts the fake tensors that stand for real ones of the host on the device that this thread traces for; once."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain: Callable[..., Any] = FakeTensorMode.from_tensor
    if plain.__dict__.get("_mt_traces"):
        return

    @functools.wraps(plain)
    def from_tensor(mode: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        fake = plain(mode, tensor, *args, **kwargs)
        if (device := _where_traced.value) is not None and fake is not tensor and tensor.device.type == "cpu":
            fake.fake_device = device
        return fake

    from_tensor._mt_traces = True  # type: ignore[attr-defined]
    owner: Any = FakeTensorMode
    owner.from_tensor = from_tensor


@contextlib.contextmanager
def refusing_random_numbers(why: str) -> Iterator[None]:
    """Raises CaptureError(why) where a function that is captured inside draws from, seeds or reads a ``random.Random``.

    Dynamo would take the numbers of the first call for those of every call, or make float32 of them, and leave the generator
    elsewhere than a plain run does."""
    from torch._dynamo.variables import misc, user_defined

    _refusing(user_defined, "call_random_fn")
    _refusing(misc, "call_random_fn")
    _refusing(misc.RandomVariable, "call_method")
    with _refused.during(why):
        yield


def _refusing(owner: Any, name: str) -> None:
    """Makes a function of Dynamo's raise CaptureError while this thread refuses; once."""
    plain: Callable[..., Any] = getattr(owner, name)
    if plain.__dict__.get("_mt_refuses"):
        return

    @functools.wraps(plain)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if (why := _refused.value) is not None:
            raise CaptureError(why)
        return plain(*args, **kwargs)

    refusing._mt_refuses = True  # type: ignore[attr-defined]
    setattr(owner, name, refusing)


def replace_method(owner: Any, name: str, replaced: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a method of a class of Dynamo's by what ``replaced`` makes of it. Changes nothing where this torch has no such
    class (None) or method."""
    if (plain := getattr(owner, name, None)) is None:
        return
    function = functools.wraps(plain)(replaced(plain))
    setattr(owner, name, function)
    for entry in vars(owner).get("tp_methods", {}).values():  # by which torch 2.14 calls methods of tensors
        if entry.handler is plain:
            entry.handler = function


def raised_in_capture(error: BaseException) -> bool:
    """Tells whether an exception was raised while Dynamo captured a function, and not by what it has captured."""
    from torch._dynamo import convert_frame

    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == convert_frame.__file__:
            return True
        trace = trace.tb_next
    return False


def is_graph_break(error: BaseException) -> bool:
    """Tells whether Dynamo met something that it leaves to Python where it may make several graphs."""
    from torch._dynamo.exc import Unsupported, UserError
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, (Unsupported, UserError, GuardOnDataDependentSymNode))


def gives_memory(node: fx.Node) -> bool:
    """Tells whether a node of Dynamo's graphs gives its first operand the memory of another tensor: ``.data = other``."""
    return node.target in (torch.Tensor.set_, getattr(torch.ops.aten, "shallow_copy_data_", None))  # the latter in torch 2.14


def break_after(graph: fx.GraphModule) -> tuple[str, str]:
    """Returns why a graph of Dynamo's ends before its function does, and a report of the line; empty texts if it does not."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return "", ""
    why = next((line.strip() for line in reason.reason.splitlines() if line.strip()), "")
    return why, "".join(traceback.format_list(reason.user_stack))


@functools.cache
def without_reports_of_failures() -> None:
    """Silences what torch logs of an operation that it cannot trace, while this thread captures: an error tells it in short."""
    for name in ("torch._subclasses.fake_tensor", "torch._dynamo.utils"):
        logging.getLogger(name).addFilter(lambda record: _refused.value is None or bool(knobs.debug()))


@contextlib.contextmanager
def without_break_warnings() -> Iterator[None]:
    """Silences torch's own advice on the first lines that part a graph."""
    logger = logging.getLogger("torch._dynamo.variables.tensor")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def failed_inside(error: BaseException) -> bool:
    """Tells whether Dynamo passes on an exception that it did not expect: its own, or that of the backend it called."""
    from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError

    return isinstance(error, (BackendCompilerFailed, InternalTorchDynamoError))


# ------------------------------------------------------------------------------------------------------------ new leaves
#
# ``x.requires_grad = True`` in a forward, on a tensor that it has computed: from there on autograd follows the tensor. Dynamo
# refuses to trace it, or, as ``x.requires_grad_()``, to return what was computed from the tensor. Here the variable stands for
# a new leaf of the same memory from then on, as in a plain run. Nobody may see the leaf itself outside of the forward, where
# its ``grad`` would be missing.

_new_leaves = ThreadSetting(False)


def new_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf that requires grad and shares the memory of ``tensor``."""
    return tensor.detach().requires_grad_()


@contextlib.contextmanager
def tracing_new_leaves() -> Iterator[None]:
    """Captures inside, in this thread, trace what makes a computed tensor require grad."""
    _replace_assignments()
    with _new_leaves.during(True):
        yield


def returned_leaf(graph: fx.Graph) -> fx.Node | None:
    """The first new leaf that a captured graph returns."""
    return next((node for node in graph.output_node().all_input_nodes if node.target is new_leaf), None)


def _become_leaf(tx: Any, variable: Any) -> bool:
    """Lets a variable stand for a new leaf, where it stands for a computed tensor that has no gradient so far."""
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.builder import wrap_fx_proxy

    if type(variable) is not TensorVariable or variable.source is not None:
        return False
    example = variable.proxy.node.meta["example_value"]
    if not (example.is_floating_point() or example.is_complex()):
        return False
    if not example.requires_grad:
        leaf: Any = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", new_leaf, (variable.proxy,), {}))
        variable.proxy = leaf.proxy
        variable.synchronize_attributes(tx)
    return True


@functools.cache
def _replace_assignments() -> None:
    """Lets Dynamo ask here first. Outside ``tracing_new_leaves``, nothing is changed."""
    from torch._dynamo.variables import ConstantVariable, TensorVariable, builtin

    def is_true(value: Any) -> bool:
        return value is True or (isinstance(value, ConstantVariable) and value.value is True)

    def assigning(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call_setattr(function: Any, tx: Any, variable: Any, name: Any, value: Any) -> Any:
            named = isinstance(name, ConstantVariable) and name.value == "requires_grad"
            traced = named and is_true(value) and _new_leaves.value and _become_leaf(tx, variable)
            return value if traced else plain(function, tx, variable, name, value)

        return call_setattr

    def calling(plain: Callable[..., Any]) -> Callable[..., Any]:
        def method_requires_grad_(variable: Any, tx: Any, requires_grad: Any = True) -> Any:
            traced = is_true(requires_grad) and _new_leaves.value and _become_leaf(tx, variable)
            return variable if traced else plain(variable, tx, requires_grad)

        return method_requires_grad_

    classes = {"SetAttrBuiltinVariable": "_call_setattr", "BuiltinVariable": "call_setattr"}  # from torch 2.13 on, and before
    places = [(getattr(builtin, owner, None), name, assigning) for owner, name in classes.items()]
    for owner, name, replaced in (*places, (TensorVariable, "method_requires_grad_", calling)):
        replace_method(owner, name, replaced)


# ---------------------------------------------------------------------------------------------------- autograd functions


@functools.cache
def leaving_out_absent_gradients() -> None:
    """Lets Python run, where a model is captured, an ``autograd.Function`` of several outputs whose backward is to get None for
    an output without a gradient (``ctx.set_materialize_grads(False)``). Dynamo traces its backward with a gradient for each."""
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables import higher_order_ops

    owner: Any = higher_order_ops.AutogradFunctionApplyVariable
    plain = getattr(owner, "trace_forward_graph", None)
    if plain is None:
        return

    @functools.wraps(plain)
    def trace_forward_graph(variable: Any, tx: Any, ctx: Any, *rest: Any) -> Any:
        traced = plain(variable, tx, ctx, *rest)
        asked = "materialize_grads" in tx.output.side_effects.store_attr_mutations.get(ctx, ())
        outputs = [] if traced[1].is_tensor() else [item for item in traced[1].items if item.is_tensor()]
        if _refused.value is not None and asked and len(outputs) > 1:  # this thread captures a model
            raise Unsupported("an autograd.Function of several outputs that calls ctx.set_materialize_grads")
        return traced

    owner.trace_forward_graph = trace_forward_graph


# ---------------------------------------------------------------------------------------------------------------- deques


@functools.cache
def tracing_limits_of_deques() -> None:
    """Lets Dynamo know how many items a deque from outside of the function may have: it takes each for one without a limit."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, DequeVariable, builder

    wraps, writes = builder.VariableBuilder.wrap_listlike, SideEffects.codegen_update_mutated
    no_limit = ConstantVariable.create(None)

    @functools.wraps(wraps)
    def wrap_listlike(variables: Any, value: Any) -> Any:
        variable: Any = wraps(variables, value)
        if type(variable) is DequeVariable:
            install_guard(AttrSource(variables.get_source(), "maxlen").make_guard(GuardBuilder.CONSTANT_MATCH))
            variable.maxlen = ConstantVariable.create(value.maxlen)
        return variable

    @functools.wraps(writes)
    def codegen_update_mutated(effects: Any, *args: Any, **kwargs: Any) -> Any:
        """Writes what a deque holds in the end, which is within its limit, as into one without."""
        deques = [variable for variable in effects._get_modified_vars() if type(variable) is DequeVariable]
        limits = [deque.maxlen for deque in deques]
        for deque in deques:
            deque.maxlen = no_limit
        try:
            return writes(effects, *args, **kwargs)
        finally:
            for deque, limit in zip(deques, limits, strict=True):
                deque.maxlen = limit

    reading: Any = builder.VariableBuilder
    writing: Any = SideEffects
    reading.wrap_listlike, writing.codegen_update_mutated = wrap_listlike, codegen_update_mutated


# ------------------------------------------------------------------------------------------------------------- memory
#
# What torch keeps of a capture for as long as the process lives. It goes with the capture here: a program that compiles one
# model after another would grow by it.


def compiled_by(backend: Callable[..., Any], fn: Callable[..., Any], whole: bool) -> Callable[..., Any]:
    """``fn`` as ``torch.compile`` returns it, ``whole`` or in parts, for ``backend``. torch keeps each backend, and with it all
    that it holds, to reset it in ``torch.compiler.reset()``; one that has nothing to reset is forgotten here."""
    from torch._dynamo import eval_frame

    compiled: Callable[..., Any] = torch.compile(fn, backend=backend, fullgraph=whole, dynamic=False)
    kept = eval_frame.cached_backends
    for key in [key for key, value in kept.items() if getattr(value, "compiler_fn", None) is backend]:
        del kept[key]
    return compiled


_TAKES_ALL = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def captured_before(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Returns what Dynamo would run for a call of ``compiled``, a function of (first, *args, **kwargs) that is captured whole:
    the first capture whose guards hold. None if there is none, or if ``torch.compiler.set_stance`` asks for something else.
    Dynamo's own way there sets and restores a dozen settings that only a capture needs."""
    from torch._dynamo import eval_frame

    fn: Any = compiled._torchdynamo_orig_callable
    code, stance = fn.__code__, eval_frame._stance
    alike = code.co_flags & _TAKES_ALL == _TAKES_ALL and code.co_argcount == 1 and not code.co_kwonlyargcount
    if not (alike and args) or stance.stance != "default" or stance.backend is not None:
        return None
    first, rest, named = code.co_varnames[:3]
    values = {first: args[0], rest: args[1:], named: kwargs}
    values.update((name, cell.cell_contents) for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True))
    for entry in eval_frame._debug_get_cache_entry_list(code):
        if entry.guard_manager.check(values):
            return types.FunctionType(entry.code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    return None


def forget_measures() -> None:
    """Drops the stacks that Dynamo keeps of where it has measured this thread's captures, to show one of them in an error. They
    hold the code that ran, and with code that Dynamo wrote all that this code needs."""
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    if not context.in_progress():
        context._edits.clear()


_made = ThreadSetting["weakref.WeakSet[Any] | None"](None)


def captures_of(made: weakref.WeakSet[Any]) -> contextlib.AbstractContextManager[None]:
    """Adds what Dynamo captures inside, in this thread, to a set that ``drop_captures`` takes."""
    return _made.during(made)


def drop_captures(made: weakref.WeakSet[Any]) -> None:
    """Lets Dynamo drop captures that nobody will call again. Of itself it keeps them as long as the code that was captured, and
    that code as long as them."""
    for manager in tuple(made):
        manager.invalidate("its model")


@functools.cache
def dropping_guards() -> None:
    """Lets the guards of a capture of mtcompile's go with the capture, from now on. Dynamo leaves a finalizer with each object
    that it guards by identity, and the finalizer holds the guards. Most such objects are types, which live on: so would the
    guards of every model that has died. Here the guards hold what waits for the object's end."""
    from torch._dynamo.guards import CheckFunctionManager

    owner: Any = CheckFunctionManager
    makes, waits, ending = owner.__init__, owner.id_ref, sys.is_finalizing

    @functools.wraps(makes)
    def init(manager: Any, *args: Any, **kwargs: Any) -> None:
        makes(manager, *args, **kwargs)
        manager.guard_manager.mt_waits = manager.__dict__.pop("mt_waits", None)
        if _made.value is not None:
            _made.value.add(manager)

    @functools.wraps(waits)
    def id_ref(manager: Any, value: object, name: str) -> int:
        if _refused.value is None:  # this thread captures nothing of mtcompile's
            return int(waits(manager, value, name))
        if id(value) not in manager._weakrefs:
            with contextlib.suppress(TypeError):  # a value that nothing can wait for, such as True
                manager._weakrefs[id(value)] = weakref.ref(value)
                # at the end of the process torch's modules may be gone before the value
                gone = weakref.ref(value, lambda _: None if ending() else manager.invalidate(name))
                manager.__dict__.setdefault("mt_waits", []).append(gone)
        return id(value)

    owner.__init__, owner.id_ref = init, id_ref


@functools.cache
def dropping_sources() -> None:
    """Lets the source that torch keeps of each graph's code, to show lines of it, go with the code, from now on."""
    from torch.fx import graph_module

    module: Any = graph_module
    plain, kept = module._method_from_src, module._loader.eval_cache

    def forget(file: str) -> None:
        kept.pop(file, None)
        linecache.cache.pop(file, None)

    @functools.wraps(plain)
    def method_from_src(*args: Any, **kwargs: Any) -> Any:
        method = plain(*args, **kwargs)
        weakref.finalize(method.__code__, forget, method.__code__.co_filename).atexit = False
        return method

    module._method_from_src = method_from_src


# ------------------------------------------------------------------------------------------- attributes of an nn.Module


@functools.cache
def keeping_later_attributes() -> None:
    """Lets Dynamo keep what a forward assigns to attributes of a module after a hook of an intermediate value or a
    ``torch.cond``. Dynamo goes on with a copy of its list of changes there, but its stand-in for ``__dict__`` keeps the first
    list (seen in torch 2.13)."""
    from torch._dynamo.variables import dicts

    proxy: Any = getattr(dicts, "SideEffectsProxyDict", None)
    if proxy is None:
        return

    def current(variable: Any) -> Any:
        return variable.mt_first_list.output_graph_weakref().side_effects

    proxy.side_effects = property(current, lambda variable, first: setattr(variable, "mt_first_list", first))


# ----------------------------------------------------------------------------------------------------------- checkpoints

NEEDS_GRAD = "mt_argument_needs_grad"  # in the meta of a checkpoint's node: an argument of the user's call requires grad


@functools.cache
def noting_arguments_of_checkpoints() -> None:
    """Lets Dynamo note, from now on, whether each checkpoint is called with a tensor that requires grad. The operands in the
    graph do not tell: they also hold what else the checkpoint uses."""
    from torch._dynamo.variables import higher_order_ops

    owner: Any = higher_order_ops.CheckpointHigherOrderVariable
    name = next(name for name in ("_call_function", "call_function") if name in vars(owner))
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def noting(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result = plain(variable, tx, args, kwargs)
        nodes = tx.output.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
        if nodes:
            nodes[-1].meta[NEEDS_GRAD] = any(map(_needs_grad, args[1:]))
        return result

    setattr(owner, name, noting)


def _needs_grad(argument: Any) -> bool:
    from torch._dynamo.variables import LazyVariableTracker, TensorVariable

    if isinstance(argument, LazyVariableTracker):
        argument = argument.realize()
    return isinstance(argument, TensorVariable) and argument.proxy.node.meta["example_value"].requires_grad


def gives_no_gradients(checkpoint: fx.Node) -> bool:
    """Tells whether a plain run gives no gradient to what a checkpoint uses, because no tensor argument requires grad."""
    return checkpoint.kwargs.get("use_reentrant") is not False and checkpoint.meta.get(NEEDS_GRAD) is False
