"""Which files and folders there are, how large they grow, and what lands in a wheel."""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.sources import LAYERS, ROOT, module_name, name_of, parse, sources

ROOT_FILES = {
    f"{name}.py"
    for name in (
        "__init__", "__main__", "api", "options", "compiler", "backend", "cache", "errors", "knobs", "progress", "reading",
        "references", "sizes",
    )
} | {"py.typed"}  # fmt: skip
ROOMS = {
    "cached", "capture", "checkpoint", "cli", "data", "distributed", "execution", "forecast", "kernels", "machine", "models",
    "optim", "parity", "report", "torch_private", "trainer", "viz",
}  # fmt: skip
LINKS = {"passes", "runtime"}
MOST_PARAMETERS = 7
PUBLIC_DOORS = {  # the functions of more parameters: options as users write them, and kernels in Triton's language
    "mtcompile/api.py": {"compile"},
    "mtcompile/checkpoint/": {"autosave", "save", "save_in_background"},
    "mtcompile/forecast/": {"plan"},
    "mtcompile/parity/": {"verify"},
    "mtcompile/cli/": {"bench", "explain", "graph", "plan", "trace", "train", "verify", "viz"},
    "mtcompile/kernels/arriving_triton.py": {"linear"},
    "runtime/optim/triton_kernels.py": {"adamw", "sgd"},
}
PAGE_PARTS = {".html", ".css", ".js"}  # of the timeline
PACKAGING = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def functions_of_many_parameters(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """(name, line, number of parameters without ``self`` and ``cls``) of each that has more than ``MOST_PARAMETERS``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > MOST_PARAMETERS:
                yield node.name, node.lineno, count


def is_public_door(path: Path, function: str) -> bool:
    return any(name_of(path).startswith(place) and function in names for place, names in PUBLIC_DOORS.items())


def copy_of_the_package(folder: Path) -> Path:
    """A checkout without links: as where a file system or an archive has none."""
    for layer in LAYERS:
        ignore = shutil.ignore_patterns("__pycache__", "*.so", *(LINKS if layer == "mtcompile" else ()))
        shutil.copytree(ROOT / layer, folder / layer, ignore=ignore)
    return folder


def output_of(program: str, path: Path, cwd: Path) -> str:
    """What a new process that finds its modules at ``path`` prints, or its errors."""
    env = os.environ | {"PYTHONPATH": str(path)}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=cwd, env=env)
    return (result.stdout + result.stderr).strip()


def test_the_package_holds_its_entry_files_and_rooms_and_nothing_else() -> None:
    entries = {path.name for path in (ROOT / "mtcompile").iterdir()}
    assert entries - ROOT_FILES - ROOMS - LINKS - {"__pycache__"} == set()


@pytest.mark.parametrize("name", sorted(LINKS))
def test_a_link_in_the_package_leads_to_the_layer(name: str) -> None:
    link = ROOT / "mtcompile" / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}"


@pytest.mark.slow
def test_a_plain_checkout_imports_without_being_installed(tmp_path: Path) -> None:
    program = "import mtcompile.passes.planning.planner as planner; print(planner.__file__)"
    assert output_of(program, ROOT, tmp_path) == str(ROOT / "mtcompile/passes/planning/planner.py")


@pytest.mark.parametrize("module", ["mtcompile.passes", "mtcompile.runtime"])
def test_a_checkout_without_links_finds_its_layers_beside_the_package(module: str, tmp_path: Path) -> None:
    checkout = copy_of_the_package(tmp_path / "checkout")
    program = f"import importlib.util; print(importlib.util.find_spec({module!r}).origin)"
    assert output_of(program, checkout, tmp_path) == str(checkout / module.split(".")[1] / "__init__.py")


def test_only_public_doors_have_more_than_seven_parameters() -> None:
    wrong = [
        f"{name_of(path)}:{line}: {function} has {count} parameters"
        for path in sources(*LAYERS)
        for function, line, count in functions_of_many_parameters(parse(path))
        if not is_public_door(path, function)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    checkout = copy_of_the_package(folder / "checkout")  # setuptools leaves build/ behind
    for file in PACKAGING:
        shutil.copy(ROOT / file, checkout)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    result = subprocess.run([*command, str(checkout)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("mtcompile-*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_every_module_once_the_timeline_the_c_libraries_and_no_other_file(wheel: Path, tmp_path: Path) -> None:
    """The layers are imported from it."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"mtcompile"}
    modules = [name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in names if name.endswith(".py")]
    assert sorted(modules) == sorted(module_name(path) for path in sources(*LAYERS))
    parts = {f"mtcompile/viz/{path.name}" for path in (ROOT / "mtcompile/viz").iterdir() if path.suffix in PAGE_PARTS}
    assert len(parts) == 7
    assert parts | {"mtcompile/py.typed"} <= set(names)
    others = [name for name in names if not name.endswith((".py", "py.typed", *PAGE_PARTS)) and ".dist-info/" not in name]
    libraries = {"mtcompile/runtime/optim/_update", "mtcompile/passes/planning/figures/_figures"}
    built = [name.partition(".")[0] for name in others]
    assert all(name.count(".") == 1 for name in others) and "-py3-none-" in wheel.name  # of no Python version
    assert len(built) == len(set(built)) and {min(libraries)} <= set(built) <= libraries, others
    assert {*built} == libraries or not shutil.which("gcc") or sys.platform != "linux", "gcc is here, and did not build both"
    program = "import mtcompile.passes, mtcompile.runtime; print(mtcompile.runtime.__file__)"
    assert output_of(program, wheel, tmp_path).startswith(str(wheel))


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or not shutil.which("objdump"), reason="needs glibc and objdump")
def test_the_wheel_is_for_the_oldest_glibc_that_has_what_its_libraries_need(wheel: Path, tmp_path: Path) -> None:
    needed, links = set[tuple[int, ...]](), set[str]()
    with zipfile.ZipFile(wheel) as archive:
        for name in (name for name in archive.namelist() if name.endswith(".so")):
            told = output_of_command("objdump", "-T", "-p", archive.extract(name, tmp_path))
            needed |= {tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([\d.]+)", told)}
            links |= {link.partition(".so")[0] for link in re.findall(r"NEEDED +(\S+)", told)}
    major, minor, *_ = max(needed)
    assert wheel.name.endswith(f"-py3-none-manylinux_{major}_{minor}_{platform.machine()}.whl")
    assert links <= {"libc", "libm", "libpthread", "libgomp", "libomp"}  # the last two: without, torch's operations update


def output_of_command(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_the_sdist_holds_the_tests_and_what_they_read_and_nothing_that_was_built(tmp_path: Path) -> None:
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if kept.returncode:
        pytest.skip("not a checkout")
    files = set(kept.stdout.split("\n")) - {"", *(f"mtcompile/{link}" for link in LINKS)}
    for name in files:
        if (ROOT / name).is_file():
            (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    program = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "checkout", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("mtcompile-*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    assert files <= held, sorted(files - held)[:9]
    assert not [
        name for name in held - files if not name.startswith("mtcompile.egg-info/") and name not in ("PKG-INFO", "setup.cfg")
    ]


def test_continuous_integration_runs_what_a_developer_runs() -> None:
    assert re.search(r"run: \.ci/run$", (ROOT / ".github/workflows/ci.yml").read_text(), re.M)
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_every_pinned_version_is_installed_by_hash() -> None:
    """But torch's, and what only some builds of it need."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, rest = line.partition("==")
        if rest and "python_version < " not in rest:
            pins[name.lower().replace("_", "-")] = rest.partition(";")[0].strip()
    hashed, last = {}, ""
    for line in (ROOT / "hashes.txt").read_text().splitlines():
        if "==" in line and not line.startswith(("#", " ")):
            last, _, rest = line.partition("==")
            hashed[last] = (rest.split()[0], 0)
        elif "--hash=sha256:" in line:
            hashed[last] = (hashed[last][0], hashed[last][1] + 1)
    wrong = {name for name, version in pins.items() if hashed.get(name, ("", 0))[0] != version}
    assert wrong == {"torch", "triton"} and all(count for _, count in hashed.values())
