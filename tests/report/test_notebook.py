"""What a notebook shows: the text of each object, and timelines in a frame that needs no network."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import mtcompile
from mtcompile.report.live_timeline import Viewable
from mtcompile.viz import notebook
from tests.helpers.stacks import forecast, stack


class Elements(HTMLParser):
    """Collects (tag, attributes) and the text of a piece of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text: str) -> None:
        self.text += text


def frame(html: str) -> str:
    """Returns the page in the only frame."""
    ((_, attributes),) = [each for each in Elements(html).tags if each[0] == "iframe"]
    assert attributes["sandbox"] == "allow-scripts" and "src" not in attributes
    page = attributes["srcdoc"]
    assert page is not None and page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert not re.search(r"https?://|src=|import\(|<link (?!rel=\"icon\" href=\"data:)", page)  # nothing is fetched
    return page


@pytest.mark.slow
def test_a_forecast_is_its_text_and_its_timeline() -> None:
    planned = forecast()
    html = planned._repr_html_()
    assert Elements(html).text == str(planned) and planned.model in unescape(frame(html))
    refused = mtcompile.plan(lambda: stack(), memory="2KiB", machine="rtx4090")
    assert Elements(refused._repr_html_()).text == str(refused) and "iframe" not in refused._repr_html_()


def test_a_model_shows_its_plan_schedule_explanation_and_report(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model = mtcompile.compile(plain, memory="100KiB")
    for _ in range(2):
        model(torch.ones(4, 8)).mean().backward()
    assert Elements(model.plan._repr_html_()).text == str(model.plan)
    schedule = model.schedule
    assert isinstance(schedule, Viewable)
    page = frame(schedule._repr_html_())
    assert "float32 (4, 8)" in page and '"source":"measured"' in page and "0.weight" in page
    explained = model.explain("0.weight")
    assert Elements(explained._repr_html_()).text == str(explained)
    report = model.memory_report()
    assert report == dict(report) and report["programs"]
    shown = Elements(report._repr_html_())
    assert [tag for tag, _ in shown.tags].count("table") == 2
    assert all(name in shown.text for name in ("peak_device_bytes", "(last)", "step, predicted"))
    monkeypatch.setattr(notebook, "_LARGEST", 1000)
    assert "model.schedule.show()" in schedule._repr_html_() and "iframe" not in schedule._repr_html_()


def test_text_cannot_end_its_element() -> None:
    assert notebook.text("</pre><script>x</script>").count("<") == 2
