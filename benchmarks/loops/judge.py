"""Runs a program plainly and compiled, and says whether the two agree."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

import mtcompile
from benchmarks.loops.program import Program, source, statement

EQUAL, REFUSED, DIFFERENT, INTERNAL, BOTH_RAISE, INVALID = "equal", "refused", "different", "internal", "both raise", "invalid"
DEFECTS = (DIFFERENT, INTERNAL)
MOST_S = 180  # for one run
_JARGON = re.compile(
    r"torch\._|\b(Assertion|Key|Attribute|Index|Name|Type|Recursion)Error|Unsupported|FakeTensor|functorch|aot_|"
    r"graph break|Explanation:|Hint:|internal error|InternalTorch|<locals>|placeholder"
)
_LOAD_AGAIN = re.compile(r"load_state_dict|[Ll]oad (a|the last|the) ?checkpoint")
_NUMBERS = itertools.count()
# After these, the state that a backward with updates has used is not the one that the program has at a refusal.
_OTHER_STATE = ("new_optimizer", "bound_optimizer", "change_states")
_OURS = str(Path(mtcompile.__file__).resolve().parent.parent)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``kind``: one of those above; ``says``: what was found, in a sentence; ``cause``: the same for programs that fail alike;
    ``labels``: what differs, or the cause; ``memory``: the budget it ran in; ``warned``: first lines of warnings."""

    kind: str
    says: str = ""
    cause: str = ""
    labels: tuple[str, ...] = ()
    memory: int | str = ""
    warned: tuple[str, ...] = ()


@dataclass(slots=True)
class See:
    """What a program shows, by statement and label; labels within a statement may come in another order."""

    seen: dict[tuple[int, str], list[Any]] = field(default_factory=lambda: defaultdict(list))
    handles: list[Any] = field(default_factory=list)
    now: int = -1
    until: int = -1

    def __call__(self, label: str, value: Any) -> None:
        self.seen[self.now, label].append(_copied(value))

    def at(self, number: int) -> None:
        if number == self.until:
            raise Stop
        self.now = number


class Stop(Exception):
    """Raised where a plain run is to end early."""


class TooLong(BaseException):
    """Raised in a run that does not end."""


@dataclass(slots=True)
class Ran:
    """One run: what it showed, the error that ended it, and the program's variables then."""

    see: See
    error: BaseException | None
    variables: dict[str, Any]
    warned: tuple[str, ...]


def judge(program: Program) -> Verdict:
    """Runs a program as its reference, which is plain PyTorch in nearly all cases, and compiled."""
    torch._dynamo.reset()
    text = source(program, marks=True)
    reference = _run(text, program.reference)
    if isinstance(reference.error, (NameError, SyntaxError)) or "Inference tensors" in str(reference.error):
        return Verdict(INVALID, _first_line(reference.error))
    if isinstance(reference.error, mtcompile.MtcompileError):
        return Verdict(REFUSED, _first_line(reference.error), _general(_first_line(reference.error)))
    with _environment(MT_CHECK="1" if program.checked else os.environ.get("MT_CHECK", "0")):
        ours, memory, enough = _run_in_budget(program, text)
    verdict = _compared(program, text, reference, ours)
    if not enough:
        says = f"the minimum_bytes of a BudgetError are not enough: {_first_line(ours.error)}"
        verdict = Verdict(DIFFERENT, says, "minimum_bytes")
    return replace(verdict, labels=verdict.labels or (verdict.cause,), memory=memory, warned=ours.warned)


def _run_in_budget(program: Program, text: str) -> tuple[Ran, int | str, bool]:
    """Runs a program in the budget that it names: the least one is found from what each BudgetError says. Returns the budget,
    and whether all that errors said was true."""
    options: dict[str, Any] = {"device": "cpu", **dict(program.options)}
    memory: int | str = 1 if program.memory in ("least", "middle") else program.memory
    refused_at = set[int]()
    while True:
        ours = _run(text, {"memory": memory, **options})
        if not isinstance(ours.error, mtcompile.BudgetError) or isinstance(memory, str) or ours.error.tier != "device":
            return ours, memory, True
        if ours.see.now in refused_at:
            return ours, memory, False
        refused_at.add(ours.see.now)
        memory = ours.error.minimum_bytes * (13 if program.memory == "middle" else 10) // 10


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def _loaded(text: str) -> Iterator[Callable[..., None]]:
    """The program of a source text, as a function of a module in a file, of which errors name lines."""
    with tempfile.TemporaryDirectory() as folder:
        name = f"drawn_{next(_NUMBERS)}"  # Dynamo keeps modules by their names
        path = Path(folder) / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            yield module.program
        finally:
            del sys.modules[name]


