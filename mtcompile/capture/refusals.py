"""Words for what cannot be captured: the reason, the user's own line, and what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

import torch
from torch import fx, nn

from mtcompile import knobs, torch_private
from mtcompile.errors import CaptureError, MtcompileError
from mtcompile.optim.precision import Precision
from mtcompile.passes.joint.batch.joining import Micro
from mtcompile.reading import printable

_DATA = (
    "expected shapes and Python values that do not depend on what tensors hold; try torch.where or a tensor operation at "
    "that line, or compute the value outside forward and pass it"
)
_ASKS_VALUES = r"(?i)data.?dependent|\.item\(\)|tolist|nonzero|unbacked|dynamic.?(output.?)?shape"
_TIPS = (  # for the first expression that occurs in the first line of torch's report, or else in all of it
    (
        "when making fake tensor call",
        "expected operands that fit together, even where forward catches the error; if they do fit, torch cannot trace that "
        "operation: use another one at that line, such as torch.tensor(values, dtype=...) in place of torch.FloatTensor",
    ),
    (
        r"(?i)nested.?tensor",
        "expected dense tensors; if nn.TransformerEncoder packs padded batches into nested tensors in evaluation, pass "
        "enable_nested_tensor=False to it, and to a plain model that you compare with; this changes nothing in training",
    ),
    (
        r"Observed exception",
        "the forward raises this by itself, as it would without mtcompile. Check what you pass to the model",
    ),
    ("backwards hooks", "remove the module's backward hooks; those on parameters and outputs (tensor.register_hook) work"),
    (
        r"[Rr]andom|\brandn?\b|Generator\b|seed\b|_rng\b",
        "expected random numbers from torch's default generator only (torch.rand(..., device=x.device), dropout, ...), seeded "
        "outside forward: draw others outside and pass them as tensors",
    ),
    (_ASKS_VALUES, _DATA),
)
_OTHERWISE = (
    "expected a forward without data-dependent Python control flow or unsupported calls; "
    "try torch.where / a tensor operation at that line, or compile the submodules that do not contain it"
)

_DTYPES = re.compile(r"same dtype|scalar type|should be the same|mixed dtype")

_UNTRACED = (
    "expected operations that torch can trace from shapes and dtypes alone: use others at that line, or compile the "
    "submodules that do not contain it"
)
_ELSEWHERE = (
    "expected a call as plain training makes it: if it stands in a transform (torch.func.vmap, grad, functional_call), call "
    "the plain model in it"
)


_RESUMED = r"^(?:torch_dynamo_resume_in_)+(.*?)(?:_at_\d+)+$"  # the name that Dynamo gives to the rest of a function


class NotOneGraph(CaptureError):
    """Raised for what cannot be part of a graph, but may stand between two."""


@contextlib.contextmanager
def naming_casts(precision: Precision) -> Iterator[None]:
    """Adds to errors about operands of two dtypes that ``precision`` has cast the parameters and nothing else."""
    try:
        yield
    except (RuntimeError, CaptureError) as error:
        if precision.weights is None or type(error) not in (RuntimeError, CaptureError) or not _DTYPES.search(str(error)):
            raise
        raise type(error)(
            f'{error}\n  precision="{precision.name}" has cast the parameters only: pass inputs in {precision.weights}, and '
            "cast floating-point buffers, such as a batch norm's, before compile: buffer.data = buffer.data.to(...)"
        ) from error


def place_in(text: str) -> str:
    """The last line of the user's own code that a report or a traceback in ``text`` names, as a sentence's end; "" for none."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)(?:\n[ \t]+(?!File ")(\S[^\n]*))?', text)
    frames = [frame for frame in frames if "/torch/" not in frame[0] and "/mtcompile/" not in frame[0]]
    if not frames:
        return ""
    file, line, function, code = frames[-1]
    function = re.sub(_RESUMED, r"\1", function)
    return f"\n  at {file}:{line} in {function}" + (code and f": {code}")


def place_of(nodes: Iterable[fx.Node]) -> str:
    """The user's line that made the first of ``nodes`` for which one is known."""
    places = (place_in(str(node.meta.get("stack_trace") or "")) for node in nodes)
    return next((place for place in places if place), "")


