"""Timelines: what is shown of a schedule is what its own proof and the simulator say of it; every door writes a page."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import mtcompile
from mtcompile.cli.app import app
from mtcompile.passes.plan import Certificate, Plan
from mtcompile.report.live_timeline import Viewable, viewable
from mtcompile.runtime.schedule import Instruction, Schedule, to_dict
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import Record, Trace, busy_us, time_of
from mtcompile.runtime.verify import peak
from mtcompile.viz import data, page
from tests.helpers.schedules import (
    inference,
    measured,
    of_layers,
    offload,
    recompute,
    small_schedules,
    streamed,
    training,
)
from tests.helpers.stacks import forecast

LARGEST = 3_000_000  # bytes of a page


def shown(text: str) -> dict[str, Any]:
    """The data in a page."""
    found = re.search(r'<script id="picture" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    made: dict[str, Any] = json.loads(found[1])
    return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def steps(model: nn.Module, count: int) -> None:
    for _ in range(count):
        model(torch.ones(8, 32)).backward()


@pytest.mark.parametrize("name", small_schedules())
def test_peaks_are_the_proven_ones_however_long_instructions_take(name: str) -> None:
    schedule = small_schedules()[name]
    made = data.picture(schedule, measured=measured(schedule))
    expected = {tier: nbytes for tier, nbytes in peak(schedule).items() if nbytes}
    assert [trace["source"] for trace in made["traces"]] == ["predicted", "measured"]
    for trace in made["traces"]:
        assert {tier: held["peak"] for tier, held in trace["memory"].items()} == expected
    assert {tier: each["peak"] for tier, each in made["tiers"].items()} == expected


def test_series_of_memory_begin_and_end_with_what_is_there_all_the_time() -> None:
    schedule = training()
    times = data.timed(schedule, simulate(schedule))
    held = data.memory(schedule, times, "device")
    now: dict[tuple[str, str], int] = {}
    for which, nbytes in zip(held.which, held.nbytes, strict=True):
        now[held.series[which]] = nbytes
    assert list(held.time_us) == sorted(held.time_us) and min(held.nbytes) == 0
    tangent = next(b.nbytes for b in schedule.buffers.values() if b.role == "tangent")
    left = sum(b.nbytes for b in schedule.buffers.values() if b.returned)
    assert {series: n for series, n in now.items() if n} == {("pooled", "tangent"): tangent, ("pooled", "output"): left}
    assert ("slot", "param") in now and ("workspace", "") in now


def test_busy_times_are_the_traces_own() -> None:
    schedule = offload()
    traces = simulate(schedule), measured(schedule)
    made = data.picture(schedule, measured=traces[1])
    assert [trace["busy_us"] for trace in made["traces"]] == [busy_us(trace) for trace in traces]
    assert made["traces"][1]["missing"] == []
    rows = made["instructions"]
    starts, ends = made["traces"][1]["start_us"], made["traces"][1]["end_us"]
    for index, (op, deps) in enumerate(zip(rows["op"], rows["deps"], strict=True)):
        assert op in ("copy", "run") or starts[index] == ends[index]
        assert all(ends[dep] <= starts[index] + 1e-9 for dep in deps)


def test_what_a_trace_does_not_have_is_said_to_be_missing() -> None:
    schedule = inference()
    everything = measured(schedule)
    made = data.picture(schedule, measured=Trace(everything.records[:-1], "measured"))
    assert made["traces"][1]["missing"] == [everything.records[-1].index]


def test_lives_name_what_makes_moves_uses_and_frees_a_value() -> None:
    lives = data.lives(recompute())  # run y, head, free y | run y again, backward, free it, copy g home, free g
    ops = [(i.op, i.kernel or i.writes[0]) for i in recompute().instructions]
    y = lives["y"]
    assert [ops[i] for i in y.made] == [("run", "layer"), ("run", "layer")] and not y.moved
    assert [ops[i] for i in y.used] == [("run", "head"), ("run", "layer_backward")]
    assert [ops[i] for i in y.freed] == [("free", "y"), ("free", "y.again")]
    assert [ops[i] for i in lives["g"].moved] == [("copy", "home.g")]
    assert lives["w"].made == () and len(lives["w"].used) == 3


def test_the_critical_path_is_what_the_end_waited_for() -> None:
    schedule = inference(2)  # copy p0, copy p1 | layer 0 (after copy 0), layer 1 (after both)
    slow_copies = {"copy": 10.0, "run": 1.0}
    timed = replace(schedule, instructions=tuple(replace(i, time_us=slow_copies.get(i.op, 0.0)) for i in schedule.instructions))
    trace = simulate(timed)
    path = data.critical_path(timed, data.timed(timed, trace), trace)
    working = [
        (timed.instructions[i].op, timed.instructions[i].writes[0], why) for i, why in path if timed.instructions[i].time_us
    ]
    assert working == [("copy", "w0", "queue"), ("copy", "w1", "queue"), ("run", "y1", "dep")]
    assert path[0][1] == "start"
    made = data.picture(timed)["traces"][0]
    assert made["limit"] == "h2d" and made["critical_us"] == {"h2d": 20.0, "compute": 1.0}


@pytest.mark.parametrize("name", small_schedules())
def test_predicted_critical_paths_have_no_gaps(name: str) -> None:
    made = data.picture(small_schedules()[name])["traces"][0]
    spent = sum(made["end_us"][i] - made["start_us"][i] for i in made["critical"])
    assert spent == pytest.approx(made["span_us"])
    assert [made["end_us"][i] for i in made["critical"]] == sorted(made["end_us"][i] for i in made["critical"])


def test_a_phase_waits_for_all_of_the_phase_before_it() -> None:
    schedule = training()
    late = tuple(
        replace(i, time_us=50.0 if i.op == "run" and i.phase == "forward" else i.time_us) for i in schedule.instructions
    )
    timed = replace(schedule, instructions=late)
    trace = simulate(timed)
    path = data.critical_path(timed, data.timed(timed, trace), trace)
    assert "phase" in [why for _, why in path]
    first = next(index for index, why in path if why == "phase")
    assert timed.instructions[first].phase == "backward" and timed.instructions[first - 1].phase == "forward"


def test_texts_and_colours_are_of_the_block_and_the_work_that_instructions_name() -> None:
    schedule = of_layers(training())
    made = data.picture(schedule)["instructions"]
    said = [text for op, text in zip(made["op"], made["text"], strict=True) if op in ("copy", "run")]
    expected = ["fetch layers.0 param", "layers.0 forward", "fetch layers.1 param", "layers.1 forward"]
    expected += ["fetch layers.1 param", "layers.1 backward (recompute)", "store layers.1 grad"]
    assert said == [*expected, "fetch layers.0 param", "layers.0 backward", "store layers.0 grad"]
    paints = [paint for op, paint in zip(made["op"], made["paint"], strict=True) if op == "run"]
    assert paints == ["forward", "forward", "recompute", "backward"]
    assert made["block"] == [i.block for i in schedule.instructions]
    unnamed = data.picture(replace(schedule, instructions=tuple(replace(i, block="") for i in schedule.instructions)))
    assert next(text for text in unnamed["instructions"]["text"] if "layer" in text) == "layer"  # the kernel


@pytest.mark.parametrize("work", ["update", "convert"])
@pytest.mark.parametrize("queue", ["host", "compute"])
def test_updates_and_casts_are_named_so(work: Any, queue: Any) -> None:
    if (work, queue) != ("convert", "compute"):  # casts run on the host
        run = Instruction("run", queue, "backward", kernel="k", label="update_layers_3", block="layers.3", work=work)
        made = data.picture(Schedule((run,), {}, {}, {}, {}))["instructions"]
        assert (made["text"], made["paint"]) == ([f"{work} layers.3"], ["update"])


def test_a_page_is_one_file_that_fetches_nothing_and_runs_nothing_of_its_data() -> None:
    schedule = inference()
    text = page.html(data.picture(schedule, title="</script><b>", plan="<script>alert(1)</script>"))
    assert "http" not in text and "src=" not in text and "import(" not in text
    assert text.count("</script>") == 2 and "<b>" not in text
    assert shown(text)["plan"] == "<script>alert(1)</script>"


def test_the_header_says_how_near_the_bound_a_plan_is() -> None:
    plan = Plan(step_time_us=100.0, update_us=10.0, certificate=Certificate(100.0, {"device memory": 7.0}))
    told = "within 10.0% of the bound: no plan within these budgets, cut as here, is faster than 0.1 ms"
    told += " (the bound falls by 0.007 ms with 1 GiB more device memory)"
    assert data.picture(inference(), plan=replace(plan, step_time_us=110.0, update_us=0.0))["bound"] == told
    assert data.picture(inference(), plan=plan)["bound"] == told and told in str(plan)
    for without in (None, replace(plan, certificate=None)):
        assert data.picture(inference(), plan=without)["bound"] == ""
    text = page.html(data.picture(inference(), plan=plan))
    assert shown(text)["bound"].endswith(told) and '<p id="bound" hidden></p>' in text and 'byId("bound")' in text


def test_the_header_has_the_step_time_of_the_plan() -> None:
    """A schedule has no update after the backward; the header says how long both take, and the page draws it behind."""
    (predicted,) = data.picture(training())["traces"]
    span = predicted["span_us"]
    assert data.picture(training())["step"] == f"{time_of(span)} predicted"
    assert data.picture(training(), plan=Plan(step_time_us=span))["step"] == f"{time_of(span)} predicted"
    longer = Plan(step_time_us=span, update_us=span)
    told = (
        f"{time_of(2 * span)} a step planned, {time_of(span)} of it for optimizer.step(); the rest: {time_of(span)} predicted"
    )
    assert data.picture(training(), plan=longer)["step"] == told
    assert shown(page.html(data.picture(training(), plan=longer)))["update_us"] == span
    assert data.picture(training())["update_us"] == 0.0
    both = data.picture(training(), measured=measured(training()), plan=longer)
    assert both["step"] == f"{told}, {time_of(both['traces'][1]['span_us'])} measured"
    text = page.html(data.picture(training(), plan=longer))
    assert shown(text)["step"] == told and "steps = P.step" in text


def test_the_headers_lines_wrap_and_are_not_cut() -> None:
    """At 1280 px the tools leave them about 500, less than a plan's title and facts take."""
    css = (Path(page.__file__).parent / "page.css").read_text()
    rules = dict(re.findall(r"^([^{}@\n]+) \{([^}]*)\}", css, re.M))
    for line in ("h1", "#facts, #bound", "header .name"):
        assert not re.search(r"nowrap|ellipsis|overflow: hidden|height", rules[line]), line


