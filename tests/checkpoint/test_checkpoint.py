"""Checkpoints: the same bits go on, whole or not at all, and no byte is trusted."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtcompile
from mtcompile import checkpoint
from mtcompile.checkpoint import files, generators
from mtcompile.errors import CheckpointError
from tests.checkpoint.runs import WAYS, Net, Run, seeded

pytestmark = pytest.mark.slow  # it compiles models and starts processes


@pytest.mark.parametrize(
    ("one", "other"), [("plain", "small"), ("small", "plain"), ("backward", "resident"), ("small", "backward")]
)
def test_a_resumed_training_has_the_same_bits(one: str, other: str, tmp_path: Path) -> None:
    """Also under another budget, or from a plain run to a compiled one."""
    seeded()
    first = Run(WAYS[one])
    for _ in range(2):
        first.step()
    path = first.save(tmp_path, extra={"position": [1, (2, 3)], "seen": torch.arange(3)})
    expected = [first.step() for _ in range(3)]
    torch.rand(5)
    second = Run(WAYS[other])
    loaded = second.load(tmp_path)
    assert loaded.path == path == checkpoint.latest(tmp_path) and loaded.step == 2
    assert loaded.extra["position"] == [1, (2, 3)] and torch.equal(loaded.extra["seen"], torch.arange(3))
    assert all(map(torch.equal, expected, [second.step() for _ in range(3)]))
    assert all(map(torch.equal, first.state(), second.state()))


def test_masters_are_saved_and_go_on(tmp_path: Path) -> None:
    options = {"memory": "64MiB", "precision": "bf16-master32", "update": "backward", "run_ahead": True}
    seeded()
    first = Run(options, Net(norm=nn.LayerNorm))
    first.step()
    first.save(tmp_path)
    expected = [first.step() for _ in range(3)]
    second = Run(options, Net(norm=nn.LayerNorm))
    second.load(tmp_path)
    assert all(map(torch.equal, expected, [second.step() for _ in range(3)]))
    one, other = mtcompile.master_parameters(first.model), mtcompile.master_parameters(second.model)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_plain_torch_and_transformers_read_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    compiled: Any = mtcompile.compile(model, memory="64MiB", optimizer=torch.optim.AdamW(model.parameters()))
    monkeypatch.setattr("mtcompile.checkpoint.writing.SHARD_NBYTES", 10_000)
    path = checkpoint.save(tmp_path, compiled, step=1)
    assert len(list(path.glob("model-*.safetensors"))) > 2 and (path / "model.safetensors.index.json").exists()
    again = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert type(again) is transformers.LlamaForCausalLM
    assert all(torch.equal(values[name], value) for name, value in again.state_dict().items())
    read: dict[str, Tensor] = {}
    for file in path.glob("model-*.safetensors"):
        read |= load_file(file)
    assert all(torch.equal(values[name], value) for name, value in read.items())
    fresh = transformers.LlamaForCausalLM(config)
    checkpoint.load(tmp_path, fresh)
    assert all(torch.equal(values[name], value) for name, value in fresh.state_dict().items())


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(TypeError, match=r"found object at extra\['a'\]\[1\]"):
        run.save(tmp_path, extra={"a": [1, object()]})
    with pytest.raises(ValueError, match="whole number of 0 or more, found -1"):
        run.save(tmp_path, step=-1)
    assert not list(tmp_path.iterdir())


def test_old_ones_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    run = Run()
    notes = run.save(tmp_path, step=1) / "notes.txt"
    notes.write_text("mine")
    (tmp_path / "step-00000009").mkdir()  # no checkpoint
    half = tmp_path / ".step-00000009.unfinished-abcdefgh"  # one that did not come to its end
    for folder in (half, tmp_path / ".step-00000009.original"):
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
    paths = [run.save(tmp_path, step=step) for step in (2, 3, 3, 9)]
    assert [path.name for path in paths] == ["step-00000002", "step-00000003", "step-00000003-4", "step-00000009-5"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".lock", ".step-00000009.original", "step-00000001", "step-00000003-4", "step-00000009", "step-00000009-5"}
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]
    assert checkpoint.latest(tmp_path) == paths[-1] and checkpoint.inspect(paths[2]).step == 3
    assert run.save(tmp_path, step=2, keep=0) == tmp_path / "step-00000002" == checkpoint.latest(tmp_path)


def test_what_cannot_be_read_again_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, deep = Run(), []
    for _ in range(80):
        deep = [deep]
    path = run.save(tmp_path, keep=1)
    monkeypatch.setattr(files, "_MOST_MANIFEST_NBYTES", 100_000)
    unreadable: list[dict[str, Any]] = [
        {"extra": {"x": deep}},
        {"extra": {"x": "x" * 200_000}},
        {"step": 10**12},
        {"keep": 1.5},
    ]
    for options in unreadable:
        with pytest.raises((ValueError, TypeError)):
            run.save(tmp_path, **{"step": 3, "keep": 1, **options})
        assert checkpoint.latest(tmp_path) == path and not list(tmp_path.glob(".step-*"))
    with pytest.raises(CheckpointError, match="is itself a checkpoint"):
        run.save(path)
    assert checkpoint.latest(path) == path


class Versioned(nn.Module):
    """Turns the values of its first version around when it loads them."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *others)


