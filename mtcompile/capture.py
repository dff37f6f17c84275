"""From the graph Dynamo captured to a joint (forward + backward) ATen graph. The only file that uses private torch APIs.

Dynamo itself is entered by the public door, ``torch.compile(fn, backend=...)``: it keeps the guards and checks them at
every call, replays Python side effects, rebuilds pytree outputs and makes a new graph when a guard fails. What reaches
``describe`` is its graph with parameters and buffers lifted to inputs.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch._dynamo.exc import TorchDynamoException
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch.utils import _pytree as pytree

from mtcompile.errors import CaptureError
from mtcompile.passes.step_graph import InputSpec, OutputSpec

_RECOMPILE_LIMIT = 512  # signatures of one model; Dynamo's own default of 8 is for functions, not for training runs


# ------------------------------------------------------------------------------------------------------------ front end


def front_end(fn: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` captured whole (no graph breaks), with static shapes; ``backend(graph_module, inputs)`` compiles a graph.

    Raises CaptureError with the user's own source line where ``fn`` cannot be captured.
    """
    compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)
    # Floats and ints of the call become constants of the graph (guarded), so that nothing in it is symbolic.
    settings = torch._dynamo.config.patch(
        specialize_float=True,
        automatic_dynamic_shapes=False,
        recompile_limit=_RECOMPILE_LIMIT,
        accumulated_recompile_limit=8 * _RECOMPILE_LIMIT,
    )
    torch._dynamo.config.ignore_logging_functions |= _logging_functions()

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with settings:
                return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            cause = error.__cause__ or error
            if isinstance(cause, CaptureError):
                raise cause from None
            raise CaptureError(_capture_message(error)) from error

    return call


def _logging_functions() -> set[Any]:
    """Functions that only log: harmless to leave out of a graph (Transformers' models call them in forward)."""
    found: set[Any] = set()
    with contextlib.suppress(ImportError, AttributeError):
        from transformers.utils import logging

        logger = logging.get_logger("transformers")
        found |= {type(logger).warning_once, type(logger).warning, type(logger).info, type(logger).debug}
    return found


def _capture_message(error: BaseException) -> str:
    """The reason and the user's line out of Dynamo's report."""
    text = str(error)
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(\S[^\n]*)', text)
    own = [f for f in frames if "/torch/" not in f[0]] or frames
    where = f"\n  at {own[-1][0]}:{own[-1][1]} in {own[-1][2]}: {own[-1][3]}" if own else ""
    return (
        f"the model's forward could not be captured as one graph: {reason}{where}\n"
        "  expected a forward without data-dependent Python control flow or unsupported calls; "
        "try torch.where / a tensor operation at that line, or compile the submodules that do not contain it"
    )


# ---------------------------------------------------------------------------------------------------------- description


@dataclass(frozen=True, slots=True)
class Passed:
    """An output that is one of the inputs, or a view of it: rebuilt from the call's own tensor."""

    index: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None


@dataclass(frozen=True, slots=True)
class Computed:
    """An output that the graph computes: the ``position``-th tensor of the program; ``view`` (size, stride, offset) when
    it shares the storage of that tensor."""

    position: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None


@dataclass(frozen=True, slots=True)
class Constant:
    """An output that is not a tensor."""

    value: Any


@dataclass(frozen=True, slots=True)
class Description:
    """What a captured graph takes and returns.

    ``inputs``: a spec per input of the graph. ``outputs``: how to rebuild each of its outputs. ``computed``: the outputs
    the program must produce: (name, differentiable, is a scalar). ``autocast``: (device, enabled, dtype) at the call.
    """

    graph: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    outputs: tuple[Passed | Computed | Constant, ...]
    computed: tuple[tuple[str, bool, bool], ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]


def _autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))


