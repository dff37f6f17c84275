"""The documents are true: code in them runs, messages in them exist, and the reference is that of the docstrings.

python -m tests.project.test_docs     # writes docs/api.md anew
"""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mtcompile
from mtcompile.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def code(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def test_the_pass_of_the_page_runs_and_does_what_it_says() -> None:
    torch.compiler.reset()
    space: dict[str, Any] = {}
    for part in code(DOCS / "writing-a-pass.md", "python"):
        exec(compile(part, "writing-a-pass.md", "exec"), space)
    copies = [i for i in space["schedule"].instructions if (i.queue, i.op) == ("h2d", "copy")]
    assert len(copies) > 8 and {len(i.reads) for i in copies} == {1}
    first = code(DOCS / "writing-a-pass.md", "python")[0]
    assert len(first.strip().splitlines()) <= 30


@pytest.mark.slow
def test_the_tours_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MT_CACHE", str(tmp_path / "cache"))
    commands = [line for part in code(DOCS / "tour.md", "sh") for line in part.splitlines()]
    assert len(commands) > 6
    for command in commands:
        wanted = int(found.group(1)) if (found := re.search(r"# exit code (\d)", command)) else 0
        torch.compiler.reset()
        result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
        assert result.exit_code == wanted, f"{command}\n{result.output}"
        assert result.output.strip()
    assert {path.name for path in tmp_path.iterdir()} >= {"timeline.html", "timeline.json", "step.dot"}


def test_every_message_of_the_troubleshooting_page_is_one_of_ours() -> None:
    sources = " ".join(
        path.read_text() for folder in ("mtcompile", "passes", "runtime") for path in (ROOT / folder).rglob("*.py")
    )
    joined = re.sub(r'"\s+f?"', "", re.sub(r"'\s+f?'", "", sources))  # strings over several lines
    joined = re.sub(r"\s+", " ", re.sub(r"""["']\s*\n?\s*f?["']""", "", joined))
    rows = [line for line in (DOCS / "troubleshooting.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    for row in rows:
        for message in re.findall(r"`([^`]+)`", row.split("|")[1]):
            for part in message.split(" ... "):
                spoken = part.replace("memory=", "").replace("host=", "").strip()
                assert spoken in joined, f"no error says {spoken!r}"


def test_links_between_documents_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target.replace("\\", "")).exists(), f"{page.name}: {target}"


def reference() -> str:
    """Every public name with its signature and docstring."""
    lines = ["# Reference", "", "Made from the docstrings by `python -m tests.project.test_docs`.", ""]
    for name in sorted(mtcompile.__all__):
        found = getattr(mtcompile, name)
        lines += [f"## mtcompile.{name}", "", *_described(found)]
        if inspect.isclass(found):
            for member, function in inspect.getmembers(found, lambda m: inspect.isfunction(m) or isinstance(m, property)):
                documented = member in vars(found) and not member.startswith("_") and function.__doc__
                if documented:
                    lines += [f"### {name}.{member}", "", *_described(function)]
    return "\n".join(lines)


def _described(found: Any) -> list[str]:
    lines = []
    if inspect.isfunction(found):
        lines += ["```python", f"{found.__name__}{_signature(found)}", "```", ""]
    text = inspect.getdoc(found)
    return [*lines, "```text", *(text or "").splitlines(), "```", ""]


def _signature(function: Any) -> str:
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(inspect.signature(function)))
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are text, defaults are not
    return text if len(text) < 100 else re.sub(r", (?=\*|\w+:)", ",\n    ", text).replace("(", "(\n    ", 1)


def test_the_reference_is_that_of_the_docstrings() -> None:
    assert (DOCS / "api.md").read_text() == reference(), "run: python -m tests.project.test_docs"


if __name__ == "__main__":
    (DOCS / "api.md").write_text(reference())
