"""Tiles of tokens: the same rows by the same operations, sums over tiles where weights' gradients are, and less memory."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import mtcompile
from mtcompile.models.decoders import Decoder
from mtcompile.models.shapes import Shape
from mtcompile.passes.analysis.memory import body_peak
from mtcompile.passes.analysis.tiles import run_tiles
from mtcompile.passes.cuts.tiles.layouts import Tiling, cut, dims_of_rows, is_dense
from mtcompile.passes.cuts.tiles.rewrite import tile_rows, tile_tokens
from mtcompile.passes.graph_json import graph_from_json, graph_to_json
from mtcompile.passes.joint.build import build
from mtcompile.passes.step_graph import copy_step, is_view, kernel_of, listing, regions
from tests.helpers.tracing import Traced, interpret, trace
from tests.helpers.training import adamw, compiled_run, minimum_bytes, same, train

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


def untiled_of_heads(joint: fx.GraphModule) -> list[str]:
    """What is made outside of tiles in attention's layout, (batch, heads, tokens, width), but for attention itself."""
    made = (node for node in joint.graph.nodes if node.op == "call_function" and not is_view(node))
    tensors = [node for node in made if isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].dim() == 4]
    return [str(node.target) for node in tensors if node.target is not operator.getitem]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.long), 2])
def test_rows_keep_their_bits_and_weights_are_summed(batch: int) -> None:
    """Of a decoder: norms, projections and the MLP of every block. The embedding's gradient is that of every row's input."""
    torch.manual_seed(0)
    model, ids = Decoder(_SHAPE), torch.randint(0, 80, (batch, 64))
    traced = trace(model, {"tokens": ids, "targets": ids.roll(-1)})
    joint, count = in_tiles(traced, 4)
    assert count == 4 and not untiled_of_heads(joint)
    expected, results = (interpret(build(graph), traced.inputs) for graph in (traced.joint, joint))
    names = [spec.name for spec in joint.meta["outputs"]]
    equal = {name for name, one, other in zip(names, results, expected, strict=False) if torch.equal(one, other)}
    assert {names[0], "embed.weight"} <= equal
    for one, other in zip(results[:-1], expected[:-1], strict=True):  # the last is the generator's state
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


