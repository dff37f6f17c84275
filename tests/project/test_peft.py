"""examples/peft_lora.py: LoRA on a frozen base, with plain losses, and nothing but weights for the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mtcompile
from mtcompile.runtime.schedule import placed
from tests.project.examples import equal, example, weights

pytestmark = pytest.mark.slow  # it compiles a model


def copied_nbytes(schedule: Any, queue: str, role: str) -> int:
    copies = [i for i in schedule.instructions if i.op == "copy" and i.queue == queue]
    return sum(i.nbytes for i in copies if all(schedule.buffers[name].role == role for name in i.reads))


@pytest.mark.parametrize(
    ("layers", "memory", "update"),
    [
        (2, "1MiB", "backward"),
        pytest.param(2, "1MiB", "step", marks=pytest.mark.long),
        pytest.param(24, "1900KiB", "step", marks=pytest.mark.long),  # the base has eight times as many bytes
    ],
)
def test_the_base_is_read_and_nothing_else(layers: int, memory: str, update: str, tmp_path: Path) -> None:
    peft, lora = pytest.importorskip("peft"), example("peft_lora")
    plain, plain_losses = lora.train(None, layers, steps=3)
    model, losses = lora.train(memory, layers, steps=3, update=update)
    assert losses == plain_losses and equal(weights(model), weights(plain))

    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    nbytes, report = sum(p.nbytes for p in adapters.values()), model.memory_report()
    base_nbytes = sum(p.nbytes for p in model.parameters()) - nbytes
    if layers == 24:
        assert report["budget_device_bytes"] * 8 <= base_nbytes
    assert report["optimizer_bytes"] - 2 * nbytes == 4 * len(adapters)  # step counters
    assert report["gradients_bytes"] == (nbytes if update == "step" else 0)
    for tier in ("device", "host"):
        assert report[f"peak_{tier}_bytes"] <= report[f"planned_peak_{tier}_bytes"]
    schedule, copies = model.schedule, 4 if update == "step" else 3
    held = sum(placed(p.nbytes) * (copies if p.requires_grad else 1) for p in model.parameters())
    counters = 64 * len(adapters)  # the optimizer's steps
    generator_states = sum(schedule.resident_nbytes.values()) - held - counters  # two, for dropout
    assert 0 <= generator_states <= 2**14
    assert copied_nbytes(schedule, "d2h", "grad") <= sum(placed(p.nbytes) for p in adapters.values())
    assert copied_nbytes(schedule, "h2d", "param") >= base_nbytes // 2  # it is streamed

    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(lora.base(layers), tmp_path / "adapter")
    merged = again.merge_and_unload()
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    saved = type(merged).from_pretrained(tmp_path / "merged")
    assert type(merged).__name__ == "LlamaForCausalLM" and equal(weights(saved), weights(merged))


@pytest.mark.long
def test_a_peft_model_is_planned_as_it_runs() -> None:
    lora, tokens = example("peft_lora"), torch.zeros((1, 32), dtype=torch.long)

    def factory(batch: int, seq: int) -> Any:
        with torch.device("meta"):
            model = lora.base(2).to(torch.bfloat16)
            model = lora.get_peft_model(model, lora.LoraConfig(r=8, target_modules="all-linear"))
        return model, {"input_ids": tokens, "labels": tokens}

    forecast = mtcompile.plan(factory, memory="1GiB")
    built = mtcompile.plan(lambda batch, seq: (lora.base(2).to(torch.bfloat16), factory(1, 1)[1]), memory="1GiB", lora=8)
    trained = 2 * 8 * (4 * (128 + 128) + 3 * (128 + 256))
    for each in (forecast, built):
        assert each.ledger is not None
        parts = each.ledger["device"]
        assert 4 * trained <= parts["gradients"] < 1.3 * 4 * trained and parts["optimizer"] == 2 * parts["gradients"]
    assert forecast.parameters == built.parameters == sum(p.numel() for p in lora.base(2).parameters()) + trained


def test_dora_is_captured_whole(recwarn: pytest.WarningsRecorder) -> None:
    """PEFT asks for the type of each weight; in parts, some gradients would differ in their last bits."""
    lora, tokens = example("peft_lora"), torch.arange(64).view(2, 32)

    def train(memory: str | None) -> tuple[Any, list[torch.Tensor]]:
        config = lora.LoraConfig(r=4, target_modules="all-linear", use_dora=True, init_lora_weights=False)
        base = lora.base(2)
        torch.manual_seed(1)
        model = lora.get_peft_model(base, config).train()
        if memory:
            model = mtcompile.compile(model, memory=memory)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        losses = []
        for _ in range(2):
            losses.append(model(input_ids=tokens, labels=tokens).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, [loss.detach() for loss in losses]

    (plain, plain_losses), (model, losses) = train(None), train("1500KiB")
    assert equal(weights(model), weights(plain)) and all(map(torch.equal, losses, plain_losses))
    assert model.memory_report()["peak_device_bytes"] < sum(p.nbytes for p in model.parameters())
    assert not [warning for warning in recwarn if "compiled in parts" in str(warning.message)]