def describe(
    graph: fx.GraphModule, inputs: Sequence[Any], names: Callable[[torch.Tensor], tuple[str, str] | None]
) -> Description:
    """Read Dynamo's graph; ``names(tensor)`` gives (role, path) of the model's own parameters and buffers.

    ``graph`` is changed: outputs become those the program computes, each with storage of its own.
    Raises CaptureError for inputs or outputs that have no static shape.
    """
    specs = []
    slots = list(graph.graph.find_nodes(op="placeholder"))
    for index, (node, tensor) in enumerate(zip(slots, inputs, strict=True)):
        if not isinstance(tensor, torch.Tensor):
            raise CaptureError(
                f"input {node.name} is symbolic ({type(tensor).__name__}); expected tensors of static shape: "
                "do not mark dimensions as dynamic"
            )
        known = names(tensor)
        role, name = known if known else ("input", _input_name(node))
        specs.append(InputSpec(role, name, index, tensor.requires_grad))  # type: ignore[arg-type]

    output = graph.graph.output_node()
    outputs: list[Passed | Computed | Constant] = []
    kept: dict[fx.Node, int] = {}
    by_storage: dict[int, fx.Node] = {}
    inputs_by_storage = {_storage(n): i for i, n in enumerate(slots)}
    for value in pytree.tree_leaves(output.args[0]):
        if not isinstance(value, fx.Node):
            outputs.append(Constant(value))
            continue
        val = value.meta.get("example_value")
        if not isinstance(val, torch.Tensor):
            raise CaptureError(f"output {value.name} is {type(val).__name__}; expected a tensor of static shape")
        layout = (tuple(val.shape), tuple(val.stride()), int(val.storage_offset()))
        storage = _storage(value)
        if value.op == "placeholder":
            outputs.append(Passed(slots.index(value), None))
        elif value in kept:
            outputs.append(Computed(kept[value], None))
        elif storage in inputs_by_storage and val.dtype == _fake(slots[inputs_by_storage[storage]]).dtype:
            outputs.append(Passed(inputs_by_storage[storage], layout))
        elif storage in by_storage and _covers(_fake(by_storage[storage])) and val.dtype == _fake(by_storage[storage]).dtype:
            outputs.append(Computed(kept[by_storage[storage]], layout))
        else:
            kept[value] = len(kept)
            by_storage.setdefault(storage, value)
            outputs.append(Computed(kept[value], None))
    computed = tuple(
        (node.name, bool(_fake(node).requires_grad), _fake(node).numel() == 1 and _fake(node).is_floating_point())
        for node in kept
    )
    output.args = (tuple(kept),)
    graph.recompile()
    return Description(graph, tuple(specs), tuple(outputs), computed, _autocast_state())


def _fake(node: fx.Node) -> torch.Tensor:
    return node.meta["example_value"]  # type: ignore[no-any-return]


def _storage(node: fx.Node) -> int:
    return int(_fake(node).untyped_storage()._cdata)


def _covers(val: torch.Tensor) -> bool:
    """True when the tensor, made again with its own strides, holds every byte its storage held."""
    return val.storage_offset() == 0 and val.untyped_storage().nbytes() == val.numel() * val.element_size()


def _input_name(node: fx.Node) -> str:
    return re.sub(r"^[lL]_+|_+$", "", node.name) or node.name


def _source_name(node: fx.Node) -> str:
    argument = node.meta.get("grapharg")
    name = getattr(argument, "source", None)
    name = name.name if name is not None else node.name
    return str(name() if callable(name) else name)


# ---------------------------------------------------------------------------------------------------------- joint graph


def joint_graph(description: Description, tangents: tuple[bool, ...] | None) -> fx.GraphModule:
    """The ATen graph of one program, in the form ``passes.normalize`` takes.

    ``tangents[i]``: whether computed output i receives a gradient; others are detached, so that no backward is traced
    for them. None: inference, the forward only. Raises CaptureError.
    """
    with _tracing(description, tangents) as (stack, graph, fakes):
        try:
            joint = aot_export_joint_with_descriptors(stack, graph, fakes, ignore_shape_env=True).graph_module
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"the backward of this model could not be traced: {type(error).__name__}: "
                + next(iter(str(error).splitlines()), "")
            ) from error
    return _annotate(joint, description)