@contextlib.contextmanager
def in_micro_batches(micro: Micro | None) -> Iterator[None]:
    """Turns a NotImplementedError, which says what a model does, what to do, and perhaps where, into the CaptureError that
    says why the model cannot run in micro-batches. None: there are none."""
    try:
        yield
    except NotImplementedError as error:
        if micro is None:
            raise
        what, *ways = (argument for argument in error.args if isinstance(argument, str))
        place = place_of(node for node in (getattr(error, "node", None), *error.args) if isinstance(node, fx.Node))
        way = ", or ".join((*ways, "pass accumulate=1"))
        raise CaptureError(f"accumulate={micro.count}: the model has {what}; {way}{place}") from None


def not_captured(error: BaseException) -> CaptureError:
    """Returns the error that says why Dynamo could not capture a forward."""
    text = str(error)
    context = re.search(r"Developer debug context: *(\S[^\n]*)", text)
    raised = re.search(r"when making fake tensor call.*?: got \w+\((['\"])(.*?)\1\)", text, re.DOTALL)  # by an operation
    report = text.partition("from user code")[0]
    tips = (tip for words in (first_line(error), report) for expression, tip in _TIPS if re.search(expression, words))
    place = place_in(text)
    tip = next(tips, _OTHERWISE if place else _ELSEWHERE)
    kind = torch_private.raised_by_captured(error)
    if raised is not None:
        reason = raised[2]
    elif context is not None and (kind is not None or "Observed exception" in text):
        reason = f"it raised an exception of its own ({_plainly(context[1])})"
    elif torch_private.is_graph_break(error):
        reason = f"{'this line' if place else 'it'} {what_it_does(first_line(error))}"
    else:
        reason = first_line(error)
    return _also(kind)(f"the model's forward could not be captured as one graph: {reason}{place}\n  {tip}")


def _plainly(context: str) -> str:
    """Rewrites an exception that Dynamo shows as Python would show it."""
    shown = re.sub(r"\w*Variable\((?:\w+: )?((?:[^()]|\([^()]*\))*)\)", r"\1", context).removeprefix("raised exception ")
    return re.sub(r"\(\[(.*)\]\)$", r"(\1)", shown)


def _also(raised: type[BaseException] | None) -> type[CaptureError]:
    """CaptureError as a ``raised`` too, so that code which catches the forward's own exception catches it here."""
    if raised is None or issubclass(CaptureError, raised):
        return CaptureError
    members = {
        "__module__": CaptureError.__module__,
        "__str__": Exception.__str__,  # a KeyError would show its message quoted
        "__reduce__": lambda error: (CaptureError, error.args),
    }
    try:
        return type(CaptureError.__name__, (CaptureError, raised), members)
    except TypeError:  # no class can be both
        return CaptureError


def not_compiled(error: BaseException, doing: str, place: str = "") -> CaptureError:
    """Returns the error for what went wrong while a captured step was traced, planned or measured. Raises MemoryError if memory
    ran out."""
    check_memory_error(error)
    reason = f"{type(error).__name__}: {first_line(error)}"
    tip = _DATA if re.search(_ASKS_VALUES, reason) else _UNTRACED
    where = place_in(str(error)) or place
    return CaptureError(f"{doing}: {reason}{where}\n  {tip}; MT_DEBUG=1 shows where this was raised")


_ONLY_WHOLE = r"(?i)backwards hooks|nested.?tensor"  # what plain PyTorch does there reaches beyond the line


def may_part(error: BaseException) -> bool:
    """Tells whether Python may run the line that ``error`` reports, between two graphs."""
    return not re.search(_ONLY_WHOLE, str(error).partition("from user code")[0])


