"""``mtcompile verify``: equal where it is, and where it is not the first thing that differs, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import mtcompile
from mtcompile.cli.app import app
from mtcompile.models.decoders import Decoder
from mtcompile.models.shapes import Shape
from mtcompile.parity.verification import Difference, _beyond_rounding, difference_of

pytestmark = pytest.mark.slow  # it compiles many models

SHAPE = Shape(32, 64, 1, 2, 1, 256, head_dim=16, dtype=torch.float32)


def decoder(batch: int, seq: int) -> Any:
    tokens = torch.randint(0, 256, (batch, seq))
    targets = tokens.clone()
    targets[0, :5] = -100  # not all micro-batches weigh alike
    return Decoder(SHAPE), {"tokens": tokens, "targets": targets}


class Normed(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.last(self.dropout(self.norm(self.first(x)).relu())).square().mean()}


class Odd(nn.Module):
    """Looks at its values where it is not being compiled, which cannot be captured, and computes something else where it is.
    ``where``: in its loss, or only in a gradient."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.outer, self.where = nn.Linear(4, 4), nn.Linear(4, 1), where
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if torch.compiler.is_compiling() or bool(y.isnan().all()):
            if self.where == "loss":
                y = y * 1.001
            elif self.where == "gradient":
                y = y.detach() + (y - y.detach()) * 1.5
            elif self.where == "buffer":
                self.seen.add_(1)
            elif self.where == "generator":
                y = y + 0 * torch.rand_like(y)
        return self.outer(y).square().mean()


def test_buffers_dropout_and_the_generator_are_equal_at_half_of_what_all_resident_takes() -> None:
    state = torch.get_rng_state()
    module = Normed()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    told: list[str] = []
    found = mtcompile.verify(
        module, {"x": torch.randn(8, 32)}, device="cpu", progress=lambda text, done, total: told.append(text)
    )
    assert found.equal and found.first is None and found.notes == () and found.resident_bytes is not None
    assert found.memory_bytes >= found.resident_bytes // 2 and found.peak_device_bytes <= found.memory_bytes
    assert found.compared == {"loss": 3, "gradient": 18, "generator": 3, "buffer": 9, "weight": 18, "master": 0}
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert "compiled step" in told and "equal: every bit" in str(found)
    assert not torch.equal(state, torch.get_rng_state())  # randn of this test; the verification itself leaves no trace
    state = torch.get_rng_state()
    mtcompile.verify(module, {"x": torch.ones(8, 32)}, memory="1MiB", steps=1, device="cpu")
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"update": "backward", "max_grad_norm": 0.5}, marks=pytest.mark.long),
        pytest.param({"accumulate": 2, "max_grad_norm": 0.5}, marks=pytest.mark.long),
        pytest.param({"precision": "bf16", "accumulate": 2}, marks=pytest.mark.long),
        {"precision": "bf16-master32", "accumulate": 2, "update": "backward", "max_grad_norm": 0.5},
        pytest.param({"precision": "bf16-master32", "accumulate": 4}, marks=pytest.mark.long),
    ],
    ids=lambda options: ", ".join(map(str, options.values())),
)
def test_options_are_those_of_the_plain_loop(options: dict[str, Any]) -> None:
    found = mtcompile.verify(decoder, memory="1MiB", batch=4, seq=16, steps=2, device="cpu", **options)
    assert found.equal, str(found)
    parameters = sum(1 for _ in Decoder(SHAPE).parameters())
    assert found.compared["weight"] == 2 * parameters
    assert found.compared["gradient"] == (0 if options.get("update") == "backward" else 2 * parameters)
    assert found.compared["master"] == (2 * parameters if options.get("precision") == "bf16-master32" else 0)


@pytest.mark.parametrize("where", ["loss", "gradient", "buffer", "generator"])
def test_the_first_that_differs_is_named(where: str) -> None:
    found = mtcompile.verify(Odd(where), {"x": torch.ones(2, 4)}, memory="1MiB", device="cpu")
    assert not found.equal and found.first is not None and found.steps == 1
    names = {"loss": "", "gradient": "inner.weight", "buffer": "seen", "generator": "state"}
    assert (found.first.kind, found.first.name, found.first.step) == (where, names[where], 1)
    assert found.first.elements >= 1 and (found.first.largest or 0) > 0
    assert f"step 1: the {where}" in str(found)
    assert json.loads(found.to_json())["differences"][0]["kind"] == where


