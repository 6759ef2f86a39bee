"""Ed25519 keys in PEM files: made, read, and refused when they are of another kind."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from validation.errors import UsageError, one_line
from validation.files import read_limited

PASSPHRASE = "DECODEGATE_KEY_PASSPHRASE"
"""Environment variable with the passphrase of an encrypted private key; never an option, which others can list."""

_LARGEST_KEY = 2**16


def public_path(path: Path) -> Path:
    """Where the public key of the private one at `path` lies: beside it, `.pub.pem`."""
    return path.with_name(path.name.removesuffix(".pem") + ".pub.pem")


def make_keys(path: Path) -> Path:
    """Write a new private key to `path` (mode 0600) and its public key beside it, `.pub.pem`; the latter comes back.

    The private key is encrypted where `PASSPHRASE` is set.

    Raises:
        UsageError: a file of that name exists already, or cannot be written.
    """
    public = public_path(path)
    # Of both, before either is written: a new public key beside an older private one would verify nothing.
    for taken in (path, public):
        if taken.exists():
            raise _taken(taken)
    key = Ed25519PrivateKey.generate()
    secret = os.environ.get(PASSPHRASE)
    encryption: KeySerializationEncryption = BestAvailableEncryption(secret.encode()) if secret else NoEncryption()
    _write_new(public, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o644)
    _write_new(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption), 0o600)
    return public


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """The private key in a PEM file.

    Raises:
        UsageError: no such file, no key, another kind of key, or a passphrase that is missing or wrong.
    """
    secret = os.environ.get(PASSPHRASE)
    data = read_limited(path, _LARGEST_KEY, "PEM file")
    try:
        key = load_pem_private_key(data, secret.encode() if secret and b"ENCRYPTED" in data else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        hint = f"; {PASSPHRASE} holds the passphrase of an encrypted one" if b"ENCRYPTED" in data else ""
        raise UsageError(
            f"{str(path)!r} holds no private key in PEM form that can be read: {one_line(error)}{hint}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(
            f"{str(path)!r} holds a key of another kind; an ed25519 key is needed (decodegate keygen makes one)"
        )
    return key


def read_public_key(path: Path) -> Ed25519PublicKey:
    """The public key in a PEM file.

    Raises:
        UsageError: no such file, no public key, or another kind of key.
    """
    data = read_limited(path, _LARGEST_KEY, "PEM file")
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        if b"PRIVATE KEY" in data:
            raise UsageError(
                f"{str(path)!r} holds a private key; the public one is needed: --key {public_path(path)}"
            ) from error
        raise UsageError(f"{str(path)!r} holds no public key in PEM form; give the .pub.pem of the signer") from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{str(path)!r} holds a key of another kind; an ed25519 key is needed")
    return key


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or one_line(error)}") from error


def _taken(path: Path) -> UsageError:
    return UsageError(f"{str(path)!r} exists already; a key is never overwritten, choose another name")