RUNS_A_BACKWARD = "runs a backward"
# What a line does that torch cannot capture: the first expression that occurs in the first line of torch's report decides.
_DOES = (
    (r"generic_jump|[Dd]ata.dependent (branching|assertion)|control flow", "branches on what a tensor holds"),
    (
        r"\.item\(\)|tolist|what tensors hold|[Dd]ata.dependent|[Dd]ynamic (shape|slicing)|[Uu]nbacked|non-scalar tensor|"
        r"index\(Tensor\)|Tensor comparison",
        "takes a shape or Python value from what a tensor holds",
    ),
    (r"backward\(\)", RUNS_A_BACKWARD),
    (r"autograd[._]grad|grad_fn", "takes gradients through code that is not captured"),
    (r"requires_grad|retain_grad", "changes whether a tensor requires or keeps a gradient"),
    (r"[Hh]ook", "adds or removes a hook"),
    (r"[Cc]ontext ?manager|contextlib|ContextWrapping|escaped from compiled", "enters a context that torch cannot follow"),
    (r"set_materialize_grads|autograd\.?_?[Ff]unction", "calls an autograd.Function that torch cannot follow"),
    (r"[Rr]andom|Generator\b|seed\b|uniform_", "draws random numbers from another generator than torch's default one"),
    (r"[Nn]um[Pp]y|ndarray", "calls a numpy function that torch cannot trace"),
    (
        r"[Ss]parse|[Nn]ested.?[Tt]ensor|subclass|Torch[Ss]cript|ScriptModule|jit\b|[Oo]paque",
        "uses a kind of tensor or module that no graph holds",
    ),
    (
        r"(method|function) call|marked as skipped|disable\(\)|skip_frame|graph_break\(\)|Skip ",
        "calls a function that torch does not look into",
    ),
    (
        r"HOP\b|[Hh]igher.?[Oo]rder|functorch|torch\.(cond|while_loop|scan|map|associative_scan)|custom [jv][jv]p",
        "uses a transform that torch cannot follow",
    ),
    (r"fake tensor|FakeTensor|meta kernel|PT2-compliant", "calls an operation whose shapes torch cannot find without values"),
    (r"[Gg]raph break|in loop|[Cc]omprehension", "leads to a line that torch cannot capture"),
    (r"__\w+__|attr|[Mm]issing|not implemented|[Rr]econstruct", "reads or changes an object in a way that torch cannot follow"),
)
_UNKNOWN = "does what torch cannot capture"


def what_it_does(report: str) -> str:
    """Says, as a verb and its objects, what a line does that torch cannot capture. ``report``: the first line of torch's."""
    return next((does for expression, does in _DOES if re.search(expression, report)), _UNKNOWN)


def why_and_where(reason: BaseException | str, report: str) -> tuple[str, str]:
    """Returns what a line does that cannot be part of a graph, and the user's line that ``report`` names, as a sentence's
    end."""
    first = first_line(reason) if isinstance(reason, BaseException) else reason
    named = re.search(r"\n  at [^\n]*", str(reason))
    return what_it_does(first), place_in(report) or (named[0] if named else "")


def with_place(error: MtcompileError, report: BaseException) -> MtcompileError:
    """``error``, with the user's line that ``report``, in which Dynamo passes it on, names, and without Dynamo's own words."""
    if type(error) not in (CaptureError, NotOneGraph):
        return error
    text = str(error).partition("\n\nfrom user code")[0]
    if "\n  at " not in text:
        reason, _, tip = text.partition("\n")
        text = "\n".join(filter(None, (reason + place_in(str(report)), tip)))
    return CaptureError(text)


def check_memory_error(error: BaseException) -> None:
    """Raises MemoryError if memory ran out, whatever other errors are around that."""
    around: BaseException | None = error
    while around is not None:
        text = str(around)
        if isinstance(around, MemoryError) or (isinstance(around, RuntimeError) and "can't allocate memory" in text):
            raise MemoryError(
                f"memory ran out while the step was captured and planned ({first_line(around)}): expected some to be free on "
                "the host; free some, or raise the limit of this process (ulimit -v, control groups)"
            ) from None
        around = around.__cause__ or around.__context__


def refuse(refusal: MtcompileError, error: BaseException) -> NoReturn:
    """Raise ``refusal`` in place of ``error``, which is chained under MT_DEBUG."""
    raise refusal from (error if knobs.debug() else None)


def first_line(error: BaseException) -> str:
    return printable(next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__))


def lazy_modules_in(model: nn.Module, where: torch.device) -> Mapping[nn.Module, str]:
    """Returns the lazy modules, which the next forward initializes, and their names. Raises CaptureError for those that would
    not get the random numbers of a plain run."""
    modules = torch_private.lazy_modules(model)
    tensors = (*nn.Module.named_parameters(model), *model.named_buffers())
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    others = [name for name in lazy if model.get_submodule(name.rpartition(".")[0]) not in modules]
    if others or (lazy and where.type != "cpu"):
        raise CaptureError(
            f"{(others or lazy)[0]} is not initialized yet; expected parameters with values: call the plain model once "
            "before mtcompile.compile, as in model(example)"
        )
    return modules