@pytest.mark.slow
def test_a_page_and_a_forecast_give_one_step_time() -> None:
    planned = forecast()
    assert planned.planned is not None and planned.update_us > 0
    made = data.picture(planned.planned.schedule, plan=planned.planned.plan)
    assert made["step"].startswith(f"{time_of(planned.step_time_us)} a step planned")
    assert f": {time_of(planned.step_time_us)} a step" in str(planned)


def test_packing_keeps_times_to_the_nanosecond() -> None:
    made = data.picture(training(), measured=measured(training()))
    for packed, trace in zip(page.packed(made)["traces"], made["traces"], strict=True):
        at = 0
        for after, took, start, end in zip(
            packed["after_ns"], packed["took_ns"], trace["start_us"], trace["end_us"], strict=True
        ):
            at += after
            assert abs(at / 1000 - start) < 1e-3 and abs((at + took) / 1000 - end) < 1e-3


@pytest.mark.slow
def test_large_schedules_make_small_pages() -> None:
    schedule = streamed(3340)
    assert len(schedule) > 20_000
    text = page.html(data.picture(schedule, measured=Trace(tuple(simulate(schedule).records), "measured")))
    assert len(text.encode()) < LARGEST


def test_a_viewable_schedule_is_the_schedule() -> None:
    net = Net()
    model = mtcompile.compile(net, memory="1MiB", device="cpu", optimizer=torch.optim.SGD(net.parameters()))
    assert model.schedule is None
    steps(model, 1)
    last = model._mt_model.session.last
    assert last is not None and isinstance(model.schedule, Viewable)
    assert model.schedule == last.schedule and last.schedule == model.schedule
    assert model.schedule != replace(last.schedule, run_ahead=True)
    assert str(model.schedule) == str(last.schedule) and to_dict(model.schedule) == to_dict(last.schedule)
    assert replace(model.schedule, run_ahead=True).names == model.schedule.names


