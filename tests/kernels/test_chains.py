"""Chains: which operations they hold, and that none serves whose bits are not eager's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from mtcompile.kernels.chains.build import ExactKernels, Proof
from mtcompile.kernels.chains.proof import digests, drawn, first_difference, rounds
from mtcompile.kernels.chains.split import chains_of, elementwise_nbytes
from mtcompile.kernels.eager import Built, EagerKernels
from mtcompile.machine.device import allocator_peak
from mtcompile.passes.analysis.kernels import install
from mtcompile.passes.step_graph import body_outputs
from tests.helpers.tracing import trace

aten = torch.ops.aten
CPU = torch.device("cpu")
BF16 = torch.bfloat16
Body = fx.GraphModule


def body_of(function: Callable[..., Any], *operands: torch.Tensor) -> Body:
    owner = nn.Module()
    body = owner.get_submodule(install(owner, {}, make_fx(function, tracing_mode="fake")(*operands).graph))
    assert isinstance(body, fx.GraphModule)
    return body


def split(body: Body) -> list[list[str]]:
    """The operations of each chain, views among them."""
    chains = chains_of(body, lambda node: False)
    nodes = [[n for n in chain.kernel.graph.nodes if n.op == "call_function"] for chain in chains]
    return [[str(n.target).removeprefix("aten.").partition(".")[0] for n in each] for each in nodes]


def norm(x: torch.Tensor, weight: torch.Tensor) -> Any:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return ((wide * scale * weight).to(x.dtype),)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    heads = x.view(4, 32, 2, 32).transpose(1, 2)
    first, second = heads.split(16, -1)
    return (heads * cos + torch.cat([-second, first], -1) * sin,)


def one_rounding_left_out(x: torch.Tensor) -> Any:
    return (((x.float() * 3.1).to(BF16).float() * 1.7 + 0.3).to(BF16),)


def multiplied_and_added(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
    return ((a * b + c).abs().sqrt(),)


def test_reductions_and_products_part_chains() -> None:
    body = body_of(norm, torch.randn(64, 256, dtype=BF16), torch.randn(256, dtype=BF16))
    assert split(body) == [["_to_copy", "pow"], ["add", "rsqrt", "mul", "mul", "_to_copy"]]

    def two_products(x: torch.Tensor, w: torch.Tensor) -> Any:
        gate = nn.functional.silu(x @ w) * x
        return ((gate @ w).tanh() * 2 + gate,)

    square = torch.randn(128, 128)
    assert split(body_of(two_products, square, square)) == [["silu", "mul"], ["tanh", "mul", "add"]]


def test_a_rotation_is_one_chain_with_its_views() -> None:
    body = body_of(
        rotated, torch.randn(4, 32, 64, dtype=BF16), torch.randn(32, 32, dtype=BF16), torch.randn(32, 32, dtype=BF16)
    )
    (chain,) = chains_of(body, lambda node: False)
    assert [node.name for node in chain.operands] == [node.name for node in body.graph.find_nodes(op="placeholder")]
    assert chain.nbytes == elementwise_nbytes(body)


def test_what_is_worth_nothing_stays_eager() -> None:
    x = torch.randn(128, 128)
    for function in (lambda x: (x + 1,), lambda x: (x.t().reshape(64, 256),), lambda x: ((x[0, :4] + 1) * 2,)):
        assert not chains_of(body_of(function, x), lambda node: False)


def test_integers_of_nan_stay_eager() -> None:
    assert split(body_of(lambda x: ((x * 2 + 1).to(torch.int64) * 2,), torch.randn(128, 128))) == [["mul", "add"]]


class Dropping(nn.Module):
    """Draws twice, between elementwise operations that read what was drawn last, then first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = nn.functional.dropout(x * 2 + 1, 0.5)
        b = nn.functional.dropout(x * 3 + 2, 0.5)
        return (b * a + x).mean()


