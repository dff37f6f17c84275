"""Dynamo's front end: a function captured whole, with static shapes, and its guards checked at every call.

Dynamo is entered by the public door, ``torch.compile(fn, backend=...)``: it keeps the guards, replays Python side effects,
rebuilds pytree outputs and makes a new graph when a guard fails. What reaches the backend is its graph with parameters and
buffers lifted to inputs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from mtcompile import knobs, progress, torch_private
from mtcompile.capture import known_shapes
from mtcompile.capture.methods import TracedMethods
from mtcompile.capture.refusals import (
    RUNS_A_BACKWARD,
    NotOneGraph,
    check_memory_error,
    may_part,
    not_captured,
    not_compiled,
    place_in,
    place_of,
    refuse,
    why_and_where,
    with_place,
)
from mtcompile.errors import CaptureError, MtcompileError
from mtcompile.references import collecting_seldom
from mtcompile.runtime.disk.errors import DiskError
from mtcompile.torch_private import plain_torch, refusing_random_numbers

_CPU = torch.device("cpu")
_DOING = "the model's forward could not be captured as one graph"
_RANDOM = (
    "forward uses a random.Random or Python's random module, whose numbers cannot be part of a graph\n"
    "  expected random numbers from torch's default generator only; draw others outside forward and pass them as tensors"
)
_LEAF = (
    "forward returns or stores a tensor on which it set requires_grad=True; its .grad would be missing\n"
    "  expected such a tensor to stay inside forward; return tensor.detach() instead"
)
_TRAINS_WITHIN = (
    "forward runs a backward itself, and may step the optimizer {name}; a graph can hold neither{place}\n"
    "  expected a forward that leaves gradients and parameters as they are: train that part outside forward"
)
_OWN_GRADIENTS = (
    "expected torch's own gradients of its operations, found an implementation for autograd by torch.library: {}\n"
    "  a capture goes past it, and would give other gradients. Call a torch.autograd.Function or an operation of your own"
)
_only_whole: ContextVar[bool] = ContextVar("only_whole", default=False)
_MOST_PROGRAMS = 32  # of one model; in parts, for each part
_MOST_SIGNATURES = 512  # of one model; Dynamo's own default of 8 is for functions, not for training runs


def front_end(
    fn: Callable[..., Any],
    backend: Callable[..., Any],
    device: torch.device = _CPU,
    in_parts: bool = False,
    drop: Callable[[], None] = lambda: None,
) -> Callable[..., Any]:
    """``fn`` captured whole with static shapes, when it is called; ``backend(graph_module, inputs)`` compiles a graph.
    Parameters may be at home on the host while inputs are on ``device``. ``in_parts``: where ``fn`` cannot be captured whole,
    capture what lies between the lines that cannot be captured, as one graph each, and run these lines in Python. ``drop`` is
    called when all that ``backend`` has returned is needed no more.

    Raises CaptureError with the user's own source line where ``fn`` cannot be captured.
    """
    state = _State(plain_torch.Answers(_stand_ins(device)))

    def checked(graph: fx.GraphModule, inputs: Any, place: str = "") -> Any:
        if (leaf := torch_private.returned_leaf(graph.graph)) is not None:
            raise CaptureError(state.passed_on(place_of([leaf])) if state.in_parts else _LEAF + place_of([leaf]))
        state.programs[place] += 1
        state.traced |= torch_private.traced_code()
        expecting, seeing = torch_private.expecting_values(graph), torch_private.seeing_hooks(graph)
        graph.meta["told"] = state.answers.told()
        with torch_private.interrupts_at_once():
            program = expecting(seeing(backend(graph, inputs)))
        progress.tell("")  # from here on the program runs
        return program

    def checked_part(graph: fx.GraphModule, inputs: Any) -> Any:
        reason, report = torch_private.break_after(graph)
        why, place = why_and_where(reason, report)
        state.note_break(why, place, reason)
        graph.meta["is_part"] = True
        return checked(graph, inputs, place)

    torch_private.leave_out_of_graphs(_logging_functions())
    torch_private.noting_arguments_of_checkpoints()
    torch_private.leaving_out_absent_gradients()
    torch_private.tracing_wide_grouped_products()
    torch_private.tracing_limits_of_deques()
    torch_private.keeping_later_attributes()
    torch_private.dropping_guards()
    torch_private.dropping_sources()
    torch_private.without_reports_of_failures()
    torch_private.holding_interrupts()
    methods = TracedMethods()
    made = weakref.WeakSet[Any]()

    # ``fn`` by the settings that choose kernels, and the hooks of all modules: variants, each captured with other values; the
    # one that ran last is the first
    captures: dict[tuple[Any, ...], list[Callable[..., Any]]] = {}

    def variant() -> Callable[..., Any]:
        _let_weights_be_seen()
        if state.in_parts:  # a backend of its own: Dynamo keeps captures of inner functions by their code and the backend
            return torch_private.compiled_by(functools.partial(checked_part), _copied(fn), whole=False)
        return torch_private.compiled_by(checked, _copied(fn), whole=True)

    @torch_private.one_at_a_time
    def call(*args: Any, **kwargs: Any) -> Any:
        if state.in_parts and _only_whole.get():
            raise CaptureError("expected a forward that is captured whole, found one that is captured in parts")
        if state.is_full() or methods.changed():
            captures.clear()
            drop()
        settings = *torch_private.kernel_choices(device), torch_private.global_module_hooks()
        if settings not in captures and (own := torch_private.users_gradients()):  # which the settings name
            raise CaptureError(_OWN_GRADIENTS.format(own[0]))
        try:
            return by_variant(captures.setdefault(settings, []), args, kwargs)
        finally:
            if state.traced:
                torch_private.forget_measures()
                methods.note(state.traced, args[0].modules() if args and isinstance(args[0], nn.Module) else ())
                state.traced = set()

    def by_variant(variants: list[Callable[..., Any]], args: Any, kwargs: Any) -> Any:
        for _ in tuple(variants):
            with contextlib.suppress(torch_private.OtherValues):
                return captured(variants, args, kwargs)
            variants.append(variants.pop(0))
        variants.insert(0, variant())
        with progress.doing("capturing the forward"):
            return captured(variants, args, kwargs)

    def captured(variants: list[Callable[..., Any]], args: Any, kwargs: Any) -> Any:
        try:
            known = None if state.in_parts else torch_private.captured_before(variants[0], args, kwargs)
            if known is not None:
                return known(*args, **kwargs)
            torch_private.forget_counted_frames()
            with (
                collecting_seldom(),
                torch_private.own_capture(),
                torch_private.captures_of(made),
                torch_private.capture_settings(_MOST_SIGNATURES, state.in_parts),
                torch_private.mixing_devices(device),
                refusing_random_numbers(_RANDOM),
                plain_torch.plain_answers(state.answers),
                torch_private.checking_branches(not state.in_parts),
                torch_private.tracing_new_leaves(),
                torch_private.copying_equal_modules(state.copies),
                torch_private.tracing_side_actions(),
                torch_private.computing_numpy(device),
                torch_private.taking_known_values(state.takes, known_shapes.shaped),
            ):
                return variants[0](*args, **kwargs)
        except torch_private.OtherValues:
            raise
        except Exception as error:
            check_memory_error(error)
            cause = torch_private.cause_in_dynamo(error)
            if cause is None and not torch_private.raised_in_capture(error):
                raise
            if isinstance(cause, DiskError):  # of what was planned behind the capture
                raise cause from None
            open_to_others = not isinstance(cause, MtcompileError) or type(cause) in (CaptureError, NotOneGraph)
            if open_to_others and (_has_set_up(args, error) or state.concede()):
                return captured(variants, args, kwargs)
            if in_parts and not state.in_parts and not _only_whole.get() and _breaks(cause, error):
                why, place = why_and_where(cause or error, str(error))
                if why == RUNS_A_BACKWARD and (name := _optimizer_in(args)):
                    refuse(CaptureError(_TRAINS_WITHIN.format(name=name, place=place)), error)
                state.part(why, place, str(error))
                variants[:] = [variant()]
                with torch_private.without_break_warnings():
                    return captured(variants, args, kwargs)
            if isinstance(cause, MtcompileError):
                refuse(with_place(cause, error), error)
            if cause is None or torch_private.failed_inside(error):
                refuse(not_compiled(cause or error, _DOING, place_in(str(error))), error)
            refuse(not_captured(error), error)

    weakref.finalize(call, torch_private.drop_captures, made).atexit = False
    return call


@contextlib.contextmanager
def only_whole() -> Iterator[None]:
    """Lets a forward that would be captured in parts raise CaptureError: Python would run what lies between them."""
    token = _only_whole.set(True)
    try:
        yield
    finally:
        _only_whole.reset(token)


def _breaks(cause: BaseException | None, error: Exception) -> bool:
    """Tells whether a capture failed at a line that Python can run between two graphs."""
    return (isinstance(cause, NotOneGraph) or torch_private.is_graph_break(error)) and may_part(error)


@dataclass(slots=True)
class _State:
    """How one function is captured. ``takes``: the types of values that its captures take where the call's inputs decide them:
    truth values, of which there are two, and where there is no other way also numbers, of which each makes a capture of its
    own. ``in_parts``: it is captured in parts. ``breaks``: the lines between them that the user has been told of, and what they
    do. ``programs``: how many were made, since all were dropped. ``traced``: the code that the present call has traced."""

    answers: plain_torch.Answers
    copies: torch_private.Copies = field(default_factory=torch_private.Copies)
    takes: tuple[type, ...] = (bool,)
    in_parts: bool = False
    breaks: dict[str, str] = field(default_factory=dict)
    programs: Counter[str] = field(default_factory=Counter)  # by the line that the part ends before
    has_been_full: bool = False
    traced: set[types.CodeType] = field(default_factory=set)

    def is_full(self) -> bool:
        """Tells whether all programs are to be dropped, because there are as many as may be. Warns the first time."""
        if max(self.programs.values(), default=0) < _MOST_PROGRAMS:
            return False
        self.programs.clear()
        if not self.has_been_full:
            warnings.warn(
                f"mtcompile has made {_MOST_PROGRAMS} programs for this model, its limit; it drops them, and makes them again "
                "when needed. Pad inputs to a few lengths, such as multiples of 64",
                stacklevel=3,
            )
        self.has_been_full = True
        return True

    def concede(self) -> bool:
        """After a capture that failed: says whether there is another way to try."""
        if self.copies.allowed and self.copies.made:
            self.copies.allowed = False
            return True
        if self.answers.concede():
            return True
        if self.in_parts or int in self.takes:
            return False
        self.takes = (bool, int)
        return True

    def part(self, why: str, place: str, report: str) -> None:
        """Goes on in parts. They take no values: what a later part expects could be found out only after earlier ones ran."""
        self.in_parts, self.takes, self.copies.allowed = True, (), False
        self.note_break(why, place, report)

    def note_break(self, why: str, place: str, report: str) -> None:
        """Warns once about a line that parts a forward, and says what it does. ``report``: torch's own words."""
        line = place.partition(" in ")[0]  # without its function: Dynamo makes one of what is left of a forward
        if line and line not in self.breaks:
            self.breaks[line] = f"{why}{place}"
            warnings.warn(
                f"the forward is compiled in parts: Python runs this line between two of them, since it {why}{place}\n"
                "  values stay the same; so do gradients, except those that model.plan.numerics names. What Python runs is not "
                "counted in the budget. Change the line to get one plan"
                + (f"\n  torch says: {report}" if knobs.debug() else ""),
                stacklevel=2,
            )

    def passed_on(self, place: str) -> str:
        """Says why a forward in parts is refused if one of them returns a tensor that began to require grad at ``place``."""
        lines = "".join(f", since a line {line}" for line in list(self.breaks.values())[:1])
        return (
            "a part of the forward passes on a tensor on which forward set requires_grad=True; its .grad would be missing"
            f"{place}\n  the forward is compiled in parts{lines}\n  change one of these lines, or pass on tensor.detach()"
        )


