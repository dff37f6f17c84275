"""Trainings that are killed at any moment and started again: the newest whole checkpoint is there, and the bits at the end are
those of a training that was never killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # it starts processes

# A process forks one training after the other, so that none has to import torch again, and kills each at a random moment, until
# one comes to its end. Only ``checkpoint.latest`` tells the next where to go on. Every second kill is drawn from the time after
# the first step: compiling with Inductor takes so long that few of the others meet a step.
_PROGRAM = """
import os, random, signal, sys, time
from pathlib import Path
import torch
import mtcompile
from mtcompile import checkpoint
from tests.checkpoint.runs import INDUCTOR, Run, WAYS, seeded

torch.set_num_threads(1)
kills, way, folder, steps = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), 24
stepping = folder / "stepping"

def train(folder, background):
    seeded()
    run = Run(WAYS.get(way, INDUCTOR))
    done = run.load(folder).step if folder is not None and checkpoint.latest(folder) else 0
    print("begins after", done, flush=True)
    if folder is None:
        while done < steps:
            run.step()
            done += 1
        return run.state()
    with checkpoint.autosave(folder, run.model, run.optimizer, every=3, others={"scheduler": run.scheduler},
                             background=background) as saver:
        while done < steps:
            run.step()
            if not stepping.exists():
                stepping.touch()
            done += 1
            saver.after(done)
    return run.state()

def result_of(pid):
    return os.waitpid(pid, 0)[1]

def has_ended(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

def forked(function):
    stepping.unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return pid
    try:
        os._exit(function())
    except BaseException as error:
        print("failed:", repr(error), flush=True)
        os._exit(9)

def whole():
    torch.save(train(None, False), folder / "whole.pt")
    return 0

def killed(number):
    def training():
        state, expected = train(folder / "run", number % 3 == 2), torch.load(folder / "whole.pt")
        print("ended", all(map(torch.equal, state[:7], expected[:7])), flush=True)
        for index, (found, wanted) in enumerate(zip(state[:7], expected[:7])):
            if not torch.equal(found, wanted):
                print("tensor", index, "differs by", float((found - wanted).abs().max()), flush=True)
        return 0
    return training

warm = Run()  # what is imported late is imported once
warm.step()
warm.save(folder / "warm")
warm.load(folder / "warm")
assert result_of(forked(whole)) == 0
generator = random.Random(int(sys.argv[4]))
done = count = ended = 0
began = time.monotonic()
assert result_of(forked(killed(0))) == 0  # how long one takes that is not killed
duration, of_steps = time.monotonic() - began, time.time() - stepping.stat().st_mtime
print("seconds", duration, "of them after the first step", of_steps)
while count < kills:
    if ended or done >= steps:
        for path in sorted((folder / "run").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        done = ended = 0
    pid = forked(killed(count))
    if count % 2:
        while not stepping.exists() and not has_ended(pid):
            time.sleep(0.001)
    time.sleep(generator.random() * (of_steps if count % 2 else duration))
    os.kill(pid, signal.SIGKILL)
    status = result_of(pid)
    latest = checkpoint.latest(folder / "run")
    now = 0 if latest is None else checkpoint.inspect(latest).step
    assert now >= done, (now, done)
    done, count, ended = now, count + os.WIFSIGNALED(status), not os.WIFSIGNALED(status)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    if generator.random() < 0.1:  # and to its end
        assert result_of(forked(killed(0))) == 0
        done, ended = steps, True
assert result_of(forked(killed(0))) == 0
names = {path.name for path in (folder / "run").iterdir()}
assert not [name for name in names if "unfinished" in name] and len(names) <= 3, names
print("kills", count, flush=True)
"""


@pytest.mark.parametrize(
    ("way", "kills"),
    [("plain", 8), *(pytest.param(way, 100, marks=pytest.mark.long) for way in ("plain", "small", "backward", "inductor"))],
)
def test_killed_at_any_moment(way: str, kills: int, tmp_path: Path) -> None:
    root, memory = Path(__file__).parents[2], Path("/dev/shm")  # where a sync takes no time; what a disk keeps is another test
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MT_PROGRESS": "0", "PYTHONPATH": str(root)}
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        command = [sys.executable, "-c", _PROGRAM, str(kills), way, folder, str(random.randrange(1 << 30))]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.split("\n")
    assert f"kills {kills}" in lines and "ended True" in lines and "ended False" not in lines, result.stdout + result.stderr
