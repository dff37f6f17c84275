"""The loss head in chunks: near the whole, exact in its own right, and its logits never exist."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mtcompile
from mtcompile.passes.graph_json import graph_from_json, graph_to_json
from mtcompile.passes.joint.build import build
from mtcompile.passes.joint.loss_head import chunk_loss
from mtcompile.passes.step_graph import listing
from tests.helpers.models import Gpt, tokens
from tests.helpers.tracing import interpret, trace

pytestmark = pytest.mark.slow  # it compiles many models


class Head(nn.Module):
    """A large vocabulary. ``bias``, ``dtype`` of the product; ``logits``: which are returned with the loss."""

    def __init__(
        self, vocabulary: int = 60, bias: bool = True, dtype: torch.dtype = torch.float32, logits: str = "none"
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, 32, dtype=dtype)
        self.head = nn.Linear(32, vocabulary, bias=bias, dtype=dtype)
        self.logits = logits

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.embed(tokens).tanh())
        wide = logits.float()
        loss = F.cross_entropy(wide.view(-1, logits.shape[-1]), labels.view(-1))
        also = {"none": (), "as made": (logits,), "wide": (wide,), "both": (logits, wide), "argmax": (logits.argmax(-1),)}
        return (loss, *also[self.logits]) if self.logits != "none" else loss


def data(vocabulary: int = 60, rows: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, vocabulary, (3, rows), generator=generator)
    labels[0, :4] = -100  # ignored
    return {"tokens": torch.randint(0, vocabulary, (3, rows), generator=generator), "labels": labels}


_CASES = list(itertools.product((2, 4, 7, 30, 99), (True, False), (torch.float32, torch.bfloat16)))


@pytest.mark.parametrize(  # in the shorter runs each number of chunks in one of them
    ("chunks", "bias", "dtype"),
    [pytest.param(*case, marks=[pytest.mark.long] * bool(number % 3)) for number, case in enumerate(_CASES)],
)
def test_near_the_whole(chunks: int, bias: bool, dtype: torch.dtype) -> None:
    model = Head(bias=bias, dtype=dtype)
    whole = trace(model, data())
    chunked = trace(model, data())
    assert chunk_loss(chunked.joint, chunks) == 1
    expected, found = interpret(whole.step, whole.inputs), interpret(build(chunked.joint), chunked.inputs)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance / 10)
    sizes = {tuple(n.meta["val"].shape) for n in chunked.joint.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    assert (30, 60) not in sizes


def test_a_graph_read_from_text_is_chunked_alike() -> None:
    """Its values are tensors without content, of no trace."""
    for dtype in (torch.float32, torch.bfloat16):
        chunked = trace(Head(dtype=dtype), data())
        again = graph_from_json(graph_to_json(chunked.joint))
        assert chunk_loss(chunked.joint, 4) == chunk_loss(again, 4) == 1
        assert listing(build(again)) == listing(build(chunked.joint))


def test_everything_ignored_is_nan_as_in_the_whole() -> None:
    inputs = data()
    inputs["labels"].fill_(-100)
    chunked = trace(Head(), inputs)
    assert chunk_loss(chunked.joint, 3) == 1
    assert interpret(build(chunked.joint), chunked.inputs)[0].isnan()


@pytest.mark.parametrize("logits", ["as made", "wide", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_returned_are_made_once(logits: str, dtype: torch.dtype) -> None:
    model, inputs = Head(60, bias=False, dtype=dtype, logits=logits), data()
    whole, chunked = trace(model, inputs), trace(model, inputs)
    assert chunk_loss(chunked.joint, 4) == 1
    expected, found = interpret(whole.step, whole.inputs), interpret(build(chunked.joint), chunked.inputs)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for one, other in zip(found, expected, strict=True):
        atol = 0 if other.dim() == 3 else tolerance / 10  # the logits are the same
        assert torch.allclose(one.float(), other.float(), rtol=10 * atol, atol=atol)
    rows = [n.meta["val"].shape[0] for n in chunked.joint.graph.nodes if "log_softmax" in str(n.target)]
    assert max(rows) == 8 and sum(rows) == 3 * 30  # in the forward, in the backward, and in what that makes of gradients
    products = [n for n in chunked.joint.graph.nodes if str(n.target) == "aten.mm.default" and n.meta["val"].shape[1] == 60]
    assert [n.meta["val"].shape[0] for n in products][:5] == [30, 8, 8, 8, 6]  # whole in the forward, in chunks in the backward


def test_changing_returned_logits_does_not_change_gradients() -> None:
    model, inputs = Head(logits="as made"), data()
    program = mtcompile.compile(copy.deepcopy(model), memory="64MiB", loss_chunks=4)
    for each, change in ((model, False), (program, True)):
        loss, logits = each(**inputs)
        if change:
            with torch.no_grad():
                logits.zero_()
        loss.backward()
    for one, other in zip(model.parameters(), program.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, 1e-5, 1e-7)


def test_another_loss_on_returned_logits_keeps_the_head_whole() -> None:
    """The logits then have a gradient of their own."""
    model, inputs = Head(logits="as made"), data()
    program = mtcompile.compile(copy.deepcopy(model), memory="64MiB", loss_chunks="auto")
    for each in (model, program):
        loss, logits = each(**inputs)
        (loss + logits.square().mean()).backward()
    for one, other in zip(model.parameters(), program.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_chunks_reduce_memory_if_logits_are_returned() -> None:
    inputs = data(8192, 171)  # 16 MiB of logits
    needs = {}
    for chunks in (1, "auto"):
        with pytest.raises(mtcompile.BudgetError) as refused:
            mtcompile.compile(Head(8192, logits="as made"), memory="18MiB", loss_chunks=chunks)(**inputs)
        needs[chunks] = refused.value.minimum_bytes
        assert ("returns its logits (16.03 MiB)" in str(refused.value)) == (chunks == "auto")
    assert needs["auto"] < 0.6 * needs[1]
    forecast = mtcompile.plan(Head(8192, logits="as made"), inputs, memory="18MiB")
    assert not forecast.feasible and any("returns its logits (16.03 MiB)" in note for note in forecast.notes)


def test_logits_that_are_read_stay() -> None:
    assert chunk_loss(trace(Head(logits="argmax"), data()).joint, 4) == 0
    model = mtcompile.compile(Head(logits="argmax"), memory="64MiB", loss_chunks=4)
    with pytest.raises(mtcompile.CaptureError, match="loss_chunks=4"):
        model(**data())


def test_other_reductions_are_left_alone() -> None:
    class Summed(Head):
        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.head(self.embed(tokens).tanh())
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="sum")

    assert chunk_loss(trace(Summed(), data()).joint, 4) == 0


def test_narrow_logits_stay_and_a_refusal_says_so() -> None:
    """Sums over chunks would be rounded as the logits are."""

    class Narrow(Head):
        def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.head(self.embed(tokens).tanh())
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    model, inputs = Narrow(2048, dtype=torch.bfloat16), data(2048, 171)
    assert chunk_loss(trace(model, inputs).joint, 4) == 0
    with pytest.raises(mtcompile.CaptureError, match="whose float32 logits"):
        mtcompile.compile(copy.deepcopy(model), memory="64MiB", loss_chunks=4)(**inputs)
    with pytest.raises(mtcompile.BudgetError, match=r"logits \(2.00 MiB\) are bfloat16") as refused:
        mtcompile.compile(copy.deepcopy(model), memory="5MiB", loss_chunks="auto")(**inputs)
    assert refused.value.minimum_bytes > 5 * 2**20
    forecast = mtcompile.plan(copy.deepcopy(model), inputs, memory="5MiB")
    assert not forecast.feasible and any("logits (2.00 MiB) are bfloat16" in note for note in forecast.notes)
    for fitting in (mtcompile.plan(model, inputs, memory="16MiB"), mtcompile.plan(model, inputs, memory="6600KiB")):
        assert fitting.feasible and not any("loss head" in note for note in fitting.notes)
    wide = mtcompile.plan(Head(2048, dtype=torch.bfloat16), inputs, memory="16KiB")
    assert not wide.feasible and not any("loss head" in note for note in wide.notes)


@pytest.mark.parametrize("door", ["compile", "backend"])
def test_the_peak_falls_by_about_the_logits(door: str) -> None:
    """8K words, 513 tokens: 16 MiB of logits."""
    words, inputs = 8192, data(8192, 171)
    logits = 3 * 171 * words * 4
    peaks, losses = {}, {}
    for chunks in (1, 8):
        torch.compiler.reset()
        model = Head(words)
        if door == "compile":
            compiled = mtcompile.compile(model, memory="4GiB", loss_chunks=chunks)
            losses[chunks] = compiled(**inputs)
            losses[chunks].backward()
            report = compiled.memory_report()
            assert (compiled.plan is not None) and ("8 chunks" in compiled.plan.numerics) == (chunks == 8)
        else:
            options = {"loss_chunks": chunks}
            losses[chunks] = torch.compile(model, backend="mtcompile", options=options)(**inputs)
            losses[chunks].backward()
            from mtcompile.backend import _backends

            report = _backends[id(options), torch.device("cpu")].report()
        assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"]
        peaks[chunks] = report["peak_device_bytes"]
    whole, chunked, saved = (n / 2**20 for n in (peaks[1], peaks[8], logits))
    print(f"{door}: peak {whole:.1f} MiB whole, {chunked:.1f} MiB in 8 chunks; logits {saved:.1f} MiB")
    assert peaks[1] - peaks[8] >= 0.8 * logits
    assert torch.allclose(losses[1], losses[8])


def test_in_a_model_with_blocks() -> None:
    torch.manual_seed(0)
    model, batch = Gpt(layers=2), tokens(6)
    plain = copy.deepcopy(model)
    plain(batch).backward()
    for memory in ("64MiB", None):
        copied = copy.deepcopy(model)
        torch.manual_seed(1)
        compiled = mtcompile.compile(copied, memory=memory, loss_chunks=5)
        copied.eval(), plain.eval()
        plain.zero_grad(), copied.zero_grad()
        expected, loss = plain(batch), compiled(batch)
        expected.backward(), loss.backward()
        assert torch.allclose(loss, expected, rtol=1e-6)
        for one, other in zip(copied.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_auto_takes_as_few_chunks_as_the_budget_allows() -> None:
    chosen = []
    for memory in (None, "6MiB", "2304KiB"):
        torch.compiler.reset()
        compiled = mtcompile.compile(Head(2048), memory=memory, loss_chunks="auto")
        compiled(**data(2048, 171)).backward()
        assert compiled.plan is not None
        report = compiled.memory_report()
        assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"] <= report["budget_device_bytes"]
        found = re.search(r"in (\d+) chunks", compiled.plan.numerics)
        chosen.append(int(found[1]) if found else 1)
    assert chosen[0] == 1 < chosen[1] <= chosen[2]
    returning = mtcompile.compile(Head(logits="as made"), memory="64MiB", loss_chunks="auto")
    loss, logits = returning(**data())
    assert logits.shape == (3, 10, 60) and loss.isfinite()