def test_random_numbers_are_drawn_in_order() -> None:
    step = trace(Dropping(), {"x": torch.randn(128, 128, requires_grad=True)}).step
    kernels, eager = list(step.children()), EagerKernels(CPU)
    built = ExactKernels(CPU, compiled=lambda chain: chain.forward).build(kernels, eager)
    assert any(kernel.in_chains_nbytes for kernel in built.values())
    for kernel in kernels:
        operands = [torch.randn(n.meta["val"].shape).to(n.meta["val"].dtype) for n in kernel.graph.find_nodes(op="placeholder")]
        torch.manual_seed(1)
        expected = [*eager(kernel).call(*operands), torch.get_rng_state()]
        torch.manual_seed(1)
        found = [*built[str(kernel.meta["name"])].call(*operands), torch.get_rng_state()]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# ---------------------------------------------------------------------------------------------------------------- proof


def test_drawn_operands_are_all_values_of_16_bits_and_all_edges() -> None:
    body = body_of(lambda x, y: (x + y, x.float() * 2), torch.zeros(64, 64, dtype=BF16), torch.zeros(64, 64, dtype=BF16))
    all_rounds = [drawn(body, CPU, number) for number in range(rounds(body))]
    for place in (0, 1):
        assert (
            len(torch.cat([operands[place].view(torch.int16).flatten() for operands in all_rounds[1::2]]).unique()) == 1 << 16
        )
    (x,) = drawn(body_of(lambda x: (x + 1,), torch.zeros(256, 257)), CPU, 1)
    tiny = torch.finfo(torch.float32).smallest_normal
    assert x.isnan().any() and x.isinf().any() and ((x.abs() < tiny) & (x != 0)).any()
    assert ((x == 0) & x.signbit()).any() and ((x == 0) & ~x.signbit()).any() and (x == torch.finfo(torch.float32).max).any()
    (usual,) = drawn(body_of(lambda x: (x + 1,), torch.zeros(256, 257)), CPU, 0)
    assert usual.isfinite().all() and usual.unique().numel() > 10_000


def test_a_digest_is_of_bits_but_any_nan_is_one() -> None:
    x = torch.tensor([1.0, -0.0, math.nan, 1e-40])
    other_nan = x.view(torch.int32).clone()
    other_nan[2] += 1
    assert digests([x]) == digests([other_nan.view(torch.float32)])
    assert digests([x]) != digests([torch.where(x == 0, 0.0, x)]) and digests([x]) != digests([x.to(BF16)])
    transposed = torch.randn(64, 3).t()
    assert digests([transposed]) == digests([transposed.clone()]) != digests([transposed + 1])


