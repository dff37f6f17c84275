"""Plans before anything runs: their figures add up and agree with what is compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.forecast.result import Row
from mtcompile.machine.presets import PRESETS
from mtcompile.models.shapes import SHAPES, Shape
from mtcompile.passes.analysis.cost import Machine
from mtcompile.runtime.schedule import gib, placed
from mtcompile.sizes import three_digits
from tests.helpers.models import make, tower

pytestmark = pytest.mark.slow  # it compiles many models


def test_the_ledger_adds_up_and_names_every_byte() -> None:
    forecast = mtcompile.plan("small", batch=4, seq=64, memory="4MiB", machine="rtx4090")
    assert forecast.feasible and forecast.ledger is not None and forecast.planned is not None
    for tier, parts in forecast.ledger.items():
        assert sum(parts.values()) == forecast.peak_bytes[tier]
        assert 0 <= parts["other"] <= 2**20
    assert forecast.busy is not None and all(0 < share <= 1 for share in forecast.busy.values())
    assert forecast.peak_bytes["device"] <= 4 * 2**20
    assert forecast.state_bytes == pytest.approx(4 * 4 * forecast.parameters, rel=0.01)
    assert forecast.step_time_us > forecast.update_us > 0 and forecast.tokens == 256
    assert forecast.tokens_per_s == pytest.approx(256 / forecast.step_time_us * 1e6)
    assert forecast.certificate is not None and 0 < forecast.certificate.bound_us <= forecast.step_time_us
    assert forecast.gap == pytest.approx(forecast.step_time_us / forecast.certificate.bound_us - 1)
    assert all(saved > 0 for saved in forecast.certificate.gains_us.values())
    text = str(forecast)
    assert f"fits, if the host has {gib(forecast.peak_bytes['host'])}: " in text and "workspace" in text and "numerics" in text


def test_it_plans_what_compile_then_runs() -> None:
    model, data = make("tied")
    forecast = mtcompile.plan(lambda: (make("tied")[0], data), memory="1MiB", machine=Machine())
    compiled: Any = mtcompile.compile(model, memory="1MiB", optimizer=torch.optim.AdamW(model.parameters()), device="cpu")
    compiled(**data).backward()
    assert forecast.planned is not None
    assert [d.choice for d in forecast.planned.plan.decisions] == [d.choice for d in compiled.plan.decisions]
    assert forecast.parameters == sum(p.numel() for p in model.parameters())
    assert forecast.state_bytes >= compiled.memory_report()["state_bytes"]


SMALL = Shape(128, 384, 1, 2, 1, 1024, head_dim=64, dtype=torch.float32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``plan`` know a small decoder by name: the traces of what it knows by name are cached."""
    monkeypatch.setitem(SHAPES, "small", SMALL)


def test_what_does_not_fit_says_how_much_is_short_and_what_would() -> None:
    def planned(memory: str | int, host: str | None = None) -> mtcompile.Forecast:
        return mtcompile.plan("small", batch=4, seq=16, memory=memory, host=host)

    forecast = planned("200KiB")
    assert not forecast.feasible and forecast.short_bytes > 0 and len(forecast.ways_out) == 3
    assert forecast.minimum_device_bytes == 200 * 2**10 + forecast.short_bytes
    again = planned(forecast.minimum_device_bytes)
    assert again.feasible and again.peak_bytes["device"] <= forecast.minimum_device_bytes
    both = planned("200KiB", "1MiB")
    assert not both.feasible and len(both.ways_out) == 3


def test_a_module_of_real_tensors_is_planned_without_being_run() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).square().mean()

    forecast = mtcompile.plan(Loss(), {"x": torch.zeros(4, 8)}, memory="1MiB")
    assert forecast.feasible and forecast.parameters == 72


def test_a_planned_module_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Flatten(0)).eval()
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x).float().square().mean()

    loss = Loss().eval()
    for options in ({"precision": "bf16"}, {"lora": 4}, {"precision": "bf16", "lora": 4}):
        assert mtcompile.plan(loss, {"x": torch.zeros(4, 8)}, **options).feasible
        after = dict(model.named_parameters())
        assert after.keys() == before.keys() and not any(part.training for part in loss.modules())
        for name, (parameter, values) in before.items():
            assert after[name] is parameter and parameter.requires_grad and torch.equal(parameter, values)


