"""A process that loads weights within an address space of their size and little more, and says what it took.

python -m tests.helpers.limited_loading FOLDER EXTRA_MIB [PRECISION]
"""

from __future__ import annotations

import json
import resource
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mtcompile

MIB = 2**20
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def write_weights(folder: Path, like: dict[str, torch.Tensor], shards: int) -> int:
    """Writes shards and an index with tensors of these names, shapes and dtypes, each full of its number. One tensor at a time
    is in memory. Returns their bytes."""
    names, weight_map, total = sorted(like), {}, 0
    for shard in range(shards):
        file, header, end = f"model-{shard:05d}.safetensors", {}, 0
        own = names[shard::shards]
        for name in own:
            nbytes = like[name].numel() * like[name].element_size()
            header[name] = {
                "dtype": _CODES[like[name].dtype],
                "shape": list(like[name].shape),
                "data_offsets": [end, end + nbytes],
            }
            weight_map[name], end = file, end + nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
            for name in own:
                opened.write(torch.full_like(like[name], number(names, name), device="cpu").view(torch.uint8).numpy().data)
        total += end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def number(names: list[str], name: str) -> float:
    """Returns the value of a tensor's elements: one that bfloat16 has."""
    return float(names.index(name) % 128)


def meta_module(count: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Builds layers on the device "meta", of one parameter each."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(columns, rows, bias=False, dtype=dtype) for _ in range(count)))


def _kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def main() -> None:
    folder, extra, precision = Path(sys.argv[1]), int(sys.argv[2]) * MIB, sys.argv[3]
    module: Any = None
    if (folder / "config.json").exists():
        import transformers.models.llama.modeling_llama  # noqa: F401
    else:
        module = meta_module(*json.loads((folder / "module.json").read_text()))
    home = int((folder / "home.txt").read_text())
    load = mtcompile.from_pretrained
    mtcompile.compile(nn.Linear(1, 1), memory="1MiB")  # imports what it needs: code is no weight
    before = _kib("VmRSS")
    limit = _kib("VmSize") * 1024 + home + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        model = load(folder, module, memory="1GiB", precision=precision)
    except mtcompile.BudgetError as error:
        print(json.dumps({"refused": str(error), "taken": (_kib("VmHWM") - before) * 1024}))
        return
    taken = (_kib("VmHWM") - before) * 1024
    state = model.state_dict()
    names = sorted(state)
    right = all(bool((value == number(names, name)).all()) for name, value in state.items())
    print(json.dumps({"taken": taken, "right": right, "dtypes": sorted({str(value.dtype) for value in state.values()})}))


if __name__ == "__main__":
    main()
