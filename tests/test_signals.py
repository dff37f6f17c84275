"""Signals that are noted: those within a second are one request, and the next one acts at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os, signal, sys, time
from mtcompile.reading import signals_noted
signal.signal(signal.SIGINT, signal.default_int_handler)
first, second, when = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
try:
    with signals_noted({signal.SIGINT: "", signal.SIGTERM: ""}) as noted:
        signal.pthread_sigmask(signal.SIG_BLOCK, {first, second} if when == "together" else ())
        os.kill(os.getpid(), first)
        time.sleep({"together": 0, "soon": 0.3, "later": 1.2}[when])
        os.kill(os.getpid(), second)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {first, second})
        time.sleep(0.01)
        print(*sorted(noted), flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    ("first", "second", "when", "told", "code"),
    [
        (15, 2, "together", "2 15\n", 0),
        (2, 15, "together", "2 15\n", 0),
        (2, 2, "soon", "2\n", 0),
        (15, 15, "soon", "15\n", 0),
        (2, 15, "soon", "2 15\n", 0),
        (2, 2, "later", "interrupted\n", 0),
        (15, 2, "later", "interrupted\n", 0),
        (2, 15, "later", "", -15),
    ],
)
def test_signals_that_come_together_are_one(first: int, second: int, when: str, told: str, code: int) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(first), str(second), when]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert (ended.stdout, ended.returncode, ended.stderr) == (told, code, "")