class Odd(nn.Module):
    """Buffers that share memory, and some with a lazy bit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Versioned()
        complex_numbers = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
        self.register_buffer("numbers", complex_numbers)
        self.register_buffer("conjugate", complex_numbers.conj())
        self.register_buffer("negative", torch._neg_view(torch.ones(2)))
        self.register_buffer("flat", torch.arange(6.0).view(2, 3))
        self.register_buffer("shared", self.get_buffer("flat").view(-1))


def test_versions_lazy_bits_and_shared_memory(tmp_path: Path) -> None:
    model, average = Odd(), Odd()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW([{"params": [model.inner.weight]}, {"params": []}], lr=rate)
    both = torch.arange(3)
    checkpoint.save(tmp_path, model, optimizer, step=1, others={"average": average}, extra={"a": both, "b": both})
    other, other_average = Odd(), Odd()
    expected = {name: value.clone() for name, value in other.state_dict().items()}
    for one in (other, other_average):
        for value in (*one.parameters(), one.get_buffer("numbers"), one.get_buffer("flat")):
            value.data.zero_()
    loaded = checkpoint.load(tmp_path, other, others={"average": other_average})
    assert torch.equal(loaded.extra["a"], both) and torch.equal(loaded.extra["b"], both)
    for one in (other, other_average):
        assert all(torch.equal(expected[name], value) for name, value in one.state_dict().items())
    with pytest.raises(TypeError, match=r"complex128.* at big"):
        model.register_buffer("big", torch.zeros(2, dtype=torch.complex128))
        checkpoint.save(tmp_path, model, step=2)


@pytest.mark.parametrize("width", [37, 101])
def test_an_optimizer_that_sums_over_its_state(width: int, tmp_path: Path) -> None:
    """How a kernel sums depends on the address of what it sums; and loaded state does not change with the file."""

    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.linspace(-1, 1, 5 * 7).view(5, 7)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 1))
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    (model, optimizer), (other, other_optimizer) = made(), made()
    stepped(model, optimizer)
    path = checkpoint.save(tmp_path, model, optimizer, step=1)
    checkpoint.load(tmp_path, other, other_optimizer)
    (path / "state.safetensors").write_bytes(b"")
    for _ in range(3):
        stepped(model, optimizer)
        stepped(other, other_optimizer)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_another_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run = Run()
    run.step()
    path = run.save(tmp_path)
    other = Run()
    before = other.state()
    sgd = torch.optim.SGD(other.model.parameters(), lr=0.1)
    swapped = torch.optim.AdamW(reversed(list(other.model.parameters())))
    for optimizer in (sgd, swapped):
        with pytest.raises(CheckpointError, match=r"expected the state of SGD|has the shape"):
            checkpoint.load(path, other.model, optimizer)
    assert all(map(torch.equal, before, other.state()))


def test_a_model_that_asks_for_a_checkpoint_can_load_one(tmp_path: Path) -> None:
    run = Run({"memory": "64MiB", "update": "backward"})
    seeded()
    run.step()
    path = run.save(tmp_path)
    run.step()
    expected = run.state()
    run.load(path)
    run.model._mt_model.door.updates.failed_behind()
    with pytest.raises(mtcompile.StepError, match="Load a checkpoint"):
        run.step()
    run.load(path)
    run.step()
    assert all(map(torch.equal, expected, run.state()))
    loss = run.model(torch.arange(8), torch.arange(8))
    loss.backward()
    with pytest.raises(CheckpointError, match="save after it"):
        run.save(tmp_path)
    run.optimizer.step()
    run.save(tmp_path)


def damaged(path: Path, position: float) -> Callable[[], None]:
    data = path.read_bytes()
    changed = bytearray(data)
    changed[int(position * (len(data) - 1))] ^= 4
    path.write_bytes(changed)
    return lambda: path.write_bytes(data) and None


def test_any_changed_byte_is_found_before_anything_changes(tmp_path: Path) -> None:
    run = Run()
    run.step()
    path = run.save(tmp_path)
    other = Run()
    before = other.state()
    for file in sorted(path.iterdir()):
        for position in (0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 1):
            repair = damaged(file, position)
            with pytest.raises(CheckpointError, match=rf"{file.name}"):
                other.load(path)
            repair()
        for change in (b"", file.read_bytes()[:-1], file.read_bytes() + b"\0"):
            data = file.read_bytes()
            file.write_bytes(change)
            with pytest.raises(CheckpointError, match=rf"{file.name}"):
                other.load(path)
            file.write_bytes(data)
        file.rename(path / "aside")
        with pytest.raises(CheckpointError):
            other.load(path)
        os.symlink(path / "aside", file)
        with pytest.raises(CheckpointError):
            other.load(path)
        file.unlink()
        (path / "aside").rename(file)
    assert all(map(torch.equal, before, other.state()))
    other.load(path)


@pytest.mark.parametrize(
    "content",
    [
        '{"serial": 1, "step": 2, "files": {"../model.safetensors": [1, "0"]}, "tied": {}, "state": {}}',
        '{"serial": 1, "step": 2, "files": {"/etc/hostname.json": [1, "0"]}, "tied": {}, "state": {}}',
        '{"serial": 1, "step": 1e999, "files": {}, "tied": {}, "state": {}}',
        '{"serial": 1, "step": "2", "files": {}, "tied": {"a": "b"}, "state": {}}',
        '{"serial": 1, "step": 2, "files": [], "tied": {}, "state": {}}',
        '{"serial": 1, "step": 2, "files": {}, "tied": {}, "state": ' + '{"tuple": [' * 60 + "]}" * 60 + "}",
        "[" * 100_000,
        '{"serial": ' + "9" * 5000 + "}",
        "[]",
        "",
    ],
)
def test_a_manifest_from_a_stranger(content: str, tmp_path: Path) -> None:
    import xxhash

    path = Run().save(tmp_path)
    whole = {"format": files.FORMAT, "checksum": xxhash.xxh3_128(content.encode()).hexdigest(), "content": content}
    (path / "manifest.json").write_text(json.dumps(whole))
    run = Run()
    before = run.state()
    with pytest.raises(CheckpointError):
        run.load(path)
    assert all(map(torch.equal, before, run.state()))


@pytest.mark.parametrize(
    ("name", "state"),
    [("numpy", ("MT19937", [2**40] * 624, 1, 0, 0.0)), ("python", (3, (1, 2), None)), ("torch", torch.zeros(3)), ("torch", 5)],
)
def test_generators_that_nothing_can_be_put_in(name: str, state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by fuzzing: the model had been loaded before the error."""
    plain = generators.generator_states()
    monkeypatch.setattr("mtcompile.checkpoint.content.generator_states", lambda: {**plain, name: state})
    path = Run().save(tmp_path)
    run = Run()
    run.step()
    before = run.state()
    with pytest.raises(CheckpointError, match="states of the random generators cannot be used"):
        run.load(path)
    assert all(map(torch.equal, before, run.state()))


