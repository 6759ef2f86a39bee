"""A record that is corrupt, foreign, huge or hostile: one line, exit code 2, and nothing is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import decodegate_toy as toy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_commandline import CommandLine

from validation.errors import UsageError
from validation.records import reading
from validation.records.reading import read_run_record
from validation.records.storage import RunFolder
from validation.reports.write import write_reports

POLICY = 'name = "toy"\nrequired = ["costly"]\n'


@pytest.fixture
def folder(decodegate: CommandLine) -> RunFolder:
    """A finished toy run with plots, and a policy beside it."""
    decodegate.write_profile(toy.PROFILE_WITH_PLOT)
    assert decodegate.run() == 0
    (decodegate.folder / "policy.toml").write_text(POLICY)
    return decodegate.newest()


def edited(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    """The record's bytes with its JSON changed."""

    def damage(data: bytes) -> bytes:
        document = json.loads(data)
        change(document)
        return json.dumps(document).encode()

    return damage


def _second_verdict(document: Any) -> None:
    document["stable"]["verdict"] = "FAIL"


def _gate_failed_but_run_passed(document: Any) -> None:
    document["stable"]["gates"][0].update(verdict="FAIL", counts_as="FAIL")


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda data: data[:-40], "EOF"),
    "empty": (lambda data: b"", "EOF"),
    "not text": (lambda data: b"\xff\xfe\x00", "record"),
    "foreign version": (
        edited(lambda d: d.update(schema_version=99)),
        "its schema_version is 99; this decodegate reads the number 1: use the decodegate that wrote it",
    ),
    "version in quotes": (
        edited(lambda d: d.update(schema_version="1")),
        'its schema_version is "1", which is no whole number; this decodegate reads the number 1',
    ),
    "version of nothing": (edited(lambda d: d.update(schema_version=None)), "is null, which is no whole number"),
    "version in a list": (edited(lambda d: d.update(schema_version=[1])), "is [1], which is no whole number"),
    "hostile version": (edited(lambda d: d.update(schema_version="\x1b[2J\nx")), "its schema_version is"),
    "foreign field": (edited(lambda d: d.update(signed=True)), "signed"),
    "nested": (lambda data: b"[" * 100_000, "record"),
    "nested metrics": (
        lambda data: data.replace(b'"metrics": {', b'"metrics": {"x": ' + b"[" * 5000 + b"]" * 5000 + b", ", 1),
        "record",
    ),
    "large number": (edited(lambda d: d["stable"].update(seed=2**63)), "2^63"),
    "endless number": (lambda data: data.replace(b'"seed": 0', b'"seed": 1' + b"0" * 6000), "record"),
    "NaN": (lambda data: data.replace(b'"seed": 0', b'"seed": NaN'), "record"),
    "key twice": (lambda data: data.replace(b'"seed": 0', b'"seed": 7, "seed": 0'), "key 'seed' is there twice"),
    "key twice in what is free": (
        lambda data: data.replace(b'"metrics": {', b'"metrics": {"x\\n": 1, "x\\n": 2, ', 1),
        "is there twice in one object",
    ),
    "no arms": (edited(lambda d: d["stable"].update(arms={})), "stable.arms has no baseline"),
    "no profile": (edited(lambda d: d["stable"]["profile"].update(content={})), "no description or no gates"),
    "another verdict": (edited(_second_verdict), "its verdict is FAIL, its gates make PASS"),
    "a failed gate painted over": (edited(_gate_failed_but_run_passed), "its verdict is PASS, its gates make FAIL"),
    "gate as a path": (edited(lambda d: d["stable"]["gates"][0].update(name="../../x")), "not safe as a file name"),
    "gate twice": (edited(lambda d: d["stable"]["gates"].append(d["stable"]["gates"][0])), "is there twice"),
    "histogram of words": (
        edited(lambda d: d["stable"]["gates"][0]["plots"][0].update(kind="histogram", x=["a", "b"] * 3)),
        "bin edges that are no numbers",
    ),
    "id as a path": (edited(lambda d: d["run"].update(id="../../../etc")), "is not a run id"),
}
COMMANDS = ("report", "resume", "signoff", "history add", "history compare")


