"""The project's source files, parsed, and what they import."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("mtcompile", "passes", "runtime")  # each imports itself and what stands after it
FOLDERS = (*LAYERS, "tests", "examples", "benchmarks")


def sources(*folders: str) -> list[Path]:
    """The Python files below ``folders``; links to folders are not followed."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), name_of(path))


def module_name(path: Path) -> str:
    """``passes/slots.py`` → ``mtcompile.passes.slots``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "mtcompile":
        parts = ("mtcompile", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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


@functools.cache
def imports_of(path: Path) -> tuple[tuple[str, str | None, int], ...]:
    return tuple(imports(parse(path)))


def circles(imports_by_module: Mapping[str, Iterable[tuple[str, str | None, int]]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others."""
    graph = networkx.DiGraph()
    for module, imported in imports_by_module.items():
        for name, member, _ in imported:
            target = f"{name}.{member}" if f"{name}.{member}" in imports_by_module else name
            if target in imports_by_module:
                graph.add_edge(module, target)
    return sorted(sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1)


def private_torch(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Uses of torch names with a leading underscore: imports, attribute chains, ``import_module("torch._x")``.

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
