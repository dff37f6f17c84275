"""Makes a program smaller while its verdict stays the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.loops.judge import Verdict, judge
from benchmarks.loops.program import LARGE, Program

MOST_TRIES = 60


def shrunk(program: Program, verdict: Verdict) -> tuple[Program, Verdict]:
    """Returns the smallest program found that fails alike, and its verdict."""
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            tries += 1
            if tries > MOST_TRIES:
                return program, verdict
            found = judge(candidate)
            if (found.kind, found.cause) == (verdict.kind, verdict.cause):
                program, verdict, smaller = candidate, found, True
                break
    return program, verdict


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, those with much less first."""
    kinds = dict.fromkeys(event.kind for event in program.events)
    for kind in kinds:  # all of a kind, such as a whole part of each step
        yield replace(program, events=tuple(event for event in program.events if event.kind != kind))
    for index in range(len(program.layers)):
        yield replace(program, layers=(*program.layers[:index], *program.layers[index + 1 :]))
    for index in range(len(program.options)):
        yield replace(program, options=(*program.options[:index], *program.options[index + 1 :]))
    if program.memory != LARGE:
        yield replace(program, memory=LARGE)
    if program.tokens:
        yield replace(program, tokens=False, tied=False)
    if program.form != "out":
        yield replace(program, form="out")
    if program.optimizer != "sgd":
        yield replace(program, optimizer="sgd")
    for index, event in enumerate(program.events):
        yield replace(program, events=(*program.events[:index], *program.events[index + 1 :]))
    for index, (kind, number) in enumerate(program.layers):
        if kind not in ("linear",):
            yield replace(program, layers=(*program.layers[:index], ("linear", number), *program.layers[index + 1 :]))
