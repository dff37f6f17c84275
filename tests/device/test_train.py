"""What the emulated device promises, on a device with memory of its own: equal bits at every budget, bytes within it."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import mtcompile
from mtcompile.capture.description import describe
from mtcompile.execution import model as model_file
from mtcompile.execution import runner
from mtcompile.runtime.devices import cuda
from mtcompile.runtime.devices.pinned import NotPinned
from tests.device.models import make
from tests.device.reference import compare, compiled_at, on
from tests.device.reference import floor as floor_of
from tests.device.second import LateCopies
from tests.device.second.streams import DEVICE
from tests.helpers.stacks import WIDTH, Residual, stack
from tests.helpers.training import adamw, loss_of

MODELS = ("decoder", "dropping", "cnn", *(pytest.param(name, marks=pytest.mark.long) for name in ("tied", "chain")))


def repeated(data: dict[str, Any], times: int) -> dict[str, Any]:
    return {name: value.repeat(times, *([1] * (value.dim() - 1))) for name, value in data.items()}


@functools.cache
def floor(name: str, device: torch.device, times: int = 1) -> int:
    """The smallest budget of a model for so many times its data."""
    model, data = make(name)
    return floor_of(model, repeated(data, times), device)


@pytest.mark.parametrize("name", MODELS)
def test_bits_are_equal_and_budgets_met_from_the_floor_to_resident(name: str, device: torch.device) -> None:
    model, data = make(name)
    least = floor(name, device)
    for memory in (least, 2 * least, None):
        compiled, optimizer = compiled_at(model, memory, device)
        compare(compiled, optimizer, model, data, device)
        report = compiled.memory_report()
        assert 0 < report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= report["budget_device_bytes"]
        homes = {p.device.type for p in compiled.parameters()}
        if memory == least:
            assert homes == {"cpu"}
        if memory is None:
            assert homes == {device.type}


@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_a_model_with_resident_parameters_is_captured_once(
    first: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[Any] = []
    monkeypatch.setattr(model_file, "describe", lambda *args, **options: described.append(args) or describe(*args, **options))
    model, data = make("decoder")
    compiled, optimizer = compiled_at(model, None, device)
    if first == "evaluation":
        with torch.no_grad():
            compiled(**on(device, data))
    compare(compiled, optimizer, model, data, device)
    assert {p.device.type for p in compiled.parameters()} == {device.type}
    assert len(described) == 1


def test_a_step_may_be_driven_from_host_tensors_and_from_a_model_on_the_device(device: torch.device) -> None:
    model, data = make("decoder")
    for start in ("cpu", str(device)):
        copied = copy.deepcopy(model).to(start)
        optimizer = adamw(copied.parameters())
        loss_of(copied(**on(torch.device(start), data))).backward()
        optimizer.step()  # its state is where the parameters are before they go home
        optimizer.zero_grad()
        sent = 4096  # the tokens and labels that are sent there
        least = floor("decoder", device) + sent
        compiled = mtcompile.compile(copied, memory=least, optimizer=optimizer, device=device)
        plain = copy.deepcopy(model).to(device)
        for _ in range(2):
            plain.load_state_dict(compiled.state_dict())
            loss = loss_of(compiled(**data))
            assert loss.device == device and torch.equal(loss, loss_of(plain(**on(device, data))))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.device.type == "cpu" for p in compiled.parameters())


def test_evaluation_and_a_second_size_between_steps_give_equal_bits(device: torch.device) -> None:
    model, data = make("tied")
    compiled, optimizer = compiled_at(model, 2 * floor("tied", device), device)
    compare(compiled, optimizer, model, data, device, steps=2)
    plain = copy.deepcopy(compiled).to(device)
    half = {name: value[: len(value) // 2] for name, value in on(device, data).items()}
    with torch.no_grad():
        assert torch.equal(compiled(**half), plain(**half))
    compiled(**half).backward()
    plain(**half).backward()
    for p, q in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad.to(device), q.grad)


def test_gradients_accumulate_and_inputs_receive_theirs(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    compiled = mtcompile.compile(copy.deepcopy(model), memory="1MiB", device=device)
    plain = copy.deepcopy(model).to(device)
    for _ in range(2):
        x = torch.randn(8, 16)
        one, other = x.to(device).requires_grad_(), x.to(device).requires_grad_()
        compiled(one).square().sum().backward()
        plain(other).square().sum().backward()
        assert torch.equal(one.grad, other.grad)
    for p, q in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad.to(device), q.grad)


class Casting(nn.Module):
    """Its Python looks at devices and dtypes, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(8, device=self.inner.weight.device) / 8
        h = self.inner(x + place)
        return self.outer(torch.tanh(h).to(h.dtype) * torch.ones(8, device=x.device, dtype=h.dtype)).float().square().mean()


