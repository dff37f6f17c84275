"""The trace-event format that chrome://tracing and Perfetto read, as a check."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

REQUIRED = {  # phase of an event -> its keys, by the document that describes the format
    "M": {"ph", "name", "pid", "args"},
    "X": {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"},
    "s": {"ph", "name", "cat", "id", "ts", "pid", "tid"},
    "f": {"ph", "name", "cat", "id", "ts", "pid", "tid", "bp"},
    "C": {"ph", "name", "ts", "pid", "args"},
}


def is_time(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value) and value >= 0


def check_format(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The events, each of which must be one that the format knows."""
    events: list[dict[str, Any]] = data["traceEvents"]
    assert data["displayTimeUnit"] in ("ms", "ns")
    named = {e["tid"] for e in events if e["name"] == "thread_name"}
    sorts = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    (process,) = [e["pid"] for e in events if e["name"] == "process_name"]
    assert named == sorts.keys() and len(set(sorts.values())) == len(sorts)
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys() and event["pid"] == process and isinstance(event["name"], str)
        if event["ph"] != "M":
            assert is_time(event["ts"])
        if "tid" in event:
            assert event["tid"] in named
        if event["ph"] == "X":
            assert is_time(event["dur"])
        if event["ph"] == "C":
            assert event["args"] and all(type(v) is int and v >= 0 for v in event["args"].values())
    kinds = [event["ph"] == "M" for event in events]
    assert kinds == sorted(kinds, reverse=True), "metadata comes first"
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert json.loads(json.dumps(data)) == data
    return events
