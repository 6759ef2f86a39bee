"""The evidence of a sign-off: every file of every run folder, by name and SHA-256."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Set
from pathlib import Path

from validation.errors import UsageError, one_line
from validation.records.jsonio import digest
from validation.records.record import GateDoc
from validation.records.storage import RunFolder
from validation.verdict import Verdict

NOT_EVIDENCE = frozenset({"lock"})
"""Files at the top of a run folder that say nothing about the run: who works on it right now."""

_CHUNK = 2**20


def files(folder: Path, apart: Set[str] = NOT_EVIDENCE) -> dict[str, str]:
    """SHA-256 of every file below a folder by its path in it, with slashes, sorted; the paths `apart` are left out.

    Raises:
        UsageError: something in it is a link, a pipe or a device, has a name that no text can hold, or cannot be read.
    """
    found: dict[str, str] = {}
    try:
        for parent, folders, names in os.walk(folder, onerror=_raise):
            for name in (*folders, *names):
                path = Path(parent, name)
                kind = path.lstat().st_mode
                if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                    raise UsageError(f"{str(path)!r} is no regular file; evidence has only files and folders")
                inside = path.relative_to(folder).as_posix()
                if not inside.isprintable():
                    raise UsageError(f"{str(path)!r} has a name that cannot be printed; evidence has plain names")
                if stat.S_ISREG(kind) and inside not in apart:
                    found[inside] = sha256(path)
    except OSError as error:
        raise UsageError(f"{str(folder)!r} cannot be read: {error.strerror or one_line(error)}") from error
    return dict(sorted(found.items()))


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def root(subjects: Mapping[str, str]) -> str:
    """One digest over names and digests of all files: what a person can read out over the telephone."""
    return digest(dict(subjects))


def require_units(folder: RunFolder, gates: list[GateDoc], measured: Mapping[str, Mapping[str, float]]) -> None:
    """Ask that the file of every unit is there and whole: a record without its evidence is only a claim.

    A gate that broke has the files of those units that were `measured` before.

    Raises:
        UsageError: a unit's file is missing, torn or edited.
    """
    for gate in gates:
        broke = gate.verdict is Verdict.ERROR
        for unit in gate.units:
            wanted = not broke or unit in measured.get(gate.name, {})
            if wanted and not folder.unit_is_whole(gate.name, unit):
                raise UsageError(
                    f"run {folder.run_id!r}: unit {unit!r} of gate {gate.name!r} is missing, torn or edited; "
                    "give the whole run folder, or run again"
                )


def _raise(error: OSError) -> None:
    raise error
