"""Compiled kernels are loaded only from a folder that nobody else can write into."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtcompile.cached.private import why_not_private

_SETTLED = """
import os, stat, sys, warnings
warnings.simplefilter("ignore")
from mtcompile.cached.private import settle_inductor_cache
settle_inductor_cache()
folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
print(folder, oct(stat.S_IMODE(os.stat(folder).st_mode)))
"""


def settled(cache: str, given: Path | None = None, imports: str = "") -> tuple[str, str]:
    env = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"} | {"MT_CACHE": cache}
    if given is not None:
        env["TORCHINDUCTOR_CACHE_DIR"] = str(given)
    ran = subprocess.run([sys.executable, "-c", imports + _SETTLED], capture_output=True, text=True, env=env, check=True)
    folder, mode = ran.stdout.split()
    return folder, mode


def test_kernels_are_kept_below_the_cache_in_a_folder_of_the_user(tmp_path: Path) -> None:
    assert settled(str(tmp_path)) == (str(tmp_path / "inductor"), "0o700")
    assert settled(str(tmp_path), imports="import torch._dynamo;")[0] == str(tmp_path / "inductor")  # which sets the variable
    folder, mode = settled("0")
    assert "mtcompile-inductor-" in folder and mode == "0o700" and not Path(folder).exists()


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o755)
    assert settled("0", tmp_path / "own")[0] == str(tmp_path / "own")
    (tmp_path / "own" / "kernel.so").write_text("")
    (tmp_path / "own" / "kernel.so").chmod(0o666)
    assert "mtcompile-inductor-" in settled("0", tmp_path / "own")[0]
    assert why_not_private(tmp_path / "own") == f"others can write {tmp_path / 'own' / 'kernel.so'}"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert why_not_private(tmp_path / "open") == "others can write there"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can change owners")
def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    assert why_not_private(theirs) == "user 65534 owns it"
    (tmp_path / "link").symlink_to(theirs)
    assert why_not_private(tmp_path / "link") == "user 65534 owns it"
    (tmp_path / "own" / "ab").mkdir(parents=True)
    (tmp_path / "own" / "ab" / "kernel.so").write_text("")
    os.chown(tmp_path / "own" / "ab" / "kernel.so", 65534, 65534)
    assert why_not_private(tmp_path / "own") == f"user 65534 owns {tmp_path / 'own' / 'ab' / 'kernel.so'}"


_TRAINED = """
import sys, torch, mtcompile
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
loss = mtcompile.compile(model, memory="1GiB", kernels="inductor")(torch.randn(4, 16)).square().mean()
loss.backward()
print(loss.item().hex(), *[p.grad.double().sum().item().hex() for p in model.parameters()])
"""


@pytest.mark.long
def test_kernels_that_were_not_written_whole_are_compiled_again(tmp_path: Path) -> None:
    """Also the programs by which Inductor tries vector instructions, without which the bits would be others."""
    env = {**os.environ, "MT_CACHE": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}

    def trained() -> tuple[str, str]:
        ran = subprocess.run([sys.executable, "-c", _TRAINED], capture_output=True, text=True, env=env, check=True)
        return ran.stdout, ran.stderr

    expected, _ = trained()
    objects = sorted(tmp_path.rglob("*.so"))
    assert objects
    for path in objects:
        os.truncate(path, 100)
    found, said = trained()
    assert found == expected and "stays eager" not in said and "to keep compiled kernels again" in said
