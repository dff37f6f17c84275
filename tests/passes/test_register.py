"""A registered pass is in every plan: in listings and schedules, proven, counted by schedules, known to caches, and blamed for
its own errors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import mtcompile
from mtcompile import cache
from mtcompile.passes import PIPELINE, pipeline, register
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.state import Budgets
from mtcompile.passes.plan import Plan
from mtcompile.passes.planning.planner import make_plan
from mtcompile.passes.planning.problem import DoesNotFit, PlanningProblem
from mtcompile.passes.registered import NotKnown, key_of
from mtcompile.passes.step_graph import calls, is_region, kernel_of, prefetch, regions, results
from tests.helpers.tracing import traced_case
from tests.helpers.training import adamw, same, train

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-pass.md"
MEMORY = 10 * 64 * 64 * 4  # bytes: of ten weights
DATA = {"x": torch.randn(4, 64, generator=torch.Generator().manual_seed(1))}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def of_the_page() -> Callable[..., Any]:
    """The pass that the page shows."""
    space: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    exec(next(block for block in blocks if "def one_copy_per_value" in block), space)
    return space["one_copy_per_value"]  # type: ignore[no-any-return]


def unchanged(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    return step


def fetches_at_once(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Brings everything that a phase needs in at its beginning."""
    first: dict[str, fx.Node] = {}
    for call in list(calls(step)):
        begin = first.setdefault(call.meta["phase"], call)
        if call.target is prefetch and call is not begin and all(value.op == "placeholder" for value in call.args):
            for node in (call, *results(call)):
                begin.prepend(node)
    return step


def raises(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    plan.lookahead = 2  # type: ignore[misc]
    return step


def forgets(step: fx.GraphModule, plan: Plan) -> None:
    """Returns nothing."""


def breaks_order(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Moves a region in front of what it reads."""
    nodes = [call for call in calls(step) if is_region(call)]
    next(iter(step.graph.nodes)).prepend(nodes[-1])
    return step


def breaks_computation(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Lets the first region that reads two values alike read one of them twice."""
    for call in calls(step):
        alike: dict[Any, fx.Node] = {}
        for operand in call.args if is_region(call) else ():
            val = operand.meta["val"]  # type: ignore[union-attr]
            other = alike.setdefault((val.shape, val.dtype), operand)  # type: ignore[arg-type]
            if other is not operand:
                call.replace_input_with(operand, other)  # type: ignore[arg-type]
                return step
    raise AssertionError("expected a region that reads two values alike")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    assert pipeline() == PIPELINE


def trained(memory: int, **options: Any) -> tuple[Any, list[Any]]:
    torch.compiler.reset()
    model = Layers()
    optimizer = adamw(model.parameters())
    compiled = mtcompile.compile(model, memory=memory, optimizer=optimizer, device="cpu", **options)
    return compiled, train(compiled, optimizer, DATA)


def problem(device: int | None = None, case: str = "chain") -> PlanningProblem:
    return PlanningProblem(traced_case(case).step, Machine(), Budgets(device))


def copies(schedule: Any) -> list[Any]:
    return [i for i in schedule.instructions if (i.queue, i.op) == ("h2d", "copy")]


def test_passes_are_put_behind_others_and_taken_out() -> None:
    first = register(unchanged, after="stream_params")
    names = [transform.__name__ for transform in pipeline()]
    assert names[names.index("stream_params") + 1] == "unchanged"
    with register(fetches_at_once, after=unchanged), register(raises):
        names = [transform.__name__ for transform in pipeline()]
        assert names[names.index("unchanged") + 1] == "fetches_at_once" and names[-1] == "raises"
    first.remove()
    assert pipeline() == PIPELINE
    with register(unchanged):
        first.remove()  # it is the other one's now
        assert pipeline() == (*PIPELINE, unchanged)


def test_what_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match="expected a function"):
        register("stream_params")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected after= to be one of recompute, .*, found 'stream_parameters'"):
        register(unchanged, after="stream_parameters")
    with register(unchanged), pytest.raises(ValueError, match="found unchanged, which is"):
        register(unchanged)
    with pytest.raises(ValueError, match="found trim, which is"):
        register(PIPELINE[2])


def test_the_pass_of_the_page_is_in_the_plan_and_keeps_the_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_DUMP", str(tmp_path))
    plain = Layers()
    expected = train(plain, adamw(plain.parameters()), DATA)
    before, found = trained(MEMORY)
    schedule, merged = before.schedule, max(len(i.reads) for i in copies(before.schedule))
    assert same(found, expected) and merged > 1
    for file in tmp_path.iterdir():
        file.unlink()
    with register(of_the_page(), after="stream_params"):
        before(**DATA).backward()
        assert before.schedule == schedule  # what was planned before keeps its plan
        compiled, found = trained(MEMORY)
    assert same(found, expected)
    assert {len(i.reads) for i in copies(compiled.schedule)} == {1}
    (listing,) = (file.read_text() for file in tmp_path.glob("*.step.txt"))
    fetched = re.findall(r"prefetch\((.*?)\)", listing)
    assert fetched and not any("," in operands for operands in fetched)
    assert any("rewritten by one_copy_per_value" in note for note in compiled.plan.notes) and compiled.plan.certificate is None
    report = compiled.memory_report()
    assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] == compiled.plan.peak_bytes["device"] <= MEMORY
    assert trained(MEMORY)[0].schedule == schedule  # now that it is removed


