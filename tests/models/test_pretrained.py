"""``from_pretrained``: a folder's weights become the model's, in little more memory than they take, or are refused unread."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

import mtcompile
from mtcompile import checkpoint
from mtcompile.checkpoint.shards import stored_tensors
from tests.helpers.limited_loading import MIB, meta_module, write_weights
from tests.project.examples import equal, weights

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "use_cache": False,
}  # fmt: skip
TOKENS = torch.arange(8).view(1, 8)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*address: object, **options: object) -> NoReturn:
        raise AssertionError("there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def saved(folder: Path, config: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder, **options)
    return folder


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x))).square().mean()  # type: ignore[no-any-return]


def on_meta(module: type[nn.Module] = Tied) -> Any:
    with torch.device("meta"):
        return module()


# ------------------------------------------------------------------------------------------------------------ Transformers


@pytest.mark.parametrize(
    ("config", "dtype", "runs"),
    [
        ("LlamaConfig", torch.float32, False),
        pytest.param("GPT2Config", torch.float32, True, marks=pytest.mark.long),
        pytest.param("MixtralConfig", torch.float32, True, marks=pytest.mark.long),  # its file has each expert by itself
        pytest.param("Qwen3MoeConfig", torch.bfloat16, True, marks=pytest.mark.long),
        pytest.param("LlamaConfig", torch.bfloat16, True, marks=pytest.mark.long),
    ],
)
def test_a_folder_becomes_what_transformers_makes_of_it(config: str, dtype: torch.dtype, runs: bool, tmp_path: Path) -> None:
    own = getattr(transformers, config)(**SMALL, tie_word_embeddings=config == "LlamaConfig")
    saved(tmp_path, own, dtype, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model = mtcompile.from_pretrained(tmp_path, memory="64MiB")
    assert type(model).__name__ == type(plain).__name__ and model.training == plain.training
    assert equal(weights(model), weights(plain)) and equal(dict(model.named_buffers()), dict(plain.named_buffers()))
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert model.config.to_dict() == plain.config.to_dict()
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    if not runs:
        return
    losses = [each(input_ids=TOKENS, labels=TOKENS).loss for each in (plain, model)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(place.home is not None for place in model._mt_model.door.parameters.places.values())  # nothing else holds them
    model.save_pretrained(tmp_path / "again")  # in the layout of the files it came from
    assert stored_tensors(tmp_path / "again").keys() == stored_tensors(tmp_path).keys()
    assert equal(weights(type(plain).from_pretrained(tmp_path / "again")), weights(plain))


@pytest.mark.long
def test_a_new_head_is_initialized_as_transformers_would(tmp_path: Path) -> None:
    saved(tmp_path, transformers.LlamaConfig(**SMALL))
    models = []
    for load in (transformers.AutoModelForSequenceClassification.from_pretrained, mtcompile.from_pretrained):
        torch.manual_seed(1)
        given: Any = {"model": transformers.AutoModelForSequenceClassification, "allow_new": ["score"]} if models else {}
        models.append(load(tmp_path, **given))
    assert equal(weights(models[0]), weights(models[1]))


def changed(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Changes tensors of a folder's weights; dots of their names are written as ``__``."""
    tensors = load_file(folder / "model.safetensors") | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({n: value for n, value in tensors.items() if value is not None}, folder / "model.safetensors", {"format": "pt"})
    return folder


