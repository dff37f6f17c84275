from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtcompile.runtime import schedule as module
from mtcompile.runtime.schedule import (
    ALIGNMENT,
    FORMAT,
    Buffer,
    Instruction,
    Schedule,
    ScheduleFormatError,
    aligned,
    from_json,
    gib,
    to_dict,
    with_deps,
)
from tests.helpers.schedules import from_disk, small_schedules, training

SCHEDULES = small_schedules()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("indent", [None, 2])
def test_json_round_trip(name: str, indent: int | None) -> None:
    schedule = SCHEDULES[name]
    text = schedule.to_json(indent)
    assert from_json(text) == schedule
    assert from_json(text).to_json(indent) == text


def test_json_defaults_may_be_left_out() -> None:
    data = to_dict(training())
    for row in data["buffers"]:
        for key in [key for key, default in (("offset", None), ("returned", False), ("version_of", "")) if row[key] == default]:
            del row[key]
    for row in data["instructions"]:
        for key in (
            "reads",
            "deps",
            "kernel",
            "workspace",
            "nbytes",
            "time_us",
            "label",
            "block",
            "work",
            "previous_step_deps",
        ):
            if not row[key]:
                del row[key]
    assert from_json(json.dumps(data)) == training()


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def drop(*path: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


MALFORMED: dict[str, tuple[Callable[[Any], None], str]] = {
    "another format": (put("format", value="mtcompile-schedule-9"), f"expected format '{FORMAT}', found 'mtcompile"),
    "no format": (drop("format"), "found None"),
    "no buffers": (drop("buffers"), "'buffers'"),
    "no peak table": (drop("peak_nbytes"), "'peak_nbytes'"),
    "instructions null": (put("instructions", value=None), "wrong type"),
    "buffers by name": (put("buffers", value={"x": {}}), "wrong type"),
    "a field missing": (drop("buffers", 0, "value"), "'value'"),
    "a field too many": (put("instructions", 0, "stream", value=1), "'stream'"),
    "bytes as text": (put("buffers", 0, "nbytes", value="12"), "nbytes: expected int, found '12'"),
    "bytes as fraction": (put("buffers", 0, "nbytes", value=1.5), "nbytes: expected int, found 1.5"),
    "bytes as truth": (put("buffers", 0, "nbytes", value=True), "nbytes: expected int, found True"),
    "name as list": (put("buffers", 0, "name", value=["x"]), "name: expected str"),
    "operands as text": (put("instructions", 3, "reads", value="w0"), "reads: expected tuple"),
    "operands as numbers": (put("instructions", 3, "reads", value=[1]), "reads: expected tuple"),
    "deps as number": (put("instructions", 3, "deps", value=1), "deps: expected tuple"),
    "deps as text": (put("instructions", 3, "deps", value=["1"]), "deps: expected tuple"),
    "time as text": (put("instructions", 3, "time_us", value="x"), "time_us: expected float"),
    "time not a number": (put("instructions", 3, "time_us", value=float("nan")), "time_us: expected float"),
    "bytes of nothing": (put("peak_nbytes", value={"device": None}), "found device: None"),
    "bytes per tier as text": (put("peak_nbytes", value={"device": "1"}), "found device: '1'"),
    "bytes per tier as a list": (put("peak_nbytes", value=[1]), "wrong type"),
    "bytes of no tier": (put("peak_nbytes", value={"tape": 1}), "found tape: 1"),
    "fewer than no bytes": (put("arena_nbytes", value={"host": -1}), "found host: -1"),
    "negative buffer": (put("buffers", 0, "nbytes", value=-64), "negative nbytes"),
    "two of a name": (lambda data: data["buffers"].append(data["buffers"][0]), "two buffers share a name"),
    "tier": (put("buffers", 0, "tier", value="tape"), "tier 'tape'"),
    "kind": (put("buffers", 0, "kind", value="heap"), "unknown kind 'heap'"),
    "role": (put("buffers", 0, "role", value="extra"), "unknown role 'extra'"),
    "offset of a home": (put("buffers", 0, "offset", value=0), "only placed ones have an offset"),
    "op": (put("instructions", 0, "op", value="wait"), "#0: unknown op 'wait'"),
    "queue": (put("instructions", 0, "queue", value="nic"), "#0: unknown queue 'nic'"),
    "phase": (put("instructions", 0, "phase", value="update"), "#0: unknown phase 'update'"),
    "work": (put("instructions", 0, "work", value="sort"), "#0: unknown work 'sort'"),
    "the format before": (
        put("format", value="mtcompile-schedule-1"),
        f"expected format '{FORMAT}', found 'mtcompile-schedule-1'",
    ),
    "operand": (put("instructions", 3, "reads", value=["nobody"]), "#3: names buffer 'nobody'"),
    "alloc of nothing": (put("instructions", 0, "writes", value=[]), "#0: alloc names one buffer"),
    "copy to nothing": (put("instructions", 1, "writes", value=[]), "#1: copy pairs reads with writes, found 1 and 0"),
    "later dep": (put("instructions", 3, "deps", value=[3]), "#3: a dependency must be an earlier instruction"),
    "negative dep": (put("instructions", 3, "deps", value=[-1]), "#3: a dependency must be an earlier instruction"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_refused(name: str) -> None:
    change, words = MALFORMED[name]
    data = copy.deepcopy(to_dict(training()))
    change(data)
    with pytest.raises(ScheduleFormatError) as caught:
        from_json(json.dumps(data))
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"mtcompile-schedule-1"', "{}"])
def test_what_is_no_schedule_at_all(text: str) -> None:
    with pytest.raises(ScheduleFormatError, match="expected"):
        from_json(text)


def test_overlap_is_of_bytes_in_one_arena() -> None:
    def slot(name: str, offset: int, nbytes: int, tier: Any = "device") -> Buffer:
        return Buffer(name, name, tier, "placed", nbytes, "activation", offset=offset)

    a = slot("a", 64, 128)
    assert a.overlaps(slot("b", 128, 64)) and slot("b", 128, 64).overlaps(a)
    assert a.overlaps(slot("b", 0, 512))
    assert not a.overlaps(slot("b", 192, 64)) and not a.overlaps(slot("b", 0, 64))
    assert not a.overlaps(slot("b", 64, 128, "host"))
    home = Buffer("h", "v", "device", "home", 64, "param")
    assert home.overlaps(home) and not home.overlaps(a)
    assert not home.overlaps(Buffer("i", "v", "device", "home", 64, "param"))


def test_text_is_one_line_per_instruction() -> None:
    lines = str(training()).splitlines()
    assert lines[0] == f"# {FORMAT}: 27 instructions, 15 buffers"
    assert lines[1] == "# device: peak 1.81 KiB of 1.81 KiB, arena 768 B, resident 0 B"
    listing = lines[-27:]
    assert listing[0] == "    0 for h2d     alloc w0  [256 B device+0, param]"
    assert listing[1] == "    1 for h2d     copy  p0 -> w0  [256 B]"
    assert listing[3] == "    3 for compute run   layer(w0, x) -> a0  waits #1"
    assert listing[14].endswith("layer_backward(v1, a0, t) -> g1, d  [workspace 64 B]  waits #11")
    assert "# disk: peak 1.00 KiB of 1.00 KiB" in str(from_disk())
    label = Instruction("run", "host", "forward", kernel="adam", label="block 3")
    assert str(Schedule((label,), {}, {}, {}, {})).endswith("    0 for host    run   adam() -> ()  ; block 3")


def test_units() -> None:
    assert [aligned(n) for n in (0, 1, 64, 65)] == [0, ALIGNMENT, 64, 128]
    assert [gib(n) for n in (0, 1023, 1024, 3 * 2**20, 2**30 * 5 // 2, -(2**30))] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "3.00 MiB",
        "2.50 GiB",
        "-1.00 GiB",
    ]


def test_phases_and_deps() -> None:
    schedule = training()
    assert len(schedule) == 27
    assert [i for i, _ in schedule.phase("forward")] == list(range(10))
    assert [i for i, _ in schedule.phase("backward")] == list(range(10, 27))
    none = with_deps(schedule, [()] * 27)
    assert not any(ins.deps for ins in none.instructions)
    assert with_deps(none, [ins.deps for ins in schedule.instructions]) == schedule
    with pytest.raises(ValueError):
        with_deps(schedule, [()])


def test_the_format_page_names_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedule.md").read_text(encoding="utf-8")
    data = to_dict(training())
    for key in (FORMAT, *data, *data["buffers"][0], *data["instructions"][0]):
        assert f"`{key}`" in page or f'"{key}"' in page, key
    for word in (
        *module.QUEUES,
        *module.TIERS,
        *module.PHASES,
        *module.get_args(module.Role),
        *filter(None, module.get_args(module.Work)),
    ):
        assert f"`{word}`" in page, word


def test_the_example_on_the_format_page_is_a_safe_schedule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedule.md").read_text(encoding="utf-8")
    example = page.split("```json\n")[1].split("```")[0]
    listing = page.split("```text\n")[1].split("```")[0]
    schedule = from_json(example)
    from mtcompile.runtime.verify import verify

    verify(schedule)
    assert str(schedule) == listing.strip("\n")


def test_no_torch_is_needed() -> None:
    """To read, derive, prove and simulate. The folder is loaded without the package, which may import what it likes."""
    code = f"""
import sys, types
package = types.ModuleType("mtcompile"); package.__path__ = []
runtime = types.ModuleType("mtcompile.runtime"); runtime.__path__ = [{str(Path(module.__file__).parent)!r}]
sys.modules.update({{"mtcompile": package, "mtcompile.runtime": runtime}})
from mtcompile.runtime import deps, schedule, sim, verify
made = deps.derive(schedule.from_json(sys.stdin.read()))
verify.verify(made)
print(len(sim.simulate(made).records), [m for m in ("torch", "numpy", "networkx") if m in sys.modules])
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=training().to_json(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["27", "[]"]
