"""Kernels are measured on made-up inputs: whatever operations do with these, a step is planned, and with enough workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import mtcompile
from mtcompile.errors import MtcompileError
from mtcompile.kernels.eager import EagerKernels
from mtcompile.kernels.measure import measure
from mtcompile.kernels.zeros.run import looks_up_values, on_zeros
from tests.helpers.tracing import trace
from tests.helpers.training import equal_to_plain

pytestmark = pytest.mark.slow  # it compiles many models

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x)).pow(2).sum()


def definite(h: torch.Tensor) -> torch.Tensor:
    return h @ h.t() + torch.eye(4)


def sorted_and_back(h: torch.Tensor) -> torch.Tensor:
    """As Transformers' mixtures of experts: the inverse of a permutation, written into uninitialized memory."""
    permutation = torch.argsort(h.detach()[:, 0])
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(4)
    return h[permutation].tanh()[inverse] * torch.arange(4)


def counted(h: torch.Tensor) -> torch.Tensor:
    """Positions that count up to a mask's sum: an index of -1 where the mask is zeros."""
    positions = (h.detach() > -100).long().cumsum(0) - 1
    return h + torch.nn.functional.embedding(positions, torch.eye(4))[:, 0]


def segments(h: torch.Tensor) -> torch.Tensor:
    return torch.segment_reduce(h, "sum", lengths=torch.tensor([1, 1, 2]), axis=0)


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "inv": lambda h: torch.linalg.inv(definite(h)),
    "cholesky": lambda h: torch.linalg.cholesky(definite(h)),
    "solve": lambda h: torch.linalg.solve(definite(h), h),
    "eigvalsh": lambda h: torch.linalg.eigvalsh(definite(h)),
    "det": lambda h: torch.linalg.det(definite(h)),
    "slogdet": lambda h: torch.linalg.slogdet(definite(h))[1],
    "permutation": sorted_and_back,
    "positions": counted,
    "segments": segments,
    "multinomial": lambda h: h[torch.multinomial(h.detach().softmax(-1)[0], 2)],
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_that_refuses_zeros_is_planned(operation: str) -> None:
    torch.manual_seed(0)
    dirty = [torch.full((n,), 2**62) for n in (4, 16, 64) for _ in range(500)]  # what uninitialized memory then holds
    del dirty
    assert equal_to_plain(Model(OPERATIONS[operation]), {"x": 0.1 * torch.randn(4, 4)}, policy="checkpoint-all")


def test_a_check_raises_as_in_a_plain_run() -> None:
    compiled = mtcompile.compile(Model(lambda h: torch.linalg.inv(h * 0)), memory="1GiB")
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(torch.ones(4, 4))