def joint_key(description: Description, tangents: tuple[bool, ...] | None) -> str | None:
    """Text that is equal for two programs only if ``joint_graph`` makes the same of both: torch's own key of what it would
    trace, which knows the settings that tracing depends on. None where torch can promise no such key."""
    modules = [str(list((n.meta.get("nn_module_stack") or {}).values())) for n in description.graph.graph.nodes]
    try:
        from torch._functorch._aot_autograd.autograd_cache import autograd_cache_key
        from torch._functorch._aot_autograd.schemas import AOTConfig

        with _tracing(description, tangents) as (_, graph, fakes):
            settings = AOTConfig(None, None, None, None, 0, 0, False, is_export=True, ignore_shape_env=True)
            traced = autograd_cache_key(graph, fakes, settings)[0]
    except Exception:  # an operation, setting or torch version that it does not know to be safe
        return None
    return repr((traced, description.inputs, description.computed, tangents, modules, _settings()))


def _settings() -> tuple[Any, ...]:
    """What decides, beside the graph itself, which operations a trace consists of, and is not in torch's key."""
    sdp = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.get_float32_matmul_precision(),
        (sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled(), sdp.cudnn_sdp_enabled()),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cpu.get_cpu_capability(),
    )


@contextlib.contextmanager
def _tracing(
    description: Description, tangents: tuple[bool, ...] | None
) -> Iterator[tuple[contextlib.ExitStack, fx.GraphModule, tuple[torch.Tensor, ...]]]:
    """What is traced, its inputs, and the settings it is traced under."""
    graph = fx.GraphModule(description.graph, _with_detached(description.graph.graph, tangents))
    fakes = tuple(_fake(node) for node in description.graph.graph.find_nodes(op="placeholder"))
    fake_mode = next((f.fake_mode for f in fakes if hasattr(f, "fake_mode")), None) or torch._guards.detect_fake_mode()
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(fake_mode)))
        stack.enter_context(torch.set_grad_enabled(tangents is not None))
        stack.enter_context(rng_preserved())
        for device, enabled, dtype in description.autocast:  # a retrace happens in a backward, outside the user's autocast
            if enabled != torch.is_autocast_enabled(device) or enabled:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield stack, graph, fakes


def _with_detached(graph: fx.Graph, tangents: tuple[bool, ...] | None) -> fx.Graph:
    copied = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    copied.graph_copy(graph, env)
    results = []
    seen: set[int] = set()
    for position, value in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type]
        node = env[value]
        storage = _storage(value)
        if storage in seen:  # two results that overlap in storage: give the second its own
            node = copied.call_method("clone", (node,))
        seen.add(storage)
        if tangents is not None and not tangents[position]:
            node = copied.call_method("detach", (node,))
        results.append(node)
    copied.output(tuple(results))
    return copied


def _annotate(joint: fx.GraphModule, description: Description) -> fx.GraphModule:
    """Replace torch's descriptors by InputSpec and OutputSpec, so that no pass knows them."""
    inputs, computed = description.inputs, description.computed
    specs = []
    for node in joint.graph.find_nodes(op="placeholder"):
        desc = node.meta["desc"]
        kind = type(desc).__name__
        if kind == "PlainAOTInput":
            specs.append(inputs[desc.idx])
        elif kind == "TangentAOTInput" and type(desc.output).__name__ == "PlainAOTOutput":
            specs.append(InputSpec("tangent", f"grad of {computed[desc.output.idx][0]}", desc.output.idx))
        else:
            raise CaptureError(f"the traced graph takes {desc.expr()}, which is not supported (a tensor subclass or effect)")
    results, described = [], []
    output = joint.graph.output_node()
    for value, desc in zip(
        pytree.tree_leaves(output.args[0], is_leaf=_is_none), pytree.tree_leaves(output.meta["desc"]), strict=True
    ):
        if value is None:
            continue
        kind = type(desc).__name__
        if kind == "PlainAOTOutput":
            spec = OutputSpec("output", desc.idx, computed[desc.idx][0])
        elif kind == "GradAOTOutput" and type(desc.grad_of).__name__ == "PlainAOTInput":
            spec = OutputSpec("grad", desc.grad_of.idx, inputs[desc.grad_of.idx].name)
        elif kind == "InputMutationAOTOutput" and type(desc.mutated_input).__name__ == "PlainAOTInput":
            spec = OutputSpec("mutation", desc.mutated_input.idx, inputs[desc.mutated_input.idx].name)
            if inputs[spec.index].role == "param" or inputs[spec.index].differentiable:
                raise CaptureError(
                    f"forward changes {spec.name} in place, which is trained; expected only buffers or inputs "
                    "that need no gradient to be changed in place: do it outside forward"
                )
        else:
            raise CaptureError(f"the traced graph returns {desc.expr()}, which is not supported")
        results.append(value)
        described.append(spec)
    output.args = (tuple(results),)
    joint.meta["inputs"], joint.meta["outputs"] = tuple(specs), tuple(described)
    for node in joint.graph.nodes:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if stack:
            node.meta["module_path"] = _module_path(str(list(stack.values())[-1][0]))
    return joint