def test_autocast_is_the_devices(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Casting()
    x = torch.randn(4, 8)
    plain = copy.deepcopy(model).to(device)
    for where in (torch.device("cpu"), device):
        compiled = mtcompile.compile(copy.deepcopy(model), memory="1MiB", device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss, expected = compiled(x.to(where)), plain(x.to(device))
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        for p, q in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad.to(device), q.grad)
        plain.zero_grad()


def test_a_parameter_that_was_resident_goes_home_when_a_larger_batch_needs_its_room(device: torch.device) -> None:
    model, data = make("tied")
    small = {name: value[:1] for name, value in data.items()}
    large = repeated(data, 16)
    compiled, optimizer = compiled_at(model, floor("tied", device, 16), device)
    compare(compiled, optimizer, model, small, device, steps=2)
    resident = {p.device.type for p in compiled.parameters()}
    now = copy.deepcopy(compiled).cpu()
    loss = compiled(**on(device, large))
    plain = now.to(device)
    expected = plain(**on(device, large))
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for p, q in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert p.grad is None or torch.equal(p.grad.to(device), q.grad)
    optimizer.step()  # its state has followed
    assert device.type in resident and {p.device.type for p in compiled.parameters()} == {"cpu"}


def test_torch_compile_gives_equal_bits(device: torch.device) -> None:
    torch.manual_seed(0)
    model, data = make("decoder")
    plain = copy.deepcopy(model).to(device)
    own = copy.deepcopy(model).to(device)
    torch.compiler.reset()
    called = torch.compile(own, backend="mtcompile", options={"activation_memory": "64MiB"})
    data = on(device, data)
    loss, expected = loss_of(called(**data)), loss_of(plain(**data))
    assert torch.equal(loss, expected) and loss.device == device
    loss.backward()
    expected.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(own.parameters(), plain.parameters(), strict=True))


def test_checked_runs_poison_and_delay(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_CHECK", "1")
    for name in ("decoder", "dropping"):
        model, data = make(name)
        compiled, optimizer = compiled_at(model, floor(name, device), device)
        compare(compiled, optimizer, model, data, device, steps=2)


def test_many_steps_give_equal_bits(device: torch.device) -> None:
    model, data = make("dropping")
    compiled, optimizer = compiled_at(model, floor("dropping", device), device)
    compare(compiled, optimizer, model, data, device, steps=100 if device.type == "cuda" else 25)  # what is no GPU is slow


def test_a_trace_is_taken_by_the_devices_clock(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_TRACE", "1")
    model, data = make("decoder")
    compiled, optimizer = compiled_at(model, floor("decoder", device), device)
    compare(compiled, optimizer, model, data, device, steps=1)
    worked = [i for i, each in enumerate(compiled.schedule.instructions) if each.op in ("run", "copy")]
    assert sorted(record.index for record in compiled.last_trace.records) == worked
    assert all(record.end_us >= record.start_us for record in compiled.last_trace.records)


def test_numbers_drawn_on_the_host_are_refused(device: torch.device) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) + torch.rand(8).to(x.device)).square().mean()

    compiled: Any = mtcompile.compile(Noisy(), memory="1MiB", device=device)
    with pytest.raises(mtcompile.CaptureError, match="rand without device="):
        compiled(torch.randn(4, 8))


