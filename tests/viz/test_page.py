"""The timeline in a browser: it draws, and every way to use it does what it says. Skipped where there is no Chromium."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mtcompile.passes.plan import Certificate, Plan
from mtcompile.viz.page import write
from tests.helpers.browser import Page, browser, chromium
from tests.helpers.schedules import measured, of_layers, streamed, training

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium here: install the package chromium")
LARGE = 3340  # layers of a schedule of 20,000 instructions


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    small, large = of_layers(training()), streamed(LARGE)
    return {
        "small": write(small, folder / "small.html", title="small", names={"p1": "layers.1.weight"}),
        "both": write(small, folder / "both.html", title="both", measured=measured(small)),
        "bounded": write(small, folder / "bounded.html", plan=Plan(step_time_us=110.0, certificate=Certificate(100.0))),
        "updated": write(small, folder / "updated.html", plan=Plan(step_time_us=100.0, update_us=50.0), title="updated " * 20),
        "large": write(large, folder / "large.html", title="large"),
    }


@pytest.fixture(autouse=True)
def quiet(page: Page) -> Iterator[None]:
    """Whatever a test does, the console stays empty and nothing is fetched."""
    page.errors.clear()
    page.requests.clear()
    yield
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


# What is on the canvas, as pixels to read.
PIXELS = """const canvas = document.createElement("canvas"), drawn = document.getElementById("canvas");
      canvas.width = drawn.width;
      canvas.height = drawn.height;
      const ctx = canvas.getContext("2d", { willReadFrequently: true });
      ctx.drawImage(drawn, 0, 0);"""


def colours(page: Page, where: str) -> Counter[str]:
    """How often each colour is on the canvas, over the rows that the condition ``where`` of a row holds for."""
    page.settle()
    script = f"""(() => {{
      {PIXELS}
      const seen = {{}};
      for (const row of mt.rows().filter((row) => {where})) {{
        const {{ data }} = ctx.getImageData(118, Math.ceil(row.y), canvas.width - 130, Math.floor(row.h) - 1);
        for (let i = 0; i < data.length; i += 4) {{
          const key = [data[i], data[i + 1], data[i + 2]].map((n) => n.toString(16).padStart(2, "0")).join("");
          seen[key] = (seen[key] ?? 0) + 1;
        }}
      }}
      return seen;
    }})()"""
    return Counter(page.value(script))


def middle(page: Page, index: int) -> tuple[float, float]:
    place = page.value(f"mt.place({index})")
    return place["x"], place["y"]


def first(op: str, kernel: str = "") -> int:
    rows = training().instructions
    return next(i for i, each in enumerate(rows) if each.op == op and kernel in each.kernel)


def test_lanes_and_memory_are_drawn(page: Page, files: dict[str, Path]) -> None:
    page.open(files["small"])
    lanes, memory = colours(page, "row.queue"), colours(page, "row.tier === 'device'")
    assert min(lanes["56b4e9"], lanes["e69f00"], lanes["0072b2"], lanes["d55e00"]) > 200  # forward, backward, params, gradients
    assert min(memory["009e73"], memory["0072b2"], memory["f0e442"]) > 200  # activations, parameters, workspace
    assert page.value("mt.rows().map((row) => row.queue ?? row.tier)") == ["compute", "h2d", "d2h", "device", "host"]


def test_the_memory_drawn_is_as_high_as_it_is(page: Page, files: dict[str, Path]) -> None:
    page.open(files["small"])
    schedule = training()
    full = next(i for i, each in enumerate(schedule.instructions) if each.kernel == "layer_backward" and each.workspace == 64)
    script = f"""(() => {{
      {PIXELS}
      const row = mt.rows().find((row) => row.tier === "device"), x = mt.place({full}).x;
      const colour = (y) => [...ctx.getImageData(x, y, 1, 1).data].slice(0, 3).join();
      let y = Math.ceil(row.y);
      while (colour(y) !== "240,228,66") y++; // workspace, which is uppermost
      return (row.y + row.h - y) / row.h;
    }})()"""
    top = 1.12 * schedule.peak_nbytes["device"]  # of the chart
    assert page.value(script) * top == pytest.approx(schedule.peak_nbytes["device"], rel=0.02)


def test_dark_and_light_follow_the_system_and_the_button(page: Page, files: dict[str, Path]) -> None:
    for dark in (False, True):
        page.open(files["small"], dark=dark)
        assert page.value("mt.theme") == ("dark" if dark else "light")
        ground = colours(page, "row.queue").most_common(1)[0][0]  # of the canvas
        header = page.value("getComputedStyle(document.querySelector('header')).backgroundColor")
        assert (int(ground[:2], 16) < 60, sum(map(int, re.findall(r"\d+", header))) < 180) == (dark, dark)
    page.value("document.getElementById('theme').click()")
    assert page.value("mt.theme") == "light"
    page.key("t")
    assert page.value("mt.theme") == "dark"


def test_zoom_and_pan_by_wheel_keys_and_drag(page: Page, files: dict[str, Path]) -> None:
    page.open(files["small"])
    whole = page.value("mt.view")
    x, y = middle(page, first("run"))
    under = page.value(f"mt.place({first('run')}).x")
    page.wheel(x, y, -400)
    near = page.value("mt.view")
    assert near[1] - near[0] < 0.5 * (whole[1] - whole[0])
    assert page.value(f"mt.place({first('run')}).x") == pytest.approx(under, abs=2)  # what is pointed at stays there
    page.drag(600, y, 500, y)
    moved = page.value("mt.view")
    assert moved[0] > near[0] and moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    page.key("ArrowLeft")
    assert page.value("mt.view")[0] < moved[0]
    page.key("+")
    assert page.value("mt.view[1] - mt.view[0]") < moved[1] - moved[0]
    page.key("-")
    page.key("0")
    assert page.value("mt.view") == whole
    page.drag(300, 72, 400, 72)  # in the overview, the view is all there is
    assert page.value("mt.view") == whole


def test_clicking_shows_an_instruction_and_its_dependencies(page: Page, files: dict[str, Path]) -> None:
    page.open(files["small"])
    run = first("run", "layer_backward")
    page.click(*middle(page, run))
    assert page.value("mt.selected") == {"kind": "instruction", "index": run}
    panel = page.value("document.getElementById('panel').innerText")
    assert "layers.1 backward" in panel and f"#{run}" in panel and "WAITS FOR" in panel.upper()
    waits = [f"#{dep}" for dep in training().instructions[run].deps]
    assert waits and all(wait in panel for wait in waits)
    assert page.value("document.getElementById('live').textContent").startswith("layers.1 backward (recompute), compute")
    page.key("Escape")
    assert page.value("mt.selected") is None


def test_a_value_shows_its_life(page: Page, files: dict[str, Path]) -> None:
    page.open(files["small"])
    page.click(*middle(page, first("run", "layer_backward")))
    button = "[...document.querySelectorAll('#panel button')].find((b) => b.textContent.includes('layers.1.weight'))"
    page.value(f"{button}.click()")
    assert page.value("mt.selected.kind") == "value"
    panel = page.value("document.getElementById('panel').innerText").upper()
    assert "MOVED BY (2)" in panel and "USED BY (2)" in panel and "FREED BY (2)" in panel and "MADE BY" not in panel
    black = colours(page, "row.tier === 'device'")["000000"]
    page.key("Escape")
    assert black > colours(page, "row.tier === 'device'")["000000"] + 300  # its bars


def test_memory_can_be_asked_what_is_in_it(page: Page, files: dict[str, Path]) -> None:
    page.open(files["small"])
    row = page.value("mt.rows().find((row) => row.tier === 'device')")
    top = page.value("document.getElementById('canvas').getBoundingClientRect().top")
    x, _ = middle(page, first("run", "layer_backward"))
    page.move(x, top + row["y"] + row["h"] - 5)
    assert page.value("document.getElementById('tip').innerText").startswith("device:")
    page.click(x, top + row["y"] + row["h"] - 5)
    assert page.value("mt.selected.kind") == "moment"
    assert "param, in slots of the arena" in page.value("document.getElementById('panel').innerText")


def test_hovering_names_what_is_there(page: Page, files: dict[str, Path]) -> None:
    page.open(files["small"])
    page.move(*middle(page, first("copy")))
    assert page.value("mt.hovered") == first("copy")
    assert page.value("document.getElementById('tip').innerText").startswith("fetch layers.0 param")
    page.move(600, 20)
    assert page.value("document.getElementById('tip').hidden")


def test_search_finds_layers_labels_and_the_users_names(page: Page, files: dict[str, Path]) -> None:
    page.open(files["small"])
    page.key("/")
    page.type("layers.1.w")
    rows = training().instructions
    expected = [i for i, each in enumerate(rows) if {"w1", "v1", "p1"} & {*each.reads, *each.writes}]
    assert page.value("mt.matches") == expected
    page.key("Enter")
    chosen = page.value("mt.selected")
    assert chosen["index"] in expected and page.value("document.getElementById('count').textContent").startswith("1 / ")
    page.key("Escape")
    assert page.value("mt.matches") == [] and page.value("document.activeElement.id") == "canvas"
    page.key("/")
    page.type("LAYER_BACKWARD")
    assert page.value("mt.matches") == [i for i, each in enumerate(rows) if each.kernel == "layer_backward"]


def test_keys_go_through_a_queue_and_explain_themselves(page: Page, files: dict[str, Path]) -> None:
    page.open(files["small"])
    kernels = [i for i, each in enumerate(training().instructions) if each.op == "run"]
    found = []
    for _ in kernels:
        page.key("n")
        found.append(page.value("mt.selected.index"))
    page.key("p")
    assert found == kernels and page.value("mt.selected.index") == kernels[-2]
    before = page.value("mt.view[1] - mt.view[0]")
    page.key("Enter")
    assert page.value("mt.view[1] - mt.view[0]") < before
    page.key("?")
    assert "search" in page.value("document.querySelector('dialog[open]').innerText")
    page.key("Escape")
    page.key("c")
    assert page.value("mt.critical") is False


def test_everything_is_there_as_tables(page: Page, files: dict[str, Path]) -> None:
    page.open(files["small"])
    page.key("a")
    assert page.value("document.querySelectorAll('dialog[open] table').length") == 3
    work = sum(each.op in ("copy", "run") for each in training().instructions)
    assert page.value("document.querySelectorAll('dialog[open] table:last-of-type tbody tr').length") == work
    summary = page.value("document.getElementById('summary').textContent")
    assert "device peak" in summary and "limited by" in summary
    page.key("Escape")
    page.open(files["large"])
    page.key("a")
    assert page.value("document.querySelectorAll('dialog[open] table:last-of-type tbody tr').length") == 500
    page.key("Escape")


def test_the_header_says_how_near_the_bound_a_plan_is(page: Page, files: dict[str, Path]) -> None:
    page.open(files["bounded"])
    told = "Planned: within 10.0% of the bound: no plan within these budgets, cut as here, is faster than 0.1 ms"
    assert page.value("document.getElementById('bound').innerText") == told
    assert told in page.value("document.getElementById('summary').textContent")
    page.open(files["small"])
    assert page.value("document.getElementById('bound').hidden") is True


def test_the_header_is_not_cut_at_1280_pixels(page: Page, files: dict[str, Path]) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
    page.open(files["updated"])
    lines = "[...document.querySelectorAll('header h1, #facts, #bound')]"
    assert page.value(f"{lines}.every((line) => line.scrollWidth <= line.clientWidth)") is True
    page.call("Emulation.clearDeviceMetricsOverride")


def test_updates_after_the_backward_are_drawn(page: Page, files: dict[str, Path]) -> None:
    def pale_pink(name: str) -> int:
        page.open(files[name])
        parts = ((bytes.fromhex(colour), count) for colour, count in colours(page, "row.queue").items())
        return sum(count for (red, green, blue), count in parts if red > 220 and red - green > 24 and 12 < blue - green < 24)

    assert pale_pink("updated") > 200 and pale_pink("small") == 0


def test_predicted_and_measured_are_shown_together_or_one_by_one(page: Page, files: dict[str, Path]) -> None:
    page.open(files["both"])
    assert page.value("mt.mode") == "both"
    both = page.value("mt.boxes")
    found = []
    for _ in range(3):
        page.key("m")
        found.append((page.value("mt.mode"), page.value("mt.boxes") < both))
    assert found == [("predicted", True), ("measured", True), ("both", False)]
    titles = page.value("[...document.querySelectorAll('#modes button')].map((b) => b.textContent)")
    assert titles == ["Predicted", "Measured", "Both"]
    page.open(files["small"])
    assert page.value("document.querySelectorAll('#modes button').length") == 0


def test_twenty_thousand_instructions_are_merged_and_stay_quick(page: Page, files: dict[str, Path]) -> None:
    page.open(files["large"])
    assert page.value("mt.count") > 20_000 and page.value("mt.boxes") < 4_000
    x, y = middle(page, 10_000)
    page.key("/")
    acts: dict[str, Callable[[], None]] = {"search": lambda: page.key("7"), "hover": lambda: page.move(x + 40, y)}
    acts |= {"zoom": lambda: page.wheel(x, y, -300), "pan": lambda: page.drag(x, y, x - 60, y)}
    for name, act in acts.items():
        began = time.perf_counter()
        act()
        took = 1e3 * (time.perf_counter() - began)
        print(f"{name}: {took:.0f} ms from the event to the next frame but one, {page.value('mt.drawMs'):.1f} ms of it drawing")
    schedule = streamed(LARGE)
    values = [{schedule.buffers[name].value for name in (*i.reads, *i.writes)} for i in schedule.instructions]
    assert page.value("mt.matches") == [i for i, there in enumerate(values) if "7" in str(i) or any("7" in v for v in there)]
    page.key("/")
    page.key("Enter")
    assert page.value("mt.place(mt.selected.index).width") > 3  # it is in view, and can be seen
    lanes = colours(page, "row.queue")
    assert lanes["56b4e9"] + lanes["0072b2"] > 100
