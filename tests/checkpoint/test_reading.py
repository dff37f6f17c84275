"""No reader of a file runs, imports or unpickles what the file could choose, starts a process or opens a connection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # it starts a process

_PROGRAM = """
import json
import sys
from pathlib import Path
import numpy as np
import torch
from torch import nn
import mtcompile
from mtcompile import checkpoint
from mtcompile.checkpoint.shards import stored_tensors
from mtcompile.data.records import read_records
from mtcompile.data.windows import read_tokens
from mtcompile.machine.presets import named, to_json
from mtcompile.runtime.schedule import from_json

folder = Path(sys.argv[1])
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
optimizer = torch.optim.AdamW(model.parameters())
compiled = mtcompile.compile(nn.Linear(8, 8), memory="1MiB")
compiled(torch.randn(4, 8)).sum().backward()
schedule = compiled.schedule.to_json()
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
path = checkpoint.save(folder / "run", model, optimizer, step=1, extra={"seen": torch.ones(2)})
(folder / "machine.json").write_text(to_json(named("rtx4090")))
talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
(folder / "talks.jsonl").write_text(json.dumps({"messages": talk}))
np.arange(100, dtype=np.uint16).tofile(folder / "tokens.bin")

def read():
    checkpoint.load(folder / "run", model, optimizer)
    checkpoint.inspect(path)
    for tensor in stored_tensors(path).values():
        tensor.read()
    named(str(folder / "machine.json"))
    list(read_records([folder / "talks.jsonl"]))
    read_tokens([folder / "tokens.bin"], 200)
    from_json(schedule)

read()  # what the readers themselves need is loaded now
events = []

def audit(event, arguments):
    if event.split(".")[0] in ("exec", "compile", "import", "pickle", "marshal", "subprocess", "socket") or event in (
        "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "ctypes.dlopen"
    ):
        events.append((event, str(arguments)[:200]))

sys.addaudithook(audit)
read()
assert not events, events
__import__("pickle").loads(__import__("pickle").dumps(Path("seen")))
assert any(event == "pickle.find_class" for event, _ in events)  # the hook does see such things
"""


def test_reading_runs_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MT_PROGRESS": "0"}
    subprocess.run([sys.executable, "-c", _PROGRAM, str(tmp_path)], check=True, env=environment)