def _has_set_up(args: Any, error: Exception) -> bool:
    """Lets Transformers install the hooks by which its models keep hidden states and attention maps, where a capture failed
    because forward would do that. A plain run installs them once, under a lock, in the first call that asks for such outputs.
    Tells whether any were missing."""
    library: Any = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(library, "maybe_install_capturing_hooks", None)
    if install is None or f" in {install.__name__}\n" not in str(error) or not isinstance(args[0], torch.nn.Module):
        return False
    pretrained = sys.modules["transformers.modeling_utils"].PreTrainedModel
    models = [module for module in args[0].modules() if isinstance(module, pretrained)]  # the outermost install for the others
    missing = [model for model in models if not getattr(model, "_output_capturing_hooks_installed", False)]
    for model in missing:
        install(model)
    return bool(missing)


def _optimizer_in(args: Any) -> str | None:
    """The name of an optimizer that the called model, or a module in it, holds."""
    modules = args[0].named_modules() if args and isinstance(args[0], torch.nn.Module) else ()
    held = ((path, name, value) for path, module in modules for name, value in vars(module).items())
    return next((f"{path}.{name}".lstrip(".") for path, name, value in held if isinstance(value, torch.optim.Optimizer)), None)


def _stand_ins(device: torch.device) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Python functions that are captured in place of torch's."""
    looking_at_values = torch.nn.functional.gaussian_nll_loss  # which Dynamo would take whole
    stand_ins: dict[Callable[..., Any], Callable[..., Any]] = {looking_at_values: looking_at_values, **known_shapes.STAND_INS}
    return stand_ins if device.type == "cuda" else {**stand_ins, torch.backends.cudnn.flags: _no_flags}


