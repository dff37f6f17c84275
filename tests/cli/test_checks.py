"""A command that cannot work ends before torch is imported, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from mtcompile.cli.app import app
from mtcompile.cli.options import in_flags

WRONG = {
    "did you mean gpt-11m?": ["plan", "gpt-11x"],
    "found '16GX'": ["plan", "gpt-11m", "--memory", "16GX"],
    "did you mean h100-sxm?": ["plan", "gpt-11m", "--machine", "h100-sx"],
    "no such file: gone.json": ["plan", "gone.json"],
    "no such file: gone.py": ["plan", "gone.py:make"],
    "which function of it": ["explain", "text.py"],
    "found 'empty'": ["plan", "empty"],
    "found './gone'": ["viz", "./gone"],
    "found no 'gone/folder'": ["train", "gone/folder", "--data", "text.txt"],
    "no such path: gone.txt": ["train", "gpt-11m", "--data", "gone.txt"],
    "no config.json in empty": ["train", "empty", "--data", "text.txt"],
    "expected --method dpo with a folder of pretrained weights": ["train", "gpt-11m", "--method", "dpo"],
    "expected --beta with --method dpo or kto or grpo": ["train", "gpt-11m", "--beta", "0.1"],
    "expected --completions with --method grpo, found --method sft": ["train", "gpt-11m", "--completions", "4"],
    "expected --new-tokens with --method grpo, found --method dpo": ["train", "x", "--method", "dpo", "--new-tokens", "8"],
    "expected a tokenizer.json in folder": ["train", "folder", "--data", "text.txt"],
}
RUN = f"""
import sys
from mtcompile.cli.app import app
for words in {list(WRONG.values())!r}:
    try:
        app(words, prog_name="mtcompile")
    except SystemExit as ended:
        print(ended.code, "torch" in sys.modules)
"""


def test_a_command_that_cannot_work_ends_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "text.txt").write_text("text")
    ran = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["2", "False"] * len(WRONG)
    for expected, line in zip(WRONG, ran.stderr.splitlines(), strict=True):
        assert expected in line


def test_python_arguments_are_told_as_the_options_of_a_command() -> None:
    said = 'update="backward" with run_ahead=True; lora=16, disk= or host="64GB". solve=\'seq\' of kernels="exact"'
    told = '--update backward with --run-ahead; --lora 16, --disk or --host 64GB. --solve seq of kernels="exact"'
    assert in_flags(said, ("update", "run_ahead", "lora", "disk", "solve", "host")) == told
    assert in_flags('update="step"', ()) == 'update="step"'


def test_a_refusal_names_the_commands_own_options() -> None:
    result = CliRunner().invoke(app, ["plan", "gpt-11m", "--host", "1GB", "--disk", "1GB", "--solve", "memory"])
    assert result.exit_code == 2 and "--solve memory expects no --disk, found '1GB'" in result.output
