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
from tests.helpers.tracing import interpret, trace, traced_case

pytestmark = pytest.mark.slow  # it compiles many models


class Head(nn.Module):
    """A large vocabulary. ``bias``, ``dtype`` of the product; ``logits``: whether the caller gets them too."""

    def __init__(
        self, vocabulary: int = 60, bias: bool = True, dtype: torch.dtype = torch.float32, logits: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, 32, dtype=dtype)
        self.head = nn.Linear(32, vocabulary, bias=bias, dtype=dtype)
        self.logits = logits

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.embed(tokens).tanh())
        loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))
        return (loss, logits) if self.logits else loss


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


def test_logits_that_are_read_stay() -> None:
    for name in ("llama", "gpt2"):  # they return their logits
        assert chunk_loss(traced_case(name).joint, 4) == 0
    assert chunk_loss(trace(Head(logits=True), data()).joint, 4) == 0
    model = mtcompile.compile(Head(logits=True), memory="64MiB", loss_chunks=4)
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
    reading = mtcompile.compile(Head(logits=True), memory="64MiB", loss_chunks="auto")
    loss, logits = reading(**data())
    assert logits.shape == (3, 10, 60) and loss.isfinite()
