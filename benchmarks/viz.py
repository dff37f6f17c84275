"""How quick a timeline is with 20,000 instructions, and how large its file is for a 7B model.

    python -m benchmarks.viz --json out.json

Needs Chromium. ``script_ms``: what the page itself takes for one interaction and the drawing that follows, by its own clock.
``frame_ms``: from sending the event to the browser until the second frame after it, by the clock here: what a reader waits,
the protocol and up to two frames included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.run import about
from mtcompile.runtime.sim import simulate
from mtcompile.runtime.trace import Trace
from mtcompile.viz.page import write
from tests.helpers.browser import Page, browser
from tests.helpers.schedules import streamed

INSTRUCTIONS, PER_LAYER = 20_000, 6
REPEATS = 30
X, Y = 520, 150  # on the lane of compute
# Each interaction as the page's own events: k counts up.
SCRIPTS = {
    "zoom": f'canvas.dispatchEvent(new WheelEvent("wheel", {{ deltaY: k % 9 < 5 ? -200 : 200, clientX: {X}, clientY: {Y} }}))',
    "pan": 'press(k % 2 ? "ArrowLeft" : "ArrowRight")',
    "hover": f'canvas.dispatchEvent(new PointerEvent("pointermove", {{ clientX: {X} + k, clientY: {Y} }}))',
    "click": 'press("n")',
    "search": '(box.value = `p${k}`, box.dispatchEvent(new Event("input")))',
}
TIMED = """(async () => {
  const canvas = document.getElementById("canvas"), box = document.getElementById("search"), times = [];
  const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  for (let k = 0; k < %d; k++) {
    const began = performance.now();
    %s;
    mt.draw();
    times.push(performance.now() - began);
    await new Promise((done) => requestAnimationFrame(done));
  }
  return times;
})()"""


def frames(page: Page, act: Callable[[int], None]) -> list[float]:
    times = []
    for k in range(REPEATS):
        began = time.perf_counter()
        act(k)
        times.append(1e3 * (time.perf_counter() - began))
    return times


def interactions(path: Path) -> list[dict[str, Any]]:
    with browser() as page:
        page.open(path)
        acts: dict[str, Callable[[int], None]] = {
            "zoom": lambda k: page.wheel(X, Y, -200 if k % 20 < 10 else 200),
            "pan": lambda k: page.drag(X, Y, X + (60 if k % 2 else -60), Y),
            "hover": lambda k: page.move(X + k, Y),
            "click": lambda k: page.click(X + 4 * k, Y),
        }
        rows = []
        for name, script in SCRIPTS.items():
            page.key("0")
            inside = page.value(TIMED % (REPEATS, script))
            row = {"interaction": name, "script_ms": statistics.median(inside), "script_ms_most": max(inside)}
            if name in acts:
                outside = frames(page, acts[name])
                row |= {"frame_ms": statistics.median(outside), "frame_ms_most": max(outside)}
            page.key("Escape")
            rows.append(row)
        page.key("/")
        outside = frames(page, lambda k: page.key(str(k % 10)) if k % 3 else page.key("Escape") or page.key("/"))
        rows[-1] |= {"frame_ms": statistics.median(outside), "frame_ms_most": max(outside)}
        if page.errors:
            raise RuntimeError(f"expected a quiet console, found {page.errors}")
        return rows


def size_of_7b(folder: Path) -> dict[str, Any]:
    import mtcompile
    from mtcompile.passes.analysis.names import value_names

    options: dict[str, Any] = {"precision": "bf16-master32", "update": "backward", "machine": "rtx3090"}
    planned = mtcompile.plan("qwen2.5-7b", batch=2, seq=4096, **options).planned
    assert planned is not None
    began = time.perf_counter()
    measured = Trace(simulate(planned.schedule).records, "measured")  # as many records as a step leaves, and more
    names = value_names(planned.step)
    path = write(planned.schedule, folder / "7b.html", measured=measured, plan=planned.plan, names=names)
    seconds = time.perf_counter() - began
    return {"shape": "qwen2.5-7b", "instructions": len(planned.schedule), "nbytes": path.stat().st_size, "write_s": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        schedule = streamed(INSTRUCTIONS // PER_LAYER + 10)
        began = time.perf_counter()
        path = write(schedule, Path(name, "large.html"))
        large = {"instructions": len(schedule), "nbytes": path.stat().st_size, "write_s": time.perf_counter() - began}
        large["interactions"] = interactions(path)
        for row in large["interactions"]:
            shown = f"{row['interaction']}: {row['script_ms']:.1f} ms in the page (most {row['script_ms_most']:.1f})"
            print(f"{shown}, {row['frame_ms']:.0f} ms until it is on the screen (most {row['frame_ms_most']:.0f})")
        print(f"{large['instructions']} instructions: {large['nbytes'] / 1e6:.2f} MB in {large['write_s']:.1f} s")
        seven = size_of_7b(Path(name))
        written = f"{seven['nbytes'] / 1e6:.2f} MB in {seven['write_s']:.1f} s"
        print(f"{seven['shape']}, {seven['instructions']} instructions: {written}")
    if args.json:
        args.json.write_text(json.dumps({**about(), "large": large, "7b": seven}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
