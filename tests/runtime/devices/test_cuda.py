"""The CUDA device without one: the calls that are made, and every order in which a device may follow them."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtcompile.passes import rewrite
from mtcompile.passes.analysis.cost import Machine
from mtcompile.passes.lower import lower
from mtcompile.passes.step_graph import step_outputs
from mtcompile.runtime.devices.arena import Layout, arena, view
from mtcompile.runtime.devices.cpu import Arenas
from mtcompile.runtime.devices.cuda import CudaDevice, CudaMemory, Fence, NamedMemory, Streams
from mtcompile.runtime.devices.cuda_driver import Api
from mtcompile.runtime.devices.joining import runs_of_bytes
from mtcompile.runtime.devices.pinned import NotPinned, pinned
from mtcompile.runtime.executor import PhaseOptions, execute, prepare
from mtcompile.runtime.schedule import HOST_AWAITS, Schedule
from mtcompile.runtime.verify import ScheduleError, verify
from tests.helpers.fake_cuda import FakeCuda, on_fake
from tests.helpers.proof.subjects import Subject, subject
from tests.helpers.tracing import Traced, bind, equal, interpret, layouts_and_arenas, random_plan, traced_case

pytestmark = pytest.mark.slow  # it runs whole steps under delays

MODELS = ("llama", "tied", "cnn", "gpt2")


def planned(traced: Traced, seed: int) -> tuple[Any, Schedule]:
    plan = random_plan(traced.step, random.Random(seed).choice)
    step = rewrite(traced.step, plan)
    step.recompile()
    return step, lower(step, plan, Machine(), {})


@pytest.mark.parametrize(
    ("name", "seeds"),
    [*((name, range(2)) for name in MODELS), *(pytest.param(name, range(2, 6), marks=pytest.mark.long) for name in MODELS)],
)
def test_equal_bits_in_whatever_order_the_streams_run(name: str, seeds: range) -> None:
    traced = traced_case(name)
    expected = interpret(traced.step, traced.inputs)
    for seed in seeds:
        step, schedule = planned(traced, seed)
        for eager in (0.0, 0.5, 0.95):
            assert equal(expected, on_fake(step, schedule, traced.inputs, FakeCuda(seed, eager)))


@pytest.mark.parametrize("staged", [64, 1000, 100_000])
def test_memory_that_is_not_pinned_goes_through_a_ring(staged: int) -> None:
    traced = traced_case("tied")
    expected = interpret(traced.step, traced.inputs)
    for seed in range(4):
        step, schedule = planned(traced, seed)
        for eager in (0.0, 0.6):
            cuda = FakeCuda(seed, eager)
            assert equal(expected, on_fake(step, schedule, traced.inputs, cuda, staged=staged))
            assert not cuda.copies or max(cuda.copies) <= staged


@pytest.mark.parametrize("broken", ["wait", "begin", "end"])
def test_an_event_left_out_shows(broken: str) -> None:
    """The test above can fail: without the waits, without the start or the end of a phase, some order gives other bits."""

    class Broken(Fence):
        pass

    setattr(Broken, broken, lambda *args, **kwargs: None)
    traced = traced_case("llama")
    expected = interpret(traced.step, traced.inputs)

    def shows(seed: int, eager: float) -> bool:
        step, schedule = planned(traced, seed)
        try:
            return not equal(expected, on_fake(step, schedule, traced.inputs, FakeCuda(seed, eager), Broken))
        except (IndexError, RuntimeError):  # an operation saw poison as an index
            return True

    assert any(shows(seed, eager) for seed in range(8) for eager in (0.0, 0.3))


def test_every_copy_and_kernel_is_within_a_range_of_its_name() -> None:
    traced = traced_case("llama")
    expected = interpret(traced.step, traced.inputs)
    step, schedule = planned(traced, 2)
    cuda = FakeCuda(1, 0.5)
    assert equal(expected, on_fake(step, schedule, traced.inputs, cuda, kind=NamedMemory))
    for events in cuda.ranges.values():  # none within another, each ended by the thread that began it
        assert all(event is not None for event in events[::2]) and not any(events[1::2]) and len(events) % 2 == 0
    names = Counter(event for events in cuda.ranges.values() for event in events if event is not None)
    assert names == Counter(i.label for i in schedule.instructions if i.op in ("copy", "run"))
    plain = FakeCuda(1, 0.5)
    on_fake(step, schedule, traced.inputs, plain)
    assert not plain.ranges


def test_a_range_ends_where_what_is_in_it_fails() -> None:
    traced = traced_case("tied")
    step, schedule = planned(traced, 1)
    cuda = FakeCuda(1)

    def fails(*inputs: torch.Tensor) -> None:
        raise RuntimeError("broken")

    memory: Any = CudaDevice(torch.device("cpu"), cuda, ranges=True).memory(
        schedule, *layouts_and_arenas(step, schedule), check=False, trusted=False, views=None
    )
    bind(memory, step, traced.inputs)
    first = next(i for i in schedule.instructions if i.op == "run")
    for name in first.reads:
        memory.tensors.setdefault(name, torch.empty(0))
    with pytest.raises(RuntimeError, match="broken"):
        memory.run(fails, first.reads, first.writes, 0)
    assert [*cuda.ranges.values()] == [[first.label, None]]


def test_one_event_per_dependency_that_crosses_queues() -> None:
    traced = traced_case("llama")
    step, schedule = planned(traced, 1)
    crossing = [
        (schedule.instructions[dep].queue, instruction.queue)
        for instruction in schedule.instructions
        for dep in instruction.deps
        if schedule.instructions[dep].phase == instruction.phase
    ]
    assert crossing and all(one != other for one, other in crossing)
    cuda = FakeCuda(0)
    on_fake(step, schedule, traced.inputs, cuda)
    names = {"compute": "main", "h2d": "stream1", "d2h": "stream2"}
    phases = {phase: {i.queue for _, i in schedule.phase(phase)} - {"compute"} for phase in ("forward", "backward")}
    bounds = [q for queues in phases.values() for q in queues]  # one at the start and one at the end of each phase
    waits = Counter(stream for what, stream, _ in cuda.log if what == "wait")
    expected = (
        Counter(names[other] for _, other in crossing) + Counter(names[q] for q in bounds) + Counter({"main": len(bounds)})
    )
    assert waits == expected
    recorded: set[int] = set()
    for what, _, event in cuda.log:  # each event is recorded once, and before anything waits for it
        if what == "record":
            assert id(event) not in recorded
            recorded.add(id(event))
        else:
            assert id(event) in recorded
    awaited = {dep for i in schedule.instructions for dep in i.deps if schedule.instructions[dep].phase == i.phase}
    assert len(recorded) == len(awaited) + len(bounds) + sum(bool(queues) for queues in phases.values())


@pytest.mark.parametrize("told", [True, False])
def test_the_caller_may_go_on_on_another_stream(told: bool) -> None:
    """A backward on another stream than its forward comes after it; untold, some order gives other bits."""
    traced = traced_case("llama")
    expected = interpret(traced.step, traced.inputs)
    wrong = 0
    for seed in range(8):
        step, schedule = planned(traced, seed)
        cuda = FakeCuda(seed, eager=0.0)
        memory = CudaMemory(schedule, *layouts_and_arenas(step, schedule), check=True, api=cuda)
        bind(memory, step, traced.inputs)
        kernels = {name: cuda.kernel(module) for name, module in step.named_children()}
        streams = Streams(cuda)
        torch.manual_seed(3)
        try:
            for phase in ("forward", "backward"):
                with cuda.use(cuda.new_stream()), torch.no_grad():
                    execute(prepare(schedule, phase), memory, kernels, PhaseOptions(fence=Fence(streams)))
                if not told:
                    streams.last = None
            cuda.synchronize()
        except IndexError:  # an operation saw poison as an index
            wrong += 1
            continue
        results = [memory.tensors[node.name] for node in step_outputs(step)]
        wrong += not equal(expected, [*results, torch.get_rng_state()])
    assert bool(wrong) != told


def test_a_timed_phase_is_recorded_by_the_devices_clock() -> None:
    traced = traced_case("llama")
    step, schedule = planned(traced, 1)
    cuda = FakeCuda(0, eager=0.0)  # so that all of it runs after it was issued
    memory = CudaMemory(schedule, *layouts_and_arenas(step, schedule), api=cuda)
    bind(memory, step, traced.inputs)
    kernels = {name: cuda.kernel(module) for name, module in step.named_children()}
    fence = Fence(Streams(cuda), timed=True)
    with torch.no_grad():
        records = execute(prepare(schedule, "forward"), memory, kernels, PhaseOptions(fence=fence))
    worked = {i: each.queue for i, each in schedule.phase("forward") if each.op in ("run", "copy")}
    assert {record.index: record.queue for record in records} == worked
    assert all(0 < record.start_us < record.end_us for record in records)
    ends = {record.index: record.end_us for record in records}
    for record in records:
        waited = [ends[dep] for dep in schedule.instructions[record.index].deps if dep in ends]
        assert all(end < record.end_us for end in waited)


def test_an_error_waits_for_the_copies_in_flight() -> None:
    traced = traced_case("llama")
    step, schedule = planned(traced, 1)
    cuda = FakeCuda(0, eager=0.0)
    memory = CudaMemory(schedule, *layouts_and_arenas(step, schedule), api=cuda)
    bind(memory, step, traced.inputs)

    def failing(*inputs: torch.Tensor) -> Any:
        raise OSError("a kernel failed")

    kernels = {name: failing for name, _ in step.named_children()}
    with pytest.raises(OSError, match="a kernel failed"):
        execute(prepare(schedule, "forward"), memory, kernels, PhaseOptions(fence=Fence(Streams(cuda), visible=())))
    assert cuda.blocked and not any(stream.work for stream in cuda.streams[1:])


def test_neighbours_move_in_one_copy() -> None:
    source, target = arena(4096), arena(4096)
    layout = Layout(torch.float32, (10,), (1,))

    def at(memory: torch.Tensor, offset: int) -> torch.Tensor:
        return view(memory, offset, layout)

    def sizes(*offsets: tuple[int, int]) -> list[int]:
        pairs = [(at(target, t), at(source, s)) for t, s in offsets]
        made = list(runs_of_bytes(pairs))
        source.random_(0, 255)
        target.zero_()
        for one, other in made:
            one.copy_(other)
        assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)
        return [one.numel() for one, _ in made]

    assert sizes((0, 64), (64, 128), (128, 192)) == [168]
    assert sizes((0, 0), (64, 128)) == [40, 40]  # farther apart in the source
    assert sizes((64, 64), (0, 0)) == [40, 40]  # not in order
    assert sizes((0, 0), (512, 512)) == [40, 40]  # other bytes lie between
    assert sizes() == []


def test_pinned_memory_has_its_exact_size() -> None:
    calls: list[tuple[str, int, int]] = []

    class Runtime:
        code = 0

        def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
            calls.append(("register", pointer, nbytes))
            return self.code

        def cudaHostUnregister(self, pointer: int) -> int:
            calls.append(("unregister", pointer, 0))
            return 0

    tensor = pinned(10_000, Runtime(), lambda: calls.append(("wait", 0, 0)))
    assert tensor.numel() == 10_000 and calls == [("register", tensor.data_ptr(), 10_000)]
    tensor.fill_(7)
    part = tensor[5:]
    del tensor
    assert len(calls) == 1  # a view still holds it
    del part
    assert calls[1:] == [("wait", 0, 0), ("unregister", calls[0][1], 0)]
    Runtime.code = 2
    with pytest.raises(NotPinned, match="refused 4096 bytes with error 2"):
        pinned(4096, Runtime(), lambda: None)
    assert len(calls) == 4


def test_memory_is_pinned_and_let_go_on_its_own_device() -> None:
    """The runtime's calls act on the thread's current device, and would open a context on another one."""
    current, calls = [0], list[tuple[str, int, int]]()

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    class Runtime:
        def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
            calls.append(("register", current[0], flags))
            return 0

        def cudaHostUnregister(self, pointer: int) -> int:
            calls.append(("unregister", current[0], 0))
            return 0

    api = object.__new__(Api)
    api.device = torch.device("cuda", 1)
    api.module = SimpleNamespace(
        device=on,
        cudart=Runtime,
        synchronize=lambda device: calls.append(("wait", current[0], device.index)),
        get_device_properties=lambda device: SimpleNamespace(),
    )
    api.pin(100)
    portable = 1
    assert calls == [("register", 1, portable), ("wait", 1, 1), ("unregister", 1, 0)] and current == [0]


def test_a_thread_that_waits_for_the_device_does_not_spin() -> None:
    """CUDA's own default is to spin, on cores that updates and kernel launches need."""
    calls: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool, blocking: bool = False) -> None:
            calls.append(blocking)

        def record(self, stream: Any) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")

    api = object.__new__(Api)
    api.device, api.module = torch.device("cuda", 0), SimpleNamespace(Event=Event, current_stream=lambda device: None)
    api.block(api.new_event())
    api.new_event(timed=True)
    assert calls == [True, "wait", True]
    calls.clear()
    tensor = torch.arange(6).view(2, 3).t()
    copied = api.to_host(tensor)
    assert calls == [True, "record", "wait"] and torch.equal(copied, tensor) and copied.stride() == tensor.stride()


