"""Draws programs: one seed, one program, on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from string import Template
from typing import Any, TypeVar

from benchmarks.loops.events import EVENTS, READY, SETUP, Kind
from benchmarks.loops.modules import FORMS, LAYERS
from benchmarks.loops.program import LARGE, OPTIMIZERS, Event, Program

T = TypeVar("T")
MOST_STEPS = 3
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
    draft = Program(layers, tokens, tied, form, optimizer, options, memory, ())
    return Program(layers, tokens, tied, form, optimizer, options, memory, _events(rng, draft))


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
    steps = rng.randint(2, MOST_STEPS)
    plain_step = "clipped_step" if "max_grad_norm" in options else "step"
    loops: list[dict[str, list[Event]]] = []
    sees_weights = rng.random() < 0.5
    for _ in range(steps):
        loop: dict[str, list[Event]] = {
            "start": [],
            "forward": [Event("forward", "forward")],
            "forwarded": [],
            "backward": [Event("backward", "backward")],
            "backwarded": [Event("see_gradients", "backwarded")] if "update" not in options else [],
            "step": [Event(plain_step, "step")],
            "stepped": [Event("see_weights", "stepped")] if sees_weights else [],
            "zero_grad": [Event("zero_grad", "zero_grad")],
            "end": [],
        }
        loops.append(loop)
    before: list[Event] = []
    ready: list[Event] = []
    fitting = {name: kind.weight for name, kind in EVENTS.items() if (kind.places or kind.instead) and _fits(kind, has)}
    if "max_grad_norm" in options:  # the plain run clips in a plain step only
        fitting = {name: weight for name, weight in fitting.items() if EVENTS[name].instead != "step" and "step" not in name}
    for _ in range(rng.randint(1, 5)):
        name = _weighted(rng, fitting)
        kind = EVENTS[name]
        names = _names(rng, draft, kind)
        if names is None:
            continue
        chosen = loops if rng.random() < 0.4 else [rng.choice(loops)]
        if kind.instead:
            for loop in chosen:
                loop[kind.instead] = [Event(name, kind.instead, names)]
            continue
        place = rng.choice(kind.places)
        event = Event(name, place, names)
        if place in (SETUP, READY):
            (before if place == SETUP else ready).append(event)
            continue
        first = rng.random() < 0.5
        for loop in chosen:
            loop[place].insert(0 if first else len(loop[place]), event)
    flat = [event for loop in loops for events in loop.values() for event in events]
    return (*before, *ready, *_allowed(flat, has), Event("see_all", "end"))


def _allowed(events: list[Event], has: frozenset[str]) -> list[Event]:
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
        "float_states": draft.optimizer in ("adamw", "amsgrad", "rmsprop", "adagrad", "groups"),
        "no_autocast": True,
    }
    return frozenset(name for name, value in checks.items() if value)


def _fits(kind: Kind, has: frozenset[str]) -> bool:
    return has.issuperset(kind.needs)


def _once(draft: Program) -> list[str]:
    """Modules whose weight a forward uses once."""
    own = [Template(f"model.{LAYERS[kind].once}").substitute(i=number) for kind, number in draft.layers if LAYERS[kind].once]
    sequences = {"mlp", "checkpointed"}
    own = [f"{name}[0]" if kind in sequences else name for name, kind in zip(own, _kinds_once(draft))]
    return own + ([] if draft.tied or draft.form == "weight" else ["model.head"])


def _kinds_once(draft: Program) -> list[str]:
    return [kind for kind, _ in draft.layers if LAYERS[kind].once]


def _modules(draft: Program) -> list[str]:
    own = [f"model.l{number}" for kind, number in draft.layers if "self.l$i" in LAYERS[kind].init]
    return [*own, "model.head", *(["model.embed"] if draft.tokens else [])]


def _names(rng: Random, draft: Program, kind: Kind) -> tuple[tuple[str, str], ...] | None:
    """Chooses the parameters and modules of an event; None if there are none."""
    once = _once(draft)
    settings = [
        Template(LAYERS[layer].setting).substitute(i=number) for layer, number in draft.layers if LAYERS[layer].setting
    ]
    terms = list(FORMS[draft.form].terms)
    choices = {
        "p": [f"{name}.weight" for name in once],
        "q": [*(f"{name}.weight" for name in once), "model.head.weight"],
        "m": _modules(draft),
        "setting": settings,
        "term": terms,
    }
    names = []
    for key, values in choices.items():
        if f"${key}" in kind.text:
            if not values:
                return None
            names.append((key, rng.choice(values)))
    return tuple(names)


def _weighted(rng: Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def shortened(values: Sequence[T], index: int) -> tuple[T, ...]:
    """Without one."""
    return (*values[:index], *values[index + 1 :])