def words(command: str, decodegate: CommandLine, run: str) -> tuple[str, ...]:
    """The command line that makes `command` read the record of `run`."""
    out = ("--out", str(decodegate.runs))
    if command == "resume":
        return ("run", "--resume", run, *out)
    if command == "signoff":
        return ("signoff", run, "--policy", str(decodegate.folder / "policy.toml"), *out)
    return (*command.split(), *((run, run) if command == "history compare" else (run,)), *out)


def tree(path: Path) -> dict[str, bytes]:
    """Every file below `path` and what it holds; locks apart."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != "lock"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_reader_refuses_a_damaged_record_in_one_line_and_loses_nothing(
    decodegate: CommandLine, folder: RunFolder, command: str
) -> None:
    path = folder.path / "record.json"
    whole = path.read_bytes()
    for name, (damage, reason) in DAMAGES.items():
        path.write_bytes(damage(whole))
        assert path.read_bytes() != whole, name
        before = tree(decodegate.folder)
        assert decodegate(*words(command, decodegate, folder.run_id)) == 2, name
        assert decodegate.err.startswith("decodegate: "), name
        assert decodegate.err.count("\n") == 1, name
        assert "Traceback" not in decodegate.err + decodegate.out, name
        assert "record.json' is not a whole run record" in decodegate.err, name
        assert reason in decodegate.err, name
        assert "\x1b" not in decodegate.err
        assert tree(decodegate.folder) == before, name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_reader_refuses_a_record_of_another_run_than_its_folder_says(
    decodegate: CommandLine, folder: RunFolder, command: str
) -> None:
    folder.path.rename(folder.path.with_name("another"))
    before = tree(decodegate.folder)
    assert decodegate(*words(command, decodegate, "another")) == 2
    assert decodegate.err.count("\n") == 1
    assert f"another' holds run '{folder.run_id}'; give it the run's name again" in decodegate.err
    assert tree(decodegate.folder) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_record_that_is_no_file_or_too_large_is_not_read(
    decodegate: CommandLine, folder: RunFolder, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LARGEST_RECORD", 1000)
    assert decodegate(*words(command, decodegate, folder.run_id)) == 2
    assert "has more than 1,000 bytes" in decodegate.err
    path = folder.path / "record.json"
    path.unlink()
    os.mkfifo(path)
    assert decodegate(*words(command, decodegate, folder.run_id)) == 2
    assert "is not a regular file" in decodegate.err
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert decodegate(*words(command, decodegate, folder.run_id)) == 2
    assert "leads out of the run's folder" in decodegate.err


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*place, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _places(item, (*place, index))


class Refused(Exception):
    """One clear line."""


@contextmanager
def one_line_refusals() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        if "\n" in str(error):
            raise
        raise Refused from error


HOSTILE = st.one_of(
    st.sampled_from(
        ["", "NaN", "<script>", "\x00\x1b[2J", "../..", "::error::x", -1, 0, 1e308, 2**62, None, [], {}, True]
    ),
    st.text(st.characters(codec="latin-1"), max_size=20),
    st.floats(allow_nan=False, allow_infinity=False),
)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_one_value_of_a_record_may_be_anything(folder: RunFolder, tmp_path: Path, data: st.DataObject) -> None:
    document = json.loads((folder.path / "record.json").read_bytes())
    place = data.draw(st.sampled_from([place for place in _places(document) if place]))
    holder = document
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = data.draw(HOSTILE)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(document))
    # Whatever is not refused can be shown; a refusal is one line.
    with suppress(Refused), one_line_refusals():
        write_reports(RunFolder(tmp_path / "shown"), read_run_record(path))
