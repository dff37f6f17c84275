"""The one thing that pyproject.toml cannot say stably: a C library that is built where it can be, and left out elsewhere.

It is loaded with ctypes (runtime/optim/host_kernels.py), needs no Python header, and installs inside the package. No
flag is for the machine it is built on: update.c picks its vector width when it is loaded.
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
        )
    ]
)
