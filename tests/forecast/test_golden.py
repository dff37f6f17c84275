"""The printed plans of eight models change only on purpose.

python -m tests.forecast.test_golden        writes tests/forecast/golden/ anew; read the difference before committing it
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mtcompile
from tests.helpers.models import make, tower

pytestmark = pytest.mark.slow  # it compiles many models

FOLDER = Path(__file__).parent / "golden"
TORCH = "2.13"  # other versions trace other graphs
MODELS = {  # name -> device memory
    "llama": "256KiB",
    "gpt2": "192KiB",
    "cnn": "48KiB",
    "tied": "40KiB",
    "chain": "120KiB",
    "constants": "8KiB",
    "tower": "4MiB",
    "gpt-11m": "48MiB",
}


def printed(name: str) -> str:
    """Returns what ``mtcompile plan`` prints, and every decision."""
    model = name if name == "gpt-11m" else (lambda: tower(2, 256)) if name == "tower" else (lambda: make(name))
    forecast = mtcompile.plan(
        model, batch=4, seq=64, memory=MODELS[name], machine="rtx4090", policies=("megatrain",), force=True
    )
    assert forecast.planned is not None
    text = f"{forecast}\n\n{forecast.planned.plan}\n"
    return text.replace("<lambda>", name)


@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason=f"golden plans are of torch {TORCH}")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n not in ("llama", "tied", "tower"))) for n in MODELS]
)
def test_plans_change_only_on_purpose(name: str) -> None:
    expected = (FOLDER / f"{name}.txt").read_text()
    assert printed(name) == expected, "if this was meant: python -m tests.forecast.test_golden"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in MODELS:
        (FOLDER / f"{each}.txt").write_text(printed(each))