UP = "model__layers__0__mlp__up_proj__weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {UP: None},
            r"missing there: model.layers.0.mlp.up_proj.weight; of other shapes: nothing; not in LlamaForC.*: nothing",
        ),
        ({UP: None, UP.replace("weight", "wieght"): torch.ones(48, 32)}, "not in LlamaForCausalLM: model.layers.0.*wieght"),
        (
            {UP: torch.ones(48, 31)},
            r"of other shapes: model.layers.0.mlp.up_proj.weight of shape \(48, 31\) instead of \(48, 32\)",
        ),
        ({"model__norm__weight": None, "lm_head__weight": None}, "missing there: lm_head.weight, model.norm.weight"),
        ({"model__layers__7__mlp__up_proj__weight": torch.ones(48, 32)}, "missing there: nothing; .*: model.layers.7"),
        ({UP: torch.ones(48, 32, dtype=torch.int8)}, r"not quantized, found torch.int8 for m.*up_proj"),
        ({UP: torch.ones(48, 32, dtype=torch.float8_e4m3fn)}, r"not quantized, found torch.float8_e4m3fn for m.*up_proj"),
        ({UP: torch.ones(48, 32, dtype=torch.complex64)}, r"not quantized, found torch.complex64 for m.*up_proj"),
    ],
)
def test_weights_that_are_not_the_model_s_are_listed(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = changed(saved(tmp_path, transformers.LlamaConfig(**SMALL)), **changes)
    with pytest.raises(mtcompile.CheckpointError, match=words):
        mtcompile.from_pretrained(folder, allow_new=["model.layers.1"])


def test_one_expert_in_whole_numbers_is_not_stacked_with_the_others(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)
    saved(tmp_path, config)
    name = next(name for name in load_file(tmp_path / "model.safetensors") if "expert" in name)
    changed(tmp_path, **{name.replace(".", "__"): load_file(tmp_path / "model.safetensors")[name].to(torch.int8)})
    with pytest.raises(mtcompile.CheckpointError, match=f"not quantized, found torch.int8 for {name}"):
        mtcompile.from_pretrained(tmp_path)


def test_a_tensor_that_a_module_ties_is_one_in_the_file(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    before = tied[0].weight.detach().clone()
    refused = "expected one tensor for 1.weight and 0.weight, which the module ties, found two"
    for other, words in (torch.ones(4, 4), None), (torch.zeros(4, 4), refused):
        save_file({"0.weight": torch.ones(4, 4), "1.weight": other}, tmp_path / "model.safetensors")
        tied[0].weight.data.copy_(before)
        with pytest.raises(mtcompile.CheckpointError, match=words) if words else contextlib.nullcontext():
            mtcompile.from_pretrained(tmp_path, tied).close()
        assert torch.equal(tied[0].weight, before if words else torch.ones(4, 4))


def test_what_is_new_is_said_and_saved(tmp_path: Path) -> None:
    folder = changed(saved(tmp_path / "base", transformers.LlamaConfig(**SMALL)), lm_head__weight=None)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="not from .*base, and as they were initialized: lm_head.weight"):
        model = mtcompile.from_pretrained(folder, allow_new=["lm_head"])
    torch.manual_seed(1)
    assert equal(weights(model), weights(transformers.AutoModelForCausalLM.from_pretrained(folder)))
    path = checkpoint.save(tmp_path / "run", model, step=1)
    assert checkpoint.inspect(path).provenance["weights"] == [{"folder": str(folder), "new": ["lm_head.weight"]}]
    with pytest.raises(TypeError, match=r"pass allow_new=\['lm_head'\]"):
        mtcompile.from_pretrained(folder, allow_new="lm_head")


def test_a_part_of_a_module_may_be_new(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(3, 2), "old.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    module, bias = nn.Linear(2, 3), torch.full((3,), 2.0)
    module.bias.data.copy_(bias)
    with pytest.raises(mtcompile.CheckpointError, match=r"missing there: bias; .*in the module: old.bias"):
        mtcompile.from_pretrained(tmp_path, module)
    with pytest.raises(mtcompile.CheckpointError, match=r"allow_new=\['bias', 'old'\]"):  # what was named stays
        mtcompile.from_pretrained(tmp_path, module, allow_new=["bias"])
    with pytest.warns(UserWarning, match="as they were initialized: bias"):
        model = mtcompile.from_pretrained(tmp_path, module, allow_new=["bias", "old"])
    assert torch.equal(model.weight, torch.ones(3, 2)) and torch.equal(model.bias, bias)
    with pytest.raises(mtcompile.CheckpointError, match="bias would be new, and has no values on the device meta"):
        mtcompile.from_pretrained(tmp_path, nn.Linear(2, 3, device="meta"), allow_new=["bias", "old"])


def test_precision_decides_how_weights_are_read(tmp_path: Path) -> None:
    saved(tmp_path, transformers.LlamaConfig(**SMALL))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    halves = mtcompile.from_pretrained(tmp_path, memory="64MiB", precision="bf16")
    assert equal(weights(halves), weights(plain.to(torch.bfloat16)))
    exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    split = mtcompile.from_pretrained(tmp_path, memory="64MiB", precision="bf16-master32")
    assert equal(mtcompile.master_parameters(split), {name: p.detach() for name, p in exact.named_parameters()})


def test_a_model_is_prepared_before_it_is_compiled(tmp_path: Path) -> None:
    saved(tmp_path, transformers.LlamaConfig(**SMALL))
    kinds = []

    def prepare(model: Any) -> Any:
        kinds.append(isinstance(model, mtcompile.CompiledModule))
        return model.requires_grad_(False)

    model = mtcompile.from_pretrained(tmp_path, memory="64MiB", prepare=prepare)
    assert kinds == [False] and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "unheard"}, "expected a Hugging Face config file"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "expected weights that are not quantized"),
        ({"hidden_size": 64}, "of other shapes: lm_head.weight of shape .* and 13 more"),
        (None, "expected a folder with a config.json, found none .* pass a module"),
    ],
)
def test_folders_that_are_no_model_are_refused(change: dict[str, Any] | None, words: str, tmp_path: Path) -> None:
    config = saved(tmp_path, transformers.LlamaConfig(**SMALL)) / "config.json"
    if change is None:
        config.unlink()
    else:
        config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises((ValueError, mtcompile.CheckpointError), match=words):
        mtcompile.from_pretrained(tmp_path)


