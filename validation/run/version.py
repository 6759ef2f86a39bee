"""The version of decodegate that is running, and the digest of the code that it is made of."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

PACKAGES = ("numerics", "decode_impl", "evals", "validation")
_DIGITS = 12


def version() -> str:
    """The installed version, or `source` when the code runs from a source tree without being installed."""
    try:
        return metadata.version("decodegate")
    except metadata.PackageNotFoundError:
        return "source"


@cache
def code_version() -> str:
    """The version with a digest of all Python files of the packages: an edit that nobody committed changes it too."""
    root = Path(__file__).resolve().parents[2]
    code = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            code.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return f"{version()} (code {code.hexdigest()[:_DIGITS]})"