class Normed(nn.Module):
    """Layers of their own, each behind a norm, whose backward has several results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.layers(x)).square().mean()


def test_one_result_of_a_norms_backward_is_not_made_again_alone() -> None:
    torch.manual_seed(0)
    traced = trace(Normed(), {"x": torch.randn(64, 16)})
    joint, count = in_tiles(traced, 4)
    assert count == 4
    expected, results = (interpret(build(graph), traced.inputs) for graph in (traced.joint, joint))
    assert torch.equal(results[0], expected[0])
    for one, other in zip(results[:-1], expected[:-1], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_tile_with_rows_of_two_sequences_has_no_rotary_embedding() -> None:
    """Tiles of 16 rows, sequences of 24: what reads the same angles for each sequence stays whole, everything else does not."""
    torch.manual_seed(0)
    ids = torch.randint(0, 80, (2, 24))
    traced = trace(Decoder(_SHAPE), {"tokens": ids, "targets": ids.roll(-1)})
    joint, count = in_tiles(traced, 3)
    assert count == 3 and untiled_of_heads(joint)
    for one, other in zip(interpret(build(joint), traced.inputs), interpret(traced.step, traced.inputs), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_rows_are_leading_dimensions_or_the_first_and_an_inner_one() -> None:
    shapes = [(12, 5), (3, 4, 5), (1, 12, 5), (3, 2, 4, 5), (1, 2, 12, 5), (2, 12, 5), (4, 5), (3, 5)]
    assert [dims_of_rows(shape, 12) for shape in shapes] == [(0,), (0, 1), (1,), (0, 2), (2,), (1,), (), ()]


def test_tiles_of_what_is_not_leading_are_views_that_fill_the_whole() -> None:
    """Of (batch, heads, tokens, width) in memory of its own order, and of the angles that each sequence reads again."""
    tiling, value = Tiling(12, 2), torch.arange(3 * 4 * 2 * 5).view(3, 4, 2, 5).transpose(1, 2)
    tiled, again = cut(value, "rows", tiling), cut(torch.empty(4, 5), "repeated", tiling, 4)
    assert tiled is not None and again is not None and is_dense(value) and not is_dense(value[:, :1])
    rows = value.transpose(1, 2).reshape(12, 2, 5)
    for start in range(0, 12, 2):
        assert torch.equal(tiled.tile(value, start, 2).squeeze(0).transpose(0, 1), rows[start : start + 2])
    angles = torch.arange(20).view(4, 5)
    assert torch.equal(again.tile(angles, 6, 2), angles[2:4])
    assert cut(value, "rows", Tiling(12, 3)) is None and cut(angles, "repeated", Tiling(12, 3), 4) is None


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


BACKWARD: dict[str, Any] = {"update": "backward"}


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2, "loss_chunks": 2, "run_ahead": True, **BACKWARD},
        *(
            pytest.param(options, marks=pytest.mark.long)
            for options in (
                {},
                {"accumulate": 4},
                {"loss_chunks": 4},
                {"max_grad_norm": 1e3, "run_ahead": True, **BACKWARD},
                {"policy": "megatrain"},
                {"elastic": True},
                {"host": "560KB", "disk": "8MiB", "run_ahead": True, **BACKWARD},
            )
        ),
    ],
    ids=str,
)
@pytest.mark.slow
def test_with_other_options_the_bits_are_those_of_any_budget(options: dict[str, Any], tmp_path: Path) -> None:
    """And the weights are those of plain PyTorch, within the rounding of float64."""
    torch.manual_seed(0)
    model, ids = Decoder(_SHAPE).double(), torch.randint(0, 80, (4, 64))
    data = {"tokens": ids, "targets": ids.roll(-1)}
    on_disk = {"disk": f"{tmp_path}:{options['disk']}"} if "disk" in options else {}
    logs = []
    for memory in ("1GiB", "1300KB"):
        log, report, compiled = compiled_run(model, data, memory, steps=2, tiles=4, **{**options, **on_disk})
        assert report["peak_device_bytes"] <= report["planned_peak_device_bytes"]
        logs.append(log)
    assert same(*logs)
    assert bool(on_disk) == any(buffer.tier == "disk" for buffer in compiled.schedule.buffers.values())
    plain = train(model, adamw(model.parameters()), data, 2)
    for one, other in zip(logs[0][-2][-3:], plain[-2][-3:], strict=True):
        assert one is not None and other is not None and torch.allclose(one, other, rtol=0, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "run_ahead": True, **BACKWARD}], ids=str)
def test_fp32_masters_and_dropout_have_the_bits_of_any_budget(options: dict[str, Any]) -> None:
    model = Mlp(F.dropout)
    runs = [
        compiled_run(model, tokens(4, 64), memory, tiles=4, precision="bf16-master32", **options)[0]
        for memory in ("1GiB", "400KB")
    ]
    assert same(*runs)


@pytest.mark.long
def test_sequences_are_four_times_as_long() -> None:
    """In the smallest budget that recomputing all blocks without tiles works in, by its refusal."""
    needed = {}
    for tokens_count, tiles in ((1024, 1), (4096, 64)):
        torch.manual_seed(0)
        model = Decoder(Shape(64, 340, 3, 4, 1, 128, head_dim=16, dtype=torch.float32))
        ids = torch.arange(tokens_count).view(1, -1) % 128
        needed[tiles] = minimum_bytes(model, {"tokens": ids, "targets": ids}, tiles=tiles, loss_chunks=64)
    assert needed[64] <= needed[1]


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
