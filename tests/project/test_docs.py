"""The documents are true: code in them runs, commands, links and messages in them exist, and the reference is generated.

python -m tests.project.test_docs     # writes docs/api.md again, from the docstrings
"""

from __future__ import annotations

import importlib.util
import inspect
import operator
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import mtcompile
from mtcompile import checkpoint
from mtcompile.cli.app import app
from mtcompile.models.shapes import SHAPES
from mtcompile.passes import PIPELINE, pipeline
from mtcompile.torch_private import contract

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def code(page: Path, language: str) -> list[str]:
    """Returns the fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def shell_lines(page: Path) -> list[str]:
    """Returns the lines of the shell blocks, and code within the text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return [line for block in code(page, "sh") for line in block.splitlines()] + re.findall(r"`([^`]+)`", text)


def rows(page: Path, heading: str) -> list[list[str]]:
    """Returns the cells of the first table whose header begins with ``heading``, header and rule left out."""
    lines = page.read_text().partition(f"\n| {heading} |")[2].splitlines()[2:]
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def anchors(page: Path) -> set[str]:
    """Returns the anchors that headings get: lower case, without punctuation, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_site_lists_every_page_once() -> None:
    listed = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.slow
def test_the_pass_of_the_page_runs_and_does_what_it_says() -> None:
    torch.compiler.reset()
    space: dict[str, Any] = {}
    for part in code(DOCS / "writing-a-pass.md", "python"):
        exec(compile(part, "writing-a-pass.md", "exec"), space)
    copies = [i for i in space["schedule"].instructions if (i.queue, i.op) == ("h2d", "copy")]
    assert len(copies) > 8 and {len(i.reads) for i in copies} == {1}
    planned = space["forecast"].planned
    assert {len(i.reads) for i in planned.schedule.instructions if (i.queue, i.op) == ("h2d", "copy")} == {1}
    assert any("one_copy_per_value" in note for note in planned.plan.notes) and pipeline() == PIPELINE
    first = code(DOCS / "writing-a-pass.md", "python")[0]
    assert len(first.strip().splitlines()) <= 30


@pytest.mark.slow
def test_the_tours_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MT_CACHE", str(tmp_path / "cache"))
    small = {
        "hidden": 64,
        "intermediate": 128,
        "layers": 2,
        "heads": 1,
        "kv_heads": 1,
        "vocabulary": 256,
    }  # less than a reader's
    monkeypatch.setitem(SHAPES, "gpt-11m", replace(SHAPES["gpt-11m"], **small))
    commands = [line for part in code(DOCS / "tour.md", "sh") for line in part.splitlines()]
    assert len(commands) > 6
    for command in commands:
        expected = int(code_said.group(1)) if (code_said := re.search(r"# exit code (\d)", command)) else 0
        torch.compiler.reset()
        command = command.replace("12MiB", "256KiB")
        result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
        assert result.exit_code == expected, f"{command}\n{result.output}"
        assert result.output.strip()
    assert {path.name for path in tmp_path.iterdir()} >= {"timeline.html", "timeline.json", "step.dot"}


def test_every_message_of_the_troubleshooting_page_is_one_of_ours() -> None:
    sources = " ".join(
        path.read_text() for folder in ("mtcompile", "passes", "runtime") for path in (ROOT / folder).rglob("*.py")
    )
    joined = re.sub(r'"\s+f?"', "", re.sub(r"'\s+f?'", "", sources))  # strings over several lines
    joined = re.sub(r"\s+", " ", re.sub(r"""["']\s*\n?\s*f?["']""", "", joined))
    table = rows(DOCS / "troubleshooting.md", "message")
    assert len(table) > 10
    for messages, *_ in table:
        for message in re.findall(r"`([^`]+)`", messages):
            for part in message.split(" ... "):
                spoken = part.replace("memory=", "").replace("host=", "").strip()
                assert spoken in joined, f"no error says {spoken!r}"


def test_links_between_documents_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if "://" not in target:
                path, _, anchor = target.replace("\\", "").partition("#")
                linked = page.parent / path if path else page
                assert linked.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(linked), f"{page.name}: {target}"


def test_every_page_is_linked_from_the_readme_and_the_list_of_documents() -> None:
    for index in (ROOT / "README.md", DOCS / "README.md"):
        linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", index.read_text())}
        pages = {page.resolve() for page in DOCS.glob("*.md")} - {DOCS / "README.md"}
        assert pages <= linked, f"{index}: {pages - linked}"


def test_the_readme_is_short_and_says_its_caveat_once() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 140
    assert text.count("never on a consumer card") == 1
    assert text.count("<!-- fits -->") == 2


def test_code_in_the_pages_is_python() -> None:
    blocks = [(page.name, block) for page in PAGES for block in code(page, "python") if page != DOCS / "api.md"]
    assert len(blocks) > 5
    for name, block in blocks:
        compile(block, name, "exec")


def test_commands_and_options_in_the_pages_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    seen = set()
    for page in PAGES:
        for line in shell_lines(page):
            command = re.match(r"(?:python -m )?mtcompile ([a-z]+)\b(.*)", line)
            if command and not line.endswith(("=", ".py")):
                name, arguments = command.groups()
                assert name in commands, f"{page.name}: {line}"
                within = getattr(commands[name], "commands", {}).values()  # of a group, such as checkpoint verify
                parameters = [parameter for each in (commands[name], *within) for parameter in each.params]
                options = {option for parameter in parameters for option in parameter.opts} | {"--help"}
                used = re.findall(r"(?<=\s)--?[a-z][\w-]*", arguments.partition("#")[0])
                assert set(used) <= options, f"{page.name}: {line}"
                seen.add(name)
    assert seen == set(commands)


def test_make_targets_and_modules_in_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):(?!=)", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for line in shell_lines(page):
            if target := re.match(r"make ([a-z]+)\b", line):
                assert target.group(1) in targets, f"{page.name}: {line}"
            if module := re.match(r"python -m ((?:benchmarks|tests)[\w.]*)", line):
                assert importlib.util.find_spec(module.group(1)), f"{page.name}: {line}"


