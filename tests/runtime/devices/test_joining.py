"""Neighbouring parameters at home cross in one copy, though each has a storage of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtcompile.execution.memory.parameters import ParameterStore
from mtcompile.passes import rewrite
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.analysis.fetches import fetches
from mtcompile.passes.lower import lower
from mtcompile.passes.plan import Plan
from mtcompile.passes.step_graph import inputs_of
from mtcompile.runtime.devices.arena import arena, fills_storage
from mtcompile.runtime.devices.cpu import CpuMemory
from mtcompile.runtime.devices.cuda import CudaDevice, CudaMemory
from mtcompile.runtime.devices.joining import Slabs, runs_of_bytes
from mtcompile.runtime.executor import PhaseOptions, execute, prepare
from mtcompile.runtime.schedule import PHASES
from mtcompile.runtime.usage import allocated_together
from tests.helpers.fake_cuda import FakeCuda, on_fake
from tests.helpers.tracing import bind, equal, interpret, layouts_and_arenas, traced_case

PLANS = {"slots": Plan(lookahead=1), "pooled": Plan(lookahead=1, pooled=True)}


def at_home(step: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[ParameterStore, list[torch.Tensor]]:
    """A store that holds a step's parameters at home, and the step's inputs, these among them."""
    specs = [spec for spec, _ in inputs_of(step) if spec.role == "param"]
    parameters = {spec.name: torch.nn.Parameter(inputs[spec.index].clone(), spec.differentiable) for spec in specs}
    store, homes = ParameterStore(CudaDevice(torch.device("cpu"), FakeCuda(0))), step.meta["homes"]
    store.adopt(homes, dict.fromkeys(homes.values(), "host"), parameters)
    by_index = {spec.index: parameters[spec.name].detach() for spec in specs}
    return store, [by_index.get(index, tensor) for index, tensor in enumerate(inputs)]


@pytest.mark.slow
@pytest.mark.parametrize("where", PLANS)
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_a_block_is_fetched_in_few_copies(name: str, where: str) -> None:
    traced = traced_case(name)
    expected = interpret(traced.step, traced.inputs)
    step = rewrite(traced.step, PLANS[where])
    step.recompile()
    schedule = lower(step, PLANS[where], Machine(), {})
    values, copies = fetches(step, schedule)
    store, inputs = at_home(traced.step, traced.inputs)
    assert all(fills_storage(place.parameter) for place in store.places.values() if place.home is not None)

    def issued(joins: bool) -> int:
        def memory(*args: Any, **options: Any) -> CudaMemory:
            made = CudaMemory(*args, **options)
            if joins:
                made.slabs, made.together = store.memories(), allocated_together(schedule)
            return made

        cuda = FakeCuda(1, 0.5)
        assert equal(expected, on_fake(step, schedule, inputs, cuda, kind=memory))  # type: ignore[arg-type]
        return len(cuda.copies)

    assert issued(joins=False) - issued(joins=True) == values - copies
    assert copies < (0.6 if where == "slots" else 0.7) * values  # tiny weights leave padding, which no allocation has


def test_what_is_allocated_together_has_its_bits_and_its_bytes_on_the_emulated_device() -> None:
    traced = traced_case("llama")
    expected = interpret(traced.step, traced.inputs)
    step = rewrite(traced.step, PLANS["pooled"])
    step.recompile()
    schedule = lower(step, PLANS["pooled"], Machine(), {})
    memory = CpuMemory(schedule, *layouts_and_arenas(step, schedule), check=True)
    memory.together = allocated_together(schedule)
    kernels = bind(memory, step, list(traced.inputs))
    torch.manual_seed(3)
    for phase in PHASES:
        with torch.no_grad():
            execute(prepare(schedule, phase), memory, kernels, PhaseOptions())
    results = [memory.tensors[node.name] for node in step.graph.output_node().args[0]]
    assert equal(expected, [*results, torch.get_rng_state()])
    sizes: dict[str, int] = {}
    for name, (first, _, nbytes) in memory.together.items():
        sizes[first] = sizes.get(first, 0) + schedule.buffers[name].nbytes
        assert sizes[first] <= nbytes
    assert all(sizes[first] == nbytes for first, _, nbytes in memory.together.values())  # what the ledger counts, no more


def test_only_what_lies_in_one_slab_is_joined() -> None:
    device, slab, other = arena(1024), arena(1024), arena(512)

    def sizes(*sources: torch.Tensor) -> list[int]:
        pairs = [(device[256 * i : 256 * i + 100], source) for i, source in enumerate(sources)]
        made = list(runs_of_bytes(pairs, Slabs([other, slab])))
        slab.random_(0, 255)
        other.random_(0, 255)
        device.zero_()
        for target, source in made:
            target.copy_(source)
        assert all(torch.equal(target, source) for target, source in pairs)
        return [target.numel() for target, _ in made]

    def own(memory: torch.Tensor, start: int) -> torch.Tensor:
        return torch.from_numpy(memory[start : start + 100].numpy())  # a storage of its own

    assert sizes(own(slab, 0), own(slab, 256), own(slab, 512)) == [612]
    assert sizes(own(slab, 0), own(other, 256)) == [100, 100]
    assert sizes(own(slab, 0), own(slab, 512)) == [100, 100]
    assert sizes(torch.empty(100, dtype=torch.uint8).fill_(3), own(slab, 256)) == [100, 100]
