"""The history loses nothing, finds steps and few others, and its baseline moves only when told."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sqlite3
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
from toy_commandline import CommandLine

from validation.errors import UsageError
from validation.history.entry import entry_of
from validation.history.store import History
from validation.records.storage import RunFolder

RUNS = 40


@pytest.fixture
def first(decodegate: CommandLine) -> RunFolder:
    """A finished toy run."""
    assert decodegate.run() == 0
    return decodegate.newest()


def copies(
    first: RunFolder, count: int, change: Callable[[dict, int], None] = lambda document, i: None
) -> list[RunFolder]:
    """Runs like the first one, a day apart, each changed."""
    found = []
    document = json.loads((first.path / "record.json").read_bytes())
    for index in range(count):
        name = f"20260101-000000-{index:06x}"
        folder = first.path.parent / name
        folder.mkdir(exist_ok=True)
        own = json.loads(json.dumps(document))
        own["run"].update(id=name, created=f"2026-01-01T00:{index:02d}:00Z")
        change(own, index)
        (folder / "record.json").write_text(json.dumps(own))
        found.append(RunFolder(folder))
    return found


def ratio(level: Callable[[int], float]) -> Callable[[dict, int], None]:
    """Sets the error gate's worst ratio."""

    def change(document: dict, index: int) -> None:
        document["stable"]["gates"][0]["metrics"]["worst"] = level(index)

    return change


def test_adding_twice_changes_nothing_and_a_changed_run_is_refused(decodegate: CommandLine, first: RunFolder) -> None:
    out = ("--out", str(decodegate.runs))
    assert decodegate("history", "add", first.run_id, *out) == 0
    assert "1 added, 0 there already" in decodegate.out
    assert decodegate("history", "add", str(first.path), *out) == 0
    assert "0 added, 1 there already" in decodegate.out
    path = first.path / "record.json"
    path.write_bytes(path.read_bytes().replace(b'"seed": 0', b'"seed": 1'))
    assert decodegate("history", "add", first.run_id, *out) == 2
    assert "history is never rewritten" in decodegate.err


def _add_each(start: Barrier, database: Path, folders: list[RunFolder]) -> None:
    entries = [entry_of(folder) for folder in folders]
    start.wait(60)
    for entry in entries:
        with History(database) as history:
            history.add([entry])


def test_concurrent_writers_lose_nothing(first: RunFolder, tmp_path: Path) -> None:
    folders = copies(first, 24)
    database = tmp_path / "history.sqlite3"
    # Every run is offered by two of the processes, and all of them make the database together.
    halves = [folders[0:12], folders[6:18], folders[12:24], [*folders[18:24], *folders[0:6]]]
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(len(halves))
    processes = [fork.Process(target=_add_each, args=(start, database, half)) for half in halves]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * len(halves)
    with History(database) as history:
        kept = history.entries()
    assert [entry.id for entry in kept] == [folder.run_id for folder in folders]
    assert all(entry == entry_of(folder) for entry, folder in zip(kept, folders, strict=True))


def test_an_import_keeps_what_it_can_read_and_names_the_rest(decodegate: CommandLine, first: RunFolder) -> None:
    good, bad, worse = copies(first, 3)
    (bad.path / "record.json").write_text("{")
    (worse.path / "record.json").write_text("")
    out = ("--out", str(decodegate.runs))
    assert decodegate("history", "add", good.run_id, bad.run_id, worse.run_id, first.run_id, *out) == 2
    assert decodegate.err.count("\n") == 1
    assert bad.run_id in decodegate.err
    assert "and 1 more" in decodegate.err
    with History(decodegate.runs / "history.sqlite3") as history:
        assert {entry.id for entry in history.entries()} == {good.run_id, first.run_id}


def test_an_unfinished_run_is_not_kept(decodegate: CommandLine, first: RunFolder) -> None:
    def unfinished(document: dict, index: int) -> None:
        document["status"] = "running"
        document["stable"]["verdict"] = None

    (folder,) = copies(first, 1, unfinished)
    assert decodegate("history", "add", folder.run_id, "--out", str(decodegate.runs)) == 2
    assert "is not finished" in decodegate.err