def test_rounding_is_no_difference_with_inductor() -> None:
    model, half = nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()
    for relative, more in ((1e-6, (False, False)), (1e-3, (True, False)), (0.1, (True, True))):
        for step, kind in ((1, "loss"), (2, "loss"), (1, "gradient")):
            found = Difference(kind, "", step, 1, 1, relative, relative)
            assert (_beyond_rounding(found, model), _beyond_rounding(found, half)) == more
        assert not _beyond_rounding(Difference("weight", "", 1, 1, 1, relative, relative), model)  # AdamW's step of a sign
    assert _beyond_rounding(Difference("weight", "", 1, 1, 1), model)  # not finite


def test_with_inductor_it_is_rounding_that_counts() -> None:
    found = mtcompile.verify(Odd("none"), {"x": torch.ones(2, 4)}, memory="1MiB", device="cpu", kernels="inductor", steps=2)
    assert found.equal and "equal within rounding" in str(found)
    found = mtcompile.verify(Odd("loss"), {"x": torch.ones(2, 4)}, memory="1MiB", device="cpu", kernels="inductor", steps=2)
    assert not found.equal and found.largest_relative["loss"] > 1e-4


def test_bits_are_bits() -> None:
    one = torch.tensor([0.0, float("nan"), 1.0])
    assert difference_of("loss", "", 1, one, one.clone()) is None
    found = difference_of("loss", "", 1, one[::2], torch.tensor([-0.0, 1.5]))
    assert found is not None and (found.elements, found.of, found.largest, found.relative) == (2, 2, 0.5, 0.5)
    found = difference_of("loss", "", 1, one, torch.ones(3))
    assert found is not None and found.largest is None and found.elements == 2
    found = difference_of("loss", "", 1, one, one.double())
    assert found is not None and "dtype torch.float32 in plain PyTorch, torch.float64 compiled" in str(found)


def test_a_model_that_plain_pytorch_cannot_run_is_not_said_to_be_hard_to_capture() -> None:
    with pytest.raises(ValueError, match="its call raises RuntimeError: mat1 and mat2 must have the same dtype"):
        mtcompile.verify(Normed(), {"x": torch.randn(8, 32)}, precision="bf16", device="cpu")
    with pytest.raises(ValueError, match="return its loss, or something with a loss, found Tensor of shape"):
        mtcompile.verify(nn.Linear(4, 4), {"input": torch.randn(2, 4)}, device="cpu")
    with pytest.raises(ValueError, match="expected steps of 1 or more"):
        mtcompile.verify(Normed(), {"x": torch.randn(8, 32)}, steps=0, device="cpu")


def test_random_numbers_in_micro_batches_are_not_compared() -> None:
    with pytest.raises(ValueError, match="draws random numbers"):
        mtcompile.verify(Normed(), {"x": torch.randn(8, 32)}, memory="1MiB", accumulate=2, device="cpu")
    found = mtcompile.verify(Normed(0.0), {"x": torch.randn(8, 32)}, memory="1MiB", accumulate=2, device="cpu")
    assert found.equal


def test_the_command_ends_with_its_verdict(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from tests.parity.test_verification import Normed, Odd\n"
        "def equal(batch, seq):\n    return Normed(), {'x': torch.randn(batch, 32)}\n"
        "def odd(batch, seq):\n    return Odd('loss'), {'x': torch.randn(batch, 4)}\n"
    )
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2, "vocab_size": 100}))
    for model, code in (("own.py:equal", 0), ("own.py:odd", 5), ("config.json", 0)):
        arguments = ["verify", f"{tmp_path}/{model}", "--steps", "2", "--seq", "48", "--device", "cpu", "--memory", "1MiB"]
        made = CliRunner().invoke(app, [*arguments, "--json"])
        assert made.exit_code == code, made.output
        found = json.loads(made.stdout)
        assert found["equal"] == (code == 0) and found["steps"] == (2 if code == 0 else 1)


def test_bench_measures_both_in_turn(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from tests.parity.test_verification import decoder\ndef make(batch, seq):\n    return decoder(batch, seq)\n"
    )
    arguments = ["bench", f"{tmp_path}/own.py:make", "--seq", "16", "--steps", "3", "--memory", "1MiB", "--device", "cpu"]
    made = CliRunner().invoke(app, [*arguments, "--json"])
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    for side in ("plain", "compiled"):
        measured = found[side]
        assert len(measured["steps_s"]) == 3 and sorted(measured["steps_s"])[1] == measured["step_s"]
        assert measured["tokens_per_s"] == pytest.approx(32 / measured["step_s"])
    assert found["time_ratio"] == pytest.approx(found["compiled"]["step_s"] / found["plain"]["step_s"])
    assert found["compiled"]["peak_device_bytes"] <= found["memory_bytes"] == 2**20
    state = 3 * 4 * sum(p.numel() for p in Decoder(SHAPE).parameters())  # weights and AdamW's two, held all the time
    assert found["plain"]["peak_device_bytes"] > state
