"""Lets a trace take the ways through torch and its libraries that a plain run takes. Uses torch's private APIs, as
``torch_private`` does.

Three things turn a trace into another computation. Its dispatcher first asks operators for kernels in Python, and finds
decompositions (of upsampling, of margin losses, ...) that a plain run never meets. Dynamo rewrites a few calls. And code that
asks whether it is compiling is told that it is, and takes another branch. Here the first two are put out of action. Code
outside torch is told no, and so are torch's attention layers. Where code outside torch then does what cannot be captured, it
is told yes after all, and that is reported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload, OpOverloadPacket

from mtcompile.torch_private.thread_setting import ThreadSetting

aten = torch.ops.aten

# Python kernels that a trace needs, each with the reason.
_NEEDED = {
    aten.native_batch_norm.default,  # changes its running statistics, which its schema does not say: so would the trace not
    aten.dropout.default,  # saves a mask of one byte per element, where the plain one saves numbers; the passes round it alike
}
_COMPOSED = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


@functools.cache
def stand_ins() -> dict[OpOverload[..., Any], Callable[..., Any]]:
    """Returns what a trace runs where eager runs cuDNN, and torch's Python kernel something else. Loads them: their operators
    take long to define."""
    from mtcompile.torch_private.cudnn import recurrent
    from mtcompile.torch_private.cudnn.batch_norm import cudnn_batch_norm

    return {aten.cudnn_batch_norm.default: cudnn_batch_norm, **recurrent.stand_ins()}


_lock = threading.Lock()
_taken: dict[OpOverload[..., Any], dict[Any, Any]] = {}  # the kernels that are out, by operator
_traces = 0  # how many are under way


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Traces inside, in any thread, decompose operators as plain runs do: by the kernels of C++."""
    global _traces
    with _lock:
        _traces += 1
        if _traces == 1:
            _take_python_kernels()
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if _traces == 0:
                _put_python_kernels_back()


def _take_python_kernels() -> None:
    for operator in _operators():
        if operator in _NEEDED:
            continue
        if kernels := {key: operator.py_kernels.pop(key) for key in _COMPOSED if key in operator.py_kernels}:
            _taken[operator] = kernels
            operator._dispatch_cache.clear()
    for operator, stand_in in stand_ins().items():
        operator.py_kernels.update(dict.fromkeys(_taken.get(operator, ()), stand_in))


def _put_python_kernels_back() -> None:
    for operator, kernels in _taken.items():
        operator.py_kernels.update(kernels)
        operator._dispatch_cache.clear()
    _taken.clear()


def _operators() -> Iterator[OpOverload[..., Any]]:
    """All operators of ATen that were used since torch was loaded: others have no Python kernels."""
    for packet in [p for p in vars(aten).values() if isinstance(p, OpOverloadPacket)]:
        yield from [o for o in vars(packet).values() if isinstance(o, OpOverload)]


# ------------------------------------------------------------------------------------------ code that asks about compilation

_Stack = tuple[tuple[str, int], ...]  # (file, line) of each call that leads to a question, innermost first
# Files whose question decides only where they keep a Python object: in a ContextVar, which cannot be captured, or in a global.
_ONLY_KEEP = (os.path.join("transformers", "utils", "output_capturing.py"),)
_OWN = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)  # torch's files and mtcompile's
# Files of torch where the answer decides what is computed: in evaluation, attention has faster kernels, which round otherwise.
_FASTER = tuple(os.path.join("torch", "nn", "modules", name) for name in ("activation.py", "transformer.py"))
left_aligned = torch._nested_tensor_from_mask_left_aligned  # which nn.TransformerEncoder asks about its mask


@dataclass(frozen=True, slots=True)
class Question:
    """A place in a model's code, or a library's, that asks whether it is compiling. ``stack``: the calls that lead there.
    ``module``: Dynamo's path of the module that it computes for. ``place``: the line of that module's code."""

    stack: _Stack
    module: str
    place: str