def _no_flags(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    """cuDNN's settings, where it does not compute."""
    return contextlib.nullcontext()


def _copied(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function like ``fn``, whose captures Dynamo keeps by themselves; ``fn`` itself if it is no Python function."""
    if not isinstance(fn, types.FunctionType):
        return fn
    copy = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def _let_weights_be_seen() -> None:
    """Lets Dynamo capture DoRA: PEFT asks a weight's type for the library that quantized it, where Dynamo stops."""
    integrations: Any = sys.modules.get("peft.utils.integrations")
    if integrations is None or hasattr(weight_of := integrations.dequantize_module_weight, "_mt_seen"):
        return
    other_libraries = _copied(weight_of)

    @torch.compiler.substitute_in_graph(weight_of)
    def seen(module: Any) -> Any:
        if type(weight := module.weight) is nn.Parameter:
            return weight
        if type(weight).__name__ == "Params4bit":
            return sys.modules["bitsandbytes"].functional.dequantize_4bit(weight, weight.quant_state)
        return other_libraries(module)

    weight_of._mt_seen = True


def _logging_functions() -> set[Any]:
    """Functions that only warn or log: harmless to leave out of a graph (Transformers' models call them in forward)."""
    logging = sys.modules.get("transformers.utils.logging")  # of a model that has it; others need not wait for its import
    if logging is None:
        return {warnings.warn}
    logger = type(logging.get_logger("transformers"))
    return {warnings.warn, logger.warning_once, logger.warning, logger.info, logger.debug}