@pytest.mark.long
def test_precisions_and_updates_count_their_own_bytes() -> None:
    sizes = {}
    for precision, update in (("fp32", "step"), ("bf16", "step"), ("bf16-master32", "step"), ("bf16-master32", "backward")):
        forecast = mtcompile.plan("small", batch=1, seq=128, machine=Machine(), precision=precision, update=update)
        assert forecast.feasible and forecast.ledger is not None and forecast.numerics
        sizes[precision, update] = forecast.state_bytes / forecast.parameters
        for tier, parts in forecast.ledger.items():
            assert sum(parts.values()) == forecast.peak_bytes[tier] and min(parts.values()) >= 0
    assert sizes["fp32", "step"] == pytest.approx(16, rel=0.01)
    assert sizes["bf16", "step"] == pytest.approx(8, rel=0.01)
    assert sizes["bf16-master32", "step"] == pytest.approx(14, rel=0.01)
    assert 12 <= sizes["bf16-master32", "backward"] < 12.1  # gradients take slots of the arena, for two regions


def test_an_update_as_gradients_arrive_hides_behind_the_backward() -> None:
    slow = replace(Machine(), host_gbps=40.0, flops=1e10)
    after, along = (mtcompile.plan("small", seq=128, memory="4MiB", machine=slow, update=u) for u in ("step", "backward"))
    assert 0 <= along.update_us < after.update_us / 2 and along.step_time_us < after.step_time_us


def test_a_fixed_policy_lets_no_gradients_wait_where_the_host_has_no_room_for_them() -> None:
    slow = replace(Machine(), host_gbps=1.0)

    def row(host: int | None) -> Row:
        options: dict[str, Any] = {"machine": slow, "update": "backward", "policies": ("megatrain",)}
        return mtcompile.plan("small", batch=4, seq=64, host=host, **options).rows[0]

    waiting = row(None)
    tight = row(waiting.peak_bytes["host"] - 1)
    assert waiting.feasible and tight.feasible and tight.peak_bytes["host"] < waiting.peak_bytes["host"]
    assert tight.step_time_us >= waiting.step_time_us
    least = tight.peak_bytes["host"]
    short = row(least - 1)
    assert (short.feasible, short.short_bytes, short.tier, short.peak_bytes["host"]) == (False, 1, "host", least)


@pytest.mark.long
@pytest.mark.parametrize(("solve", "memory"), [("seq", "30MiB"), ("batch", "20MiB")])
def test_solving_finds_the_largest_size_that_fits(solve: str, memory: str) -> None:
    forecast = mtcompile.plan(tower, batch=2, seq=256, memory=memory, machine=Machine(), solve=solve)
    assert forecast.feasible and forecast.solved is not None and forecast.peak_expressions is not None
    largest = forecast.solved[solve]
    step = 1 if solve == "batch" else 128
    assert largest > step and solve in forecast.peak_expressions["device"]
    for size, fits in ((largest, True), (largest + step, False)):
        again = mtcompile.plan(tower, **{"batch": 2, "seq": 256} | {solve: size}, memory=memory, machine=Machine())
        assert again.feasible == fits
    with pytest.raises(ValueError, match="expects a limit"):
        mtcompile.plan(tower, machine=Machine(), solve=solve)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"run_ahead": True, "precision": "bf16-master32"}, marks=pytest.mark.long)],
    ids=["plain", "masters"],
)
def test_solving_counts_what_updates_in_the_backward_need(options: dict[str, Any]) -> None:
    asked = {"seq": 64, "memory": "3MiB", "machine": Machine(), "update": "backward", "effort": "quick", **options}
    forecast = mtcompile.plan("small", **asked, solve="batch")
    assert forecast.feasible and forecast.solved is not None
    assert not mtcompile.plan("small", batch=forecast.solved["batch"] + 1, **asked).feasible


@pytest.mark.long
def test_solve_memory_says_the_least_that_works() -> None:
    forecast = mtcompile.plan("small", seq=64, memory="200KiB", solve="memory")
    assert forecast.feasible and forecast.solved == {"memory": forecast.budget_bytes["device"]}
    assert not mtcompile.plan("small", seq=64, memory=forecast.solved["memory"] - 1).feasible