def test_a_checkpoint_of_another_training(tmp_path: Path) -> None:
    run = Run()
    path = run.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"hidden.weight has the shape \(24, 24\) there, \(8, 8\) here|has the shape"):
        Run(model=Net(8)).load(path)
    with pytest.raises(CheckpointError, match=r"lacks weight and has embedding.weight"):
        Run(model=nn.Linear(2, 2, bias=False)).load(path)
    one_group = torch.optim.SGD([run.model.hidden.weight], lr=0.1)
    with pytest.raises(CheckpointError, match=r"groups of \[5\] parameters, found \[1\]"):
        checkpoint.load(path, run.model, one_group)
    with pytest.raises(CheckpointError, match="expected a state of 'scaler'"):
        checkpoint.load(path, run.model, others={"scaler": run.scheduler})
    with pytest.raises(CheckpointError, match="holds no state of an optimizer"):
        checkpoint.load(checkpoint.save(tmp_path, run.model, step=3), run.model, run.optimizer)
    with pytest.raises(CheckpointError, match="expected a checkpoint in"):
        run.load(tmp_path / "nowhere")


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    run = Run()
    run.step()
    path = run.save(tmp_path)
    expected = run.state()
    run.step()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="bytes free there"):
            run.save(tmp_path, step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {p.name for p in tmp_path.iterdir()} == {".lock", path.name}
    run.load(tmp_path)
    assert all(map(torch.equal, expected, run.state()))


_WRITER = """
import sys, torch
from pathlib import Path
from mtcompile import checkpoint
from mtcompile.errors import CheckpointError
torch.set_num_threads(1)
value, folder = float(sys.argv[2]), Path(sys.argv[1])
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)])
print("ready", flush=True)
step = 0
while True:
    step += 1
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value * 1000 + step)
    try:
        checkpoint.save(folder, model, step=step, extra={"value": value * 1000 + step})
        print("saved", flush=True)
    except CheckpointError as error:
        assert "another process" in str(error), error
        print("refused", flush=True)
"""


def writer(folder: Path, value: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WRITER, str(folder), str(value)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def consistent(folder: Path) -> int:
    """Loads what was saved last. Returns its step."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)])
    loaded = checkpoint.load(folder, model, generators=False)
    assert all(bool(parameter.eq(loaded.extra["value"]).all()) for parameter in model.parameters())
    return loaded.step


def test_two_writers_take_turns_or_are_refused(tmp_path: Path) -> None:
    processes = [writer(tmp_path, value) for value in (1, 2)]
    said = []
    for _ in range(6):
        for process in processes:
            assert process.stdout is not None
            said.append(process.stdout.readline().strip())
    for process in processes:
        process.kill()
        process.communicate()
    assert said.count("saved") > 2 and set(said) <= {"saved", "refused"}
    consistent(tmp_path)
