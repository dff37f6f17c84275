"""A stranger's path through the command line: whatever is typed, a sentence and an exit code, never a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import mtcompile
from mtcompile import knobs
from mtcompile.cli.app import app
from mtcompile.cli.options import ComparisonOptions, StepOptions, flattened, values
from mtcompile.machine import doctor

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("doctor", "plan", "verify", "train", "bench")  # in the order they are needed
FACTORIES = """
import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).square().mean()


class Branches(Linear):
    def forward(self, x):
        y = super().forward(x)
        if y > 0.5:
            print("large")
            return y * 2
        return y


class Mistaken(Linear):
    def forward(self, x):
        return self.inner(x[:, :3]).sum()


def of(kind):
    return lambda batch, seq: (kind(), {"x": torch.randn(batch, 4)})


linear, branches, mistaken = of(Linear), of(Branches), of(Mistaken)


def raises(batch, seq):
    raise KeyError("no such size")


def alone(batch, seq):
    return Linear()
"""


def run(*arguments: str) -> tuple[int, str, str]:
    made = CliRunner().invoke(app, list(arguments))
    return made.exit_code, made.stdout, made.stderr


def command(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real one, in a process of its own."""
    env = {**os.environ, "MT_CACHE": "0", "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run([sys.executable, "-m", "mtcompile", *arguments], cwd=ROOT, env=env, text=True, **options)


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(FACTORIES)
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Of a Llama so small that it takes no time."""
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 256}
    path.write_text(json.dumps({"model_type": "llama", **sizes}))
    return str(path)


def test_a_plan_says_what_the_process_takes(own: str) -> None:
    forecast = json.loads(run("plan", f"{own}:linear", "--json")[1])
    assert forecast["process_bytes"] > forecast["peak_bytes"]["host"] + (100 << 20)  # torch alone takes more
    assert "  process: about " in run("plan", f"{own}:linear")[1]


def test_the_version_and_the_short_help_are_there() -> None:
    assert run("--version")[:2] == (0, f"mtcompile {mtcompile.__version__}\n")
    assert run("-h")[:2] == run("--help")[:2] and run("plan", "-h")[:2] == run("plan", "--help")[:2]


def test_alone_it_says_what_there_is_in_the_order_it_is_needed() -> None:
    code, text, _ = run()
    assert code == 0 and text.count("  mtcompile ") == 2
    listed = re.findall(r"^  (\w+)  ", text.partition("Commands:")[2], re.MULTILINE)
    assert tuple(name for name in listed if name in COMMANDS) == COMMANDS  # others between them
    assert run("--help")[1] == text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_an_example_and_exit_codes_and_json(name: str) -> None:
    code, text, _ = run(name, "--help")
    assert code == 0 and "Exit code 0" in text and "--json" in text
    assert re.search(rf"^    mtcompile {name}\b", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["plan", "explain", "trace", "graph", "viz"])
def test_commands_that_plan_share_every_option(name: str) -> None:
    code, text, _ = run(name, "--help")
    assert code == 0 and all(f"--{field.name.replace('_', '-')} " in text for field in fields(StepOptions))


def test_fields_of_a_dataclass_become_options() -> None:
    calls: list[Any] = []

    def command(model: str, options: ComparisonOptions, loud: bool = False) -> None:
        calls.append((model, values(options), loud))

    own = typer.Typer(rich_markup_mode=None)
    own.command()(flattened(command))
    arguments = ["gpt-11m", "--precision", "bf16", "--max-grad-norm", "1.5", "--loud"]
    assert CliRunner().invoke(own, arguments).exit_code == 0
    defaults = {"memory": None, "batch": 2, "seq": 128, "update": "step", "accumulate": 1, "device": None, "kernels": "auto"}
    assert calls == [("gpt-11m", {**defaults, "precision": "bf16", "max_grad_norm": 1.5}, True)]
    assert CliRunner().invoke(own, ["gpt-11m", "--batch", "0"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("verfy", "gpt-11m"), 2, "No such command 'verfy'"),
        (("plan",), 2, "Missing argument 'model'"),
        (("verify", "gpt-11m", "--stpes", "3"), 2, "--stpes"),
        (("verify", "nobody"), 2, "expected a model among gpt-11m"),
        (("verify", "{own}"), 2, "expected file.py:factory"),
        (("verify", "/none/such.py:make"), 2, "no such file: /none/such.py"),
        (("verify", "/none/such.json"), 2, "expected a Hugging Face config file"),
        (("verify", "{own}:linaer"), 2, "expected a function 'linaer'"),
        (("verify", "{own}:raises"), 2, "raised KeyError: 'no such size'"),
        (("verify", "{own}:alone"), 2, "expected {own}:alone(2, 128) to return (module, keyword arguments), found Linear"),
        (("verify", "{own}:mistaken"), 2, "its call raises RuntimeError: mat1 and mat2 shapes"),
        (("verify", "{own}:branches"), 2, "could not be captured as one graph"),
        (("verify", "{own}:linear", "--memory", "16GBB"), 2, "found '16GBB'"),
        (("verify", "{own}:linear", "--memory", "100B"), 3, "the smallest memory that works is"),
        (("verify", "{own}:linear", "--device", "abacus"), 2, "expected device to be one that torch sees"),
        (("verify", "{own}:linear", "--max-grad-norm", "-1"), 2, "expected max_grad_norm above 0"),
        (("verify", "megatrain-120b"), 3, "two trainings are held at once"),
        (("bench", "{own}:linear", "--memory", "100B"), 3, "the smallest memory that works is"),
        (("train", "nobody"), 2, "expected a model among gpt-11m"),
        (("train", "gpt-11m", "--data", "/none/such.txt"), 2, "no such path: /none/such.txt"),
        (("train", "gpt-11m", "--data", "{own}", "--seq", "4096"), 2, "give more --data, or a smaller --batch or --seq"),
        (("train", "gpt-11m", "--memory", "16GBB"), 2, "found '16GBB'"),
        pytest.param(
            *(
                ("train", "{config}", "--memory", "10KiB", "--batch", "1", "--seq", "16"),
                3,
                "the smallest memory that works is",
            ),
            marks=pytest.mark.slow,
        ),
        (("train", "{config}", "--resume", "/none/such"), 2, "expected a checkpoint in /none/such"),
        (("train", "{config}", "--data", "{own}", "--vocab", "512"), 2, "expected no vocab with text"),
        (("train", "gpt-11m", "--run-ahead"), 2, "--update backward only"),
    ],
)
def test_what_goes_wrong_is_a_sentence_with_the_next_step(
    own: str, config: str, arguments: tuple[str, ...], code: int, said: str
) -> None:
    found, out, err = run(*(argument.replace("{own}", own).replace("{config}", config) for argument in arguments))
    assert found == code, err
    assert said.replace("{own}", own) in err and "Traceback" not in out + err
    assert out == "" or "large" in out  # what a model prints when plain PyTorch runs it


def test_what_nobody_expected_says_how_to_see_more(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("one over none\nand more")

    monkeypatch.setattr("mtcompile.parity.verification.verify", fails)
    monkeypatch.delenv("MT_DEBUG", raising=False)
    code, out, err = run("verify", "gpt-11m")
    assert (code, out) == (1, "") and err.startswith(
        "mtcompile verify: unexpected ZeroDivisionError: one over none. MT_DEBUG=1"
    )
    monkeypatch.setenv("MT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(app, ["verify", "gpt-11m"], catch_exceptions=False)


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mtcompile.parity.verification.verify", interrupted)
    assert run("verify", "gpt-11m") == (130, "", "mtcompile verify: interrupted\n")


_INTERRUPTED_IMPORT = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
module = sys.argv.pop()
class Finder:
    def find_spec(name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
runpy.run_module("mtcompile", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(("module", "name"), [("typer", "mtcompile"), ("torch", "mtcompile train")])
def test_ctrl_c_amid_imports_is_no_traceback(module: str, name: str) -> None:
    program = [sys.executable, "-c", _INTERRUPTED_IMPORT, "train", "gpt-11m", module]
    made = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert (made.returncode, made.stdout, made.stderr) == (130, "", f"{name}: interrupted\n")


@pytest.mark.parametrize(
    "closed", [pytest.param((1,), marks=pytest.mark.long), pytest.param((2,), marks=pytest.mark.long), (0, 1, 2)]
)
def test_closed_streams_are_nowhere(closed: tuple[int, ...], config: str, tmp_path: Path) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    metrics = tmp_path / "metrics.jsonl"
    arguments = ("train", config, "--batch", "1", "--seq", "16", "--device", "cpu", "--steps", "1", "--metrics", str(metrics))
    made = command(*arguments, preexec_fn=close)
    assert made.returncode == 0 and [*map(json.loads, metrics.read_text().splitlines())]  # nothing else is printed there
    for ended, code in ((("plan", "gpt-11m", "--memory", "1XB"), 2), (("--version",), 0)):
        assert command(*ended, preexec_fn=close).returncode == code


@pytest.mark.parametrize("option", ["save", "resume", "metrics", "data"])
def test_an_empty_path_is_not_the_current_folder(option: str) -> None:
    code, _, err = run("train", "gpt-11m", f"--{option}", "")
    assert code == 2 and f"'--{option}': expected the path of a file or folder, found an empty text" in err


def test_a_warning_is_one_line(config: str, tmp_path: Path) -> None:
    arguments = ("train", config, "--batch", "1", "--seq", "16", "--device", "cpu", "--steps", "1")
    said = command(*arguments, capture_output=True).stderr
    assert said.startswith("mtcompile train: the rate rises for --warmup 20 steps, and the run has 1: it never"), said
    others = [line for line in said.splitlines()[1:] if not line.startswith("[W")]  # what torch's C++ logs
    assert all(line.startswith("mtcompile train: ") for line in others), said  # no line of source below a warning


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_no_space_left_is_said(own: str, config: str) -> None:
    with open("/dev/full", "w") as full:
        made = command(stdout=full, stderr=subprocess.PIPE)
    assert made.returncode == 2 and made.stderr.startswith("mtcompile: no space left"), made.stderr
    assert len(made.stderr.splitlines()) == 1
    arguments = ("--data", own, "--batch", "1", "--seq", "16", "--memory", "64MiB", "--steps", "1")
    code, _, err = run("train", config, *arguments, "--metrics", "/dev/full")
    assert code == 2 and "no space left" in err and "Traceback" not in err


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    made = command("train", "--help", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert made.returncode == 1 and "Traceback" not in made.stderr


def test_doctor_looks_at_the_device_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []

    def examine(device: Any, *_: Any) -> Any:
        looked_at.append(device.where.type)
        raise ValueError("enough")

    monkeypatch.setattr(doctor, "examine", examine)
    for arguments in (["doctor"], ["doctor", "--device", "cpu"]):
        assert run(*arguments)[0] == 2
    assert looked_at == ["cuda" if torch.cuda.is_available() else "cpu", "cpu"]


def test_unknown_variables_are_listed_with_what_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MT_")]:
        monkeypatch.delenv(name)
    assert knobs.unknown() == {} and doctor.unknown_variables() == ()
    monkeypatch.setenv("MT_CHEK", "1")
    monkeypatch.setenv("MT_ZZZZZZ", "1")
    monkeypatch.setenv("MT_TRACE", "1")
    assert knobs.unknown() == {"MT_CHEK": "MT_CHECK", "MT_ZZZZZZ": ""}
    first, second = doctor.unknown_variables()
    assert first.level == "watch" and first.what == "MT_CHEK" and "MT_CHECK" in first.step
    assert all(name in second.step for name in knobs.listed())


def test_the_documents_have_every_exit_code_and_variable() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == ["0", "1", "2", "3", "4", "5", "130"]
    assert all(f"`mtcompile {name}" in page for name in COMMANDS)
    variables = (ROOT / "docs" / "environment.md").read_text()
    assert all(f"`{name}=" in variables for name in knobs.listed())


@pytest.mark.parametrize(
    ("shell", "word"),
    [("bash", "complete -o default -F"), ("zsh", "#compdef mtcompile"), ("fish", "complete --command mtcompile")],
)
def test_shells_complete_commands(shell: str, word: str) -> None:
    environment = {**os.environ, "_MTCOMPILE_COMPLETE": f"source_{shell}"}
    program = "import sys; from mtcompile.cli.app import app; app(prog_name='mtcompile')"
    printed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert printed.returncode == 0 and word in printed.stdout
