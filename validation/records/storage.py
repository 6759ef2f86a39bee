"""The folder of one run: safe names, atomic writes, a lock that dies with its process, and checked unit files."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from validation.errors import UsageError, one_line
from validation.files import LARGEST_TEXT_FILE, read_limited
from validation.names import is_safe_name
from validation.records.jsonio import canonical, digest, pretty
from validation.records.reading import read_run_record, require_run_name
from validation.records.record import RunRecord, UnitRecord, UnitResult

RECORD = "record.json"
"""The file in a run's folder that holds its record."""


def new_run_id(now: datetime) -> str:
    """A run id that sorts by time and does not collide."""
    return f"{now.astimezone(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a reader sees the old file or the whole new one, whatever happens.

    Raises:
        UsageError: the folder cannot be written (full disk, no permission).
    """
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from error


class RunFolder:
    """`<out>/<id>/`. Nothing is read or written outside it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, out: Path, run_id: str) -> RunFolder:
        """Make the folder of a new run.

        Raises:
            UsageError: `out` cannot be written.
        """
        path = out / run_id
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise _unwritable(path, error) from error
        return cls(path)

    @classmethod
    def find(cls, out: Path, run_id: str) -> RunFolder:
        """The folder of an earlier run.

        Raises:
            UsageError: the id is not a safe name, or there is no such run.
        """
        if not is_safe_name(run_id):
            raise UsageError(f"{run_id!r} is not a run id; an id has only letters, digits, '.', '_' and '-'")
        if not (out / run_id).is_dir():
            raise UsageError(f"there is no run {run_id!r} in {str(out)!r}; --out names the folder of runs")
        return cls(out / run_id)

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.path.name

    def file(self, *parts: str) -> Path:
        """The path of a file in this folder.

        Raises:
            UsageError: a part is not a safe name, or a link leads out of the folder.
        """
        for part in parts:
            if not is_safe_name(part):
                raise UsageError(f"{part!r} is not a safe file name")
        path = self.path.joinpath(*parts)
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise UsageError(f"{str(path)!r} leads out of the run's folder")
        return path

    def write(self, data: bytes, *parts: str) -> None:
        """Write one file of the run atomically."""
        write_atomically(self.file(*parts), data)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold this run alone. The kernel gives the lock of a dead process back, so none is ever stale.

        Raises:
            UsageError: another process is working on this run.
        """
        path = self.file("lock")
        try:
            file = path.open("a+", encoding="ascii")
        except OSError as error:
            raise _unwritable(path, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                holder = one_line(file.read()) or "another process"
                raise UsageError(f"run {self.run_id!r} is in use by {holder}; wait for it or stop it") from error
            file.truncate(0)
            file.write(f"process {os.getpid()}")
            file.flush()
            for leftover in self.path.rglob(".*.tmp"):
                leftover.unlink(missing_ok=True)
            yield

    def log(self, text: str) -> None:
        """Append to `log.txt`, with the time."""
        path = self.file("log.txt")
        try:
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {text.rstrip()}\n")
        except OSError as error:
            raise _unwritable(path, error) from error

    def write_record(self, record: RunRecord) -> None:
        """Write `record.json`."""
        self.write(pretty(record.model_dump(mode="json")), RECORD)

    def read_record(self) -> RunRecord:
        """Read `record.json`.

        Raises:
            UsageError: there is none, it is not a record of this version, it contradicts itself, or the folder has
                another run's name.
        """
        record = read_run_record(self.file(RECORD))
        require_run_name(self.path, record.run.id)
        return record

    def write_unit(self, result: UnitResult) -> None:
        """Keep the result of one finished unit."""
        content = result.model_dump(mode="json")
        unit = UnitRecord(sha256=digest(content), content=result)
        self.write(canonical(unit.model_dump(mode="json")) + b"\n", "units", result.gate, f"{result.unit}.json")

    def read_unit(self, gate: str, unit: str, identity: str) -> UnitResult | None:
        """The kept result of a unit; None when there is none, or when it is torn, edited or of another context."""
        result = self._whole_unit(gate, unit)
        return result if result is not None and result.identity == identity else None

    def unit_is_whole(self, gate: str, unit: str) -> bool:
        """Whether the file of a unit is there, neither torn nor edited, and of this unit."""
        return self._whole_unit(gate, unit) is not None

    def _whole_unit(self, gate: str, unit: str) -> UnitResult | None:
        try:
            data = read_limited(self.file("units", gate, f"{unit}.json"), LARGEST_TEXT_FILE, "unit's result")
            document = json.loads(data)
            record = UnitRecord.model_validate(document)
        except (OSError, ValueError, RecursionError):
            return None
        whole = record.sha256 == digest(document["content"])
        return record.content if whole and (record.content.gate, record.content.unit) == (gate, unit) else None


def _unwritable(path: Path, error: OSError) -> UsageError:
    reason = error.strerror or one_line(error)
    return UsageError(f"cannot write {str(path)!r}: {reason}; free space or choose another --out, then use --resume")
