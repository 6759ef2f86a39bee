"""A run's samples on disk, one line each, written as they come: what was answered is never asked again or lost.

The first line says which plan it belongs to. A line counts once it has its newline and its checksum is right; what a
kill left behind the last such line is cut off when the journal is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from evals.samples import Request, Sample

_VERSION = 1


class JournalError(ValueError):
    """A journal that cannot be gone on with; one line that says why."""


def plan_digest(requests: Sequence[Request], arms: Mapping[str, Any]) -> str:
    """What a journal belongs to: every question and every arm's public description."""
    plan = {"requests": [request.model_dump(mode="json") for request in requests], "arms": dict(arms)}
    return sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


class Journal:
    """An open journal: `samples` by key, in the order they were written. Held by one process alone.

    Raises:
        JournalError: it belongs to another plan, is damaged before its last line, is in use, or cannot be written.
    """

    def __init__(self, path: Path, plan: str) -> None:
        self.path = path
        self.samples: dict[str, Sample] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise JournalError(f"{path}: cannot be opened ({error.strerror})") from error
        try:
            self._lock()
            self._read(plan)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back."""
        os.close(self._file)

    def add(self, sample: Sample) -> None:
        """Keep a sample; on the disk when this returns.

        Raises:
            JournalError: it is there already, or the disk does not take it.
        """
        if sample.key in self.samples:
            raise JournalError(f"{self.path}: {sample.key} was answered already")
        self._append(sample.model_dump(mode="json"))
        self.samples[sample.key] = sample

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise JournalError(f"{self.path}: another process is writing it; wait for it or stop it") from error

    def _read(self, plan: str) -> None:
        data = _read_all(self._file)
        lines = data.split(b"\n")[:-1]
        good, entries = 0, []
        for number, line in enumerate(lines, 1):
            entry = _entry(line)
            if entry is None:
                if number < len(lines):
                    raise JournalError(f"{self.path}: line {number} of {len(lines)} is damaged; start a new run")
                break
            entries.append(entry)
            good += len(line) + 1
        if good < len(data):
            os.ftruncate(self._file, good)
        header = {"journal": _VERSION, "plan": plan}
        if not entries:
            self._append(header)
            return
        if entries[0] != header:
            raise JournalError(f"{self.path}: belongs to other questions or other arms; start a new run")
        for entry in entries[1:]:
            self._take(entry)

    def _take(self, entry: Any) -> None:
        try:
            sample = Sample.model_validate(entry)
        except ValidationError as error:
            raise JournalError(f"{self.path}: holds what is no sample ({error.errors()[0]['msg']})") from error
        if sample.key in self.samples:
            raise JournalError(f"{self.path}: holds {sample.key} twice")
        self.samples[sample.key] = sample

    def _append(self, content: Any) -> None:
        text = json.dumps(content, separators=(",", ":"))
        line = f'{{"sha256":"{sha256(text.encode()).hexdigest()}","content":{text}}}\n'.encode()
        before = os.fstat(self._file).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, before)
            raise JournalError(f"{self.path}: cannot be written ({error.strerror}); free space and resume") from error


def _entry(line: bytes) -> Any:
    """The content of one line, or None where it is not what was written."""
    try:
        entry = json.loads(line)
        text = json.dumps(entry["content"], separators=(",", ":"))
        return entry["content"] if sha256(text.encode()).hexdigest() == entry["sha256"] else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _read_all(file: int) -> bytes:
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(file), "rb") as stream:
        return stream.read()