@pytest.mark.slow
@pytest.mark.parametrize(("seq", "points"), [(64, 3), pytest.param(256, 20, marks=pytest.mark.long)])
def test_more_memory_is_never_slower_and_no_refusal_names_another_least(seq: int, points: int) -> None:
    """Also where the loss head has to be cut, or weights or tokens are."""
    least = mtcompile.plan("small", seq=seq, memory=1).minimum_device_bytes
    assert mtcompile.plan("small", seq=seq, solve="memory").solved == {"memory": least}
    budgets = [int(least * 20 ** (point / points)) for point in range(points + 1)]
    forecasts = [mtcompile.plan("small", seq=seq, memory=budget) for budget in budgets]
    times = [forecast.step_time_us for forecast in forecasts if forecast.feasible]
    assert len(times) == len(budgets) and times == sorted(times, reverse=True)
    assert {forecast.minimum_device_bytes < least for forecast in forecasts} == {False}


@pytest.mark.long
@pytest.mark.parametrize("memory", ["24GB", "8GB"])
def test_8b_with_adapters_fits_a_host_of_20_gb(memory: str) -> None:
    planned = mtcompile.plan("llama-8b", memory=memory, host="20GB", machine="rtx4090", lora=16)
    assert planned.feasible and planned.ledger is not None
    assert planned.peak_bytes["device"] <= int(memory[:-2]) * 10**9 and planned.peak_bytes["host"] <= 20 * 10**9
    weights = sum(parts["weights"] for parts in planned.ledger.values())
    state = sum(parts["optimizer"] + parts["gradients"] for parts in planned.ledger.values())
    assert weights == pytest.approx(2 * planned.parameters, rel=0.02) and state < 0.05 * weights  # frozen: weights alone


@pytest.mark.long
def test_a_vision_model_on_meta_tensors_takes_adapters() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}

    def factory(batch: int, seq: int) -> Any:
        with torch.device("meta"):
            model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
            pixels = torch.zeros((batch, 3, 32, 32), dtype=torch.bfloat16)
        return model.to(torch.bfloat16), {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}

    whole, adapted = (mtcompile.plan(factory, batch=4, memory="64MiB", lora=rank) for rank in (0, 8))
    assert whole.feasible and adapted.feasible
    new = adapted.parameters - whole.parameters  # in fp32, with gradients and AdamW's state; the others are weights alone
    assert new > 0 and adapted.state_bytes == pytest.approx(2 * whole.parameters + 16 * new, rel=0.03)


def test_state_of_muon_is_one_copy_of_matrices_and_two_of_the_rest() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    planned = mtcompile.plan(model, {"input": torch.zeros(4, 64)}, optimizer="muon")
    matrix, *vectors = (placed(4 * parameter.numel()) for parameter in model.parameters())
    state = sum(parts["optimizer"] for parts in planned.ledger.values())
    assert matrix + 2 * sum(vectors) <= state < 2 * matrix


def test_the_host_has_the_rams_of_its_machine_unless_a_budget_is_given() -> None:
    def host(machine: Any, host: str | None = None) -> int | None:
        return mtcompile.plan("small", seq=16, machine=machine, host=host).budget_bytes["host"]

    assert host("rtx4090") == int(PRESETS["rtx4090"].host_nbytes * 0.95) == int(128e9 * 0.95)
    assert host("rtx4090", "1GB") == 10**9
    assert host(Machine()) is None  # not known
    assert all(preset.host_nbytes for preset in PRESETS.values())


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (999_700, "1.00 million"),
        (7_615_616_512, "7.62 billion"),
        (10**9, "1.00 billion"),
        (29_700, "29.7 thousand"),
        (885, "885"),
    ],
)
def test_counts_and_speeds_are_never_in_powers_of_ten(parameters: int, said: str) -> None:
    forecast = replace(mtcompile.plan("small", seq=16), parameters=parameters, tflops=1234.5)
    assert f": {said} parameters" in str(forecast) and " 1,234 TFLOPS" in str(forecast)
    assert three_digits(999.6) == "1,000" and three_digits(0.0123) == "0.0123"
