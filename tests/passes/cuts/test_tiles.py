"""Tiles of tokens: the same rows by the same operations, sums over tiles where weights' gradients are, and less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import mtcompile
from mtcompile.models.decoders import Decoder, Shape
from mtcompile.passes.analysis.memory import body_peak
from mtcompile.passes.analysis.tiles import run_tiles
from mtcompile.passes.cuts.tiles.rewrite import tile_rows, tile_tokens
from mtcompile.passes.graph_json import graph_from_json, graph_to_json
from mtcompile.passes.joint.build import build
from mtcompile.passes.step_graph import copy_step, kernel_of, listing, regions
from tests.helpers.tracing import Traced, interpret, trace

_SHAPE = Shape(32, 96, 2, 2, 1, 80, head_dim=16, dtype=torch.float32)


class Layer(nn.Module):
    """Norm, two linear layers with biases and a residual. ``between``: what is done to the hidden values, of shape (batch,
    tokens, wide)."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.between = nn.LayerNorm(16, dtype=dtype), between
        self.up, self.down = nn.Linear(16, 64, dtype=dtype), nn.Linear(64, 16, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.up(self.norm(x))))


class Mlp(nn.Module):
    """Two layers behind an embedding."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = F.gelu, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16, dtype=dtype)
        self.layers = nn.ModuleList(Layer(between, dtype) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def tokens(batch: int = 2, count: int = 32) -> dict[str, torch.Tensor]:
    return {"tokens": torch.arange(batch * count).view(batch, count) * 7 % 50}


def in_tiles(traced: Traced, tiles: int) -> tuple[fx.GraphModule, int]:
    joint = copy_step(traced.joint)
    return joint, tile_tokens(joint, tiles)


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_keep_their_bits_and_weights_are_summed(batch: int) -> None:
    """Of a decoder: norms, projections and the MLP of every block. The embedding's gradient is that of every row's input."""
    torch.manual_seed(0)
    model, ids = Decoder(_SHAPE), torch.randint(0, 80, (batch, 64))
    traced = trace(model, {"tokens": ids, "targets": ids.roll(-1)})
    joint, count = in_tiles(traced, 4)
    assert count == 4
    expected, results = (interpret(build(graph), traced.inputs) for graph in (traced.joint, joint))
    names = [spec.name for spec in joint.meta["outputs"]]
    equal = {name for name, one, other in zip(names, results, expected, strict=False) if torch.equal(one, other)}
    assert {names[0], "embed.weight"} <= equal
    for one, other in zip(results[:-1], expected[:-1], strict=True):  # the last is the generator's state
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_layer_norms_and_half_precision(dtype: torch.dtype) -> None:
    """The last tile has fewer rows. bf16 has 8 bits."""
    traced = trace(Mlp(dtype=dtype), tokens(1, 60))
    joint, count = in_tiles(traced, 3)
    assert count == 2  # of 32 rows, and 28
    expected, results = (interpret(build(graph), traced.inputs) for graph in (traced.joint, joint))
    for one, other in zip(results[:-1], expected[:-1], strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        assert (one - other).abs().max() <= (1e-5 if dtype is torch.float32 else 3e-2) * other.abs().max()


def over_tokens(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.softmax(1)


def test_what_mixes_tokens_is_not_cut() -> None:
    traced = trace(Mlp(over_tokens), tokens())
    joint, _ = in_tiles(traced, 4)
    programs = [node.args[0] for node in joint.graph.nodes if node.target is run_tiles]
    assert not any("softmax" in str(program) for program in programs)
    for one, other in zip(interpret(build(joint), traced.inputs), interpret(traced.step, traced.inputs), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def test_random_numbers_are_drawn_as_before() -> None:
    traced = trace(Mlp(F.dropout), tokens())
    joint, _ = in_tiles(traced, 4)
    results = []
    for step in (traced.step, build(joint)):
        torch.manual_seed(1)
        results.append(interpret(step, traced.inputs)[0])
    assert torch.equal(*results)


def test_the_inside_is_there_for_one_tile_at_a_time() -> None:
    """Peaks of the bodies by shapes: the hidden layer of 1,024 tokens takes 256 KiB."""
    traced = trace(Mlp(), tokens(1, 1024))
    peaks = []
    for tiles in (1, 16):
        step = build(in_tiles(traced, tiles)[0])
        peaks.append(max(body_peak(kernel_of(step, region).graph) for region in regions(step)))
    assert peaks[1] < peaks[0] / 2


def test_a_graph_with_tiles_is_text_and_back() -> None:
    joint, _ = in_tiles(trace(Mlp(), tokens()), 4)
    again = graph_from_json(graph_to_json(joint))
    assert listing(build(again)) == listing(build(joint))


def test_tiles_are_of_whole_groups_of_rows() -> None:
    assert [tile_rows(*each) for each in ((1024, 4), (1000, 4), (60, 3), (10, 4), (3, 8))] == [256, 256, 32, 4, 1]


def test_options_and_models_without_such_parts() -> None:
    with pytest.raises(ValueError, match="expected tiles"):
        mtcompile.compile(nn.Linear(2, 2), tiles=0)
    model = mtcompile.compile(nn.Embedding(10, 4), memory="64MiB", tiles=2)
    with pytest.raises(mtcompile.CaptureError, match="tiles=2"):
        model(torch.arange(4)).sum().backward()


@pytest.mark.slow
def test_trains_below_what_whole_blocks_need() -> None:
    """On the emulated device, which refuses what the plan has not counted."""
    model = Mlp()
    plain = copy.deepcopy(model)
    plain(**tokens(1, 2048)).backward()
    peaks = {}
    for tiles in (1, 16):
        torch.compiler.reset()
        compiled = mtcompile.compile(copy.deepcopy(model), memory=4096, tiles=tiles)
        with pytest.raises(mtcompile.BudgetError) as refused:
            compiled(**tokens(1, 2048))
        torch.compiler.reset()
        compiled = mtcompile.compile(copy.deepcopy(model), memory=refused.value.minimum_bytes, tiles=tiles)
        compiled(**tokens(1, 2048)).backward()
        report = compiled.memory_report()
        peaks[tiles] = report["planned_peak_device_bytes"]
        assert report["peak_device_bytes"] <= peaks[tiles] <= refused.value.minimum_bytes
        assert torch.equal(compiled.embed.weight.grad, plain.embed.weight.grad)
        assert torch.allclose(compiled.layers[0].up.weight.grad, plain.layers[0].up.weight.grad, rtol=1e-4, atol=1e-7)
    assert peaks[16] < peaks[1] / 2
