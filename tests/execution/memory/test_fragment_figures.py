"""The figures of streamed weights, from a schedule that was written by hand."""

from __future__ import annotations

from mtcompile.execution.memory.fragment_figures import streaming
from mtcompile.runtime.schedule import Buffer, Instruction, Schedule


def schedule() -> Schedule:
    """Two fragments of 256 bytes, the second one fetched while the first is used."""
    instructions, buffers = [], {}
    for name in ("a", "b"):
        buffers[name] = Buffer(name, name, "host", "home", 256, "param")
        buffers[f"{name}_device"] = Buffer(f"{name}_device", name, "device", "placed", 256, "param", 0)
        instructions.append(Instruction("alloc", "h2d", "forward", writes=(f"{name}_device",)))
        fetch = Instruction("copy", "h2d", "forward", (name,), (f"{name}_device",), nbytes=256, time_us=10.0)
        instructions.append(fetch)
    norm = Instruction("run", "compute", "forward", (), (), "k", time_us=3.0)
    instructions.append(norm)
    for name, dep in (("a", 1), ("b", 3)):
        run = Instruction("run", "compute", "forward", (f"{name}_device",), (), "k", time_us=2.0, deps=(dep,))
        instructions += [run, Instruction("free", "compute", "forward", writes=(f"{name}_device",))]
    return Schedule(tuple(instructions), buffers, {}, {}, {})


def test_the_first_wait_and_the_weights_on_the_device_at_a_time() -> None:
    figures = streaming(schedule())
    assert figures.wait_us == 10.0  # not the 0 of the region without weights
    assert figures.staging_nbytes == 512
    assert streaming(schedule(), {5: 25.0, 7: 40.0}).wait_us == 25.0
