"""Signatures of checkpoints: what was signed verifies, and no changed byte, missing file or other key does."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from mtcompile import CheckpointError, checkpoint
from mtcompile.checkpoint.files import FileEntry, checksum, read_manifest, write_manifest
from mtcompile.checkpoint.signatures import SIGNATURE, private_key, public_key
from mtcompile.checkpoint.verifying import verified
from mtcompile.cli.app import app

ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
PEM, SSH, PKCS8 = serialization.Encoding.PEM, serialization.Encoding.OpenSSH, serialization.PrivateFormat.PKCS8


def keys(folder: Path, name: str, ssh: bool = False) -> tuple[Path, Path]:
    """Writes a new pair of keys: the files of the private and the public one."""
    key = ed25519.Ed25519PrivateKey.generate()
    form = serialization.PrivateFormat.OpenSSH if ssh else PKCS8
    private, public = folder / name, folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(PEM, form, serialization.NoEncryption()))
    kinds = serialization.PublicFormat
    encoded = (SSH, kinds.OpenSSH) if ssh else (PEM, kinds.SubjectPublicKeyInfo)
    public.write_bytes(key.public_key().public_bytes(*encoded))
    return private, public


def verify(folder: Path, *options: object) -> tuple[int, str]:
    output = CliRunner().invoke(app, ["checkpoint", "verify", str(folder), *map(str, options)])
    return output.exit_code, output.stdout + output.stderr


@pytest.mark.parametrize("ssh", [False, True])
def test_a_signed_checkpoint_verifies_with_its_key_alone(ssh: bool, tmp_path: Path) -> None:
    (private, public), (_, other) = keys(tmp_path, "key", ssh), keys(tmp_path, "other", ssh)
    saved = checkpoint.save(tmp_path / "run", nn.Linear(3, 2), step=1, signing_key=private)
    assert verify(saved, "--public-key", public)[0] == 0
    assert public_key(public) in verify(saved)[1]
    code, text = verify(saved, "--public-key", other)
    assert code == 2 and f"({public_key(other)}), found one by {public_key(public)}" in text.replace("\n", " ")
    plain = checkpoint.save(tmp_path / "plain", nn.Linear(3, 2), step=1)
    code, text = verify(plain, "--public-key", public)
    assert code == 2 and "found none" in text.replace("\n", " ") and verify(plain)[0] == 0


def test_a_forged_checkpoint_does_not_verify(tmp_path: Path) -> None:
    """The forger also writes the manifest anew, whose checksums anybody can compute."""
    private, _ = keys(tmp_path, "key")
    saved = checkpoint.save(tmp_path / "run", nn.Linear(3, 2), step=1, signing_key=private)
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    manifest = read_manifest(saved)

    def refused(words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            verified(saved)
        for path in saved.iterdir():
            path.unlink()
        for name, data in before.items():
            (saved / name).write_bytes(data)

    weights = saved / "model.safetensors"
    weights.write_bytes(before[weights.name][:-1] + b"\x7f")
    entry = FileEntry(manifest.files[weights.name].nbytes, checksum(weights))
    (saved / "manifest.json").unlink()
    write_manifest(saved, replace(manifest, files={**manifest.files, weights.name: entry}))
    refused("not the file that was signed")
    (saved / "manifest.json").unlink()
    write_manifest(saved, replace(manifest, step=2))
    refused("not the file that was signed")
    (saved / "more.json").write_text("{}")
    (saved / "manifest.json").unlink()
    write_manifest(saved, replace(manifest, files={**manifest.files, "more.json": FileEntry(2, checksum(saved / "more.json"))}))
    refused("found one of other files")
    whole = json.loads(before[SIGNATURE])
    for changed in (
        {**whole, "content": whole["content"].replace("a", "b")},
        {**whole, "public_key": json.loads(signature_of_another(tmp_path))["public_key"]},
        {**whole, "signature": whole["signature"][:-8] + "AAAAAA=="},
        {"content": "{}"},
        [],
    ):
        (saved / SIGNATURE).write_text(json.dumps(changed))
        refused("found one that is not valid")
    (saved / SIGNATURE).write_bytes(signature_of_another(tmp_path))
    refused("not the file that was signed")
    assert verified(saved)[1] == whole["public_key"]


def signature_of_another(folder: Path) -> bytes:
    torch.manual_seed(1)
    private, _ = keys(folder, "another")
    return (checkpoint.save(folder / "another run", nn.Linear(3, 2), step=1, signing_key=private) / SIGNATURE).read_bytes()


def test_old_signed_checkpoints_are_deleted_whole_and_each_kind_of_save_signs(tmp_path: Path) -> None:
    private, _ = keys(tmp_path, "key")
    model = nn.Linear(3, 2)
    with checkpoint.autosave(tmp_path / "run", model, every=1, keep=1, signing_key=private) as saver:
        for step in (1, 2):
            saver.after(step)
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == ["step-00000002"]
    assert (tmp_path / "run" / "step-00000002" / SIGNATURE).exists()
    saving = checkpoint.save_in_background(tmp_path / "run", model, step=3, signing_key=private)
    assert verified(saving.wait())[1] is not None
    with pytest.raises(ValueError, match="names of their own"):
        checkpoint.save(tmp_path / "run", model, step=4, files={SIGNATURE: b"{}"})


def test_keys_that_cannot_sign_are_refused(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "key")
    locked, key = tmp_path / "locked", ed25519.Ed25519PrivateKey.generate()
    locked.write_bytes(key.private_bytes(PEM, PKCS8, serialization.BestAvailableEncryption(b"word")))
    with pytest.raises(ValueError, match="without a password"):
        private_key(locked)
    ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
    curve = tmp_path / "curve"
    curve.write_bytes(ec.generate_private_key(ec.SECP256R1()).private_bytes(PEM, PKCS8, serialization.NoEncryption()))
    with pytest.raises(ValueError, match="found another kind"):
        private_key(curve)
    for path, read in ((public, private_key), (private, public_key)):
        with pytest.raises(ValueError, match="check that it is not the"):
            read(path)
    with pytest.raises(CheckpointError, match="No such file"):
        checkpoint.save(tmp_path / "run", nn.Linear(3, 2), step=1, signing_key=tmp_path / "none")
    assert not (tmp_path / "run").exists()


def test_a_signed_checkpoint_has_only_what_was_signed_and_none_newer_is_damaged(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "key")
    for step in (1, 2):
        saved = checkpoint.save(tmp_path / "run", nn.Linear(3, 2), step=step, signing_key=private)
    (saved / "adapter_config.json").write_text("{}")  # Transformers would add the adapter
    code, text = verify(tmp_path / "run", "--public-key", public)
    assert code == 2 and "adapter_config.json" in text
    (saved / "adapter_config.json").unlink()
    assert verify(tmp_path / "run", "--public-key", public)[0] == 0
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole + b" ")  # a load would go back to step 1
    assert verify(tmp_path / "run", "--public-key", public)[0] == 2
    (saved / "model.safetensors").write_bytes(whole)
    aside = saved.rename(tmp_path / "aside")
    saved.symlink_to(aside)
    code, text = verify(tmp_path / "run")
    assert code == 2 and "found a link" in text


def test_the_parts_of_other_ranks_are_verified_too(tmp_path: Path) -> None:
    private, public = keys(tmp_path, "key")
    saved = checkpoint.save(tmp_path / "run", nn.Linear(3, 2), step=1, signing_key=private)
    part = checkpoint.save(tmp_path / "run" / "rank-0001", nn.Linear(3, 2), step=1, signing_key=private)
    assert verify(tmp_path / "run", "--public-key", public)[0] == 0
    (part / SIGNATURE).unlink()
    code, text = verify(saved, "--public-key", public)
    assert code == 2 and "by the same key" in text.replace("\n", " ")


def test_names_from_a_checkpoint_are_neither_other_lines_nor_devices(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.__dict__["_mt_training"] = {"data": {"/dev/zero": "0" * 64}, "weights": {}, "options": {"a": "b\n  signed by me"}}
    saved = checkpoint.save(tmp_path / "run", model, step=1)
    code, text = verify(saved)
    assert code == 0 and "/dev/zero: missing" in text and "  a: b\\n  signed by me" in text
    model.__dict__["_mt_training"]["data"] = 5
    code, text = verify(checkpoint.save(tmp_path / "other", model, step=1))
    assert code == 2 and "expected its provenance" in text
    os.mkfifo(tmp_path / "pipe")
    code, text = verify(saved, "--public-key", tmp_path / "pipe")
    assert code == 2 and "to be a file" in text.replace("\n", " ")
