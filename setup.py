"""The one thing that pyproject.toml cannot say stably: C libraries that are built where they can be, and left out elsewhere.

They are loaded with ctypes (runtime/optim/host_kernels.py, passes/planning/figures/compiled.py), need no Python header, and
install inside the package. No flag is for the machine they are built on: update.c picks its vector width when it is loaded.
"""

from setuptools import Extension, setup

BITS = ["-fno-fast-math", "-ffp-contract=off"]  # what keeps it equal to other kernels, whatever CFLAGS says
SPEED = ["-O3", "-fno-math-errno", "-fno-trapping-math"]  # square roots as vectors; after BITS, which would undo it

setup(
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
            optional=True,  # where there is no compiler, Python does the same, and plans take longer
        ),
    ]
)