def twice_forward(own: Subject, cuda: FakeCuda, fence: type[Fence], first: Subject) -> list[torch.Tensor]:
    """The results of a step in arenas in which a forward of ``first`` ran and was dropped."""
    nbytes = {t: max(s.schedule.arena_nbytes[t] for s in (own, first)) for t in ("device", "host")}
    arenas = Arenas(*(arena(nbytes[tier]) for tier in ("device", "host")))
    streams = Streams(cuda)
    results: list[torch.Tensor] = []
    for ran, phases in ((first, ("forward",)), (own, ("forward", "backward"))):
        layouts, _ = layouts_and_arenas(ran.step, ran.schedule)
        memory = CudaMemory(ran.schedule, layouts, arenas, check=False, api=cuda)
        conversions = bind(memory, ran.step, list(ran.inputs))
        kernels = {name: cuda.kernel(module) for name, module in ran.step.named_children()}
        torch.manual_seed(3)
        for phase in phases:
            visible: Any = ("h2d", "d2h") if phase == "backward" else ("h2d",)
            with torch.no_grad():
                execute(
                    prepare(ran.schedule, phase),
                    memory,
                    {**conversions, **kernels},
                    PhaseOptions(fence=fence(streams, visible)),
                )
        results = [memory.tensors[node.name] for node in step_outputs(ran.step)] if "backward" in phases else []
    cuda.synchronize()
    return [*results, torch.get_rng_state()]