@pytest.mark.parametrize(
    ("transform", "message", "cause"),
    [
        (raises, "the pass raises, .*, failed: FrozenInstanceError: cannot assign to field 'lookahead'", AttributeError),
        (forgets, "the pass forgets, .*, failed: TypeError: expected it to return the step", TypeError),
        (breaks_order, "the pass breaks_order, .*, failed: RuntimeError: ", RuntimeError),
        (breaks_computation, "the pass breaks_computation, .*, made a step that is not proven: I5: expected ", ValueError),
    ],
)
def test_an_error_names_the_pass_and_not_the_model(transform: Any, message: str, cause: type[Exception]) -> None:
    with register(transform), pytest.raises(mtcompile.PassError, match=message) as caught:
        trained(MEMORY)
    assert isinstance(caught.value.__cause__, cause) and "Layers" not in str(caught.value)
    with register(transform), pytest.raises(mtcompile.PassError, match=message):
        mtcompile.plan(Layers(), DATA, memory=MEMORY, machine="rtx4090")
    assert trained(MEMORY)


def changes_a_kernel(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Changes what every plan of the step would run."""
    for region in regions(step):
        for node in kernel_of(step, region).graph.nodes:
            if node.target is torch.ops.aten.pow.Tensor_Scalar:
                node.args = (node.args[0], 3)
    return step


def replaces_a_forward(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    for region in regions(step):
        kernel_of(step, region).forward = lambda *values: values
    return step


@pytest.mark.parametrize("transform", [changes_a_kernel, replaces_a_forward])
def test_a_pass_that_changes_shared_kernels_leaves_no_trace(transform: Any) -> None:
    torch.manual_seed(0)
    model = Layers()
    compiled: Any = mtcompile.compile(model, memory=MEMORY, device="cpu")
    with register(transform), pytest.raises(mtcompile.PassError, match="changes a kernel in place"):
        compiled(**DATA)
    assert torch.equal(compiled(**DATA), Layers()(**DATA))


def test_plans_fit_by_their_schedules_where_a_pass_needs_more_bytes() -> None:
    with pytest.raises(DoesNotFit) as without:
        make_plan(problem(1))
    resident = make_plan(problem()).plan.peak_bytes["device"]
    with register(fetches_at_once, after="stream_params"):
        with pytest.raises(DoesNotFit) as refused:
            make_plan(problem(without.value.minimum))
        assert without.value.minimum < refused.value.minimum
        for budget in (refused.value.minimum, (refused.value.minimum + resident) // 2, resident):
            planned = make_plan(problem(budget))
            assert planned.plan.minimum_device_bytes <= planned.plan.peak_bytes["device"] <= budget
            assert planned.plan.peak_bytes == planned.schedule.peak_nbytes


def test_the_progress_names_the_pass() -> None:
    said = set()
    with register(unchanged):
        mtcompile.plan(Layers(), DATA, memory=MEMORY, machine="rtx4090", progress=lambda text, *_: said.add(text))
    assert "planning with unchanged, by schedules" in said


def made(number: Any) -> Any:
    def transform(step: fx.GraphModule, plan: Plan) -> fx.GraphModule:
        assert number or plan
        return step

    return transform


def test_keys_of_passes_are_those_of_their_code_and_values() -> None:
    def defined(text: str) -> Any:
        space: dict[str, Any] = {"__name__": "mine"}
        exec(text, space)
        return space["transform"]

    texts = [
        "def transform(step, plan): return step",
        "def transform(step, plan): return (step)",
        "def transform(step, plan): return plan and step",
        "W = 1\ndef helper(step): return step\ndef transform(step, plan): return helper(step, W)",
        "W = 1\ndef helper(step): return [step]\ndef transform(step, plan): return helper(step, W)",
        "W = 2\ndef helper(step): return step\ndef transform(step, plan): return helper(step, W)",
        "class transform:\n def __init__(self): self.n = 1\n def __call__(self, step, plan): return step",
    ]
    keys = [key_of(defined(text)) for text in texts]
    assert keys[0] == keys[1] and len(set(keys)) == len(keys) - 1
    assert keys == [key_of(defined(text)) for text in texts]
    partial = [functools.partial(defined("def transform(n, step, plan): return step"), n) for n in (1, 2)]
    assert len({key_of(made(1)), key_of(made(2)), key_of(made({3, 4})), *map(key_of, partial)}) == 5
    assert key_of(defined(texts[-1])()) != key_of(defined(texts[-1]))
    for unknown in (torch.ones(1), nn.Linear(1, 1), iter([1])):
        with pytest.raises(NotKnown):
            key_of(made(unknown))


def test_plans_are_cached_by_what_passes_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MT_CACHE", str(tmp_path))
    found = []

    def planned(*passes: Any) -> bool:
        """Tells whether a plan was in the cache."""
        asked = replace(problem(1 << 20), passes=(*PIPELINE, *passes))
        found.clear()
        cache.recalled(asked, "fastest", lambda known: (found.append(known), make_plan(asked))[1])
        return found[0] is not None

    assert [planned(), planned()] == [False, True]
    assert [planned(made(1)), planned(made(1)), planned(made(2)), planned()] == [False, True, False, True]
    assert [planned(made(torch.ones(1))), planned(made(torch.ones(1)))] == [False, False]