def _is_none(value: Any) -> bool:
    return value is None


def _module_path(path: str) -> str:
    """``layers.0.attention`` out of ``L['self'].__dict__['_modules']['layers'].0.attention``."""
    parts = [a or b or c for a, b, c in re.findall(r"\['?([^'\]]+)'?\]|\.?([A-Za-z_]\w*)|\.?(\d+)", path)]
    return ".".join(p for p in parts[2:] if p not in ("__dict__", "_modules", "_orig_mod"))


@contextlib.contextmanager
def rng_preserved() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


# -------------------------------------------------------------------------------------------------------------- inductor


def inductor(body: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
    """``body`` (ATen operations, functional) compiled for tensors like ``inputs``. Inductor keeps what it made on disk
    (TORCHINDUCTOR_CACHE_DIR), keyed by graph, shapes, torch version and device."""
    from torch._inductor import standalone_compile

    # A module of its own: Inductor's passes change the graph they are given.
    copied = fx.Graph()
    copied.output(copied.graph_copy(body.graph, {}))
    with torch.no_grad():
        return standalone_compile(fx.GraphModule(body, copied), list(inputs), dynamic_shapes="from_example_inputs")


def probe_inductor() -> threading.Thread:
    """Import Inductor, and let it find out in a thread which vector instructions run here: that is waiting for other
    processes, a second or two, while this one goes on tracing."""
    from torch._inductor import compile_fx, cpu_vec_isa

    def probe() -> None:
        with contextlib.suppress(Exception):  # the compilation itself meets the error again
            cpu_vec_isa.pick_vec_isa()

    assert compile_fx is not None  # its imports are those of a compilation: none is left for the thread
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    return thread


def inductor_cache() -> str:
    """The directory of Inductor's disk cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


# -------------------------------------------------------------------------------------------------------------- autograd


def keeps_graph() -> bool:
    """True inside a backward called with retain_graph=True (or create_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors and storages share the tensor's memory, those of C++ included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# ---------------------------------------------------------------------------------------------------- allocator's events


class AllocatorPeak:
    """Largest sum of live bytes that this thread allocated since entry, from the allocator's own events.

    ``nbytes`` after exit: the peak over bytes live at entry; None where another profiler was already active.
    """

    def __init__(self) -> None:
        self.nbytes: int | None = None
        self.events: list[tuple[int, int]] = []
        self._profile: Any = None

    def __enter__(self) -> AllocatorPeak:
        if not torch._C._autograd._profiler_enabled():
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(*exc)
        found = self._profile.kineto_results.events()
        memory = ((e.start_ns(), e.nbytes()) for e in found if e.name() == "[memory]")
        self.events = sorted(memory, key=lambda event: event[0])  # stable: events of the same nanosecond keep their order
        live = peak = 0
        for _, nbytes in self.events:
            live += nbytes
            peak = max(peak, live)
        self.nbytes = peak