@dataclass(slots=True)
class Answers:
    """The answers for one model's code when it asks whether it is compiling. ``stand_ins``: Python functions that are captured
    in place of torch's. ``conceded``: the places that are told the truth. ``asked``: what the capture under way has asked, the
    latest question last."""

    stand_ins: Mapping[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    conceded: set[_Stack] = field(default_factory=set)
    asked: dict[_Stack, Question] = field(default_factory=dict)

    def told(self) -> tuple[Question, ...]:
        """Returns the questions of this capture that were answered as no plain run would."""
        return tuple(question for stack, question in self.asked.items() if stack in self.conceded)

    def concede(self) -> bool:
        """After a capture that failed: tells the place that asked last the truth from now on, and if that has been tried every
        place. Returns False where that has been tried too."""
        open_questions = [stack for stack in self.asked if stack not in self.conceded]
        if not open_questions:
            self.conceded.clear()
            return False
        latest = next(reversed(self.asked))
        self.conceded.update([latest] if latest in open_questions else open_questions)
        return True


_answers = ThreadSetting[Answers | None](None)


@contextlib.contextmanager
def plain_answers(answers: Answers) -> Iterator[None]:
    """Captures inside, in this thread, take calls as they are, and answer questions about compilation by ``answers``."""
    _replace_handlers()
    _replace_functions(answers.stand_ins)
    answers.asked.clear()
    with _answers.during(answers):
        yield


@functools.cache
def _replace_handlers() -> None:
    """Lets Dynamo ask here first. Outside ``plain_answers``, its own handlers answer as ever."""
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable, tracing_state_functions

    handlers = TorchInGraphFunctionVariable._get_handlers()
    for function, answer in tracing_state_functions().items():
        if answer is True and function in handlers:
            handlers[function] = _answering(handlers[function])
    for call in _REWRITTEN:
        if call in handlers:
            handlers[call] = _as_it_is(handlers[call])
    for capturing in (torch.cuda.is_current_stream_capturing, torch.xpu.is_current_stream_capturing):
        trace_rules.get_torch_obj_rule_map()[capturing] = TorchInGraphFunctionVariable
        handlers[capturing] = _no(handlers.get(capturing))
    _replace_session()


def _replace_session() -> None:
    """Keeps a capture from telling the whole process that it is compiling, as torch 2.13 does. Optimizers that step in another
    thread meanwhile, updates of the same model among them, would take another way and round otherwise."""
    compiler: Any = torch.compiler
    plain = getattr(compiler, "_compile_session_context", None)
    if plain is not None:

        def session() -> contextlib.AbstractContextManager[Any]:
            return plain() if _answers.value is None else contextlib.nullcontext()

        compiler._compile_session_context = session


def _replace_functions(functions: Iterable[Callable[..., Any]]) -> None:
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers = TorchInGraphFunctionVariable._get_handlers()
    for function in functions:
        if not hasattr(handler := handlers.get(function), "_mt_replaced"):
            handlers[function] = _replaced(function, handler)


_REWRITTEN: tuple[Callable[..., Any], ...] = (torch.addcdiv, torch._foreach_lerp_)  # to calls that round otherwise


def _replaced(function: Callable[..., Any], handler: Callable[..., Any] | None) -> Callable[..., Any]:
    """Captures the function that stands in for ``function``, where there is one."""
    from torch._dynamo.variables import UserFunctionVariable

    def replaced(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        other = None if _answers.value is None else _answers.value.stand_ins.get(function)
        if other is None:
            return None if handler is None else handler(variable, tx, *args, **kwargs)
        return tx.inline_user_function_return(UserFunctionVariable(other), list(args), kwargs)  # type: ignore[arg-type]

    replaced._mt_replaced = True  # type: ignore[attr-defined]
    return replaced


def _answering(handler: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.variables.base import VariableTracker

    def answer(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        answers, truth = _answers.value, handler(variable, tx, *args, **kwargs)
        if answers is not None and tx.f_code.co_filename.endswith(_FASTER):
            return VariableTracker.build(tx, False)
        if answers is None or tx.f_code.co_filename.startswith(_OWN):  # torch must know, and so must mtcompile
            return truth
        if (parent := getattr(tx, "parent", None)) is not None and parent.f_code.co_filename.endswith(_ONLY_KEEP):
            return truth
        question = _question(tx)
        answers.asked.pop(question.stack, None)  # to the end
        answers.asked[question.stack] = question
        return truth if question.stack in answers.conceded else VariableTracker.build(tx, False)

    return answer


def _no(handler: Callable[..., Any] | None) -> Callable[..., Any]:
    """Answers no, which Dynamo would ask only when the graph runs."""
    from torch._dynamo.variables import ConstantVariable

    def no(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if _answers.value is not None:
            return ConstantVariable.create(False)
        return None if handler is None else handler(variable, tx, *args, **kwargs)

    return no


def _as_it_is(handler: Callable[..., Any]) -> Callable[..., Any]:
    def unless_plain(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return None if _answers.value is not None else handler(variable, tx, *args, **kwargs)

    return unless_plain


def _question(tx: Any) -> Question:
    path, cls = next(reversed(tx.nn_module_stack.values()), ("", object))
    methods = {getattr(member, "__code__", None) for base in cls.__mro__ for member in vars(base).values()}
    stack, place = [], ""
    while tx is not None:
        stack.append((tx.f_code.co_filename, tx.lineno))
        if not place and tx.f_code in methods:
            place = _shown(*stack[-1])
        tx = getattr(tx, "parent", None)
    return Question(tuple(stack), path, place or _shown(*stack[0]))


def _shown(file: str, line: int) -> str:
    """Names a line of code: that of an installed package from the package on."""
    return f"{file.rpartition('site-packages' + os.sep)[2]}:{line}"