class Widened(fx.Interpreter):
    """Computes as a compiler that is not careful enough does: keeps what eager rounds, until the end."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten._to_copy.default and kwargs["dtype"] == BF16:
            return args[0]
        if target is aten.mul.Tensor and all(
            isinstance(value, torch.Tensor) and value.dtype == torch.float32 for value in args
        ):
            return args[0].double() * args[1]  # which a fused multiplication and addition does not round
        return super().call_function(target, args, kwargs)

    def run(self, *operands: Any, **options: Any) -> Any:
        results = super().run(*operands, **options)
        return [r.to(node.meta["val"].dtype) for r, node in zip(results, body_outputs(self.module), strict=True)]  # type: ignore[arg-type]


def widened(chain: Body) -> Callable[..., Any]:
    return lambda *operands: Widened(chain).run(*operands)


CASES = [
    (one_rounding_left_out, (torch.randn(256, 256).to(BF16),), "_to_copy (bfloat16)"),
    (multiplied_and_added, tuple(torch.randn(3, 256, 256)), "add (float32, float32)"),
]


@pytest.mark.parametrize(("function", "operands", "named"), CASES)
def test_drawn_operands_alone_catch_a_chain_that_rounds_less(function: Any, operands: Any, named: str) -> None:
    body = body_of(function, *operands)
    assert first_difference(body, body.forward, CPU) is None
    exact = ExactKernels(CPU, compiled=widened, proof=Proof(runs=0))
    (built,) = exact.build([body], EagerKernels(CPU)).values()
    assert torch.equal(built.call(*operands)[0], body(*operands)[0])
    assert exact.notes() == (f"exact kernels: eager wherever they occur, as Inductor's bits differ: {named}",)


@pytest.mark.parametrize(("function", "operands", "named"), CASES)
def test_real_operands_alone_catch_a_chain_that_rounds_less(function: Any, operands: Any, named: str) -> None:
    body = body_of(function, *operands)
    exact = ExactKernels(CPU, compiled=widened, proof=Proof(drawn=False, runs=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zeros, on which a kernel is measured, do not differ
        (built,) = exact.build([body], EagerKernels(CPU)).values()
    assert built.in_chains_nbytes
    with pytest.warns(UserWarning, match="has other bits than eager PyTorch on operands of this step"):
        assert torch.equal(built.call(*operands)[0], body(*operands)[0])
    assert torch.equal(built.call(*operands)[0], body(*operands)[0])
    assert named in exact.notes()[0]
    (again,) = ExactKernels(CPU, compiled=widened, proof=Proof(drawn=False, runs=0)).build([body], EagerKernels(CPU)).values()
    assert not torch.equal(again.call(*operands)[0], body(*operands)[0])  # the mutant, unproven


def test_the_operation_that_differs_stays_eager_and_the_others_are_fused() -> None:
    def long(x: torch.Tensor) -> Any:
        return ((((x * 2 + 1).exp() * 0.5 + 3).sigmoid() * x - 1).abs(),)

    class Worse(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            result = super().call_function(target, args, kwargs)
            return result.nextafter(torch.zeros(())) if target is aten.exp.default else result

    x = torch.randn(256, 256)
    body = body_of(long, x)
    exact = ExactKernels(CPU, compiled=lambda chain: lambda *xs: Worse(chain).run(*xs))
    (built,) = exact.build([body], EagerKernels(CPU)).values()
    assert exact.notes() == ("exact kernels: eager wherever they occur, as Inductor's bits differ: exp (float32)",)
    assert 0 < built.in_chains_nbytes < built.elementwise_nbytes and len(exact.chains) == 3
    assert torch.equal(built.call(x)[0], body(x)[0])


def test_a_chain_that_cannot_be_compiled_stays_eager() -> None:
    def refuse(chain: Body) -> Any:
        raise NotImplementedError("no such thing")

    x = torch.randn(256, 256)
    body = body_of(lambda x: ((x + 1) * 2,), x)
    exact = ExactKernels(CPU, compiled=refuse)
    (built,) = exact.build([body], EagerKernels(CPU)).values()
    assert "could not be compiled: add > mul (NotImplementedError: no such thing)" in exact.notes()[0]
    assert torch.equal(built.call(x)[0], body(x)[0])


def test_equal_chains_are_compiled_once_and_compared_a_few_times() -> None:
    compiled, x = list[Body](), torch.randn(256, 256)

    def counted(chain: Body) -> Any:
        compiled.append(chain)
        return chain.forward

    bodies = [body_of(function, x) for function in (lambda x: ((x + 1) * 2,), lambda x: ((x + 1) * 2 @ x, x.sum()))]
    exact = ExactKernels(CPU, compiled=counted)
    exact.build(bodies, EagerKernels(CPU))
    assert len(bodies) == 2 and len(compiled) == 1
    (chain,) = exact.chains.values()
    assert chain is not None and chain.left == 4
    for left in (3, 2, 1, 0, 0):
        chain(x)
        assert chain.left == left


def test_comparing_takes_no_memory_beside_either_run() -> None:
    def of_two_parts(x: torch.Tensor) -> Any:
        return (((x + 1) * 2).sigmoid() * x,)

    x = torch.randn(512, 512)
    x[::7] = math.nan
    body = body_of(of_two_parts, x)
    (built,) = ExactKernels(CPU, compiled=lambda chain: chain.forward).build([body], EagerKernels(CPU)).values()
    eager: Built = EagerKernels(CPU)(body)
    assert built.workspace <= eager.workspace + (1 << 18)
    with torch.no_grad(), allocator_peak(CPU) as peak:
        results = built.call(x)
    assert peak.nbytes is not None and peak.nbytes <= results[0].nbytes + built.workspace
