"""The history's database: one SQLite file, opened by any number of processes at once.

Every write is one immediate transaction under a write-ahead log, with a busy timeout: a writer waits for another and
loses nothing. Runs are only ever added. A file that is not a history of this version is refused and left as it is.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from validation.errors import UsageError, one_line
from validation.history.entry import Entry, GateEntry

APPLICATION_ID = 0x6467_6174
"""`dgat` in SQLite's header: the file is a history of decodegate."""

VERSION = 1
BUSY_SECONDS = 60.0
"""How long a writer waits for others; an addition takes milliseconds, so this is thousands of them."""

_SCHEMA = """
CREATE TABLE runs (
    id TEXT PRIMARY KEY, sha256 TEXT NOT NULL, series TEXT NOT NULL, created TEXT NOT NULL, profile TEXT NOT NULL,
    verdict TEXT NOT NULL, faults TEXT NOT NULL, about TEXT NOT NULL
);
CREATE INDEX runs_by_series ON runs (series, created, id);
CREATE TABLE gates (
    run TEXT NOT NULL REFERENCES runs, name TEXT NOT NULL, verdict TEXT NOT NULL, summary TEXT NOT NULL,
    PRIMARY KEY (run, name)
);
CREATE TABLE figures (
    run TEXT NOT NULL REFERENCES runs, gate TEXT NOT NULL, name TEXT NOT NULL, value REAL,
    PRIMARY KEY (run, gate, name)
);
CREATE TABLE baselines (series TEXT PRIMARY KEY, run TEXT NOT NULL REFERENCES runs, since TEXT NOT NULL);
"""


