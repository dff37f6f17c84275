"""Elements that notebooks show: text as it prints, and timelines, which need no network."""

from __future__ import annotations

import html as escape
from typing import Any

from mtcompile.runtime.schedule import Schedule
from mtcompile.viz import page
from mtcompile.viz.data import picture

_HEIGHT = 640  # of a timeline, in pixels
_LARGEST = 8_000_000  # characters of a timeline: a notebook keeps each in its file


def text(shown: object) -> str:
    """Returns an element with what ``print`` would show."""
    return f'<pre style="white-space: pre-wrap">{escape.escape(str(shown))}</pre>'


def timeline(schedule: Schedule, **about: Any) -> str:
    """Returns a frame with the page of a schedule, which may run its own script and nothing else. ``about``: as for
    ``picture``. In place of a very large page it says how to write a file."""
    whole = page.html(picture(schedule, **about))
    if len(whole) > _LARGEST:
        return text(
            f"a timeline of {len(schedule):,} instructions is too large for a notebook: model.schedule.show() writes a file"
        )
    style = f"width: 100%; height: {_HEIGHT}px; border: 1px solid #8884"
    return f'<iframe title="timeline" sandbox="allow-scripts" style="{style}" srcdoc="{escape.escape(whole)}"></iframe>'