def test_code_of_the_folder_is_not_run(tmp_path: Path) -> None:
    config = saved(tmp_path, transformers.LlamaConfig(**SMALL)) / "config.json"
    own = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "auto_map": own}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert type(mtcompile.from_pretrained(tmp_path)).__name__ == "LlamaForCausalLM" and not (tmp_path / "ran").exists()


# ----------------------------------------------------------------------------------------------------------------- modules


def test_a_module_on_meta_gets_its_weights_and_trains(tmp_path: Path) -> None:
    plain = Tied()
    save_model(plain, str(tmp_path / "weights.safetensors"))
    model = mtcompile.from_pretrained(tmp_path, on_meta(), memory="1MiB")
    assert model.first.weight is model.second.weight and equal(weights(model), weights(plain))
    for each in (plain, model):
        each(torch.ones(3, 4)).backward()
    homes = model._mt_model.door.parameters.places.values()
    assert len(homes) == 5 and all(place.home is not None for place in homes)  # nothing else holds their memory
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)
    assert equal(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_a_module_keeps_its_dtypes_and_flags_unless_told_otherwise(tmp_path: Path) -> None:
    values = {"weight": torch.randn(3, 2), "bias": torch.randn(3)}
    save_file(values, tmp_path / "model.safetensors")
    own = nn.Linear(2, 3, dtype=torch.float64)
    own.bias.requires_grad_(False)
    weight = own.weight
    model = mtcompile.from_pretrained(tmp_path, own)
    assert model.weight is weight and torch.equal(weight, values["weight"].double()) and not model.bias.requires_grad
    model = mtcompile.from_pretrained(tmp_path, nn.Linear(2, 3, device="meta"), dtype=torch.bfloat16)
    assert torch.equal(model.weight, values["weight"].bfloat16())
    with pytest.raises(ValueError, match="expected dtype to be"):
        mtcompile.from_pretrained(tmp_path, nn.Linear(2, 3), dtype="int8")


def test_a_model_of_transformers_on_meta_gets_its_buffers_too(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(saved(tmp_path, config))
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    module.model.embed_tokens.weight.requires_grad_(False)
    model = mtcompile.from_pretrained(tmp_path, module, memory="1MiB")
    assert model is module and equal(weights(model), weights(plain))
    assert equal(dict(model.named_buffers()), dict(plain.named_buffers())) and len(list(model.buffers())) > 0
    assert not model.lm_head.weight.requires_grad and model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"first.bias": None}, "missing there: first.bias; of other shapes: nothing; not in the module: nothing"),
        ({"other": torch.ones(1)}, "missing there: nothing; of other shapes: nothing; not in the module: other"),
        ({"first.bias": torch.ones(5)}, r"first.bias of shape \(5,\) instead of \(4,\)"),
        ({"first.bias": torch.ones(4, dtype=torch.int32)}, "expected first.bias of torch.float32, found torch.int32"),
    ],
)
def test_weights_of_another_module_are_refused_before_anything_changes(
    changes: dict[str, torch.Tensor | None], words: str, tmp_path: Path
) -> None:
    values = {name: value for name, value in Tied().state_dict().items() if name != "second.weight"} | changes
    save_file({name: value.clone() for name, value in values.items() if value is not None}, tmp_path / "model.safetensors")
    module = Tied()
    before = weights(module)
    with pytest.raises(mtcompile.CheckpointError, match=words):
        mtcompile.from_pretrained(tmp_path, module)
    assert equal(weights(module), before) and not isinstance(module, mtcompile.CompiledModule)


