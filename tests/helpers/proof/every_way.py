"""A step under several plans, run in every way there is, with equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from torch import fx

from mtcompile.capture.tracing import Traced
from mtcompile.passes import rewrite
from mtcompile.passes.plan import Plan
from mtcompile.passes.proof.same_computation import same_computation
from mtcompile.runtime.executor import Delays
from mtcompile.runtime.schedule import Schedule, from_json
from mtcompile.runtime.verify import verify
from tests.helpers.fake_cuda import FakeCuda, on_fake
from tests.helpers.proof.oracle import why_unsafe
from tests.helpers.tracing import equal, interpret, lowered, random_plan, run


def equal_in_every_way(traced: Traced, whole: Traced | None = None) -> Iterator[Schedule]:
    """Yields the schedules of six plans once each has given the bits of interpretation: after each pass, on the emulated device
    and in every order of a GPU's streams, poisoned. ``whole``: what a step that takes rows must equal, once these move."""
    expected, rng = interpret((whole or traced).step, traced.inputs), Random(5)
    for seed, plan in enumerate((Plan(), Plan(lookahead=2), *(random_plan(traced.step, rng.choice) for _ in range(4)))):
        moves = not traced.step.meta["rows"]

        def after(name: str, step: fx.GraphModule) -> None:
            nonlocal moves
            step.graph.lint()
            moves |= name == "offload_gradients"
            if not moves:
                return
            assert equal(interpret(step, traced.inputs), expected), name
            same_computation(traced.joint, step)

        step = rewrite(traced.step, plan, after)
        schedule = lowered(step, plan)
        verify(schedule)
        assert from_json(schedule.to_json()) == schedule
        assert why_unsafe(schedule, walks=2, seed=seed) is None
        actual, _ = run(step, schedule, traced.inputs, 3, Delays(seed))
        assert equal(actual, expected)
        assert equal(expected, on_fake(step, schedule, traced.inputs, FakeCuda(seed, seed / 6)))
        yield schedule