def test_an_evaluation_between_forward_and_backward_leaves_one_arena(device: torch.device) -> None:
    model, data = make("decoder")
    compiled, _ = compiled_at(model, int(1.5 * floor("decoder", device)), device)
    plain = copy.deepcopy(model).to(device)
    data = on(device, data)
    half = {name: value[:1] for name, value in data.items()}
    loss, expected = compiled(**data), plain(**data)
    (frame,) = compiled._mt_model.session.frames.waiting()
    with torch.no_grad():
        assert torch.equal(compiled(**half), plain(**half))
    held = {
        t.data_ptr() for t in (frame.memory.arenas.device, compiled._mt_model.session.arenas._arenas["device"]) if t.numel()
    }
    assert len(held) == 1
    loss.backward()
    expected.backward()
    assert all(torch.equal(p.grad.to(device), q.grad) for p, q in zip(compiled.parameters(), plain.parameters(), strict=True))


def test_errors_name_the_device(device: torch.device) -> None:
    model, _ = make("tied")
    with pytest.raises(ValueError, match=r"expected memory of at most the \d+ bytes"):
        mtcompile.compile(copy.deepcopy(model), memory="100TiB", device=device)
    with pytest.raises(ValueError, match="expected device to be one that torch sees"):
        mtcompile.compile(copy.deepcopy(model), device="xpu")


# ------------------------------------------------------------------------------------------------- copies that come late


@pytest.mark.parametrize("name", ["decoder", "cnn", pytest.param("dropping", marks=pytest.mark.long)])
def test_bits_are_equal_when_copies_come_as_late_as_their_events_permit(
    name: str, device: torch.device, late: list[LateCopies]
) -> None:
    model, data = make(name)
    least = floor(name, device)
    for memory in (least, 2 * least):
        compiled, optimizer = compiled_at(model, memory, device)
        compare(compiled, optimizer, model, data, device)
        assert device.type == "cuda" or (late[-1].copies and late[-1].blocked)


