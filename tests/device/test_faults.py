"""What goes wrong on a device: every allocation, copy and launch of a step fails once, at the call or later. The state is that
before or after the step, or the model refuses, and says why."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mtcompile
from mtcompile.runtime.devices import cuda
from tests.device.second.streams import DEVICE, Call
from tests.helpers.models import Small

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="the second device fails as it is told")]
WAYS: dict[str, dict[str, Any]] = {
    "step": {},
    "backward": {"update": "backward"},
    "ahead": {"update": "backward", "run_ahead": True, "max_grad_norm": 0.1},
}
BATCH = torch.linspace(-1, 1, 8 * 32).view(8, 32)


@pytest.fixture(autouse=True)
def whole_device() -> Iterator[None]:
    yield
    torch.ops.second_device.fail_allocation(0)
    DEVICE.reset()


class Training:
    """A model whose parameters are at home on the host, after two steps."""

    def __init__(self, way: str, device: torch.device) -> None:
        model = Small()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options = {"policy": "megatrain", **WAYS[way]}
        self.model: Any = mtcompile.compile(model, memory="1MiB", optimizer=self.optimizer, device=device, **options)
        torch.manual_seed(1)
        for _ in range(2):
            self.step()
        self.model.synchronize()

    def step(self) -> None:
        self.model(BATCH).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.synchronize()

    def state(self) -> dict[str, list[Tensor]]:
        """The state by kind: a forward changes buffers, an update the others."""
        parameters = list(self.model.parameters())
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in parameters]
        kinds = {"updated": [*parameters, *momenta], "buffers": list(self.model.buffers())}
        return {kind: [t.detach().cpu().clone() for t in tensors] for kind, tensors in kinds.items()}


def equal(one: Mapping[str, list[Tensor]], other: Mapping[str, list[Tensor]], kind: str) -> bool:
    return all(map(torch.equal, one[kind], other[kind]))


@contextlib.contextmanager
def noted() -> Iterator[list[Call]]:
    DEVICE.calls = calls = list[Call]()
    try:
        yield calls
    finally:
        DEVICE.calls = None


@pytest.mark.parametrize("way", WAYS)
def test_every_call_is_on_its_stream(way: str, device: torch.device) -> None:
    training = Training(way, device)
    with noted() as calls:
        training.step()
    copies = {
        name: {call.stream for call in calls if call.kind == "copy" and call.name == name and "mtcompile" in call.thread}
        for name in ("to device", "to host")
    }
    assert len(copies["to device"]) == len(copies["to host"]) == 1
    assert DEVICE.main.number not in copies["to device"] | copies["to host"]
    assert copies["to device"] != copies["to host"]
    assert {call.stream for call in calls if call.kind == "launch"} == {DEVICE.main.number}


@pytest.mark.parametrize("lagging", ["compute", "copies", "all"])
@pytest.mark.parametrize("way", WAYS)
def test_streams_that_lag_give_equal_bits(way: str, lagging: str, device: torch.device) -> None:
    expected = Training(way, device)
    training = Training(way, device)
    copying = {stream.number for stream in training.model._mt_model.device.streams.copying.values()}
    for number in {"compute": {DEVICE.main.number}, "copies": copying, "all": {*copying, DEVICE.main.number}}[lagging]:
        DEVICE.lag_s[number] = 0.002
    state = torch.get_rng_state()
    for each in (training, expected):
        torch.set_rng_state(state)
        for _ in range(2):
            each.step()
        DEVICE.lag_s.clear()
    assert all(equal(training.state(), expected.state(), kind) for kind in ("updated", "buffers"))


def test_lag_shows_a_missing_event(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    expected, training = Training("step", device), Training("step", device)
    for stream in training.model._mt_model.device.streams.copying.values():
        DEVICE.lag_s[stream.number] = 0.005
    state = torch.get_rng_state()
    expected.step()
    torch.set_rng_state(state)
    monkeypatch.setattr(cuda.Fence, "wait", lambda *_: None)
    with contextlib.suppress(RuntimeError):  # what it reads may be any number
        training.step()
    assert not all(equal(training.state(), expected.state(), kind) for kind in ("updated", "buffers"))


def sweep(way: str, kind: str, device: torch.device, late: bool, most: int) -> Counter[str]:
    """Lets every ``kind`` of call of a step fail once, or ``most`` of them."""
    left, training = Counter[str](), Training(way, device)
    torch.ops.second_device.fail_allocation(10**6)
    with noted() as calls:
        training.step()
    allocations = 10**6 - torch.ops.second_device.fail_allocation(0)
    count = sum(call.kind == kind for call in calls) if kind != "allocation" else allocations
    assert count > 3
    del training
    for number in range(1, count + 1, max(1, -(-count // most))):
        training, twin = Training(way, device), Training(way, device)
        before = training.state()
        torch.manual_seed(2)
        twin.step()
        after = twin.state()
        torch.manual_seed(2)
        if kind == "allocation":
            torch.ops.second_device.fail_allocation(number)
        else:
            DEVICE.faults.at[kind], DEVICE.faults.late = number, late
        try:
            training.step()
        except RuntimeError as error:
            causes = [str(cause) for cause in (error, *causes_of(error))]  # not the errors: their frames hold the loss
            assert any("injected" in cause or "out of memory" in cause for cause in causes), causes
            outcome = "raised"
        else:
            outcome = "ran"
        torch.ops.second_device.fail_allocation(0)
        if late and DEVICE.error is not None:
            with pytest.raises(RuntimeError, match="injected"):  # the first cause, whatever is called
                training.step()
            DEVICE.reset()
            left["ended"] += 1
            continue
        DEVICE.reset()
        state = training.state()
        try:
            training.step()
        except mtcompile.StepError as error:
            assert "Load a checkpoint" in str(error)
            left["said"] += 1
        else:
            for part in state:
                assert equal(state, before, part) or equal(state, after, part), f"half of {part} after {kind} {number}"
            left[outcome] += 1
    return left


def causes_of(error: BaseException) -> Iterator[BaseException]:
    while (cause := error.__cause__ or error.__context__) is not None:
        yield cause
        error = cause


SWEPT = [
    ("step", "launch", False), ("backward", "copy", True),
    *(pytest.param("step", kind, False, marks=pytest.mark.long) for kind in ("copy", "allocation")),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:the device ran out of memory")
@pytest.mark.parametrize(("way", "kind", "late"), SWEPT)
def test_some_calls_fail(way: str, kind: str, late: bool, device: torch.device) -> None:
    assert sweep(way, kind, device, late, 3)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the device ran out of memory")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["launch", "copy", "record", "wait", "allocation"])
@pytest.mark.parametrize("way", WAYS)
def test_every_call_fails_once(way: str, kind: str, late: bool, device: torch.device) -> None:
    if kind in ("record", "wait", "allocation") and late:
        pytest.skip("these fail at the call or not at all")
    left = sweep(way, kind, device, late, 10**6)
    assert left["raised"] + left["said"] + left["ended"] > 0


def test_the_host_cannot_read_the_devices_memory(device: torch.device) -> None:
    address, rights = torch.ones(4, device=device).data_ptr(), set[str]()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, right = line.split()[:2]
        first, end = (int(number, 16) for number in span.split("-"))
        if first <= address < end:
            rights.add(right)
    assert rights == {"---p"}