class History:
    """An open history. Use as a context manager.

    Raises:
        UsageError: the file cannot be opened, is no history, or is one of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._told():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            with self._told():
                self._require_ours()
        except BaseException:
            self._database.close()
            raise

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def add(self, entries: Sequence[Entry]) -> list[str]:
        """Keep runs, all or none; the ids that are new come back. A run that is there already, unchanged, is no error.

        Raises:
            UsageError: a run of that id with another content is there; nothing was added.
        """
        new = []
        with self._transaction():
            for entry in entries:
                known = self._database.execute("SELECT sha256 FROM runs WHERE id = ?", (entry.id,)).fetchone()
                if known is None:
                    self._insert(entry)
                    new.append(entry.id)
                elif known[0] != entry.sha256:
                    raise UsageError(
                        f"run {entry.id!r} is in {str(self.path)!r} with another content; history is never rewritten"
                    )
        return new

    def entries(self, profile: str | None = None) -> list[Entry]:
        """All runs, or those of a profile, oldest first."""
        with self._told():
            ids = self._database.execute(
                "SELECT id FROM runs WHERE ? IS NULL OR profile = ? ORDER BY created, id", (profile, profile)
            ).fetchall()
            return [self._entry(row[0]) for row in ids]

    def entry(self, run: str) -> Entry:
        """One run.

        Raises:
            UsageError: it is not in the history.
        """
        with self._told():
            if self._database.execute("SELECT 1 FROM runs WHERE id = ?", (run,)).fetchone() is None:
                raise UsageError(f"run {one_line(run)!r} is not in {str(self.path)!r}; decodegate history add keeps it")
            return self._entry(run)

    def set_baseline(self, run: str, since: str) -> None:
        """Make a run the baseline of its series. Nothing else ever moves one.

        Raises:
            UsageError: the run is not there, did not pass, or had faults put in.
        """
        entry = self.entry(run)
        if entry.verdict != "PASS" or entry.faults:
            what = "had faults put in on purpose" if entry.faults else f"ended as {entry.verdict}"
            raise UsageError(f"run {run!r} {what}; only a run that passed can be a baseline")
        with self._transaction():
            self._database.execute(
                "INSERT INTO baselines VALUES (?, ?, ?) ON CONFLICT (series) DO UPDATE SET run = ?2, since = ?3",
                (entry.series, run, since),
            )

    def baselines(self) -> dict[str, tuple[str, str]]:
        """Run and time of setting, by series."""
        with self._told():
            rows = self._database.execute("SELECT series, run, since FROM baselines").fetchall()
        return {series: (run, since) for series, run, since in rows}

    def _insert(self, entry: Entry) -> None:
        about = json.dumps(entry.about)
        row = (entry.id, entry.sha256, entry.series, entry.created, entry.profile, entry.verdict)
        self._database.execute(
            "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, ", ".join(entry.faults), about)
        )
        gates = [(entry.id, name, gate.verdict, gate.summary) for name, gate in entry.gates.items()]
        self._database.executemany("INSERT INTO gates VALUES (?, ?, ?, ?)", gates)
        figures = [(entry.id, gate, name, value) for (gate, name), value in entry.figures.items()]
        self._database.executemany("INSERT INTO figures VALUES (?, ?, ?, ?)", figures)

    def _entry(self, run: str) -> Entry:
        ask = self._database.execute
        row = ask("SELECT id, sha256, series, created, profile, verdict, faults, about FROM runs WHERE id = ?", (run,))
        texts = row.fetchone()
        name, sha256, series, created, profile, verdict, faults, about = texts
        gates = ask("SELECT name, verdict, summary FROM gates WHERE run = ? ORDER BY rowid", (run,)).fetchall()
        figures = ask("SELECT gate, name, value FROM figures WHERE run = ? ORDER BY rowid", (run,)).fetchall()
        values = [value for _, _, value in figures]
        names = [text for named in (*gates, *((gate, figure) for gate, figure, _ in figures)) for text in named]
        if not all(isinstance(text, str) for text in (*texts, *names)) or not all(
            value is None or isinstance(value, float) for value in values
        ):
            raise ValueError(f"run {one_line(run)!r} in it is damaged")
        return Entry(
            id=name,
            sha256=sha256,
            series=series,
            created=created,
            profile=profile,
            verdict=verdict,
            faults=tuple(filter(None, faults.split(", "))),
            about=_about(json.loads(about), run),
            gates={gate: GateEntry(verdict, summary) for gate, verdict, summary in gates},
            # SQLite keeps no NaN; what is not finite is kept as nothing.
            figures={(gate, figure): float("nan") if value is None else value for gate, figure, value in figures},
        )

    def _require_ours(self) -> None:
        ask = self._database.execute
        if ask("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            with self._transaction():
                # Another process may have made the tables between the question and the lock.
                if ask("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
                    if ask("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                        raise UsageError(
                            f"{str(self.path)!r} is a database, but no history of decodegate; choose another --db"
                        )
                    for statement in _SCHEMA.split(";"):
                        ask(statement)
                    ask(f"PRAGMA user_version = {VERSION}")
                    ask(f"PRAGMA application_id = {APPLICATION_ID}")
        found = ask("PRAGMA user_version").fetchone()[0]
        if found != VERSION:
            raise UsageError(f"{str(self.path)!r} is a history of version {found}, this decodegate reads {VERSION}")
        ask("PRAGMA journal_mode = WAL")
        ask("PRAGMA synchronous = FULL")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._told():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the database as one line."""
        try:
            yield
        except (sqlite3.Error, OSError, ValueError, OverflowError, RecursionError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"history {str(self.path)!r} cannot be used: {one_line(error)}; choose another --db"
            ) from error


def _about(context: Any, run: str) -> dict[str, dict[str, Any]]:
    """What a run was about, if it has the two parts that every entry has.

    Raises:
        ValueError: it has not.
    """
    whole = isinstance(context, dict) and all(isinstance(context.get(part), dict) for part in ("series", "run"))
    if not whole or not {"commit", "seed"} <= context["run"].keys():
        raise ValueError(f"run {one_line(run)!r} in it is damaged")
    found: dict[str, dict[str, Any]] = context
    return found
