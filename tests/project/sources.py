"""The project's source files, parsed, and what they import."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import networkx

from mtcompile.torch_private.contract import imports

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
