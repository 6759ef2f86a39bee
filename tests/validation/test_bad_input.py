"""Whatever a user gets wrong: exit code 2, one line on standard error, no traceback, nothing judged."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import decodegate_toy as toy
import pytest
from toy_commandline import CommandLine

from validation.cli.app import main
from validation.records.storage import RunFolder


def refused(decodegate: CommandLine, *parts: str) -> None:
    """Assert that one clear line with these parts was printed."""
    assert decodegate.err.startswith("decodegate: ")
    assert decodegate.err.count("\n") == 1
    assert decodegate.err.endswith("\n")
    assert "Traceback" not in decodegate.err + decodegate.out
    for part in parts:
        assert part in decodegate.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--gate", "nonsense"), ("no gate is called 'nonsense'", "costly, crash, error")),
        (("--gate", "crash"), ("has no [gates.crash] table", "its gates: error, costly")),
        (("--fault", "nonsense"), ("no fault is called 'nonsense'", "decodegate faults")),
        (("--model", "/no/such/folder"), ("model '/no/such/folder' does not exist",)),
        (("--model", "."), ("model '.' cannot be loaded: ", "holds no toy; second reason")),
        (("--seed", "-1"), ("'--seed'", "0")),
        (("--seed", "x"), ("'--seed'", "valid integer")),
        (("--threads", "0"), ("--threads",)),
        (("--format", "xml"), ("--format", "xml", "github")),
        (("--colour",), ("No such option: --colour",)),
        (("--resume", "20200101-000000-aaaaaa"), ("there is no run '20200101-000000-aaaaaa'",)),
        (("--resume", "../../etc"), ("'../../etc' is not a run id",)),
        (("--resume", ""), ("'' is not a run id",)),
        (("--resume", "a\nb\x1b[31m"), ("is not a run id",)),
    ],
)
def test_wrong_options(decodegate: CommandLine, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert decodegate.run(*arguments) == 2
    refused(decodegate, *parts)
    assert not decodegate.runs.exists()


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        ("rows = [32, 64]", "rows = [32, 64", (":18:15", "not valid TOML: Unclosed array")),
        ('kind = "toy"', "kind = toy", (":6:8", "not valid TOML: Invalid value")),
        (
            "[baseline]",
            "[baseline]\nspeed = 1",
            ("unknown key 'baseline.speed'; keys here: context_parallel, decode_backend",),
        ),
        ("required =", "require =", ("unknown key 'require'; did you mean 'required'?", "'required' is missing")),
        ('required = ["error", "costly"]', "required = []", ("required: list should have at least 1 item",)),
        ('"error", "costly"', '"error", "ranks"', ("required: gate 'ranks' has no [gates.ranks] table",)),
        ("[gates.costly]", "[gates.costy]", ("gates.costy: no gate is called 'costy'",)),
        ('kind = "toy"', 'kind = "toaster"', ("target.kind: no kind 'toaster'; kinds: toy",)),
        ('kind = "toy"', "kind = 1", ("target.kind: input should be a valid string, not 1",)),
        ('"auto"', '"auto"\nkv_cache_dtype = "int4"', ("baseline.kv_cache_dtype", "'bf16' or 'fp8'", "'int4'")),
        ('"auto"', '"auto"\ntensor_parallel = "8"', ("baseline.tensor_parallel", "valid integer", "'8'")),
        ('"auto"', '"auto"\ntensor_parallel = 0', ("baseline.tensor_parallel", "greater than or equal to 1")),
        ('"auto"', '"auto"\ntensor_parallel = 16', ("baseline arm cannot be opened: tensor_parallel is at most 8",)),
        ("rows = [32, 64]", "rows = []", ("[gates.costly]: rows must be a list of row counts, not []",)),
        ("rows = [32, 64]", "rows = [nan]", ("gates.costly: numbers must be finite",)),
        ("rows = [32, 64]", "rows = 2020-01-01", ("gates.costly.rows",)),
        ('description = "a toy"', "description = '\ud800'", ("not UTF-8 text",)),
    ],
)
def test_wrong_profiles(decodegate: CommandLine, before: str, after: str, parts: tuple[str, ...]) -> None:
    text = toy.PROFILE.replace(before, after, 1)
    Path(decodegate.profile).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert decodegate.run() == 2
    refused(decodegate, *parts)
    assert not decodegate.runs.exists()


@pytest.mark.parametrize("name", ["nonsense", "", "a\x1b[2Jb"])
def test_an_unknown_profile_lists_the_known_ones(decodegate: CommandLine, name: str) -> None:
    assert decodegate("run", "--profile", name) == 2
    refused(decodegate, "no profile is called", "gpu, nightly, premerge, signoff, smoke, or the path of a .toml file")
    assert "\x1b" not in decodegate.err


def test_a_profile_that_is_absent_or_a_folder(decodegate: CommandLine, tmp_path: Path) -> None:
    assert decodegate("run", "--profile", "absent.toml") == 2
    refused(decodegate, "profile 'absent.toml' cannot be read: No such file or directory")
    (tmp_path / "folder.toml").mkdir()
    assert decodegate("run", "--profile", str(tmp_path / "folder.toml")) == 2
    refused(decodegate, "cannot be read: Is a directory")


def test_an_unknown_command_and_no_command(decodegate: CommandLine) -> None:
    assert decodegate("judge") == 2
    refused(decodegate, "No such command 'judge'")
    assert decodegate() == 2
    assert "Usage: decodegate" in decodegate.out


def test_a_fault_for_a_target_that_takes_none(decodegate: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy.ToyTarget, "capabilities", frozenset())
    assert decodegate.run("--fault", "toy.column") == 2
    refused(decodegate, "lacks the capability 'inject a fault'")


def test_a_folder_of_runs_that_cannot_be_made(decodegate: CommandLine) -> None:
    decodegate.runs.write_text("a file is in the way")
    assert decodegate.run() == 2
    refused(decodegate, "cannot write", "Not a directory")


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Files cannot grow beyond 2,000 bytes, as on a disk that is almost full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_one_line(decodegate: CommandLine) -> None:
    assert decodegate.run() == 2
    refused(decodegate, "cannot write", "record.json", "File too large", "--resume")
    assert not list(decodegate.runs.rglob("*.tmp"))


def cut(data: bytes) -> bytes:
    return data[:-40]


def of_the_future(data: bytes) -> bytes:
    return data.replace(b'"schema_version": 1', b'"schema_version": 99')


def with_a_hidden_nan(data: bytes) -> bytes:
    return data.replace(b'"seed": 0', b'"seed": NaN')


@pytest.mark.parametrize("damage", [cut, of_the_future, with_a_hidden_nan, lambda data: b"{}", lambda data: b"\xff"])
@pytest.mark.parametrize("command", ["report", "resume"])
def test_a_record_that_is_not_whole(decodegate: CommandLine, damage: Callable[[bytes], bytes], command: str) -> None:
    assert decodegate.run("--gate", "costly") == 0
    folder = decodegate.newest()
    path = folder.path / "record.json"
    damaged = damage(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    words = ("report", folder.run_id) if command == "report" else ("run", "--resume", folder.run_id)
    assert decodegate(*words, "--out", str(decodegate.runs)) == 2
    refused(decodegate, "record.json' is not a whole run record")


def test_a_report_of_a_run_that_is_absent(decodegate: CommandLine) -> None:
    assert decodegate("report", "nothing", "--out", str(decodegate.runs)) == 2
    refused(decodegate, "there is no run 'nothing'")
    RunFolder.create(decodegate.runs, "empty")
    assert decodegate("report", str(decodegate.runs / "empty")) == 2
    refused(decodegate, "cannot be read: No such file or directory; start a new run")


def test_a_crash_of_the_machinery_is_an_error_and_not_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("validation.cli.listing.show_gates", lambda: 1 / 0)
    assert main(["gates"]) == 4
    assert "ZeroDivisionError" in capsys.readouterr().err
