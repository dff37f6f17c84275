"""The joint export, its cache key, tensors without memory, and what a captured function changes in place."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mtcompile.torch_private.autograd import storage_id
from mtcompile.torch_private.interrupts import interrupts_after_tracing
from mtcompile.torch_private.patched import patched
from mtcompile.torch_private.thread_setting import ThreadSetting

Strides = Mapping[int, tuple[int, ...]]  # of gradients that arrive from outside, by the outputs that they are of

_tangent_strides = ThreadSetting[Strides]({})


def fake_mode_of(fakes: Iterable[torch.Tensor]) -> Any:
    """The mode that the fake tensors were made under, else the one that is active."""
    from torch._guards import detect_fake_mode

    return next((fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode")), None) or detect_fake_mode()


@functools.cache
def tracing_wide_grouped_products() -> None:
    """Lets traces take ``grouped_mm`` of fp32 and fp16 operands from now on. It runs on them, but its shape function knows bf16
    alone, up to torch 2.13 at least."""
    from torch import _meta_registrations

    meta: Any = _meta_registrations
    plain, empty = (getattr(meta, name, None) for name in ("_meta_grouped_mm_common", "_create_grouped_mm_output_tensor"))
    if plain is None or empty is None:  # another torch, which traces what it can
        return

    @functools.wraps(plain)
    def common(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wide = mat_a.dtype == mat_b.dtype and mat_a.dtype in (torch.float32, torch.float16)
        scaled = any(kwargs.get(name) is not None for name in ("scale_a", "scale_b", "scale_result", "bias"))
        offs, out_dtype = kwargs.get("offs"), kwargs.get("out_dtype")
        if args or not wide or scaled or offs is None or out_dtype not in (None, mat_a.dtype):
            return plain(mat_a, mat_b, *args, **kwargs)
        inner = (mat_a.shape[-1], mat_b.shape[-2])
        torch._check(inner[0] == inner[1], lambda: f"expected as many columns as rows in a product, found {inner}")
        for mat in (mat_a, mat_b):
            aligned = max(mat.stride()[-2:]) % (16 // mat.element_size()) == 0
            torch._check(aligned, lambda: "expected strides of multiples of 16 bytes")
        torch._check(offs.dim() == 1 and offs.dtype == torch.int32, lambda: f"expected int32 [groups], found {offs}")
        return empty(mat_a, mat_b, offs, out_dtype)

    meta._meta_grouped_mm_common = common


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they live, as on fake tensors. ``peak``: the most so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_id(value) for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)}
        results = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(results):
            if isinstance(value, torch.Tensor) and storage_id(value) not in given:
                self._note(value.untyped_storage())
        return results

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._seen:
            nbytes = self._seen[storage] = storage.nbytes()
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, nbytes)

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes


@contextlib.contextmanager
def tracing_joint(fake_mode: Any, backward_autocast: Iterable[tuple[str, torch.dtype]]) -> Iterator[None]:
    """The context that ``export_joint`` needs. ``backward_autocast``: (device, dtype) of every autocast
    that is enabled when backward is called. Random numbers that nothing reads are drawn too, as in a plain run: what is drawn
    after them depends on it."""
    from torch._functorch import config as functorch_config
    from torch._guards import TracingContext, tracing
    from torch._inductor import config as inductor_config

    autocast = [{"device_type": device, "dtype": dtype} for device, dtype in backward_autocast]
    keeping_random = patched(inductor_config, fallback_random=True)  # fx asks this before it drops what nothing reads
    with tracing(TracingContext(fake_mode)), patched(functorch_config, backward_pass_autocast=autocast), keeping_random:
        yield


def export_joint(
    stack: contextlib.ExitStack, graph: fx.GraphModule, fakes: tuple[torch.Tensor, ...], strides: Strides
) -> fx.GraphModule:
    """The joint (forward and backward) ATen graph of one of Dynamo's. Placeholders carry ``meta["desc"]``, and so does the
    output node. ``strides``: of the gradients of some outputs; torch chooses those of the others."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    _replace_tangents()
    with _tangent_strides.during(strides), interrupts_after_tracing():
        return aot_export_joint_with_descriptors(stack, graph, fakes, ignore_shape_env=True).graph_module


