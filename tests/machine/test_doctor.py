"""The doctor: what it reads of the system is read right, what it measures is a machine that plans take, bad limits end it
with 4. Nothing here is timed."""

from __future__ import annotations

import functools
import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mtcompile
from mtcompile import cache, knobs
from mtcompile.cli.app import app
from mtcompile.machine import compute, doctor, limits, measure, system_files
from mtcompile.machine.device import choose
from mtcompile.machine.disk import disk
from mtcompile.machine.presets import named, this
from mtcompile.machine.timing import Effort
from mtcompile.passes.analysis.cost import Machine
from mtcompile.runtime.devices.host_pages import Placing, placing
from mtcompile.runtime.devices.pinned import NotPinned

KB, MIB, GIB = 1024, 2**20, 2**30
TINY = Effort((MIB // 4, MIB), MIB, 8 * MIB, MIB // 4, 64, 64, 0.0)  # enough to see that it runs
PROCESS_LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max stack size            8388608              unlimited            bytes
Max locked memory         65536                65536                bytes
Max open files            128                  4096                 files
Max address space         {address}            unlimited            bytes
Max nice priority         0                    0
"""


def write(root: Path, **files: str) -> None:
    """``proc__meminfo="..."`` is the file proc/meminfo."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine_files(root: Path, available_kb: int = 32 * MIB, **more: str) -> None:
    kilobytes = {"MemTotal": 64 * MIB, "MemAvailable": available_kb, "SwapTotal": 4 * MIB, "SwapFree": 4 * MIB}
    write(root, proc__meminfo="".join(f"{name}:  {kb} kB\n" for name, kb in kilobytes.items()), **more)


def rows(root: Path, device: Any = None) -> dict[str, limits.Limit]:
    return {limit.what: limit for limit in limits.limits(device or choose("cpu"), root)}


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Measure next to nothing, and remember it in a folder of the test's own."""
    monkeypatch.setattr("mtcompile.machine.doctor.FULL", TINY)
    monkeypatch.setattr("mtcompile.machine.doctor.QUICK", TINY)
    monkeypatch.setattr("mtcompile.machine.presets.QUICK", TINY)
    monkeypatch.setattr("mtcompile.machine.compute._ISSUED", 10)
    monkeypatch.setenv("MT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def run(*arguments: str) -> tuple[int, str, str]:
    made = CliRunner().invoke(app, ["doctor", "--device", "cpu", *arguments])
    return made.exit_code, made.stdout, made.stderr


# ------------------------------------------------------------------------------------------------------------ parsers


def test_memory_and_limits_are_read(tmp_path: Path) -> None:
    machine_files(tmp_path, proc__self__limits=PROCESS_LIMITS.format(address="unlimited"))
    assert system_files.kilobytes(tmp_path / "proc/meminfo")["MemAvailable"] == 32 * GIB
    found = system_files.process_limits(tmp_path)
    assert found["locked memory"] == 65536 and found["address space"] is None and found["open files"] == 128
    assert system_files.kilobytes(tmp_path / "nothing") == {} and system_files.process_limits(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("files", "memory", "cpus"),
    [
        ({}, None, None),
        (  # version 2, in a container: the group is the top of what it sees
            {
                "proc__self__cgroup": "0::/\n",
                "sys__fs__cgroup__memory.max": f"{8 * GIB}\n",
                "sys__fs__cgroup__memory.current": f"{3 * GIB}\n",
                "sys__fs__cgroup__memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 7\n",
                "sys__fs__cgroup__cpu.max": "150000 100000\n",
            },
            (8 * GIB, 2 * GIB),
            1.5,
        ),
        (  # version 2: the slice above has less room than the job, which has no limit of its own
            {
                "proc__self__cgroup": "0::/slice/job\n",
                "sys__fs__cgroup__slice__job__memory.max": "max\n",
                "sys__fs__cgroup__slice__job__cpu.max": "max 100000\n",
                "sys__fs__cgroup__slice__memory.max": f"{4 * GIB}\n",
                "sys__fs__cgroup__slice__memory.current": f"{GIB}\n",
            },
            (4 * GIB, GIB),
            None,
        ),
        (  # version 1: the path is the host's and not there in the container
            {
                "proc__self__cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
                "sys__fs__cgroup__memory__memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys__fs__cgroup__memory__memory.usage_in_bytes": f"{GIB}\n",
                "sys__fs__cgroup__memory__memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
                "sys__fs__cgroup__cpu,cpuacct__cpu.cfs_quota_us": "50000\n",
                "sys__fs__cgroup__cpu,cpuacct__cpu.cfs_period_us": "100000\n",
            },
            (2 * GIB, GIB - 1),
            0.5,
        ),
        (  # version 1 without limits
            {
                "proc__self__cgroup": "4:memory:/\n1:cpu:/\n",
                "sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712\n",
                "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "-1\n",
                "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000\n",
            },
            None,
            None,
        ),
    ],
)
def test_control_groups_are_read(tmp_path: Path, files: dict[str, str], memory: Any, cpus: float | None) -> None:
    write(tmp_path, **files)
    assert system_files.group_memory(tmp_path) == memory
    assert system_files.group_cpus(tmp_path) == cpus


def test_kills_and_drivers_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "proc__self__cgroup": "4:memory:/\n0::/job\n",
            "sys__fs__cgroup__job__memory.events": "low 0\noom 4\noom_kill 3\n",
            "sys__fs__cgroup__memory__memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            "proc__driver__nvidia__version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC\n",
        },
    )
    assert system_files.group_kills(tmp_path) == 3
    assert "3 processes" in rows(tmp_path)["killed for memory"].found
    assert doctor.driver_version(tmp_path) == "550.54.15" and doctor.versions(tmp_path)["NVIDIA driver"] == "550.54.15"
    write(tmp_path, proc__driver__nvidia__version="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1.2  Release\n")
    assert doctor.driver_version(tmp_path) == "570.1.2"
    assert doctor.driver_version(tmp_path / "nothing") == ""


# ------------------------------------------------------------------------------------------------------------ rows


def test_what_is_not_ok_says_what_to_do(tmp_path: Path) -> None:
    machine_files(
        tmp_path,
        available_kb=512 * KB,
        proc__self__limits=PROCESS_LIMITS.format(address=2 * GIB),
        proc__self__status=f"Name: x\nVmSize:\t {int(1.5 * GIB / KB)} kB\n",
        proc__self__cgroup="0::/\n",
        **{"sys__fs__cgroup__memory.max": f"{GIB}", "sys__fs__cgroup__memory.current": f"{GIB - 1}"},
        **{"sys__fs__cgroup__cpu.max": "10000 100000"},
    )
    found = rows(tmp_path)
    levels = {what: limit.level for what, limit in found.items()}
    bad = ("host memory", "control group's memory", "ulimit -v (address space)", "ulimit -n (open files)")
    assert [levels[what] for what in bad] == ["bad"] * 4
    assert levels["/dev/shm"] == levels["processors"] == "watch" and levels["swap"] == "ok"
    assert levels["ulimit -l (locked memory)"] == "ok"  # nothing is pinned on the emulated device
    assert found["host memory"].amount == 512 * MIB
    for limit in found.values():
        assert limit.meaning and bool(limit.step) == (limit.level != "ok"), limit


def test_a_group_smaller_than_the_machine_is_named_with_a_budget_below_it(tmp_path: Path) -> None:
    files = {"sys__fs__cgroup__memory.max": f"{10 * GIB}", "sys__fs__cgroup__memory.current": "0"}
    machine_files(tmp_path, proc__self__cgroup="0::/\n", **files)
    limit = rows(tmp_path)["control group's memory"]
    assert limit.level == "watch" and f"host={9 * GIB}" in limit.step


def test_a_system_that_tells_nothing_gives_no_row_of_it(tmp_path: Path) -> None:
    found = rows(tmp_path)
    assert not any(what.startswith(("host memory", "swap", "ulimit", "control", "/dev/shm")) for what in found)
    assert "processors" in found


def test_refused_pins_are_found_in_steps(tmp_path: Path) -> None:
    class Refuses:
        def pin(self, nbytes: int) -> torch.Tensor:
            if nbytes > GIB:
                raise NotPinned("error 2")
            return torch.empty(0)

    device = limits.CudaDevice.__new__(limits.CudaDevice)
    device.api = Refuses()  # type: ignore[assignment]
    machine_files(tmp_path, proc__version="Linux version 5.15.90.1-microsoft-standard-WSL2")
    (limit,) = limits._pinning(device, tmp_path)
    assert limit.level == "watch" and limit.amount == GIB and "WSL" in limit.step
    (tmp_path / "proc/version").write_text("Linux version 6.1")
    (limit,) = limits._pinning(device, tmp_path)
    assert "memlock" in limit.step


def test_the_nodes_and_the_size_of_pages_are_said(tmp_path: Path) -> None:
    class Placed:
        def placing(self, root: Path) -> Placing:
            return placing({0}, "", root)

    device = limits.CudaDevice.__new__(limits.CudaDevice)
    device.api = Placed()  # type: ignore[assignment]
    write(tmp_path, sys__devices__system__node__has_memory="0\n")
    write(tmp_path, sys__kernel__mm__transparent_hugepage__enabled="always madvise [never]")
    nodes, huge = limits._pages(device, tmp_path)
    assert (nodes.found, nodes.level, nodes.meaning) == ("left to the system", "ok", "there is one memory node")
    assert huge.found.startswith("never") and huge.level == "watch" and "madvise" in huge.step
    write(tmp_path, sys__devices__system__node__has_memory="0-1", sys__devices__system__node__node0__cpulist="0-3")
    nodes, _ = limits._pages(device, tmp_path)
    assert nodes.found.startswith("preferred on node 0") and (
        nodes.level == "ok" or "refused" in nodes.found or "not built" in nodes.found
    )
    (huge,) = limits._pages(choose("cpu"), tmp_path)
    assert huge.what == "huge pages"


# ------------------------------------------------------------------------------------------------------------ measuring


def test_every_figure_is_measured(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    found = measure.measure(choose("cpu"), TINY, tmp_path)
    assert torch.get_num_threads() == threads and not list(tmp_path.iterdir())
    numbers = {name: value for name, value in asdict(found.machine).items() if isinstance(value, float)}
    # Of GPUs alone, or of data sheets; and host_gbps is that of updates.
    others = {"tf32_flops", "fp64_flops", "update_gbps", "watts"}
    assert len(numbers) == 15 and {name for name, value in numbers.items() if not value > 0} == others
    assert found.machine.strided_gops == Machine().strided_gops  # of GPUs alone
    rate, row = compute.strided(torch.device("cpu"), TINY)
    assert 0 < rate < 1e4 and row.values == {"a * b": rate}
    assert found.machine.device_nbytes == 0 and not found.machine.fuses  # the emulated device has what it is given
    assert all(value > 0 for row in found.measurements for value in row.values.values())
    assert all(row.values and row.meaning for row in found.measurements)
    whats = [row.what for row in found.measurements]
    assert len(set(whats)) == len(whats) == 9


def test_a_folder_without_a_disk_behind_it_is_said(tmp_path: Path) -> None:
    row = disk(tmp_path / "nothing", TINY)
    assert not row.values and "not measured" in row.meaning
    there = Path("/dev/shm")
    if there.is_dir():  # with O_DIRECT or without, as the kernel has it
        row = disk(there, TINY)
        assert row.values["write"] > 0 and row.values["read"] > 0


@pytest.mark.slow
def test_this_machine_is_measured_once_and_then_read(quickly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    first = this()
    assert first.name.endswith("(emulated device)") and first.flops > 0
    monkeypatch.setattr("mtcompile.machine.presets.measure", None)  # would be called
    assert named("this") == first
    (file,) = (quickly / "cache" / "machines").iterdir()
    assert named(str(file)) == first
    assert file == cache.machine_path(measure.identity(torch.device("cpu")))
    file.write_text("{")  # not a machine: measured again
    monkeypatch.setattr("mtcompile.machine.presets.measure", lambda *_: measure.MeasuredMachine(Machine("again"), ()))
    assert named("this").name == "again"
    assert mtcompile.plan("gpt-11m", batch=1, seq=16, machine="this").machine == "again"


# ------------------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize("free_kb", [32 * MIB, 512 * KB])
def test_the_command_ends_with_what_to_type_next(quickly: Path, monkeypatch: pytest.MonkeyPatch, free_kb: int) -> None:
    machine_files(quickly / "root", free_kb)
    monkeypatch.setattr("mtcompile.machine.doctor.limits", functools.partial(limits.limits, root=quickly / "root"))
    code, text, _ = run()
    last = text.rstrip().splitlines()
    if code == 4:
        assert free_kb < MIB and last[-1] == "first do what the rows marked bad say, then type again: mtcompile doctor"
        return
    commands = last[last.index("what to type next:") + 1 :]
    assert len(commands) == 3 and f"--host {32 * KB * 9 // 10}MiB" in text
    for command in commands:  # every option exists
        name, *arguments = shlex.split(command)[1:]
        listed = CliRunner().invoke(app, [name, "--help"]).stdout
        assert all(f"{option} " in listed for option in arguments if option.startswith("--")), command


def test_the_command_writes_a_machine_and_one_object(quickly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_files(quickly / "root")
    monkeypatch.setattr("mtcompile.machine.doctor.limits", functools.partial(limits.limits, root=quickly / "root"))
    monkeypatch.setenv("MT_DEBUG", "0")
    path = quickly / "mine.json"
    code, text, noise = run("--json", "--save", str(path))
    found = json.loads(text)
    assert "measuring" in noise
    assert set(found) == {
        "machine", "measurements", "hints", "limits", "versions", "parts", "knobs", "file", "commands", "bad",
    }  # fmt: skip
    assert asdict(named(str(path))) == found["machine"] == asdict(named(found["file"]))
    for row in found["measurements"]:
        assert set(row) == {"what", "unit", "values", "meaning"} and row["unit"] in ("GB/s", "TFLOP/s", "us")
    for row in found["limits"]:
        assert set(row) == {"what", "found", "amount", "level", "meaning", "step"} and row["level"] in ("ok", "watch", "bad")
    assert code == (4 if found["bad"] else 0)
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["mtcompile"] == mtcompile.__version__
    assert {part["name"] for part in found["parts"]} == {
        "accelerator", "triton", "C update kernels", "C++ compiler", "transformers",
    }  # fmt: skip
    assert found["knobs"]["MT_DEBUG"]["value"] == "0" and found["knobs"]["MT_CACHE"]["meaning"]


def test_people_get_a_table(quickly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_files(quickly / "root", proc__self__limits=PROCESS_LIMITS.format(address="unlimited").replace(" 128 ", " 20000 "))
    monkeypatch.setattr("mtcompile.machine.doctor.limits", functools.partial(limits.limits, root=quickly / "root"))
    monkeypatch.setattr("mtcompile.machine.limits._disks", lambda: iter(()))
    monkeypatch.setenv("MT_CHECK", "1")
    code, text, _ = run("--quick")
    assert code == 0
    for part in ("copy to the device", "weights of a 7B model (14 GB) cross in", "tokens a step", "host AdamW", "host memory"):
        assert part in text
    assert "MT_CHECK=1 is set: poison" in text and "--machine this" in text


def test_a_bad_limit_ends_with_four_and_the_next_step(quickly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_files(quickly / "root", available_kb=100 * KB)
    monkeypatch.setattr("mtcompile.machine.doctor.limits", functools.partial(limits.limits, root=quickly / "root"))
    code, text, _ = run("--quick")
    assert code == 4 and "-> end other processes" in text


def test_what_cannot_be_measured_is_a_bad_limit(quickly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr("mtcompile.machine.doctor.measure", short)
    code, text, noise = run("--save", str(quickly / "mine.json"))
    assert code == 2 and "CUDA out of memory." in text and "mtcompile doctor: expected a machine" in noise
    code, text, _ = run("--json")
    assert code == 4 and json.loads(text)["machine"] is None


@pytest.mark.parametrize("arguments", [("--device", "abacus"), ("--device", "meta"), ("--save", "mine.txt")])
def test_what_is_asked_for_wrongly_is_said_in_a_line(arguments: tuple[str, ...]) -> None:
    code, _, text = run(*arguments)
    assert code == 2 and text.startswith("mtcompile doctor: expected") and "found" in text and "Traceback" not in text


def test_every_variable_that_is_read_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = set(re.findall(r'(?:environ\.get|_number|_whole)\("(MT_\w+)"', Path(knobs.__file__).read_text()))
    monkeypatch.setenv("MT_DUMP", "/somewhere")
    monkeypatch.delenv("MT_TRACE", raising=False)
    found = knobs.listed()
    assert set(found) == read and all(meaning for _, meaning in found.values())
    assert found["MT_DUMP"][0] == "/somewhere" and found["MT_TRACE"][0] is None


def test_hints_follow_from_the_ratios() -> None:
    first, second = doctor.hints_of(Machine(flops=6e14, h2d_gbps=50.0, host_gbps=200.0))
    assert first.startswith("from 6,000 tokens") and second.startswith("from 10,500 tokens")