class WithoutWaiting(Fence):
    """Queue host starts a phase without waiting for the copies of earlier ones."""

    def on(self, queue: Any) -> Any:
        return super().on(queue) if queue != "host" else contextlib.nullcontext()


@pytest.fixture(scope="module")
def casting() -> list[Subject]:
    """Steps that cast on the host, under several plans."""
    plans = (subject("halved", "by step()", plan) for plan in range(2, 9))
    return [own for own in plans if any(i.queue == "host" for _, i in own.schedule.phase("forward"))]


@pytest.mark.parametrize("fence", [Fence, WithoutWaiting])
def test_a_dropped_forward_leaves_no_copy_that_lands_in_the_next(casting: list[Subject], fence: type[Fence]) -> None:
    """Of the same program or of another one. Without the wait on queue host, some order gives other bits."""
    wrong = 0
    for number, own in enumerate(casting):
        expected = interpret(own.step, list(own.inputs))
        for before in casting:
            found = twice_forward(own, FakeCuda(number, eager=0.0), fence, before)
            wrong += not equal(expected, found)
    assert bool(wrong) == (fence is WithoutWaiting)


def test_the_proof_knows_what_the_host_has_waited_for(casting: list[Subject]) -> None:
    """It refuses all that goes wrong where queue host waits for copies to the device alone, and names the copies in flight."""
    assert len(casting) >= 3
    for own in casting:
        verify(own.schedule)
        with pytest.raises(ScheduleError, match=r"I2 .* copies on d2h that a dropped forward left in flight"):
            verify(own.schedule, ("h2d", "host"))


def test_what_another_program_left_on_queue_host_is_not_ordered_by_that_queue(casting: list[Subject]) -> None:
    """Each program has threads of its own for it."""
    awaited = [queue for queue in HOST_AWAITS if queue != "host"]
    for own in casting:
        with pytest.raises(ScheduleError, match=r"I2 .* copies on host that a dropped forward left in flight"):
            verify(own.schedule, awaited)
