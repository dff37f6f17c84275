"""Makes a program that fails smaller, and says by what is left why it fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from benchmarks.loops.draw import PLACES, plain_loop
from benchmarks.loops.judge import Verdict, judge
from benchmarks.loops.program import LARGE, Program

MOST_TRIES = 80
_PLAIN = (
    "see_input",
    "see_hidden",
    "see_stored",
    "hook_removed",
    "forward",
    "backward",
    "step",
    "clipped_step",
    "zero_grad",
    "see_gradients",
    "see_weights",
    "see_all",
)


def features(program: Program) -> frozenset[str]:
    """What of a program is not in the plain loop of a stack of linear layers."""
    found = {f"layer {kind}" for kind, _ in program.layers if kind != "linear"}
    found |= {f"{event.kind} ({event.place})" for event in program.events if event.kind not in _PLAIN}
    found |= {f"{name}={value!r}" for name, value in program.options}
    found |= {"small budget"} if program.memory != LARGE else set()
    found |= {"tied" if program.tied else "tokens"} if program.tokens else set()
    found |= {f"form {program.form}"} if program.form != "out" else set()
    found |= {f"optimizer {program.optimizer}"} if program.optimizer != "sgd" else set()
    found |= {"MT_CHECK=1"} if program.checked else set()
    found |= {"compiled after a step"} if program.late else set()
    found |= {f"optimizer given by {program.binding}"} if program.binding != "compile" else set()
    return frozenset(found)


def without(program: Program, names: Iterable[str]) -> Program:
    """The program without the layers and events of these features."""
    names = set(names)
    layers = tuple(("linear" if f"layer {kind}" in names else kind, number) for kind, number in program.layers)
    kinds = {event.kind for event in program.events if f"{event.kind} ({event.place})" in names}
    for kind in kinds:
        program = _without_kind(program, kind)
    return replace(program, layers=layers)


def can_be_left_out(names: Iterable[str]) -> bool:
    """Whether ``without`` would change a program of these features."""
    return any(name.startswith("layer ") or name.endswith(")") for name in names)


def shrunk(program: Program, verdict: Verdict) -> tuple[Program, Verdict]:
    """Returns the smallest program found that fails alike, and its verdict."""
    tries, smaller = 0, True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if tries == MOST_TRIES:
                return program, verdict
            tries += 1
            found = _judged(candidate, verdict)
            if found is not None:
                program, verdict, smaller = candidate, found, True
                break
    return program, verdict


def _judged(program: Program, verdict: Verdict) -> Verdict | None:
    """The verdict of a program if it fails alike: in one of a few runs, where updates run beside the loop."""
    for _ in range(4 if "run_ahead" in dict(program.options) else 1):
        found = judge(program)
        if found.kind == verdict.kind and set(found.labels) <= set(verdict.labels):
            return found
    return None


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, those with much less first."""
    if program.memory != LARGE:
        yield replace(program, memory=LARGE)
    for step in sorted({event.step for event in program.events} - {-1}):
        yield replace(program, events=tuple(event for event in program.events if event.step != step))
    for kind in dict.fromkeys(event.kind for event in program.events):
        if kind not in _PLAIN or kind.startswith("see_") or kind == "hook_removed":
            yield _without_kind(program, kind)
    for index in range(len(program.layers)):
        yield replace(program, layers=(*program.layers[:index], *program.layers[index + 1 :]))
    for index in range(len(program.options)):
        yield _plain_again(replace(program, options=(*program.options[:index], *program.options[index + 1 :])))
    if program.checked:
        yield replace(program, checked=False)
    if program.late or program.binding != "compile":
        yield replace(program, late=False, binding="compile")
    if program.tokens:
        yield replace(program, tokens=False, tied=False)
    if program.form != "out":
        yield replace(program, form="out")
    if program.optimizer != "sgd":
        yield replace(program, optimizer="sgd")
    for index, event in enumerate(program.events):
        if event.kind not in _PLAIN or event.kind.startswith("see_"):
            yield _with_plain(program, index)
    for index, (kind, number) in enumerate(program.layers):
        if kind != "linear":
            yield replace(program, layers=(*program.layers[:index], ("linear", number), *program.layers[index + 1 :]))


def _without_kind(program: Program, kind: str) -> Program:
    """Without all events of a kind; the plain loop's where they stood for one of these."""
    for index in reversed([index for index, event in enumerate(program.events) if event.kind == kind]):
        program = _with_plain(program, index)
    return program


def _with_plain(program: Program, index: int) -> Program:
    event = program.events[index]
    plain = plain_loop(program, event.step, False)[event.place] if event.place in PLACES[1::2] else []
    return replace(program, events=(*program.events[:index], *plain, *program.events[index + 1 :]))


def _plain_again(program: Program) -> Program:
    """With the plain loop's steps where an option that they follow has been left out."""
    clips = "max_grad_norm" in dict(program.options)
    events = (replace(event, kind="step") if event.kind == "clipped_step" and not clips else event for event in program.events)
    return replace(program, events=tuple(events))