def test_show_writes_names_the_plan_and_the_last_whole_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    net = Net()
    model = mtcompile.compile(net, memory="1MiB", device="cpu")
    steps(model, 2)
    with torch.no_grad():
        model(torch.ones(8, 32))  # of another program: its trace is no step of this one
    target = model.schedule.show(tmp_path / "made" / "a.html")
    assert target == tmp_path / "made" / "a.html" and opened == [target.as_uri()]
    made = shown(target.read_text())
    assert "layers.1.weight" in made["values"]["alias"] and "Net" in made["title"] and made["plan"] == str(model.plan)
    assert model.plan.certificate is not None and made["bound"].endswith(model.plan.certificate.of(model.plan.total_us))
    assert [trace["source"] for trace in made["traces"]] == ["predicted", "measured"] and made["traces"][1]["missing"] == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert model.schedule.show(open=False).parent == tmp_path and len(opened) == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_viz_writes_after_the_first_step_and_again_with_the_second_one_measured(tmp_path: Path, ahead: bool) -> None:
    target, net = tmp_path / "out.html", Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    more: dict[str, Any] = {"update": "backward", "run_ahead": True} if ahead else {"policy": "checkpoint-all"}
    model = mtcompile.compile(net, memory="1MiB", device="cpu", optimizer=opt, viz=target, **more)
    sources = []
    for _ in range(3):
        steps(model, 1)
        opt.step()
        opt.zero_grad()
        if ahead:
            model.synchronize()
        sources.append([trace["source"] for trace in shown(target.read_text())["traces"]])
        kept = target.stat().st_mtime_ns
    assert sources == [["predicted"], ["predicted", "measured"], ["predicted", "measured"]]
    steps(model, 1)
    assert target.stat().st_mtime_ns == kept
    if not ahead:
        model(torch.ones(4, 32)).backward()  # another program has a page of its own
        assert len(shown((tmp_path / "out-2.html").read_text())["traces"]) == 1