def _run(text: str, options: dict[str, Any] | None, until: int = -1) -> Ran:
    see, error, variables = See(until=until), None, {}

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"no end after {MOST_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(MOST_S)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with _loaded(text) as function:
                function(options, see, see.at)
    except (Exception, TooLong) as raised:
        error, variables = raised, _variables(raised.__traceback__)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        for handle in see.handles:
            handle.remove()
    warned = tuple(dict.fromkeys(str(warning.message).splitlines()[0] for warning in caught)) if options else ()
    return Ran(see, error, variables, warned)


def _variables(trace: TracebackType | None) -> dict[str, Any]:
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code.co_name == "program":
            return dict(frame.f_locals)
    return {}


def _compared(program: Program, text: str, reference: Ran, ours: Ran) -> Verdict:
    error, ended = ours.error, ours.see.now
    raised = reference.error is not None
    if error is None and not raised:
        return _difference(reference.see, ours.see, None) or Verdict(EQUAL)
    if error is None:
        says = f"plain raises {type(reference.error).__name__}: {_first_line(reference.error)}; compiled does not"
        return Verdict(DIFFERENT, says, says)
    where = statement(program, ended).splitlines()[0] if ended >= 0 else "before the first statement"
    if reference.error is not None and reference.see.now == ended and isinstance(error, type(reference.error)):
        return _difference(reference.see, ours.see, ended) or Verdict(BOTH_RAISE, _first_line(error))
    refused = isinstance(error, mtcompile.MtcompileError) or (
        isinstance(error, (ValueError, TypeError)) and _raised_in_ours(error)
    )
    words = f"{type(error).__name__} at `{where}`: {error}"
    if raised and reference.see.now <= ended and not refused:  # of what plain PyTorch refuses, the compiled model may run more
        return Verdict(BOTH_RAISE, _first_line(error))
    if not refused or _JARGON.search(str(error)):
        return Verdict(INTERNAL, words, _general(f"{type(error).__name__}: {_first_line(error)}"))
    different = _difference(reference.see, ours.see, _shown(program, ended, error)) or _state_after(program, text, ours)
    if different is not None:
        cause = f"{different.cause} after a refusal"
        return Verdict(DIFFERENT, f"{different.says}\n  after {words}", cause, different.labels)
    return Verdict(REFUSED, words, _general(_first_line(error)))


def _shown(program: Program, ended: int, error: BaseException) -> int:
    """The statement before which what a refused program has shown must be plain PyTorch's: the refused one or, if it is the
    first that notices a change after a backward with updates, the one behind that backward: weights have been updated there."""
    if "that backward had already made the step" not in str(error):
        return ended
    return _behind_a_backward(program, ended)


def _behind_a_backward(program: Program, ended: int) -> int:
    """The statement behind the last backward before ``ended``; that one itself if there is none."""
    return next((number for number in range(ended, 0, -1) if ".backward(" in statement(program, number - 1)), ended)


def _difference(reference: See, ours: See, ended: int | None) -> Verdict | None:
    """What differs first, of what was shown before the statement ``ended``."""
    keys = [key for key in {**reference.seen, **ours.seen} if ended is None or key[0] < ended]
    found = []
    for key in sorted(keys, key=lambda key: key[0]):
        path = _differs(reference.seen.get(key, []), ours.seen.get(key, []))
        if path is not None:
            found.append((f"{key[1]}{path} (statement {key[0]})", key[1]))
    return Verdict(DIFFERENT, *found[0], tuple(dict.fromkeys(label for _, label in found))) if found else None