@functools.cache
def _replace_tangents() -> None:
    """Lets the tracing of a backward ask for strides here first. Outside ``export_joint``, nothing is changed."""
    from torch._functorch._aot_autograd import graph_compile

    plain = graph_compile.aot_dispatch_autograd_graph

    @functools.wraps(plain)
    def with_strides(*args: Any, fw_metadata: Any, **kwargs: Any) -> Any:
        def tangent(traced: torch.Tensor, desc: Any) -> torch.Tensor:
            strides = _tangent_strides.value.get(getattr(desc.output, "idx", -1))
            return traced if strides is None else traced.new_empty_strided(traced.shape, strides)

        tangents, descs = fw_metadata.traced_tangents, fw_metadata.traced_tangents_descs
        fw_metadata.traced_tangents = [tangent(traced, desc) for traced, desc in zip(tangents, descs, strict=True)]
        return plain(*args, fw_metadata=fw_metadata, **kwargs)

    graph_compile.aot_dispatch_autograd_graph = with_strides


def without_memory() -> contextlib.AbstractContextManager[Any]:
    """Tensors made inside have shapes and devices and no content."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def within_a_graphs_mode() -> contextlib.AbstractContextManager[Any]:
    """Suspends ``without_memory``: a graph's fake tensors have a mode of their own, and what is made of them has that one."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