def test_a_buffer_that_no_file_holds_needs_values(tmp_path: Path) -> None:
    class Rotary(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("angles", torch.ones(2), persistent=False)

    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(mtcompile.CheckpointError, match="angles is a buffer on the device meta that no file holds"):
        mtcompile.from_pretrained(tmp_path, on_meta(Rotary))


def test_a_module_on_meta_is_not_compiled_without_weights() -> None:
    with pytest.raises(mtcompile.MtcompileError, match=r"first.weight is on the device meta.*from_pretrained"):
        mtcompile.compile(on_meta())


# ------------------------------------------------------------------------------------------------------------------ memory


def loaded_in_a_process(folder: Path, extra_mib: int, precision: str = "model") -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.helpers.limited_loading", str(folder), str(extra_mib), precision]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr[-3000:]
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def module_folder(folder: Path, *shape: int, shards: int) -> int:
    (folder / "module.json").write_text(json.dumps(shape))
    return write_weights(folder, meta_module(*shape).state_dict(), shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "shards", "extra_mib", "precision"),
    [
        ((12, 2048, 1024), 2, 48, "model"),  # 96 MiB
        pytest.param((64, 4096, 4096), 5, 300, "model", marks=pytest.mark.long),  # 4 GiB
        pytest.param((64, 4096, 4096), 1, 300, "model", marks=pytest.mark.long),
        pytest.param((64, 4096, 4096), 5, 300, "bf16", marks=pytest.mark.long),  # its home: 2 GiB
        pytest.param((64, 4096, 4096), 5, 300, "bf16-master32", marks=pytest.mark.long),
    ],
)
def test_loading_takes_the_weights_and_one_tensor(
    shape: tuple[int, ...], shards: int, extra_mib: int, precision: str, tmp_path: Path
) -> None:
    nbytes = module_folder(tmp_path, *shape, shards=shards)
    home = nbytes // 2 if precision == "bf16" else nbytes
    (tmp_path / "home.txt").write_text(str(home))
    result = loaded_in_a_process(tmp_path, extra_mib, precision)
    assert result["right"] and home * 0.99 < result["taken"] < home + extra_mib * MIB
    shutil.rmtree(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_a_model_of_transformers_of_4_gib_is_loaded_in_300_mib_more(precision: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_key_value_heads=4, vocab_size=32000, dtype="float32"
    )
    with torch.device("meta"):
        state = transformers.LlamaForCausalLM(config).state_dict()
    nbytes = write_weights(tmp_path, state, 5)
    assert nbytes > 4 * 2**30
    config.save_pretrained(tmp_path)
    home = nbytes // 2 if precision == "bf16" else nbytes
    (tmp_path / "home.txt").write_text(str(home))
    result = loaded_in_a_process(tmp_path, 300, precision)
    assert result["right"] and result["taken"] < home + 300 * MIB
    shutil.rmtree(tmp_path)


@pytest.mark.long
def test_what_does_not_fit_is_refused_before_it_is_read_within_ulimits(tmp_path: Path) -> None:
    (tmp_path / "home.txt").write_text(str(module_folder(tmp_path, 24, 2048, 1024, shards=2)))
    result = loaded_in_a_process(tmp_path, -64)
    assert "left of ulimit -v (address space). Nothing has begun" in result["refused"] and result["taken"] < 16 * MIB


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memroy": "1GiB"}, TypeError, "memroy"),
        ({"policy": "fast"}, ValueError, "expected policy to be one of"),
        ({"update": "step", "max_grad_norm": 1.0}, ValueError, 'update="backward" with max_grad_norm'),
        ({"device": "gpu"}, ValueError, "expected device to be one that torch sees here"),
        ({"optimizer": torch.optim.AdamW}, TypeError, "expected an optimizer of this model's parameters"),
        ({"disk": "/nowhere:1GiB"}, ValueError, "takes what host= has no room for"),
    ],
)
def test_options_are_refused_before_anything_is_read(
    options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, transformers.LlamaConfig(**SMALL))
    for name in ("stored_tensors", "configuration"):
        monkeypatch.setattr(f"mtcompile.models.pretrained.{name}", lambda *_: pytest.fail("it was read"))
    for model in (None, on_meta()):
        with pytest.raises(error, match=words):
            mtcompile.from_pretrained(tmp_path, model, **options)


def test_what_does_not_fit_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, transformers.LlamaConfig(**SMALL))
    nbytes = sum(p.nbytes for p in transformers.AutoModelForCausalLM.from_pretrained(tmp_path).parameters())
    monkeypatch.setattr("mtcompile.checkpoint.shards.StoredTensor.read", lambda self: pytest.fail("it was read"))
    with pytest.raises(mtcompile.BudgetError, match=r'in the budget host=. Nothing has begun. Try: host="1MiB"') as caught:
        mtcompile.from_pretrained(tmp_path, host=nbytes)
    assert nbytes < caught.value.minimum_bytes < 2 * nbytes
    monkeypatch.setattr("mtcompile.models.placing.memory_rooms", lambda: {"available": nbytes * 3 // 4})
    with pytest.raises(mtcompile.BudgetError, match=r'available. Nothing has begun. Try: precision="bf16"'):
        mtcompile.from_pretrained(tmp_path)
    with torch.device("meta"), pytest.raises(mtcompile.BudgetError, match=r'as float32, .* Try: precision="bf16"'):
        mtcompile.from_pretrained(tmp_path, transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)))
    with pytest.raises(mtcompile.BudgetError, match=r"available. Nothing has begun. Try: free"):
        monkeypatch.setattr("mtcompile.models.placing.memory_rooms", lambda: {"available": 0})
        mtcompile.from_pretrained(tmp_path)
