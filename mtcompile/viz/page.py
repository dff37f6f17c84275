"""A picture as one HTML file that needs nothing else: style, script and data are inside it."""

from __future__ import annotations

import html as escape
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from mtcompile.reading import write_replacing
from mtcompile.runtime.schedule import Schedule
from mtcompile.runtime.trace import Trace
from mtcompile.viz.data import picture

_PART = re.compile(r"\{\{([a-z.]+)\}\}")


def html(shown: Mapping[str, Any]) -> str:
    """Returns the page of a picture (``viz.data.picture``)."""
    folder = files("mtcompile.viz")
    data = json.dumps(packed(shown), separators=(",", ":")).replace("<", "\\u003c")  # nothing in it can end the script
    title = escape.escape(shown["title"] or "schedule")

    def part(match: re.Match[str]) -> str:
        name = match[1]
        if name in ("picture", "title"):
            return data if name == "picture" else title
        return folder.joinpath(name).read_text(encoding="utf-8")

    return _PART.sub(part, folder.joinpath("page.html").read_text(encoding="utf-8"))


def write(
    schedule: Schedule,
    path: str | Path,
    *,
    measured: Trace | None = None,
    plan: object = None,
    title: str = "",
    names: Mapping[str, str] | None = None,
) -> Path:
    """Writes the page of a schedule, creates missing folders, and returns the page's path. Raises OSError."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = html(picture(schedule, measured=measured, plan=plan, title=title, names=names))
    write_replacing(target, text)
    return target


def packed(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the picture in fewer bytes: repeated strings as positions in a table, times in whole nanoseconds."""
    data = dict(shown)
    for table in ("instructions", "buffers"):
        data[table] = {name: _strings(column) for name, column in shown[table].items()}
    data["traces"] = [_trace(trace) for trace in shown["traces"]]
    return data


def _strings(column: list[Any]) -> Any:
    if not column or not isinstance(column[0], str):
        return column
    table = list(dict.fromkeys(column))
    if 2 * len(table) > len(column):
        return column
    place = {text: position for position, text in enumerate(table)}
    return {"table": table, "at": [place[text] for text in column]}


def _trace(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Packs times as differences, which are short: from one start to the next of the list, and from start to end."""
    data = {name: value for name, value in trace.items() if name not in ("start_us", "end_us")}
    starts, ends = ([round(us * 1000) for us in trace[name]] for name in ("start_us", "end_us"))
    data["after_ns"] = _differences(starts)
    data["took_ns"] = [end - start for start, end in zip(starts, ends, strict=True)]
    data["memory"] = {
        tier: {**{name: value for name, value in held.items() if name != "time_us"}, "after_ns": _differences(at)}
        for tier, held in trace["memory"].items()
        for at in [[round(us * 1000) for us in held["time_us"]]]
    }
    return data


def _differences(numbers: list[int]) -> list[int]:
    return [later - earlier for earlier, later in zip([0, *numbers], numbers)]