def test_the_options_page_is_that_of_the_signature() -> None:
    table = rows(DOCS / "options.md", "option")
    parameters = inspect.signature(mtcompile.compile).parameters
    assert sorted(row[0].strip("`") for row in table) == sorted(parameters)
    for name, default, effect in table:
        value = parameters[name.strip("`")].default
        literal = f'"{value}"' if isinstance(value, str) else repr(value)
        assert default == f"`{literal}`" or (value is None and "`" not in default), f"{name} has default {literal}"
        assert effect


def test_the_command_page_has_every_command() -> None:
    named = {row[0].strip("`").split()[1] for row in rows(DOCS / "command-line.md", "command")}
    assert named == set(get_command(app).commands)  # type: ignore[attr-defined]


def test_the_contributing_page_has_every_folder() -> None:
    text = "".join(row[0] for row in rows(ROOT / "CONTRIBUTING.md", "folder"))
    for layer in ("mtcompile", "passes", "runtime"):
        for package in (ROOT / layer).rglob("__init__.py"):
            assert f"`{package.parent.relative_to(ROOT)}/`" in text, package.parent


def test_the_versions_page_is_that_of_the_package() -> None:
    package, page = (ROOT / "pyproject.toml").read_text(), (DOCS / "versions.md").read_text()
    assert f'"torch>={contract.OLDEST[0]}.{contract.OLDEST[1]}",' in package
    minors = [f"2.{minor}" for minor in range(contract.OLDEST[1], contract.NEWEST[1] + 1)]
    assert f"PyTorch {', '.join(minors[:-1])} and {minors[-1]}" in page
    assert f"PyTorch {minors[0]} to {minors[-1]}" in (ROOT / "README.md").read_text()
    tritons = dict(re.findall(r"^TRITON_([\d.]+) := ([\d.]+)\.\*$", (ROOT / "Makefile").read_text(), re.M))
    assert list(tritons) == minors
    assert f"Triton {', '.join(list(tritons.values())[:-1])} and {tritons[minors[-1]]}" in " ".join(page.split())
    extras = set(
        re.findall(r"^(\w+) = \[", package.partition("[project.optional-dependencies]")[2].partition("[project.")[0], re.M)
    )
    table = rows(DOCS / "versions.md", "extra")
    assert {row[0].strip("`") for row in table} == extras - {"test"}
    for name, version in re.findall(r"(\w+) (\d[\d.]*)", " ".join(row[2] for row in table)):
        assert re.search(rf"^{name}=={re.escape(version)}\b", (ROOT / "constraints.txt").read_text(), re.M), name


def reference() -> str:
    """Returns the text of docs/api.md: every public name with its signature and docstring."""
    lines = ["# Reference", "", "Generated from the docstrings by `python -m tests.project.test_docs`.", ""]
    names = [*mtcompile.__all__, *(f"checkpoint.{name}" for name in checkpoint.__all__), "passes.register"]
    for name in sorted(names):
        public = operator.attrgetter(name)(mtcompile)
        lines += [f"## mtcompile.{name}", "", *_described(public)]
        if inspect.isclass(public):
            for member, function in inspect.getmembers(public, lambda m: inspect.isfunction(m) or isinstance(m, property)):
                documented = member in vars(public) and not member.startswith("_") and function.__doc__
                if documented:
                    lines += [f"### {name}.{member}", "", *_described(function)]
    return "\n".join(lines)


def _described(public: Any) -> list[str]:
    lines = []
    if inspect.isfunction(public):
        lines += ["```python", f"{public.__name__}{_signature(public)}", "```", ""]
    text = inspect.getdoc(public)
    return [*lines, "```text", *(text or "").splitlines(), "```", ""]


def _signature(function: Any) -> str:
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(inspect.signature(function)))
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are text, defaults are not
    return text if len(text) < 100 else re.sub(r", (?=\*|\w+:)", ",\n    ", text).replace("(", "(\n    ", 1)


def test_the_reference_is_that_of_the_docstrings() -> None:
    assert (DOCS / "api.md").read_text() == reference(), "run: python -m tests.project.test_docs"


if __name__ == "__main__":
    (DOCS / "api.md").write_text(reference())
