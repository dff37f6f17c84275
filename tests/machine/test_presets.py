"""Machines come from presets and from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtcompile.machine.presets import PRESETS, named


def test_machines_come_from_presets_and_files(tmp_path: Path) -> None:
    assert named("gh200") is PRESETS["gh200"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"h2d_gbps": 12, "device_nbytes": 8 * 10**9}))
    mine = named(str(path))
    assert (mine.name, mine.h2d_gbps, mine.device_nbytes) == ("mine", 12, 8 * 10**9)
    wrongs = ['{"speed": 1}', '{"h2d_gbps": 0}', '{"h2d_gbps": "fast"}', '{"device_nbytes": 1.5}', '{"fuses": 1}', "[]", "{"]
    for wrong in wrongs:
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"machine file .*mine\.json"):
            named(str(path))
    with pytest.raises(ValueError, match="expected machine to be one of h200-sxm"):
        named("abacus")
