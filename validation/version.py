"""The version of decodegate that is running."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The installed version, or `source` when the code runs from a source tree without being installed."""
    try:
        return metadata.version("decodegate")
    except metadata.PackageNotFoundError:
        return "source"
