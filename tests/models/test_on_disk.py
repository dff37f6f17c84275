"""``from_pretrained`` of weights that the host has no room for: they go to the disk, and train with the same bits."""

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
from safetensors.torch import save_file
from torch import nn

import mtcompile
from mtcompile.models.loading import language_model
from mtcompile.models.placing import SMALL, Room
from mtcompile.optim.own_files import beside, in_memory, in_own_file, is_in_own_file, own_files_nbytes

WIDTH, BLOCKS = 96, 24
HOST, LOADED = 600_000, 23 * 36_864  # bytes: that the host has, and of the large weights


class Blocks(nn.Module):
    """Whose first two weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.layers[1].weight = self.layers[0].weight
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.norm(x).square().mean()  # type: ignore[no-any-return]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    weights = {name: value for name, value in Blocks().state_dict().items() if name != "layers.1.weight"}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def on_meta() -> Blocks:
    with torch.device("meta"):
        return Blocks()


def trained(model: Any, steps: int = 3) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.bind(optimizer)
    losses, x = [], torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)
    for _ in range(steps):
        losses.append(model(x.to(next(nn.Module.parameters(model)).dtype)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    model.synchronize()
    return [loss.detach() for loss in losses], {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["model", pytest.param("bf16-master32", marks=pytest.mark.slow)])
def test_weights_larger_than_the_host_train_with_the_bits_of_a_run_in_memory(precision: str, folder: Path) -> None:
    options: dict[str, Any] = {"memory": "400KB", "update": "backward", "precision": precision}
    losses, state = trained(mtcompile.from_pretrained(folder, on_meta(), **options))
    model = mtcompile.from_pretrained(folder, on_meta(), host=HOST, disk=f"{folder}/disk:16MB", **options)
    large = [p for p in nn.Module.parameters(model) if p.numel() == WIDTH * WIDTH]
    assert len(large) == BLOCKS - 1 and all(map(is_in_own_file, large))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert before.keys() == state.keys() and all(map(is_in_own_file, large))
    with torch.no_grad():
        model.eval()(torch.zeros(2, WIDTH, dtype=large[0].dtype))
    own = trained(model.train())
    assert all(map(torch.equal, losses, own[0]))
    assert all(torch.equal(value, own[1][name]) for name, value in state.items())
    masters = model._mt_model.door.masters or ()
    assert not any(map(is_in_own_file, (*nn.Module.parameters(model), *(master.remainder for master in masters))))
    assert model.memory_report()["peak_disk_bytes"] > 0


LLAMA = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 288, "num_attention_heads": 4, "num_hidden_layers": 2}


def test_random_weights_that_the_host_has_no_room_for_begin_on_the_disk(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "vocab_size": 256, "tie_word_embeddings": True}))
    for name, host in {str(config): "600KB", "gpt-11m": "20MB"}.items():
        torch.manual_seed(0)
        wanted, vocabulary = language_model(name, Room(None, None))
        torch.manual_seed(0)
        model, _ = language_model(name, Room.of(host, f"{tmp_path}/disk:64MB"), masters=True)
        large = [p for p in model.parameters() if p.nbytes >= SMALL]
        assert large and all(map(is_in_own_file, large))
        assert all(map(torch.equal, wanted.state_dict().values(), model.state_dict().values()))
        tokens = torch.randint(0, vocabulary, (2, 16))
        assert abs(float(model(tokens, tokens.roll(-1, 1))) - math.log(vocabulary)) < 0.5
    with pytest.raises(mtcompile.BudgetError, match=r"to make gpt-11m with disk=.*Nothing has begun"):
        language_model("gpt-11m", Room.of("2MB", f"{tmp_path}/disk:64MB"))


def test_without_room_for_them_nothing_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"memory": "400KB", "update": "backward", "disk": f"{folder}/disk:16MB"}
    read = []
    monkeypatch.setattr(mtcompile.checkpoint.shards.StoredTensor, "read", lambda *arguments: read.append(arguments))
    with pytest.raises(mtcompile.BudgetError, match=r"twice the largest tensor .*, found 68.36 KiB in the budget host="):
        mtcompile.from_pretrained(folder, on_meta(), **options, host=70_000)
    options["disk"] = f"{folder}/disk:600KB"
    with pytest.raises(
        mtcompile.BudgetError, match=r"on disk=.*disk to load .* found 585.94 KiB. Nothing has begun"
    ) as refused:
        mtcompile.from_pretrained(folder, on_meta(), **options, host=HOST)
    assert refused.value.tier == "disk" and refused.value.minimum_bytes >= LOADED
    with pytest.raises(mtcompile.BudgetError, match=r'or a disk: host="SIZE", disk="/path:SIZE"'):
        mtcompile.from_pretrained(folder, on_meta(), memory="400KB", host=HOST)
    assert not read


def test_weights_on_disk_count_as_taken_there_until_the_first_step(folder: Path) -> None:
    options: dict[str, Any] = {"memory": "400KB", "update": "backward", "host": HOST}
    model = mtcompile.from_pretrained(folder, on_meta(), **options, disk=f"{folder}/disk:{LOADED + 200_000}B")
    with pytest.raises(mtcompile.BudgetError, match="disk="):
        trained(model, 1)


def test_a_tensor_in_a_file_of_its_own_is_there_until_nothing_holds_it(tmp_path: Path) -> None:
    values = torch.arange(30_000, dtype=torch.bfloat16).view(100, 300).t()
    own = in_own_file(values, tmp_path)
    assert torch.equal(own, values) and own.stride() == values.stride() and is_in_own_file(own.detach())
    assert not is_in_own_file(values) and beside(values, values) is values and in_memory(values) is values
    assert own_files_nbytes([own, own.detach(), values]) == 61_440  # whole blocks
    other = beside(own, values.float())
    assert is_in_own_file(other) and torch.equal(other, values.float()) and beside(own, other) is other
    copy = in_memory(own)
    assert not is_in_own_file(copy) and torch.equal(copy, values) and copy.stride() == values.stride()
    assert mapped(tmp_path) == 2 and not list(tmp_path.iterdir())
    del own, other
    assert mapped(tmp_path) == 0 and not own_files_nbytes([copy])


def mapped(folder: Path) -> int:
    return Path("/proc/self/maps").read_text().count(f"{folder}/.mtcompile-disk-")


@pytest.mark.slow
def test_a_model_of_transformers_is_loaded_in_a_few_tensors_of_memory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(  # whose experts are stacked as they are read
        hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=8, vocab_size=512, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config)
    plain.save_pretrained(tmp_path)
    nbytes = sum(parameter.nbytes for parameter in plain.parameters())
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    command = [sys.executable, "-c", _LOADING, str(tmp_path), str(nbytes // 3)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is the system's again
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=environment)
    assert ran.returncode == 0 and nbytes > 100 << 20, ran.stderr[-3000:]


_LOADING = """
import resource, sys, torch, mtcompile, transformers.models.mixtral.modeling_mixtral
from pathlib import Path
folder, room = Path(sys.argv[1]), int(sys.argv[2])
mtcompile.compile(torch.nn.Linear(1, 1), memory="1MiB")  # imports what it needs
held = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + room, -1))  # memory that is no file's
model = mtcompile.from_pretrained(folder, memory="1GiB", host=room, disk=f"{folder}/disk:1GiB", update="backward")
resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
plain = torch.load(folder / "plain.pt")
assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
"""
