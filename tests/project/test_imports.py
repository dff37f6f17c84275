"""What may import what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

from mtcompile.torch_private.contract import imports, private_torch
from tests.project.sources import (
    FOLDERS,
    LAYERS,
    ROOT,
    circles,
    imports_of,
    module_name,
    name_of,
    parse,
    sources,
)

TORCH_IN_RUNTIME = {
    f"runtime/devices/{name}.py" for name in ("cpu", "cuda", "cuda_driver", "arena", "fetching", "joining", "pinned", "rows")
}
TORCH_IN_RUNTIME |= {f"runtime/optim/{name}_kernels.py" for name in ("host", "torch", "device", "triton")}  # on tensors
TORCH_IN_RUNTIME |= {"runtime/optim/operands.py"}
# APIs with a leading underscore
PRIVATE_TORCH = "mtcompile/torch_private/"
UNSAFE_LOADERS = {"pickle", "cPickle", "dill", "cloudpickle"}  # loading runs code from the file


def layer_of(module: str, name: str | None) -> str:
    """The layer that ``from module import name`` (or ``import module``) reaches."""
    parts = module.split(".") + ([name] if name else [])
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else parts[0]


def test_imports_point_from_mtcompile_to_passes_to_runtime() -> None:
    wrong = []
    for path in sources("passes", "runtime"):
        own = path.relative_to(ROOT).parts[0]
        allowed = LAYERS[LAYERS.index(own) :]
        for module, name, line in imports_of(path):
            reached = layer_of(module, name)
            if reached in LAYERS and reached not in allowed:
                wrong.append(f"{name_of(path)}:{line}: {own} imports {reached}")
    assert not wrong, "\n".join(wrong)


def test_proofs_import_neither_planning_nor_what_rewrites() -> None:
    """Only what describes how micro-batches are put together, which has to be the same for both."""
    described = {"mtcompile.passes.joint.batch.joining", "mtcompile.passes.joint.loss_weights"}
    rewriting = tuple(f"mtcompile.passes.{room}" for room in ("planning", "cuts", "rewrites", "joint", "lower"))
    wrong = [
        f"{name_of(path)}:{line}: imports {module}"
        for path in sources("passes")
        if name_of(path).startswith("passes/proof/")
        for module, name, line in imports_of(path)
        if f"{module}.{name}".startswith(rewriting) and module not in described
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_of_passes_import_only_those_below_them() -> None:
    """In the order in which the docstring of ``passes`` lists them."""
    text = (ROOT / "passes/__init__.py").read_text().partition("Who knows what")[2].partition("A pass is")[0]
    rooms = {f"mtcompile.passes.{room}": place for place, room in enumerate(re.findall(r"^    (\w+) {2,}\S", text, re.M))}
    assert {f"mtcompile.passes.{path.parent.name}" for path in (ROOT / "passes").glob("*/__init__.py")} < rooms.keys()

    def place_of(module: str) -> int | None:
        return rooms.get(".".join(module.split(".")[:3]))

    wrong = []
    for path in sources("passes"):
        for module, name, line in imports_of(path):
            own, reached = place_of(module_name(path)), place_of(f"{module}.{name}")
            if own is not None and reached is not None and reached < own:
                wrong.append(f"{name_of(path)}:{line}: imports {module}")
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    groups = circles({module_name(path): imports_of(path) for path in sources(*LAYERS)})
    assert not groups, "\n".join(" and ".join(group) for group in groups)


def test_circles_are_seen_in_functions_and_under_type_checking() -> None:
    texts = {
        "a": "from b import c",
        "b.c": "def f():\n    import d",
        "d": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import X",
        "e": "import a, f",
        "f": "import importlib\nimportlib.import_module('g')",
        "g": "from f import x",
        "h": "import os, e",
    }
    assert circles({module: imports(ast.parse(text)) for module, text in texts.items()}) == [["a", "b.c", "d"], ["f", "g"]]


def test_folders_are_imported_by_their_installed_names() -> None:
    wrong = [
        f"{name_of(path)}:{line}: import of {module!r}, try mtcompile.{module.lstrip('.')}"
        for path in sources(*FOLDERS)
        for module, _, line in imports_of(path)
        if module.startswith(".") or module.split(".")[0] in ("passes", "runtime")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_of_tests_is_imported() -> None:
    """What several of them use lies in tests/helpers, or in a file beside them that holds no tests."""
    wrong = [
        f"{name_of(path)}:{line}: imports {module}"
        for path in sources("tests", "examples", "benchmarks")
        for module, name, line in imports_of(path)
        if module.split(".")[0] == "tests" and any(part.startswith("test_") for part in (*module.split("."), name or ""))
    ]
    assert not wrong, "\n".join(wrong)


def test_runtime_imports_torch_only_in_device_files_and_update_kernels() -> None:
    wrong = [
        f"{name_of(path)}:{line}: imports {module}"
        for path in sources("runtime")
        for module, _, line in imports_of(path)
        if module.split(".")[0] == "torch" and name_of(path) not in TORCH_IN_RUNTIME
    ]
    assert not wrong, "\n".join(wrong)


def test_the_other_files_of_runtime_load_with_the_standard_library_alone() -> None:
    modules = [module_name(path) for path in sources("runtime") if name_of(path) not in TORCH_IN_RUNTIME]
    program = (
        "import importlib, sys\n"
        "for name in ('torch', 'numpy', 'networkx', 'sympy', 'psutil', 'rich'): sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_private_torch_apis_stay_in_their_files() -> None:
    wrong = [
        f"{name_of(path)}:{line}: {name}"
        for path in sources(*LAYERS, "examples")
        if not name_of(path).startswith(PRIVATE_TORCH)
        for name, line in private_torch(parse(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_private_torch_is_recognised() -> None:
    program = """
import torch, torch.nn.functional as F, importlib
from torch._dynamo import config
from torch.fx import graph
import torch._inductor as inductor
torch._C.x; F._pad; graph._f; importlib.import_module("torch._functorch")
patched(config, debug=True); patched(graph, debug=True)
torch.__version__; torch.ops.aten._softmax; x._y; graph.f; importlib.import_module("torch.fx")
"""
    assert {name for name, _ in private_torch(ast.parse(program))} == {
        "torch._dynamo.config", "torch._dynamo.config.debug", "torch._inductor", "torch._C",
        "torch._C.x", "torch.nn.functional._pad", "torch.fx.graph._f", "torch._functorch",
    }  # fmt: skip


def test_no_file_imports_what_unpickles_code() -> None:
    wrong = [
        f"{name_of(path)}:{line}: imports {module}"
        for path in sources(*FOLDERS)
        for module, _, line in imports_of(path)
        if module.split(".")[0] in UNSAFE_LOADERS
    ]
    assert not wrong, "\n".join(wrong)


def test_no_call_trusts_remote_code() -> None:
    wrong = [
        f"{name_of(path)}:{node.value.lineno}: trust_remote_code"
        for path in sources(*FOLDERS)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
        if not (isinstance(node.value, ast.Constant) and node.value.value is False)  # without it, a library asks the user
    ]
    assert not wrong, "\n".join(wrong)
