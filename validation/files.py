"""Reading of files that someone else may have put there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from validation.errors import UsageError, one_line

LARGEST_TEXT_FILE = 64 * 2**20
"""Bytes of a JSON file that decodegate wrote and reads again: records, units' results, matrices, searches, statements.

A premerge record has 70 KB; what is a thousand times as large was written by someone else.
"""


def read_limited(path: Path, largest: int, what: str, advice: str = "") -> bytes:
    """The bytes of a regular file of at most `largest` bytes; `advice` ends the message of a file that cannot be read.

    Raises:
        UsageError: no such file, no permission, a folder, pipe or device, or a larger file.
    """
    try:
        # A pipe without a writer would block for ever when opened in the usual way.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{str(path)!r} is not a regular file; give a {what}")
            data = file.read(largest + 1)
    except OSError as error:
        reason = "; ".join(filter(None, (error.strerror or one_line(error), advice)))
        raise UsageError(f"{str(path)!r} cannot be read: {reason}") from error
    if len(data) > largest:
        raise UsageError(f"{str(path)!r} has more than {largest:,} bytes, which no {what} has; it is not read")
    return data