@contextlib.contextmanager
def building_without_memory() -> Iterator[Callable[[torch.nn.Module], None]]:
    """``without_memory`` for code that builds a model: ``module.to`` converts, random initial values are left out, and
    ``torch.linspace``, which says how often to drop which layer, gives numbers that can be looked at. Call what it gives with
    the model that was built: from then on it is ``without_memory`` alone, and Dynamo need not trace these additions."""
    import torch.nn.init as init
    from torch.overrides import TorchFunctionMode

    class NumbersOfLinspace(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            values = [value for value in pytree.tree_leaves(args) if isinstance(value, torch.Tensor)]
            if func is torch.linspace or (values and all(isinstance(value, _Numbers) for value in values)):
                with _with_memory():
                    computed = func(*args, **(kwargs or {}))
                return pytree.tree_map_only(torch.Tensor, lambda t: t.as_subclass(_Numbers), computed)
            return func(*args, **(kwargs or {}))

    before = torch.nn.Module._apply, init._no_grad_trunc_normal_

    def restore() -> None:
        torch.nn.Module._apply, init._no_grad_trunc_normal_ = before  # type: ignore[method-assign]

    with without_memory() as mode, contextlib.ExitStack() as building:

        def built(module: torch.nn.Module) -> None:
            building.close()
            for part in module.modules():
                for held in (part._buffers, vars(part)):
                    numbers = {name: value for name, value in held.items() if isinstance(value, _Numbers)}
                    for name, value in numbers.items():
                        held[name] = mode.from_tensor(value.as_subclass(torch.Tensor))

        building.callback(restore)
        torch.nn.Module._apply = _converting(before[0])  # type: ignore[method-assign]
        init._no_grad_trunc_normal_ = lambda tensor, *args, **kwargs: tensor  # it looks at what it has drawn
        building.enter_context(NumbersOfLinspace())
        yield built


class _Numbers(torch.Tensor):
    """A tensor with content among tensors without."""


@contextlib.contextmanager
def _with_memory() -> Iterator[None]:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch._C.DisableTorchFunctionSubclass():
        yield


def _converting(plain: Any) -> Any:
    """Returns ``nn.Module._apply`` for tensors without memory: torch would swap them with their conversions, which fails. Tied
    parameters stay tied."""
    from torch._subclasses.fake_tensor import FakeTensor

    converted: dict[tuple[int, int], tuple[Any, Any, Any]] = {}  # with what the ids are of, so that they stay theirs

    def convert(fn: Any, tensor: torch.Tensor) -> torch.Tensor:
        key = id(fn), id(tensor)
        if key not in converted:
            with torch.no_grad():
                result = fn(tensor)
            if isinstance(tensor, torch.nn.Parameter):
                result = torch.nn.Parameter(result, tensor.requires_grad)
            converted[key] = fn, tensor, result
        return converted[key][2]  # type: ignore[no-any-return]

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        own = [value for value in (*self._parameters.values(), *self._buffers.values()) if value is not None]
        if own and not all(isinstance(value, FakeTensor) or value.is_meta for value in own):
            return plain(self, fn, recurse)
        for child in self.children() if recurse else ():
            child._apply(fn)
        for tensors in (self._parameters, self._buffers):
            tensors.update({name: convert(fn, value) for name, value in tensors.items() if value is not None})
        return self

    return _apply


def lasting() -> contextlib.AbstractContextManager[Any]:
    """Tensors made inside may be written at any time, also when they are made under torch.inference_mode."""
    if not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())  # which leaving inference mode would enable
    return stack


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Inside, tensors are made and copied as outside of every mode of torch: of devices, functions, inference, transforms."""
    with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch(), lasting(), torch.no_grad():
        yield


def repeated_effects(
    checkpoint: fx.Node, body: fx.GraphModule, operands: Sequence[Any]
) -> Iterator[tuple[int | None, fx.Node]]:
    """Yields what differs when a plain run computes the body of a checkpoint again in the backward: (position, node) for each
    change in place of an operand, and (None, node) for each draw of random numbers whose generator's state is not restored
    then. Runs the body on the operands, which are fake tensors."""
    changed = set[int]()  # storages of the statistics that a batch norm changes, which its schema does not say
    draws = [False]

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "batch_norm" in func.__name__ and "backward" not in func.__name__ and len(args) > 5 and args[5] is True:
                changed.update(storage_id(tensor) for tensor in args[3:5] if isinstance(tensor, torch.Tensor))
            draws[0] |= torch.Tag.nondeterministic_seeded in func.tags
            return func(*args, **(kwargs or {}))

    class Watching(fx.Interpreter):
        def __init__(self, checkpoint: fx.Node, body: fx.GraphModule, restores: bool) -> None:
            super().__init__(body)
            self.restores = restores and bool(checkpoint.kwargs.get("preserve_rng_state", True))

        def run_node(self, node: fx.Node) -> Any:
            if node.target is torch.ops.higher_order.tag_activation_checkpoint:
                inner, *args = self.fetch_args_kwargs_from_env(node)[0]
                return Watching(node, inner, self.restores).run(*args)
            changed.clear()
            draws[0] = False
            before = [_version(operand) for operand in operands]
            result = super().run_node(node)
            for position, operand in enumerate(operands):
                of_statistics = isinstance(operand, torch.Tensor) and storage_id(operand) in changed
                if of_statistics or _version(operand) != before[position]:
                    effects.append((position, node))
            if draws[0] and not self.restores:
                effects.append((None, node))
            return result

    effects: list[tuple[int | None, fx.Node]] = []
    fake = fake_mode_of(operands) or contextlib.nullcontext()
    with fake, torch.no_grad(), _autocasts_around(checkpoint), Calls():  # type: ignore[no-untyped-call]
        Watching(checkpoint, body, True).run(*operands)
    return iter(effects)


@contextlib.contextmanager
def _autocasts_around(node: fx.Node) -> Iterator[None]:
    """The autocasts that a captured graph enters before one of its nodes and leaves after it."""
    entered = dict[fx.Node, tuple[Any, ...]]()
    for before in itertools.takewhile(lambda each: each is not node, node.graph.nodes):
        if before.target is torch.amp.autocast_mode._enter_autocast:
            entered[before] = before.args
        elif before.target is torch.amp.autocast_mode._exit_autocast:
            entered.pop(before.args[0], None)
    with contextlib.ExitStack() as stack:
        for device, dtype, enabled, _ in entered.values():
            stack.enter_context(torch.autocast(device, dtype, enabled))
        yield


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