def body(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """A kernel of ATen operations, with what a region's body says of its values."""
    from torch.fx.experimental.proxy_tensor import make_fx

    kernel = make_fx(lambda *args: (function(*args),), tracing_mode="fake")(*inputs)
    kernel.graph.output_node().args = (tuple(kernel.graph.output_node().args[0]),)
    kernel.meta.update(key=str(kernel.code), name="k")
    kernel.recompile()
    return kernel


def test_each_operation_is_given_zeros_whatever_was_computed() -> None:
    table, ids = torch.ones(8, 4), torch.arange(3)
    kernel = body(lambda table, ids: torch.nn.functional.embedding(ids - 1, table), table, ids)
    with pytest.raises(IndexError):
        kernel(torch.zeros(8, 4), torch.zeros(3, dtype=torch.int64))
    assert on_zeros(kernel, CPU)(torch.zeros(8, 4), torch.zeros(3, dtype=torch.int64))[0].shape == (3, 4)


def test_what_cannot_be_run_has_a_generous_workspace() -> None:
    square = torch.eye(64)
    kernel = body(lambda a: torch.ops.aten.linalg_lu_solve(a, torch.ones(64, dtype=torch.int32), a), square)
    measured = measure(kernel, on_zeros(kernel, CPU), CPU)
    actual = measure(kernel, lambda a: kernel(torch.eye(64)), CPU)
    assert measured.workspace >= actual.workspace > 0

    def failing(*inputs: torch.Tensor) -> list[torch.Tensor]:
        raise RuntimeError("not at all")

    assert measure(kernel, failing, CPU).workspace >= actual.workspace


def test_indices_that_a_kernel_computes_are_told_from_those_it_is_given() -> None:
    table, ids = torch.ones(8, 4), torch.arange(3)
    assert looks_up_values(body(lambda table, ids: table[ids + 1], table, ids))
    assert not looks_up_values(body(lambda table, ids: table[ids] * 2, table, ids))
    assert not looks_up_values(body(lambda table, ids: table[torch.arange(3)] + ids[0] + 1, table, ids))


@torch.library.custom_op("mtcompile_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


noise.register_fake(torch.empty_like)
noise.register_autograd(lambda ctx, grad: grad)


def test_a_custom_operation_that_draws_without_saying_so_is_refused() -> None:
    model = mtcompile.compile(Model(noise), memory="1GiB")
    state = torch.get_rng_state()
    with pytest.raises(mtcompile.CaptureError, match="nondeterministic_seeded"):
        model(torch.ones(4, 4))
    assert torch.equal(state, torch.get_rng_state())


def test_kernels_are_measured_once() -> None:
    kernels, kernel = EagerKernels(CPU), body(lambda x: x * 2, torch.ones(8))
    assert kernels(kernel) is kernels(kernel)


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.scaled_dot_product_attention(x, x, x).contiguous()
        return self.down(torch.nn.functional.gelu(self.up(x)).transpose(0, 1)).softmax(-1).sum()


def short(limit: int) -> Any:
    """``torch.zeros`` of a device on which no more than ``limit`` bytes are left."""
    zeros = torch.zeros

    def made(*size: Any, dtype: torch.dtype = torch.float32, **options: Any) -> torch.Tensor:
        tensor = zeros(*size, dtype=dtype, **options)
        if tensor.nbytes > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tensor

    return made


@pytest.mark.parametrize("limit", [None, 60_000])
def test_a_kernel_without_room_is_measured_by_its_operations(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never less than it needs, and not much more; a share of its rows where an operation alone has no room either."""
    monkeypatch.setenv("MT_CACHE", "0")  # what this process has measured with room
    step, scaled = trace(Attended(), {"x": torch.randn(16, 64, 64)}).step, list[bool]()
    for kernel in step.children():
        whole = measure(kernel, on_zeros(kernel, CPU), CPU)
        with monkeypatch.context() as patched:
            if limit is not None:
                patched.setattr(torch, "zeros", short(limit))
            parts = measure(kernel, raising(torch.OutOfMemoryError("CUDA out of memory")), CPU)
        estimate = measure(kernel, raising(RuntimeError("another error")), CPU).workspace
        assert whole.workspace <= parts.workspace
        assert parts.workspace <= (1.5 * whole.workspace + 2**16 if limit is None else 2 * estimate)
        assert not whole.note and parts.note.startswith("operation by operation")
        scaled.append("scaled" in parts.note)
    assert any(scaled) == (limit is not None)


def test_an_error_that_ends_the_gpu_is_not_taken_for_a_kernel_that_cannot_run() -> None:
    (kernel, *_) = trace(Attended(), {"x": torch.randn(2, 8, 64)}).step.children()
    ended = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    with pytest.raises(
        MtcompileError, match="while it was measured: CUDA error: an illegal memory access was encountered"
    ) as error:
        measure(kernel, raising(ended), CPU)
    assert error.value.__cause__ is ended
    assert measure(kernel, raising(RuntimeError("expected a positive size")), CPU).workspace > 0


def raising(error: Exception) -> Any:
    def call(*inputs: torch.Tensor) -> None:
        raise error

    return call


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(4096, 32, mode=mode), nn.Linear(32, 1)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(self.bags(indices)).pow(2).sum()


@pytest.mark.parametrize("mode", [*(pytest.param(mode, marks=pytest.mark.long) for mode in ("sum", "mean")), "max"])
def test_bags_take_little_more_than_the_whole_weight_whatever_they_name(mode: str) -> None:
    table = 4096 * 32 * 4
    with pytest.raises(mtcompile.BudgetError) as refusal:
        mtcompile.compile(Bags(mode), memory="1KiB")(torch.zeros(16, 64, dtype=torch.int64))
    least = refusal.value.minimum_bytes
    assert table < least < 2 * table
    model = mtcompile.compile(Bags(mode), memory=least)
    for indices in (torch.zeros(16, 64, dtype=torch.int64), torch.randint(4096, (16, 64)), torch.arange(1024).view(16, 64)):
        model(indices).backward()
        report = model.memory_report()
        assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= least