def test_pages_that_cannot_be_written_do_not_end_a_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = mtcompile.compile(Net(), memory="1MiB", device="cpu", viz=tmp_path / "file" / "out.html")
    with pytest.warns(UserWarning, match="expected to write the timeline"):
        steps(model, 1)
    with pytest.raises(TypeError, match="expected viz to be the path"):
        mtcompile.compile(Net(), device="cpu", viz=True)  # type: ignore[call-overload]


@pytest.mark.parametrize("value", ["1", "pages"])
def test_mt_viz_numbers_pages_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MT_VIZ", value)
    for _ in range(2):
        steps(mtcompile.compile(Net(), memory="1MiB", device="cpu"), 2)
    found = [path.name for path in (tmp_path if value == "1" else tmp_path / value).glob("*.html")]
    numbers = sorted(int(re.fullmatch(rf"mtcompile-{os.getpid()}-(\d+)\.html", name)[1]) for name in found)  # type: ignore[index]
    assert len(numbers) == 2 and numbers[1] == numbers[0] + 1
    monkeypatch.setenv("MT_VIZ", "0")
    assert mtcompile.compile(Net(), memory="1MiB", device="cpu")._mt_model.session.listeners == []


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["viz", *map(str, arguments)])


def test_the_command_shows_what_was_dumped(tmp_path: Path) -> None:
    source, target = tmp_path / "p.schedule.json", tmp_path / "out.html"
    source.write_text(training().to_json())
    made = command(source, "-o", target)
    assert made.exit_code == 0 and made.stdout.strip() == str(target)
    assert shown(target.read_text())["title"] == "p.schedule.json"
    source.write_text(training().to_json().replace('"role": "param"', '"role": "pram"'))
    broken = command(source, "-o", target)
    assert broken.exit_code == 2 and "unknown role" in broken.output
    source.write_text("{")
    assert command(source).exit_code == 2


@pytest.mark.slow
def test_the_command_shows_what_is_planned(tmp_path: Path) -> None:
    factory, target = tmp_path / "net.py", tmp_path / "out.html"
    factory.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(64, 64)\n\n"
        "    def forward(self, x):\n        return self.layer(x).square().mean()\n\n\n"
        "def make(batch, seq):\n    return Net(), {'x': torch.zeros(batch, 64)}\n"
    )
    made = command(f"{factory}:make", "--batch", 8, "--memory", "1MiB", "-o", target)
    assert made.exit_code == 0, made.output
    found = shown(target.read_text())
    assert "layer.weight" in found["values"]["alias"] and found["plan"].startswith("plan for")
    assert "of the bound: no plan within these budgets, cut as here, is faster than" in found["bound"]
    small = command(f"{factory}:make", "--batch", 8, "--memory", "1KiB", "-o", tmp_path / "none.html")
    assert small.exit_code == 3 and "--force" in small.output and not (tmp_path / "none.html").exists()
    assert command(f"{factory}:make", "--precision", "fp8").exit_code == 2


def test_names_are_found_for_gradients_and_new_versions() -> None:
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    model = mtcompile.compile(net, memory="1MiB", device="cpu", optimizer=opt, update="backward")
    steps(model, 1)
    last = model._mt_model.session.last
    assert last is not None
    names = viewable(last.schedule, last.step).names
    assert {"layers.0.weight", "updated layers.0.weight"} <= set(names.values())
    assert set(names) <= {buffer.value for buffer in last.schedule.buffers.values()} | {"tangents_1"}


def test_records_of_unknown_length_are_drawn_as_they_are() -> None:
    schedule = inference(1)
    index = next(i for i, each in enumerate(schedule.instructions) if each.op == "copy")
    made = data.picture(schedule, measured=Trace((Record(index, "h2d", 5.0, 7.5),), "measured"))
    assert (made["traces"][1]["start_us"][index], made["traces"][1]["end_us"][index]) == (5.0, 7.5)
    assert made["traces"][1]["span_us"] == 2.5
