"""A worker process that compiles kernels into Inductor's disk cache: a graph per line in, a line per graph out.

python -m mtcompile.kernels.compile_worker THREADS [strict]
"""

from __future__ import annotations

import sys

import torch

from mtcompile.kernels.inductor import compile_kernel
from mtcompile.passes.graph_json import graph_from_json


def main() -> int:
    torch.set_num_threads(int(sys.argv[1]))
    strict = "strict" in sys.argv[2:]
    for line in sys.stdin:
        try:
            compile_kernel(graph_from_json(line), torch.device("cpu"), strict)
        except Exception as error:  # the parent process meets it again and reports it
            print(type(error).__name__, flush=True)
        else:
            print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
