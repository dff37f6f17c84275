"""Lazy modules, whose parameters get their shapes and values when a first forward reaches them.

Dynamo initializes a lazy module when its capture reaches a call of it, from the shapes alone, and puts the random generator
back afterwards. Here the numbers that were drawn stay drawn, as in a plain run, and what a plain run would draw in between is
refused. After a refusal, modules and generator are as before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from mtcompile.errors import BudgetError, CaptureError
from mtcompile.torch_private.thread_setting import ThreadSetting

ADVICE = "\n  initialize lazy modules before: call the plain model once, as in model(example), and compile it then"


@dataclass(slots=True)
class Initialization:
    """The lazy modules of a model that is called for the first time, and their names. ``initialized``: called with the
    parameters that one has got. ``generator``: the state of the random generator after the last one."""

    names: Mapping[nn.Module, str]
    initialized: Callable[[Sequence[Tensor]], None]
    generator: Tensor | None = None

    def initialize(self, module: nn.Module, initialize: Callable[[], None]) -> None:
        """Lets a module initialize itself, with the numbers of the generator that follow those of the last one. Raises
        CaptureError."""
        name = self.names.get(module) or type(module).__name__
        hooks = module._forward_pre_hooks
        if next(iter(hooks), None) != module._initialize_hook.id:  # type: ignore[union-attr]
            raise CaptureError(f"{name} has a forward hook that runs before it is initialized{ADVICE}")
        lazy = [parameter for parameter in module.parameters() if is_lazy(parameter)]
        if self.generator is not None:
            torch.set_rng_state(self.generator)
        try:
            initialize()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise CaptureError(f"{name} could not be initialized from shapes: {reason}{ADVICE}") from error
        self.generator = torch.get_rng_state()
        self.initialized(lazy)

    def draw_as_plain(self) -> None:
        """Leaves the generator as it is after initialization in a plain run; once."""
        if self.generator is not None:
            torch.set_rng_state(self.generator)
        self.generator = None


_initialization = ThreadSetting[Initialization | None](None)


def lazy_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Returns the modules that their next forward initializes, with their names."""
    return {module: name for name, module in model.named_modules() if hasattr(module, "_initialize_hook")}


@contextlib.contextmanager
def initializing(modules: Mapping[nn.Module, str], initialized: Callable[[Sequence[Tensor]], None]) -> Iterator[None]:
    """The first call of a model inside initializes its lazy ``modules`` as a plain run does, and leaves the generator where a
    plain run would at the start of its other computation. Raises CaptureError where it would draw other numbers in between.

    ``initialized`` is called after each, with its parameters. After a CaptureError or BudgetError, everything is as before.
    """
    states, generator = [_State.of(module) for module in modules], torch.get_rng_state()
    try:
        if not _replace_initialization():
            raise CaptureError(f"{next(iter(modules.values()))} is a lazy module, which this version of torch captures{ADVICE}")
        with _initialization.during(Initialization(modules, initialized)):
            yield
    except (CaptureError, BudgetError):
        for state in states:
            state.restore()
        torch.set_rng_state(generator)
        raise


def initialize_root(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Initializes a lazy model itself, as the first of its forward hooks does. Call this inside ``initializing``."""
    assert _initialization.value is not None
    _initialization.value.initialize(model, lambda: model._infer_parameters(model, args, kwargs))  # type: ignore[operator]


def after_initialization(program: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a program captured inside ``initializing`` so that it draws what a plain run does; any other one as it is."""
    if (initialization := _initialization.value) is None:
        return program

    def drawing_as_plain(*inputs: Tensor) -> Any:
        initialization.draw_as_plain()  # Dynamo has put the generator back when this is called
        return program(*inputs)

    return drawing_as_plain


@dataclass(frozen=True, slots=True)
class _State:
    """A lazy module as it was: its class, attributes, hooks, and tensors."""

    module: nn.Module
    cls: type
    attributes: dict[str, Any]
    hooks: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]]
    tensors: list[tuple[Tensor, type, Tensor]]

    @classmethod
    def of(cls, module: nn.Module) -> _State:
        attributes = dict(vars(module))
        dicts = [value for value in attributes.values() if isinstance(value, MutableMapping)]
        own = [*module._parameters.values(), *module._buffers.values()]
        tensors: list[tuple[Tensor, type, Tensor]] = [(t, type(t), t.data) for t in own if t is not None and is_lazy(t)]
        return cls(module, type(module), attributes, [(each, dict(each)) for each in dicts], tensors)

    def restore(self) -> None:
        self.module.__class__ = self.cls
        vars(self.module).clear()
        vars(self.module).update(self.attributes)
        for each, entries in self.hooks:
            each.clear()
            each.update(entries)
        for tensor, cls, data in self.tensors:
            tensor.data = data
            tensor.__class__ = cls


@functools.cache
def _replace_initialization() -> bool:
    """Lets Dynamo initialize modules through ``Initialization``. Returns False where a version of torch does it elsewhere."""
    from torch._dynamo.variables import nn_module

    plain = getattr(nn_module, "initialize_lazy_module", None)
    if plain is None or list(inspect.signature(plain).parameters) != ["tx", "mod", "args", "kwargs"]:
        return False

    @functools.wraps(plain)
    def initialize(tx: Any, mod: nn.Module, args: Any, kwargs: Any) -> None:
        current = _initialization.value
        if current is None or not hasattr(mod, "_initialize_hook"):
            return plain(tx, mod, args, kwargs)  # type: ignore[no-any-return]
        if any(_may_draw(tracer.graph, tx.fake_mode) for tracer in tx.output.tracers):
            raise CaptureError(
                f"forward draws random numbers (dropout, torch.rand, ...) before it initializes {current.names.get(mod)}, "
                f"which a plain run does in turns{ADVICE}"
            )
        return current.initialize(mod, lambda: plain(tx, mod, args, kwargs))

    nn_module.initialize_lazy_module = initialize
    return True


class Drawing(TorchDispatchMode):
    """Notices operations that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _may_draw(graph: fx.Graph, fake_mode: Any) -> bool:
    """Tells whether what Dynamo has captured so far draws random numbers, or cannot be told."""
    drawing = Drawing()
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    with fake_mode, drawing:
        for node in calls:
            try:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta["example_value"])
                if node.op == "call_method":
                    getattr(args[0], node.target)(*args[1:], **kwargs)
                else:
                    node.target(*args, **kwargs)
            except Exception:
                return True
    return drawing.drew
