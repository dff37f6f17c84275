"""What may import what, and what lands in a wheel."""

import ast
import graphlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("mtcompile", "passes", "runtime")  # each imports itself and what stands after it
FOLDERS = (*LAYERS, "tests", "examples", "benchmarks")
TORCH_IN_RUNTIME = {f"runtime/devices/{name}.py" for name in ("cpu", "cuda", "cuda_driver", "arena", "pinned")}
TORCH_IN_RUNTIME |= {f"runtime/optim/{name}_kernels.py" for name in ("host", "torch", "device", "triton")}  # on tensors
# APIs with a leading underscore
PRIVATE_TORCH = {"mtcompile/capture/dynamo.py", "mtcompile/capture/joint.py", "mtcompile/torch_private.py"}
NEVER_IMPORTED = {"pickle", "cPickle", "dill", "cloudpickle"}  # loading runs code from the file
PAGE_PARTS = {".html", ".css", ".js"}  # of the timeline
PACKAGING = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), name_of(path))


def module_name(path: Path) -> str:
    """``passes/slots.py`` → ``mtcompile.passes.slots``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "mtcompile":
        parts = ("mtcompile", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None, int]]:
    """(module, imported name or None, line) for every import, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, node.lineno
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield "." * node.level + (node.module or ""), alias.name, node.lineno


def top_level(tree: ast.Module) -> ast.Module:
    """The statements that run on import: no function bodies, nothing under ``if TYPE_CHECKING:``."""

    class Prune(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST:
            if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                return ast.Module(node.orelse, [])
            return self.generic_visit(node)

    return Prune().visit(tree)


def layer_of(module: str, name: str | None) -> str:
    """The layer that ``from module import name`` (or ``import module``) reaches."""
    parts = module.split(".") + ([name] if name else [])
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else parts[0]


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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and is_private(str(argument.value)):
                    yield str(argument.value), node.lineno


def test_imports_point_from_mtcompile_to_passes_to_runtime() -> None:
    wrong = []
    for path in sources("passes", "runtime"):
        own = path.relative_to(ROOT).parts[0]
        allowed = LAYERS[LAYERS.index(own) :]
        for module, name, line in imports(parse(path)):
            reached = layer_of(module, name)
            if reached in LAYERS and reached not in allowed:
                wrong.append(f"{name_of(path)}:{line}: {own} imports {reached}")
    assert not wrong, "\n".join(wrong)


def test_imports_do_not_go_round() -> None:
    modules = {module_name(path): path for path in sources(*LAYERS)}
    graph = {
        module: {
            target
            for name, member, _ in imports(top_level(parse(path)))
            for target in ([f"{name}.{member}"] if f"{name}.{member}" in modules else [name])
            if target in modules
        }
        for module, path in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_folders_are_imported_by_their_installed_names() -> None:
    wrong = [
        f"{name_of(path)}:{line}: import of {module!r}, try mtcompile.{module.lstrip('.')}"
        for path in sources(*FOLDERS)
        for module, _, line in imports(parse(path))
        if module.startswith(".") or module.split(".")[0] in ("passes", "runtime")
    ]
    assert not wrong, "\n".join(wrong)


def test_runtime_imports_torch_only_in_device_files() -> None:
    wrong = [
        f"{name_of(path)}:{line}: imports {module}"
        for path in sources("runtime")
        for module, _, line in imports(parse(path))
        if module.split(".")[0] == "torch" and name_of(path) not in TORCH_IN_RUNTIME
    ]
    assert not wrong, "\n".join(wrong)


def test_rest_of_runtime_loads_with_the_standard_library_alone() -> None:
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
        if name_of(path) not in PRIVATE_TORCH
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
torch.__version__; torch.ops.aten._softmax; x._y; graph.f; importlib.import_module("torch.fx")
"""
    found = {name for name, _ in private_torch(ast.parse(program))}
    assert found == {
        "torch._dynamo.config", "torch._inductor", "torch._C", "torch._C.x", "torch.nn.functional._pad",
        "torch.fx.graph._f", "torch._functorch",
    }  # fmt: skip


def test_nothing_loads_code_from_data() -> None:
    wrong = []
    for path in sources(*FOLDERS):
        tree = parse(path)
        wrong += [
            f"{name_of(path)}:{line}: imports {module}"
            for module, _, line in imports(tree)
            if module.split(".")[0] in NEVER_IMPORTED
        ]
        wrong += [
            f"{name_of(path)}:{node.value.lineno}: trust_remote_code"
            for node in ast.walk(tree)
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"  # setuptools leaves build/ behind
    for folder in LAYERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in PACKAGING:
        shutil.copy(ROOT / file, copy)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    result = subprocess.run([*command, str(copy)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

    (wheel,) = tmp_path.glob("mtcompile-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"mtcompile"}
    modules = {name.removesuffix(".py").replace("/", ".") for name in names if name.endswith(".py")}
    assert {module.removesuffix(".__init__") for module in modules} == {module_name(path) for path in sources(*LAYERS)}
    assert "mtcompile/py.typed" in names
    parts = {f"mtcompile/viz/{path.name}" for path in (ROOT / "mtcompile/viz").iterdir() if path.suffix in PAGE_PARTS}
    assert len(parts) == 7 and parts <= set(names)
    others = [name for name in names if not name.endswith((".py", "py.typed")) and ".dist-info/" not in name]
    others = [name for name in others if name not in parts]
    assert len(others) <= 1 and all(name.startswith("mtcompile/runtime/_update.") for name in others), others
    assert others or not shutil.which("gcc") or sys.platform != "linux", "gcc is here, and the update kernels were not built"

    program = "import mtcompile.passes, mtcompile.runtime; print(mtcompile.runtime.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(wheel)!r}); {program}"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert result.stdout.startswith(str(wheel)), result.stdout + result.stderr
