"""Whether torch has what mtcompile uses of it in private, and what is said of a torch that the tests have not seen."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from mtcompile import torch_private
from mtcompile.errors import MtcompileError
from mtcompile.torch_private import contract

FOLDER = Path(torch_private.__file__).parent


def test_names_we_call_exist() -> None:
    """Every private name of torch that the files of ``torch_private`` import or read, and the settings they change."""
    names = contract.uses(FOLDER)
    assert {
        "torch._guards.detect_fake_mode",
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "torch._C._storage_Use_Count",
        "torch._C._autograd._profiler_enabled",
        "torch._dynamo.config.recompile_limit",
        "torch._functorch.config.backward_pass_autocast",
        "torch._functorch.aot_autograd.aot_export_joint_with_descriptors",
    } <= set(names)
    assert not {name: place for name, place in names.items() if not contract.exists(name)}


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1+cu130", "2.14.0a0+git1234"])
def test_tested_versions_are_taken_in_silence(version: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        contract.check(version, tmp_path)


@pytest.mark.parametrize("version", ["2.15.0", "3.0.0.dev20270101+cpu"])
def test_a_newer_torch_that_has_every_name_is_taken_with_a_warning(version: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(f"2.11 to 2.14, found {version}.")):
        contract.check(version)


def test_a_newer_torch_that_lacks_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(
        "import torch\n"
        "from torch._dynamo import config\n"
        "from torch._no_such import thing\n"
        "torch.Tensor._make_subclass, torch._C._no_such\n"
        "patched(config, recompile_limit=1, no_such=2)\n"
    )
    with pytest.raises(MtcompileError) as error:
        contract.check("2.15.0", tmp_path)
    text = str(error.value)
    assert "2.11 to 2.14, found 2.15.0, which lacks" in text and 'pip install "torch>=2.11,<2.15"' in text
    assert "torch._no_such.thing (ours.py, line 3)" in text and "torch._C._no_such (ours.py, line 4)" in text
    assert "torch._dynamo.config.no_such (ours.py, line 5)" in text
    assert "recompile_limit" not in text and "_make_subclass" not in text