@pytest.mark.long
def test_late_copies_reach_the_disk_whole_and_come_back(device: torch.device, late: list[LateCopies], tmp_path: Path) -> None:
    plain = Residual()
    x = torch.linspace(-1, 1, 512 * WIDTH).view(512, -1)
    ours, reference = copy.deepcopy(plain), copy.deepcopy(plain)
    options = {"memory": "8MiB", "host": "5500KiB", "policy": "offload-all", "disk": f"{tmp_path}:16MiB", "device": device}
    compiled: Any = mtcompile.compile(ours, **options)
    resident: Any = mtcompile.compile(reference, device=device)
    for _ in range(3):
        losses = [model(x) for model in (compiled, resident)]
        assert torch.equal(*(loss.detach().cpu() for loss in losses))
        for loss in losses:
            loss.backward()
        for one, two in zip(compiled.parameters(), resident.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None and torch.equal(one.grad.cpu(), two.grad.cpu())
    assert sum(d.kind == "activation" and d.choice == "disk" for d in compiled.plan.decisions) >= 2
    assert compiled.memory_report()["peak_disk_bytes"] > 0


class Halved(nn.Module):
    """fp32 weights that are read in bf16: those at home are cast there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = x + torch.tanh((x.to(torch.bfloat16) @ layer.weight.to(torch.bfloat16)).float())
        return x.square().mean(), x


def lives_through(compiled: Any, optimizer: torch.optim.Optimizer, device: torch.device, retraced: bool) -> None:
    """Steps with forwards that are dropped, evaluation between forward and backward and, where ``retraced``, gradients that
    arrive at outputs for which the forward was not compiled. Bits are those of plain steps."""
    plain, x = Halved().to(device), torch.randn(16, 64, device=device)
    homes = [torch.device("cpu") if p.device.type == "cpu" else device for p in compiled.parameters()]
    weights = [nn.Parameter(w.detach().to(home).clone()) for w, home in zip(plain.parameters(), homes, strict=True)]
    updates = adamw(weights)
    for step in range(4):
        for _ in range(step % 3):
            compiled(x + step)  # nobody keeps the loss
        loss, features = compiled(x)
        with torch.no_grad():
            assert torch.equal(compiled(x - 1)[0], plain(x - 1)[0]), f"evaluation in step {step}"
        expected, expected_features = plain(x)
        assert torch.equal(loss, expected) and torch.equal(features, expected_features), f"forward of step {step}"
        if retraced and step % 2:
            loss, expected = loss + features.sum(), expected + expected_features.sum()
        loss.backward()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        for weight, parameter in zip(weights, plain.parameters(), strict=True):
            assert parameter.grad is not None
            weight.grad = parameter.grad.to(weight.device)
        updates.step()
        updates.zero_grad()
        plain.zero_grad()
        for weight, parameter in zip(weights, plain.parameters(), strict=True):
            parameter.data.copy_(weight.data)
    compiled.synchronize()
    for (name, parameter), weight in zip(compiled.named_parameters(), weights, strict=True):
        assert torch.equal(parameter, weight), name


WAYS: dict[str, dict[str, Any]] = {
    "by step()": {},
    "in the backward": {"update": "backward"},
    "running ahead": {"update": "backward", "run_ahead": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_copies_that_outlive_their_phase_reach_nothing_else(way: str, device: torch.device, late: list[LateCopies]) -> None:
    """Casts on the host, and copies home that are in flight when a forward ends."""
    compiled, optimizer = compiled_at(Halved(), 2**24, device, policy="offload-all", **WAYS[way])
    lives_through(compiled, optimizer, device, retraced=not WAYS[way])
    assert {i.queue for _, i in compiled.schedule.phase("forward")} == {"compute", "h2d", "d2h", "host"}


@pytest.mark.filterwarnings("ignore:the device peak")
def test_late_copies_show_a_missing_event(device: torch.device, late: list[LateCopies], monkeypatch: Any) -> None:
    """The test above can fail."""
    monkeypatch.setattr(cuda.Fence, "wait", lambda *_: None)
    model, data = make("decoder")
    compiled, optimizer = compiled_at(model, floor("decoder", device), device)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        compare(compiled, optimizer, model, data, device)
    del compiled, optimizer, model
    gc.collect()  # what is under way may read wrong rows of an embedding: the device's error, which later tests would get
    DEVICE.reset()


def test_where_pinning_is_refused_copies_are_staged_and_the_plan_says_so(
    device: torch.device, late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = make("decoder")
    compiled, optimizer = compiled_at(model, floor("decoder", device), device)

    def refuse(self: Any, nbytes: int) -> torch.Tensor:
        raise NotPinned("as told")

    monkeypatch.setattr(type(compiled._mt_model.device.api), "pin", refuse)
    with pytest.warns(UserWarning, match="could not be pinned"):
        loss_of(compiled(**on(device, data))).backward()
    optimizer.zero_grad()
    assert "not pinned" in compiled.plan.machine
    compare(compiled, optimizer, model, data, device)


def test_homes_are_pinned_while_the_plan_is_searched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a refused plan had pinned is free again, and what a plan takes holds the weights, if it has them whole."""
    model, data = stack(batch=8)
    memory, pin = floor_of(model, data, device, fragments=None), cuda.Api.pin
    pinned: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def noted(self: cuda.Api, nbytes: int) -> torch.Tensor:
        tensor = pin(self, nbytes)
        pinned.append((threading.current_thread().name, weakref.ref(tensor)))
        return tensor

    monkeypatch.setattr(cuda.Api, "pin", noted)
    refused, _ = compiled_at(copy.deepcopy(model), memory // 2, device, fragments=None)
    with pytest.raises(mtcompile.BudgetError):
        refused(**on(device, data))
    gc.collect()
    assert pinned and {name for name, _ in pinned} == {"mtcompile-pinning"} and not any(ref() is not None for _, ref in pinned)
    pinned.clear()
    compiled, optimizer = compiled_at(model, memory, device, fragments=None)
    compare(compiled, optimizer, model, data, device)
    homes = {slab.memory.data_ptr() for slab in compiled._mt_model.door.parameters.slabs.values()}
    ahead = {memory.data_ptr() for name, ref in pinned if name == "mtcompile-pinning" and (memory := ref()) is not None}
    assert ahead and ahead <= homes


class InPlace(nn.Module):
    """Changes, in place, what is made from a buffer or parameter, by what is computed."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear, self.position = way, nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.way == "buffer":
            self.mean.lerp_(y.detach().mean(0), 0.1)
        elif self.way == "copy of a buffer":
            y = y * self.mean.expand(3, 4).clone().add_(y)
        elif self.way == "copy of a parameter":
            positions = self.position.expand(3, 4).clone()
            positions += y
            y = positions
        else:
            y = torch.zeros(3, 4, device=self.position.device).index_add_(0, torch.arange(3, device=x.device), y)
        return (y * self.position).square().sum()


@pytest.mark.parametrize("way", ["buffer", "copy of a buffer", "copy of a parameter", "new tensor"])
def test_what_is_made_of_parameters_and_buffers_is_changed_in_place(way: str, device: torch.device) -> None:
    torch.manual_seed(0)
    model = InPlace(way)
    compiled, optimizer = compiled_at(model, 2**20, device)
    compare(compiled, optimizer, model, {"x": torch.randn(3, 4)}, device)


def test_a_loss_in_chunks_is_near_the_whole_one(device: torch.device) -> None:
    torch.manual_seed(0)
    model, data = make("tied")
    compiled, optimizer = compiled_at(model, 2 * floor("tied", device), device, loss_chunks="auto")
    plain = copy.deepcopy(model).to(device)
    loss, expected = compiled(**on(device, data)), plain(**on(device, data))
    assert torch.allclose(loss, expected)
    loss.backward()
    nn.utils.clip_grad_norm_(compiled.parameters(), 0.1)
    optimizer.step()
    assert F.mse_loss(loss, expected) < 1e-6


# ------------------------------------------------- last, since torch's detector stays on for the rest of the process


class Seen:
    """Stands for torch's race detector where there is no CUDA: the operations it would have been shown."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Watched(TorchDispatchMode):
    """Shows a detector the operations of one thread. It numbers them, which is meant for one thread: ``lock`` is held. It would
    take ``_unsafe_view`` for a kernel that writes its result, since the schema does not say that it is a view."""

    def __init__(self, detector: Any, lock: threading.Lock) -> None:
        super().__init__()
        self.detector, self.lock = detector, lock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._unsafe_view.default:
            return func(*args, **(kwargs or {}))
        with self.lock:
            return self.detector.__torch_dispatch__(func, types, args, kwargs)


def test_torchs_race_detector_finds_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it raises where two streams touch a pointer that no event orders. It sees what runs under its mode: the
    kernels and copies of our phases."""
    model, data = make("decoder")
    compiled, optimizer = compiled_at(model, floor("decoder", device), device)
    detector: Any = Seen()
    if device.type == "cuda":
        detector = importlib.import_module("torch.cuda._sanitizer").CUDASanitizerDispatchMode()
    execute, copy_now, lock = runner.execute, cuda.Api.copy, threading.Lock()

    def watched(*args: Any, **options: Any) -> Any:
        with Watched(detector, lock):
            return execute(*args, **options)

    def watched_copy(self: cuda.Api, target: torch.Tensor, source: torch.Tensor) -> None:
        with Watched(detector, lock):
            copy_now(self, target, source)

    monkeypatch.setattr(runner, "execute", watched)
    monkeypatch.setattr(cuda.Api, "copy", watched_copy)
    compare(compiled, optimizer, model, data, device)
    if device.type != "cuda":
        assert {"aten.mm.default", "aten.copy_.default"} <= set(detector.names)
