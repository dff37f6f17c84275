"""The one thing that pyproject.toml cannot say stably: two C libraries. The planner's is required; that of updates is built
where it can be, and left out elsewhere.

They are loaded with ctypes (runtime/optim/host_kernels.py, passes/planning/figures/compiled.py), need no Python header, and
install inside the package. No flag is for the machine they are built on: update.c picks its vector width when it is loaded.
"""

import re
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

BITS = ["-fno-fast-math", "-ffp-contract=off"]  # what keeps it equal to other kernels, whatever CFLAGS says
SPEED = ["-O3", "-fno-math-errno", "-fno-trapping-math"]  # square roots as vectors; after BITS, which would undo it


class Build(build_ext):
    """Builds the libraries, under names of no Python version. One that is required and cannot be built ends the install with
    one sentence."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + EXTENSION_SUFFIXES[-1]

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            if ext.optional:
                raise
            found = f"expected a C compiler that builds {', '.join(ext.sources)}, which mtcompile plans with, found: {error}"
            raise SystemExit(f"mtcompile: {found}. Install gcc or clang, or name one with CC=, and install again") from error


class Wheel(bdist_wheel):
    """Names the wheel by its system alone: every Python 3 can load what is in it. On Linux, by the oldest glibc that has all
    versions of symbols which the libraries name. Their other library, libgomp, comes with torch; without one, torch's
    operations do the update."""

    def get_tag(self) -> tuple[str, str, str]:
        system = super().get_tag()[2]
        built = [path for path in map(Path, self.get_finalized_command("build_ext").get_outputs()) if path.is_file()]
        named = [version for path in built for version in re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())]
        if system.startswith("linux_") and named:  # none with another C library, or before they are built
            major, minor = max((int(major), int(minor)) for major, minor in named)
            system = system.replace("linux_", f"manylinux_{major}_{minor}_", 1)
        return ("py3", "none", system)


setup(
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
    ext_modules=[
        Extension(
            "mtcompile.runtime.optim._update",
            ["runtime/optim/update.c"],
            extra_compile_args=["-std=gnu11", "-fopenmp", "-fvisibility=hidden", *BITS, *SPEED],
            extra_link_args=["-fopenmp"],
            optional=True,  # where there is no compiler, or one without OpenMP, torch's operations do the update
        ),
        Extension(
            "mtcompile.passes.planning.figures._figures",
            [f"passes/planning/figures/c/{name}.c" for name in ("moves", "lives", "clock")],
            depends=["passes/planning/figures/c/figures.h"],
            extra_compile_args=["-std=gnu11", "-fvisibility=hidden", *BITS, "-O3"],
        ),
    ],
)
