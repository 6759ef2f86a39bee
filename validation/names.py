"""Names that may become file names."""

from __future__ import annotations

import re

_SAFE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def is_safe_name(name: str) -> bool:
    """Whether `name` may become a file name: letters, digits, `.`, `_` and `-`, no leading dot, no `..`."""
    return _SAFE.fullmatch(name) is not None and ".." not in name
