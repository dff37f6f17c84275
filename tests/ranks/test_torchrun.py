"""Programs under torchrun: ``mtcompile train``, and the Transformers Trainer, train with all ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mtcompile import checkpoint
from mtcompile.data.windows import Windows, read_tokens
from mtcompile.models.loading import language_model
from mtcompile.models.placing import Room
from mtcompile.trainer.recipe import Recipe, learning_rate

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
SIZES = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1}


def torchrun(*arguments: str, count: int = 2) -> str:
    """What a job of that many processes prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MT_PROGRESS": "0", "MT_RANKS_TIMEOUT": "60"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def recipe(folder: Path, **options: Any) -> Recipe:
    (folder / "config.json").write_text(json.dumps({**SHAPE, **SIZES}))
    (folder / "text.md").write_text((ROOT / "LICENSE").read_text())
    given = {"batch": 4, "seq": 16, "steps": 3, "warmup": 2, "evaluate_every": 0, "data": (folder / "text.md",)}
    return Recipe(str(folder / "config.json"), **{**given, **options})


def plain_job(wanted: Recipe, ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and weights of a plain loop, in which each rank's part of a batch has a backward of its own."""
    stream, _ = read_tokens(wanted.data, None)
    windows, part = Windows.cut(stream, wanted.length, wanted.batch), wanted.batch // ranks
    torch.manual_seed(wanted.seed)
    model, _ = language_model(wanted.model, Room(None, None))
    matrices, others = ([p for p in model.parameters() if (p.dim() >= 2) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": wanted.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=wanted.rate, betas=(0.9, 0.95)), []
    for step in range(1, wanted.steps_of(0) + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(wanted, wanted.steps_of(0), step)
        whole = windows.batch(step, wanted.batch, wanted.seed).arguments
        total, value = dict[str, torch.Tensor](), 0.0
        for rank in range(ranks):
            model.zero_grad()
            loss = model(**{name: each[rank * part : (rank + 1) * part] for name, each in whole.items()})
            loss.backward()
            value += float(loss.detach()) / ranks
            for name, parameter in model.named_parameters():
                own = parameter.grad / ranks
                total[name] = total[name] + own if name in total else own
        for name, parameter in model.named_parameters():
            parameter.grad = total[name]
        torch.nn.utils.clip_grad_norm_(model.parameters(), wanted.clip or math.inf)
        optimizer.step()
        losses.append(value)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.long
@pytest.mark.parametrize("update", ["step", "backward"])
def test_mtcompile_train_has_the_bits_of_a_plain_job(update: str, tmp_path: Path) -> None:
    wanted, run = recipe(tmp_path), tmp_path / "run"
    given = ["--batch", "4", "--seq", "16", "--steps", "3", "--warmup", "2", "--memory", "2MiB", "--device", "cpu"]
    given += ["--data", str(wanted.data[0]), "--save", str(run), "--update", update, "--evaluate-every", "3"]
    printed = torchrun("-m", "mtcompile", "train", wanted.model, "--json", "--metrics", str(tmp_path / "rows"), *given)
    losses, weights = plain_job(wanted, ranks=2)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["loss"] for row in rows if "loss" in row] == losses
    assert json.loads(printed)["steps"] == 3 and 0 < json.loads(printed)["eval_loss"] < 10  # one rank prints
    loaded, _ = language_model(wanted.model, Room(None, None))
    assert checkpoint.load(run, loaded, generators=False).step == 3
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
    again = torchrun("-m", "mtcompile", "train", wanted.model, "--json", "--resume", str(run), *given, "--steps", "4")
    assert json.loads(again)["steps"] == 4


TRAINER = """
import os
import sys
from pathlib import Path

import torch

folder, order, hosts = Path(sys.argv[1]), *sys.argv[2:]
os.environ["MT_RANKS_HOST"] = hosts[int(os.environ["RANK"])]
sys.path.insert(0, "examples")
from hf_trainer import train

options = {"use_cpu": True, "disable_tqdm": True, "ddp_backend": "gloo", "steps": 4}
runs = {}
for name in order.split("-"):
    trainer = train(str(folder / name), {"plain": None, "compiled": "2MiB"}[name], **options)
    assert torch.distributed.get_world_size() == 2
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    rows = [(row.get("loss"), row.get("grad_norm")) for row in trainer.state.log_history]
    runs[name] = rows, {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}
(losses, plain), (compiled_losses, compiled) = runs["plain"], runs["compiled"]
equal = losses == compiled_losses and plain.keys() == compiled.keys()
equal &= all(torch.equal(plain[key], compiled[key]) for key in plain)
(folder / f"{torch.distributed.get_rank()}-{order}").write_text(f"{equal} {len(plain)}")
"""


@pytest.mark.long
@pytest.mark.parametrize(("order", "hosts"), [("plain-compiled", "aa"), ("compiled-plain", "aa"), ("compiled-plain", "ab")])
def test_the_transformers_trainer_has_the_bits_of_a_plain_model(order: str, hosts: str, tmp_path: Path) -> None:
    """Compiled after or before the process group is there, in two processes; each is wrapped in DistributedDataParallel. The
    optimizer state that it saves is a plain run's."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    (script := tmp_path / "program.py").write_text(TRAINER)
    torchrun(str(script), str(tmp_path), order, hosts)
    found = [(tmp_path / f"{rank}-{order}").read_text().split() for rank in range(2)]
    assert [each[0] for each in found] == ["True", "True"] and all(int(each[1]) > 10 for each in found)
    saved, plain = (
        torch.load(tmp_path / name / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"]
        for name in ("compiled", "plain")
    )
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[number][key], value) for number in plain for key, value in plain[number].items())
