"""Reads from the sources of this folder what mtcompile asks of torch's private APIs, and tells whether a torch has it all.

A torch that the tests have not seen is looked at once, when this folder is first imported: it is refused if a name is missing,
and else there is one warning."""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mtcompile.errors import MtcompileError

OLDEST, NEWEST = (2, 11), (2, 14)  # the minor versions that the tests have seen


def check(version: str = torch.__version__, folder: Path = Path(__file__).parent) -> None:
    """Returns at once for a version that was tested. Warns of another one, and raises MtcompileError if torch, as it is here,
    lacks a private name that the sources in ``folder`` use."""
    minor = re.match(r"(\d+)\.(\d+)", version)
    if minor and OLDEST <= (int(minor[1]), int(minor[2])) <= NEWEST:
        return
    oldest, newest, next_one = (".".join(map(str, each)) for each in (OLDEST, NEWEST, (NEWEST[0], NEWEST[1] + 1)))
    expected = f"expected a torch that mtcompile was tested with, {oldest} to {newest}, found {version}"
    install = f'pip install "torch>={oldest},<{next_one}"'
    if missing := [f"{name} ({file})" for name, file in uses(folder).items() if not exists(name)]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise MtcompileError(
            f"{expected}, which lacks what mtcompile uses: {', '.join(missing[:3])}{more}. Install a newer mtcompile, or an "
            f"older torch: {install}"
        )
    warnings.warn(
        f"{expected}. It has every private function that mtcompile uses; mtcompile.verify tells whether a step "
        f"of yours has the bits of plain PyTorch. For a tested one: {install}",
        stacklevel=2,
    )


def uses(folder: Path) -> dict[str, str]:
    """The private names of torch that the sources below a folder cannot do without, each with a file and line."""
    found = dict[str, str]()
    for path in sorted(folder.rglob("*.py")):
        for name, line in private_torch(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(name, f"{path.name}, line {line}")
    return found


def exists(name: str) -> bool:
    """Tells whether this torch has a module or an attribute of that dotted name. Imports the modules it goes through."""
    try:
        _resolved(name)
    except (ImportError, AttributeError):
        return False
    return True


def _resolved(name: str) -> Any:
    parent, _, last = name.rpartition(".")
    if not parent:
        return importlib.import_module(name)
    of = _resolved(parent)
    return getattr(of, last) if hasattr(of, last) else importlib.import_module(name)


# ---------------------------------------------------------------------------------------------------------- reading sources


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None, int]]:
    """(module, imported name or None, line) of every import: at the top, inside functions, under ``if TYPE_CHECKING:``, and by
    ``import_module("...")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, node.lineno
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield "." * node.level + (node.module or ""), alias.name, node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), None, node.lineno


def private_torch(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of torch's names with a leading underscore: imports, attribute chains, ``import_module("torch._x")``, and
    the settings that ``patched(config, name=...)`` changes.

    ``torch.ops`` is exempt: an operator's underscore is part of its public name.
    """
    bound: dict[str, str] = {}  # local name → dotted torch name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def dotted(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return bound.get(node.id)
        if isinstance(node, ast.Attribute):
            base = dotted(node.value)
            return base and f"{base}.{node.attr}"
        return None

    def is_private(name: str) -> bool:
        parts = name.split(".")
        return (
            parts[0] == "torch"
            and parts[1:2] != ["ops"]
            and any(part.startswith("_") and not part.endswith("__") for part in parts)
        )

    for module, name, line in imports(tree):
        if is_private(f"{module}.{name}" if name else module):
            yield f"{module}.{name}" if name else module, line
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(chain := dotted(node) or ""):
            yield chain, node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "patched":
            config = dotted(node.args[0]) or ""
            settings = [setting.arg for setting in node.keywords if setting.arg]
            yield from ((f"{config}.{name}", node.lineno) for name in settings if is_private(config))


check()
