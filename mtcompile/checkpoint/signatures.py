"""Signatures of checkpoints: an Ed25519 key vouches for the SHA-256 of every file."""

from __future__ import annotations

import base64
import functools
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mtcompile.checkpoint.files import regular, sha256, write_bytes
from mtcompile.errors import CheckpointError

SIGNATURE = "signature.json"
_FORMAT = "mtcompile-signature-1"
_MOST_NBYTES = 1 << 20
_AGAIN = "copy the checkpoint again, or do not trust it"


def private_key(path: str | os.PathLike[str]) -> Any:
    """Returns the key in a file, as ``openssl genpkey -algorithm ed25519`` or ``ssh-keygen -t ed25519`` writes it, without a
    password. Raises CheckpointError where there is no such file, OSError, and ValueError, also without the package
    ``cryptography``."""
    serialization, ed25519 = _cryptography()
    readers = (serialization.load_pem_private_key, serialization.load_ssh_private_key)
    without_password = [functools.partial(read, password=None) for read in readers]
    return _key(Path(path), without_password, ed25519.Ed25519PrivateKey, "private")


def public_key(path: str | os.PathLike[str]) -> str:
    """Returns the public key in a file of ``openssl pkey -pubout`` or of ``ssh-keygen``, as ``signer`` does. Raises as
    ``private_key`` does."""
    serialization, ed25519 = _cryptography()
    readers = (serialization.load_pem_public_key, serialization.load_ssh_public_key)
    return _as_text(_key(Path(path), readers, ed25519.Ed25519PublicKey, "public"))


def sign(folder: Path, names: Collection[str], key: Any) -> None:
    """Writes the signature of these files of a checkpoint into it."""
    text = json.dumps({"format": _FORMAT, "files": {name: sha256(folder / name) for name in sorted(names)}})
    signature = base64.b64encode(key.sign(text.encode())).decode()
    whole = {"content": text, "public_key": _as_text(key.public_key()), "signature": signature}
    write_bytes(folder / SIGNATURE, json.dumps(whole, indent=1).encode())


def signer(folder: Path, names: Collection[str]) -> str | None:
    """Returns the public key, in base64, that has signed a checkpoint of these files; None if it is not signed. Reads every
    byte. Raises CheckpointError if the signature is not one of what is there, and ValueError without the package
    ``cryptography``."""
    path = folder / SIGNATURE
    if not os.path.lexists(path):
        return None
    _, ed25519 = _cryptography()
    try:
        whole = json.loads(regular(path, _MOST_NBYTES).read_bytes())
        text, public = str(whole["content"]), str(whole["public_key"])
        key = ed25519.Ed25519PublicKey.from_public_bytes(base64.b64decode(public, validate=True))
        key.verify(base64.b64decode(whole["signature"], validate=True), text.encode())
        content = json.loads(text)
        names_other_files = content["format"] != _FORMAT or content["files"].keys() != set(names)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"expected to read {path}, found: {error.strerror}") from None
    except Exception:  # what a hostile file makes of it, and cryptography's InvalidSignature
        raise CheckpointError(f"expected a signature in {path}, found one that is not valid: {_AGAIN}") from None
    if names_other_files:
        raise CheckpointError(f"expected a signature of this checkpoint in {path}, found one of other files: {_AGAIN}")
    for name, expected in content["files"].items():
        if sha256(folder / name) != expected:
            raise CheckpointError(f"{folder / name} is not the file that was signed: {_AGAIN}")
    return public


def _key(path: Path, readers: Any, kind: type, name: str) -> Any:
    data = regular(path, _MOST_NBYTES, linked=True).read_bytes()
    for read in readers:
        try:
            key = read(data)
        except TypeError:
            raise ValueError(
                f"expected a key without a password in {path}, found one with a password: make one with openssl genpkey "
                "-algorithm ed25519"
            ) from None
        except Exception:  # another format; cryptography raises several kinds
            continue
        if isinstance(key, kind):
            return key
        raise ValueError(
            f"expected an Ed25519 key in {path}, found another kind: make one with openssl genpkey -algorithm ed25519"
        )
    other = "public" if name == "private" else "private"
    raise ValueError(
        f"expected a {name} Ed25519 key in {path} (PEM or OpenSSH), found none: check that it is not the {other} one"
    )


def _as_text(key: Any) -> str:
    return base64.b64encode(key.public_bytes_raw()).decode()


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ValueError('a signature needs the package cryptography: pip install "mtcompile[sign]"') from None
    return serialization, ed25519
