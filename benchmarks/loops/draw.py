"""Draws programs: one seed, one program, on every machine."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from string import Template
from typing import Any

from benchmarks.loops.events import BACKWARDED, END, EVENTS, FORWARDED, IN_STEP, READY, SETUP, START, STEPPED, Kind
from benchmarks.loops.modules import FORMS, LAYERS
from benchmarks.loops.program import LARGE, OPTIMIZERS, Event, Program

MOST_STEPS = 3
PLACES = (START, "forward", FORWARDED, "backward", BACKWARDED, "step", STEPPED, "zero_grad", END)
# Layers whose forward draws random numbers or changes what the model holds: of a call that fails, plain PyTorch keeps what came
# before the failure, and a compiled model nothing (docs/guarantees.md).
_RANDOM = {"dropout", "noise"}
_KEEPING = {"batch_norm", "spectral_norm", "running_mean", "counter", "recurrent", "count", "kept", "kept_detached"}
_POLICIES = ("resident", "megatrain", "checkpoint-all", "offload-all", "zero3-offload")


def drawn(seed: int) -> Program:
    """Returns the program of a seed."""
    rng = Random(seed)
    layers = tuple(
        (_weighted(rng, {name: layer.weight for name, layer in LAYERS.items()}), number) for number in range(rng.randint(1, 4))
    )
    tokens = rng.random() < 0.25
    tied = tokens and rng.random() < 0.5
    form = _weighted(rng, {name: form.weight for name, form in FORMS.items() if not (tied and name == "weight")})
    optimizer = rng.choice(list(OPTIMIZERS))
    options = _options(rng)
    memory = rng.choices((LARGE, "middle", "least"), (4, 1, 3))[0]
    late = rng.random() < 0.08 and "max_grad_norm" not in dict(options)
    binding = rng.choices(("compile", "bind", "none"), (9, 1, 0 if dict(options) else 1))[0]
    checked = rng.random() < (0.5 if "run_ahead" in dict(options) else 0.1)
    draft = Program(layers, tokens, tied, form, optimizer, options, memory, (), late, binding, checked)
    return replace(draft, events=_events(rng, draft))


def _options(rng: Random) -> tuple[tuple[str, Any], ...]:
    options: dict[str, Any] = {}
    if rng.random() < 0.4:
        options["update"] = "backward"
        if rng.random() < 0.25:
            options["max_grad_norm"] = 0.1
        if rng.random() < 0.25:
            options["run_ahead"] = True
        if rng.random() < 0.25:
            options["nonfinite"] = rng.choice(("skip", "continue"))
    if rng.random() < 0.06:
        options["accumulate"] = 2
    if rng.random() < 0.35:
        options["policy"] = rng.choice(_POLICIES)
    if rng.random() < 0.1:
        options["fragments"] = rng.choice((None, "exact"))
    if rng.random() < 0.1:
        options["embeddings"] = rng.choice(("used", "all"))
    return tuple(options.items())


def _events(rng: Random, draft: Program) -> tuple[Event, ...]:
    has, options = _traits(draft), dict(draft.options)
    sees_weights = rng.random() < 0.5
    loops = [plain_loop(draft, step, sees_weights) for step in range(rng.randint(2, MOST_STEPS))]
    before: list[Event] = []
    ready: list[Event] = []
    fitting = {name: kind.weight for name, kind in EVENTS.items() if (kind.places or kind.instead) and _fits(kind, has)}
    if "max_grad_norm" in options:  # the plain run clips in a plain step only
        fitting = {name: weight for name, weight in fitting.items() if EVENTS[name].instead != "step" and "step" not in name}
    zero_first = rng.choices(("zero_grad", START, FORWARDED), (6, 3, 1))[0]
    for loop in loops if zero_first != "zero_grad" else ():
        loop[zero_first] = [replace(event, place=zero_first) for event in loop["zero_grad"]]
        loop["zero_grad"] = []
    for _ in range(rng.randint(1, 5)):
        name = _weighted(rng, fitting)
        kind = EVENTS[name]
        names = _names(rng, draft, kind)
        chosen = loops if rng.random() < 0.4 else [rng.choice(loops)]
        place = kind.instead or rng.choice(kind.places)
        first = rng.random() < 0.5
        if names is None or (kind.reads and place == BACKWARDED and "update" in options):
            continue
        if place in (SETUP, READY):
            (before if place == SETUP else ready).append(Event(name, place, names=names))
            continue
        for loop in chosen:
            event = Event(name, place, loops.index(loop), names)
            if kind.instead:
                loop[place] = [event]
            else:
                loop[place].insert(0 if first else len(loop[place]), event)
            if kind.then[0]:
                loop[kind.then[1]].append(Event(*kind.then, event.step, names))
    flat = [event for loop in loops for events in loop.values() for event in events]
    return (*before, *ready, *_allowed(flat), Event("see_all", "end"))


def plain_loop(program: Program, step: int, sees_weights: bool) -> dict[str, list[Event]]:
    """A step as in the plain loop, by place."""
    kinds: dict[str, str] = dict.fromkeys((*IN_STEP, "forward", "backward", "step", "zero_grad"), "")
    options = dict(program.options)
    kinds["forward"], kinds["backward"], kinds["zero_grad"] = "forward", "backward", "zero_grad"
    kinds["step"] = "clipped_step" if "max_grad_norm" in options else "step"
    kinds[BACKWARDED] = "" if "update" in options else "see_gradients"
    kinds[STEPPED] = "see_weights" if sees_weights else ""
    return {place: [Event(kinds[place], place, step)] if kinds[place] else [] for place in PLACES}


def _allowed(events: list[Event]) -> list[Event]:
    """Leaves out what docs/guarantees.md excepts, because of what else the program does."""
    kinds = {event.kind for event in events}
    if "autocast" in kinds:  # casts of weights that are changed through .data, and double backwards
        events = [event for event in events if event.kind not in ("data_weight_between", "penalty")]
    return events


def _traits(draft: Program) -> frozenset[str]:
    kinds = [LAYERS[kind] for kind, _ in draft.layers]
    form = FORMS[draft.form]
    checks = {
        "tokens": draft.tokens,
        "floats": not draft.tokens,
        "hidden": form.hidden,
        "terms": bool(form.terms),
        "out": draft.form in ("out", "pair", "dict"),
        "rows": draft.form in ("out", "pair", "dict"),
        "once": bool(_once(draft)),
        "unrepeated": not draft.tied and not any(kind.repeats for kind in kinds),
        "setting": any(kind.setting for kind in kinds),
        "pure": not any(kind in _RANDOM | _KEEPING for kind, _ in draft.layers),
        "stored": bool(_stored(draft)),
        "free_head": not draft.tied and draft.form != "weight" and draft.optimizer != "groups",
        "not_skipped": dict(draft.options).get("nonfinite") != "skip",
        "float_states": draft.optimizer in ("adamw", "amsgrad", "rmsprop", "adagrad", "groups"),
    }
    return frozenset(name for name, value in checks.items() if value)


def _fits(kind: Kind, has: frozenset[str]) -> bool:
    return has.issuperset(kind.needs)


def _once(draft: Program) -> list[str]:
    """Modules whose weight a forward uses once."""
    own = [Template(f"model.{LAYERS[kind].once}").substitute(i=number) for kind, number in draft.layers if LAYERS[kind].once]
    return own + ([] if draft.tied or draft.form == "weight" else ["model.head"])


def _stored(draft: Program) -> list[str]:
    """Hidden states that the model keeps."""
    return [f"model.kept{number}" for kind, number in draft.layers if kind == "kept"]


def _modules(draft: Program) -> list[str]:
    own = [f"model.l{number}" for kind, number in draft.layers if "self.l$i" in LAYERS[kind].init]
    return [*own, "model.head", *(["model.embed"] if draft.tokens else [])]


def _names(rng: Random, draft: Program, kind: Kind) -> tuple[tuple[str, str], ...] | None:
    """Chooses the parameters and modules of an event; None if there are none."""
    once = _once(draft)
    settings = [Template(LAYERS[layer].setting).substitute(i=number) for layer, number in draft.layers if LAYERS[layer].setting]
    terms = list(FORMS[draft.form].terms)
    choices = {
        "p": [f"{name}.weight" for name in once],
        "q": [*(f"{name}.weight" for name in once), "model.head.weight"],
        "m": _modules(draft),
        "s": _stored(draft),
        "setting": settings,
        "term": terms,
    }
    used = set(re.findall(r"\$(\w+)", kind.text))
    names = []
    for key, values in choices.items():
        if key in used:
            if not values:
                return None
            names.append((key, rng.choice(values)))
    return tuple(names)


def _weighted(rng: Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
