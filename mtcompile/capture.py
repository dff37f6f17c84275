"""From the graph Dynamo captured to a joint (forward + backward) ATen graph. With ``internals.py``, the only file that uses
private torch APIs.

Dynamo itself is entered by the public door, ``torch.compile(fn, backend=...)``: it keeps the guards and checks them at
every call, replays Python side effects, rebuilds pytree outputs and makes a new graph when a guard fails. What reaches
``describe`` is its graph with parameters and buffers lifted to inputs.
"""

from __future__ import annotations

import contextlib
import inspect
import re
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

from mtcompile import masks
from mtcompile.errors import CaptureError, MtcompileError
from mtcompile.passes.step_graph import InputSpec, OutputSpec, generator_state, is_random, set_generator_state
from mtcompile.runtime.schedule import aligned

_CPU = torch.device("cpu")
_RECOMPILE_LIMIT = 512  # signatures of one model; Dynamo's own default of 8 is for functions, not for training runs


# ------------------------------------------------------------------------------------------------------------ front end


def front_end(fn: Callable[..., Any], backend: Callable[..., Any], device: torch.device = _CPU) -> Callable[..., Any]:
    """``fn`` captured whole (no graph breaks), with static shapes; ``backend(graph_module, inputs)`` compiles a graph.
    Parameters may be at home on the host while inputs are on ``device``.

    Raises CaptureError with the user's own source line where ``fn`` cannot be captured.
    """
    without_packed = True

    def checked(graph: fx.GraphModule, inputs: Any) -> Any:
        if without_packed:
            masks.check_positions(graph.graph)
        return backend(graph, inputs)

    compiled = torch.compile(fn, backend=checked, fullgraph=True, dynamic=False)
    # Floats and ints of the call become constants of the graph (guarded), so that nothing in it is symbolic.
    settings = torch._dynamo.config.patch(
        specialize_float=True,
        automatic_dynamic_shapes=False,
        skip_nnmodule_hook_guards=False,  # a hook that comes or goes is another computation
        recompile_limit=_RECOMPILE_LIMIT,
        accumulated_recompile_limit=8 * _RECOMPILE_LIMIT,
    )
    devices = _mixing(device)
    torch._dynamo.config.ignore_logging_functions = _Functions(
        {*set.__iter__(torch._dynamo.config.ignore_logging_functions), *_logging_functions()}
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal without_packed
        try:
            with settings, devices, masks.without_packed() if without_packed else contextlib.nullcontext():
                return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", None) or error.__cause__ or error
            if isinstance(cause, masks.Packed):
                without_packed = False
                return call(*args, **kwargs)
            if isinstance(cause, MtcompileError):
                raise cause from None
            raise CaptureError(_capture_message(error)) from error

    return call


def _mixing(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """While tracing, an operation of host and device operands is the device's: at home is not where it computes."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch._functorch.config.patch(fake_tensor_prefer_device_type=device.type)  # type: ignore[no-any-return]


def sent(values: Any, device: torch.device) -> tuple[Any, int]:
    """A call's arguments with every tensor of the host on ``device``, and the bytes that are there for it."""
    nbytes = 0

    def there(value: Any) -> Any:
        nonlocal nbytes
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or value.device.type != "cpu":
            return value
        nbytes += aligned(max(value.untyped_storage().nbytes(), value.numel() * value.element_size()))
        return value.to(device)  # waits: the caller may write the next batch over it

    return pytree.tree_map(there, values), nbytes


def micro_batches(call: Any, count: int) -> Iterator[Any]:
    """A call's arguments for each of ``count`` micro-batches: tensors with the batch in front are cut into views, all else is
    passed to each. Raises ValueError where the batch cannot be told, or be cut into equal parts."""
    leaves, spec = pytree.tree_flatten(call)
    tensors = [t for t in leaves if isinstance(t, torch.Tensor) and not isinstance(t, torch.nn.Parameter) and t.dim()]
    sizes = sorted({tensor.shape[0] for tensor in tensors} - {1})
    if len(sizes) != 1:
        found = ", ".join(map(str, sizes)) or "none above 1"
        raise ValueError(
            f"accumulate={count}: expected tensors with one batch size in front, found {found}; give those that belong to the "
            "whole batch a first dimension of 1"
        )
    batch = sizes[0]
    if batch % count:
        near = f"{batch // count * count} or " if batch > count else ""
        near += str((batch // count + 1) * count)
        raise ValueError(f"accumulate={count}: expected a batch of a multiple of it, found {batch}; try {near}")
    split = {id(tensor) for tensor in tensors if tensor.shape[0] == batch}
    rows = batch // count
    for start in range(0, batch, rows):
        cut = [leaf[start : start + rows] if id(leaf) in split else leaf for leaf in leaves]
        yield pytree.tree_unflatten(cut, spec)


class _Functions(set[Any]):
    """Some versions of torch sort the members of this setting for their log, which functions cannot be: they see names."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(repr(member) for member in set.__iter__(self)))


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
    tip = (
        "expected a forward without data-dependent Python control flow or unsupported calls; "
        "try torch.where / a tensor operation at that line, or compile the submodules that do not contain it"
    )
    if "backwards hooks" in reason:
        tip = "remove the module's backward hooks; those on parameters and outputs (tensor.register_hook) work"
    return f"the model's forward could not be captured as one graph: {reason}{where}\n  {tip}"


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
    the program must produce: (name, differentiable, is a scalar). ``autocast``: (device, enabled, dtype) at the call;
    ``backward_autocast``: (device, dtype) of those enabled when backward is called, which is mostly outside autocast.
    ``device``: where it computes. ``at_home``: whether its parameters need not be there.
    """

    graph: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    outputs: tuple[Passed | Computed | Constant, ...]
    computed: tuple[tuple[str, bool, bool], ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    device: torch.device
    at_home: bool
    backward_autocast: tuple[tuple[str, torch.dtype], ...] = ()


def _autocast_state(device: torch.device) -> tuple[tuple[str, bool, torch.dtype], ...]:
    kinds = [d for d in dict.fromkeys(("cpu", "cuda", device.type)) if torch.amp.is_autocast_available(d)]
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in kinds)


def enabled_autocast(device: torch.device) -> tuple[tuple[str, torch.dtype], ...]:
    """(device, dtype) of every autocast that is enabled now."""
    return tuple((kind, dtype) for kind, enabled, dtype in _autocast_state(device) if enabled)


def device_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> torch.device:
    """Where a graph of Dynamo's computes: the first device other than the host among its inputs and values."""
    values = [*inputs, *(node.meta.get("example_value") for node in graph.graph.nodes)]
    found = (v.device for v in values if isinstance(v, torch.Tensor) and v.device.type not in ("cpu", "meta"))
    return next(found, _CPU)


def describe(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    names: Callable[[torch.Tensor], tuple[str, str] | None],
    device: torch.device = _CPU,
    at_home: bool = True,
) -> Description:
    """Read Dynamo's graph; ``names(tensor)`` gives (role, path) of the model's own parameters and buffers.

    ``graph`` is changed: outputs become those the program computes, each with storage of its own; with ``at_home``, what
    was said of the host, where parameters are read, is said of ``device``, where they are when they are used.
    Raises CaptureError for inputs or outputs that have no static shape.
    """
    if at_home and device.type != "cpu":
        _check_factories(graph, device)
        _retarget(graph, device)
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
        there = role == "input" and device.type != "cpu" and tensor.device == device
        specs.append(InputSpec(role, name, index, tensor.requires_grad, "device" if there else "host"))  # type: ignore[arg-type]

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
    return Description(graph, tuple(specs), tuple(outputs), computed, _autocast_state(device), device, at_home)


_RANDOM_FACTORIES = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)


def _check_factories(graph: fx.GraphModule, device: torch.device) -> None:
    """Random numbers that plain PyTorch would draw from the host's generator."""
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            made = node.meta.get("example_value")
            drawn = node.target in _RANDOM_FACTORIES and not node.all_input_nodes and "device" not in node.kwargs
            if drawn and isinstance(made, torch.Tensor) and made.device.type == "cpu":
                raise CaptureError(
                    f"the model's forward draws random numbers on the host ({getattr(node.target, '__name__', node.target)} "
                    f"without device=), expected them on {device}, where it computes: pass device=x.device, x being an input"
                )


def _retarget(graph: fx.GraphModule, device: torch.device) -> None:
    """Every constant that names the host names ``device``."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value.type == "cpu" else value

    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))
            if node.kwargs.get("device") == "cpu":
                node.kwargs = {**node.kwargs, "device": device}
            if node.op == "call_method" and node.target == "to":
                node.args = tuple(device if argument == "cpu" else argument for argument in node.args)
            if node.op == "call_method" and node.target == "cpu":
                node.target, node.args = "to", (node.args[0], device)


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
            config = AOTConfig(None, None, None, None, 0, 0, False, is_export=True, ignore_shape_env=True)
            key: Any = autograd_cache_key
            of_compilers: tuple[Any, ...] = ({},) if "fx_config" in inspect.signature(key).parameters else ()  # torch 2.11
            traced = key(graph, fakes, config, *of_compilers)[0]
    except Exception:  # an operation, setting or torch version that it does not know to be safe
        return None
    about = description.inputs, description.computed, description.device, description.at_home, description.backward_autocast
    return repr((traced, about, tangents, modules, settings(description.device)))


def settings(device: torch.device) -> tuple[Any, ...]:
    """What decides, beside the graph itself, which operations a trace for ``device`` consists of, and is not in torch's key."""
    sdp = torch.backends.cuda
    return (
        _autocast_state(device),
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
        if description.at_home and description.device.type != "cpu":
            fakes = tuple(_there(fake, fake_mode, description.device) for fake in fakes)
            stack.enter_context(_mixing(description.device))
            stack.enter_context(description.device)  # factories that name no device
        stack.enter_context(tracing(TracingContext(fake_mode)))
        backward = [{"device_type": device, "dtype": dtype} for device, dtype in description.backward_autocast]
        stack.enter_context(torch._functorch.config.patch(backward_pass_autocast=backward))
        stack.enter_context(torch.set_grad_enabled(tangents is not None))
        stack.enter_context(rng_preserved("cpu"))
        stack.enter_context(rng_preserved(str(description.device)))
        for device, enabled, dtype in description.autocast:  # a retrace happens in a backward, outside the user's autocast
            if enabled != torch.is_autocast_enabled(device) or enabled:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield stack, graph, fakes


def _there(fake: torch.Tensor, mode: Any, device: torch.device) -> torch.Tensor:
    """The same fake tensor on ``device``."""
    with mode:
        made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device)
    return made.requires_grad_(fake.requires_grad)


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
            if any("sparse" in str(node.target) for node in (value, *value.all_input_nodes)):
                raise CaptureError(
                    f"the gradient of {spec.name} is sparse; expected dense gradients, which have a place at home: "
                    "leave sparse=True out of the embedding"
                )
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
    joint.meta.update(inputs=tuple(specs), outputs=tuple(described), device=str(description.device))
    for node in joint.graph.nodes:
        _check_generator(node, description.device)
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if stack:
            node.meta["module_path"] = _module_path(str(list(stack.values())[-1][0]))
    return joint


def _check_generator(node: fx.Node, device: torch.device) -> None:
    """One generator's states are saved and replayed: the device's."""
    val = node.meta.get("val")
    if is_random(node) and isinstance(val, torch.Tensor) and val.device.type != device.type:
        raise CaptureError(
            f"{node.target} draws random numbers on {val.device}, expected on {device}, where the graph computes: "
            f"pass device= to it"
        )


def _is_none(value: Any) -> bool:
    return value is None


def _module_path(path: str) -> str:
    """``layers.0.attention`` out of ``L['self'].__dict__['_modules']['layers'].0.attention``."""
    parts = [a or b or c for a, b, c in re.findall(r"\['?([^'\]]+)'?\]|\.?([A-Za-z_]\w*)|\.?(\d+)", path)]
    return ".".join(p for p in parts[2:] if p not in ("__dict__", "_modules", "_orig_mod"))


@contextlib.contextmanager
def rng_preserved(device: str) -> Iterator[None]:
    state = generator_state(device)
    try:
        yield
    finally:
        set_generator_state(device, state)