@pytest.mark.parametrize("kind", ["text", "another database", "newer", "folder"])
def test_a_file_that_is_no_history_is_refused_and_left_alone(
    decodegate: CommandLine, first: RunFolder, kind: str
) -> None:
    path = decodegate.folder / "other.sqlite3"
    if kind == "text":
        path.write_text("not a database, but long enough to look like one " * 40)
    elif kind == "folder":
        path.mkdir()
    else:
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE theirs (x)")
            if kind == "newer":
                database.execute("PRAGMA application_id = 0x64676174")
                database.execute("PRAGMA user_version = 99")
        database.close()
    before = path.read_bytes() if path.is_file() else b""
    assert decodegate("history", "add", first.run_id, "--db", str(path), "--out", str(decodegate.runs)) == 2
    assert decodegate.err.count("\n") == 1
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_history_that_is_not_there_is_never_a_check_that_passed(decodegate: CommandLine, first: RunFolder) -> None:
    lost = decodegate.folder / "lost.sqlite3"
    for command in (["trend", "--check"], ["list"], ["baseline", "show"], ["compare", first.run_id]):
        assert decodegate("history", *command, "--db", str(lost), "--out", str(decodegate.runs)) == 2
        assert f"there is no history '{lost}'" in decodegate.err
        assert not lost.exists()
    assert decodegate("history", "add", first.run_id, "--db", str(lost), "--out", str(decodegate.runs)) == 0
    assert decodegate("history", "trend", "--check", "--db", str(lost)) == 0
    assert decodegate("history", "trend", "--check", "--db", str(lost), "--profile", "another") == 2
    assert "no run to check" in decodegate.err
    for asked in (("--metric", "wurst"), ("--gate", "errors")):
        assert decodegate("history", "trend", "--check", "--db", str(lost), *asked) == 2
        assert f"no run has a figure for {asked[0]} '{asked[1]}'" in decodegate.err


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE runs SET about = '{}'",
        "UPDATE runs SET about = '[1'",
        "UPDATE runs SET about = printf('%.20000c', '[')",
        "UPDATE runs SET created = x'00'",
        "UPDATE figures SET value = 'many'",
        "UPDATE gates SET summary = 7, verdict = x'ff'",
        "DROP TABLE figures",
    ],
)
def test_a_damaged_history_is_one_line_and_stays_as_it_is(
    decodegate: CommandLine, first: RunFolder, damage: str
) -> None:
    out = ("--out", str(decodegate.runs))
    assert decodegate("history", "add", first.run_id, *out) == 0
    with sqlite3.connect(decodegate.runs / "history.sqlite3") as database:
        database.execute(damage)
    database.close()
    for command in ("list", "trend"):
        assert decodegate("history", command, *out) == 2
        assert decodegate.err.count("\n") == 1
        assert "cannot be used" in decodegate.err


def test_the_baseline_moves_only_when_told(decodegate: CommandLine, first: RunFolder) -> None:
    folders = copies(first, 3)
    out = ("--out", str(decodegate.runs))
    assert decodegate("history", "add", *(folder.run_id for folder in folders[:2]), *out) == 0
    assert decodegate("history", "baseline", "set", folders[0].run_id, *out) == 0
    assert decodegate("history", "add", folders[2].run_id, *out) == 0
    assert decodegate("history", "trend", *out) == 0
    assert f"baseline {folders[0].run_id}" in decodegate.out
    assert decodegate("history", "baseline", "set", folders[2].run_id, *out) == 0
    assert decodegate("history", "baseline", "show", *out) == 0
    assert folders[2].run_id in decodegate.out
    assert folders[0].run_id not in decodegate.out


def test_only_a_run_that_passed_without_faults_can_be_a_baseline(decodegate: CommandLine, first: RunFolder) -> None:
    assert decodegate.run("--fault", "toy.column") == 1
    out = ("--out", str(decodegate.runs))
    red = decodegate.newest().run_id
    assert decodegate("history", "add", red, first.run_id, *out) == 0
    assert decodegate("history", "baseline", "set", red, *out) == 2
    assert "faults put in on purpose" in decodegate.err
    assert decodegate("history", "baseline", "set", "unknown", *out) == 2
    assert decodegate("history", "trend", *out) == 0
    assert "1 runs (1 PASS)" in decodegate.out, "a run with faults is in no trend"


def test_a_step_is_found_named_and_checked_against_the_baseline(decodegate: CommandLine, first: RunFolder) -> None:
    noise = np.random.default_rng(0).normal(0, 0.02, RUNS)
    folders = copies(first, RUNS, ratio(lambda i: 1.0 + (0.2 if i >= 25 else 0.0) + noise[i]))
    shutil.rmtree(first.path)
    out = ("--out", str(decodegate.runs))
    assert decodegate("history", "add", *(folder.run_id for folder in folders), *out) == 0
    assert decodegate("history", "baseline", "set", folders[5].run_id, *out) == 0
    assert decodegate("history", "trend", "--check", *out) == 1
    assert "error worst: n = 40" in decodegate.out
    assert f"since the baseline, at {folders[25].run_id}: 0.99" in decodegate.out
    assert decodegate("history", "baseline", "set", folders[30].run_id, *out) == 0
    assert decodegate("history", "trend", "--check", *out) == 0, "the step is older than the baseline"


def test_two_runs_are_shown_side_by_side(decodegate: CommandLine, first: RunFolder) -> None:
    a, b = copies(first, 2, ratio(lambda i: 1.0 + i))
    out = ("--out", str(decodegate.runs))
    assert decodegate("history", "compare", a.run_id, b.run_id, *out) == 0
    assert "error worst" in decodegate.out
    assert "+100.00%" in decodegate.out
    assert "different series" not in decodegate.out
    assert decodegate("history", "add", a.run_id, *out) == 0
    assert decodegate("history", "compare", a.run_id, *out) == 2
    assert "has no baseline" in decodegate.err
    assert decodegate("history", "baseline", "set", a.run_id, *out) == 0
    shutil.rmtree(a.path)
    assert decodegate("history", "compare", b.run_id, *out) == 0, "the baseline is read from the history"
    assert decodegate.run("--gate", "costly") == 0
    assert decodegate("history", "compare", b.run_id, decodegate.newest().run_id, *out) == 0
    assert "different series" in decodegate.out


def test_figures_that_are_not_finite_are_kept_as_such(first: RunFolder, tmp_path: Path) -> None:
    (folder,) = copies(first, 1, ratio(lambda i: "NaN"))  # type: ignore[arg-type, return-value]
    with History(tmp_path / "h.sqlite3") as history:
        history.add([entry_of(folder)])
        assert np.isnan(history.entry(folder.run_id).figures["error", "worst"])
        with pytest.raises(UsageError, match="is not in"):
            history.entry("another")