def _state_after(program: Program, text: str, ours: Ran) -> Verdict | None:
    """What a refusal has changed: weights, buffers and optimizer state must be those before the statement that was refused;
    with updates in the backward, weights and optimizer state may also be those after the update, as a step would leave them."""
    ended, error = ours.see.now, ours.error
    if program.reference is not None or "model" not in ours.variables or _LOAD_AGAIN.search(str(error)):
        return None
    if any(event.kind in _OTHER_STATE for event in program.events):
        return None
    if "closure" in statement(program, ended):  # forwards, backwards and steps in one statement
        return None
    try:
        found = _state(ours.variables)
    except Exception as raised:
        return Verdict(
            DIFFERENT, f"the state cannot be read: {type(raised).__name__}: {_first_line(raised)}", "state unreadable"
        )
    before = _run(text, None, until=ended).variables
    expected = _state(before)
    path = _differs(expected, found)
    options = dict(program.options)
    if path is not None and options.get("update") == "backward":
        if ".backward(" not in statement(program, ended):  # options that were changed since are not those of the update
            before = _run(text, None, until=_behind_a_backward(program, ended)).variables
        if "max_grad_norm" in options:
            torch.nn.utils.clip_grad_norm_(before["model"].parameters(), options["max_grad_norm"])
        type(before["optimizer"]).step.__wrapped__(before["optimizer"])  # the update alone, without the step's hooks
        after = _state(before)
        for each in (after, found):
            each.pop("options", None)
        if _differs(after, found) is None:
            return None
    return None if path is None else Verdict(DIFFERENT, f"state{path} has changed", f"state{_general(path)}")


def _state(variables: dict[str, Any]) -> dict[str, Any]:
    model, optimizer = variables["model"], variables.get("optimizer")
    if optimizer is None:
        return {}
    state = {"weights": dict(model.named_parameters()), "buffers": dict(model.named_buffers())}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    # Not by state_dict(), which is refused between a backward with updates and its step.
    of_parameters = {i: optimizer.state.get(p, {}) for i, p in enumerate(parameters)}
    copied: dict[str, Any] = _copied(state | {"optimizer": of_parameters, "options": options})
    return copied


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        parts = {name: _copied(part) for name, part in value.items()}
        # A parameter without state has an empty one in some optimizers' dictionaries, and none in others'.
        return {name: part for name, part in parts.items() if not isinstance(part, dict) or part}
    return [_copied(part) for part in value] if isinstance(value, (list, tuple)) else value


def _differs(expected: Any, found: Any, path: str = "") -> str | None:
    """Where two values differ; None if they are equal, bit for bit."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return f"{path}: {expected.dtype} {tuple(expected.shape)}, found {found.dtype} {tuple(found.shape)}"
        alike = (expected == found) | ((expected != expected) & (found != found))
        largest = (expected.double() - found.double()).abs().max().item() if not alike.all() else 0.0
        return (
            None if alike.all() else f"{path}: {int((~alike).sum())} of {alike.numel()} numbers differ, by up to {largest:.2g}"
        )
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        parts = ((_differs(expected[name], found[name], f"{path}[{name!r}]")) for name in expected)
        return next((part for part in parts if part is not None), None)
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        parts = (
            _differs(a, b, path if len(expected) == 1 else f"{path}[{i}]") for i, (a, b) in enumerate(zip(expected, found))
        )
        return next((part for part in parts if part is not None), None)
    return None if type(expected) is type(found) and expected == found else f"{path}: {_short(expected)}, found {_short(found)}"


def _short(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else f"{value!r}"[:80]


def _raised_in_ours(error: BaseException) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    path = str(Path(frame.f_code.co_filename).resolve())
    return path.startswith(tuple(f"{_OURS}/{folder}/" for folder in ("mtcompile", "passes", "runtime")))


def _first_line(error: BaseException | None) -> str:
    return (str(error).splitlines() or [""])[0]


def _general(text: str) -> str:
    """A sentence without what is of one program alone: names, numbers, addresses."""
    text = re.sub(r"(/[\w.-]+)+\.py(:\d+)?", "FILE", text)
    text = re.sub(
        r"\b(model\.)?(l|o|n|w|t|mean|count|largest|scale|state|kept|seen)\d+(\.\w+)*\b|\bhead\.\w+\b|\bembed\.\w+\b",
        "NAME",
        text,
    )
    text = re.sub(r"0x[0-9a-f]+", "ADDRESS", text)
    return re.sub(r"\d[\d,.]*", "N", text)
